"""TCP: messages on a stream that comes and goes in pieces of any size; names, greetings, silence, and what idle links
cost.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.wire import tcp_transport
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.protocol import MAX_MESSAGE_BYTES, Buffer, Placement, Received, checksum
from services.worker.kv.wire.tcp_streams import _WRITE_BYTES, HEARTBEAT, Inbound, Outbound, WireError, prefix
from services.worker.kv.wire.tcp_transport import (
    SocketAddress,
    TcpListener,
    TcpTransport,
    host_and_port,
    numeric,
    resolve,
)
from tests.services.worker.kv.rig import Rig
from tests.services.worker.kv.wire.peers import framed

LIMIT = 100_000
OWNER = object()
MESSAGES = st.lists(st.tuples(st.binary(min_size=1, max_size=50), st.binary(max_size=9000)), max_size=6)
SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=5).filter(any)


class Pipe:
    """What is written can be read, in pieces of these sizes, over and over; 0: nothing at the moment."""

    def __init__(self, sizes: list[int], data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.reads = 0
        self._sizes = sizes
        self._turn = 0

    def _size(self) -> int:
        self._turn += 1
        return self._sizes[self._turn % len(self._sizes)]

    def read(self, views: list[memoryview]) -> int:
        self.reads += 1
        left = wanted = min(self._size(), len(self.data))
        for view in views:
            size = min(left, len(view))
            view[:size] = self.data[:size]
            del self.data[:size]
            left -= size
        return wanted - left

    def expect(self, count: int) -> None:
        pass

    def write(self, views: Sequence[memoryview]) -> int:
        accepted = b"".join(views)[: self._size()]
        self.data += accepted
        return len(accepted)


def sent(messages: list[tuple[bytes, bytes]], sizes: list[int]) -> bytes:
    """The checksum of every other payload is known."""
    pipe, outbound = Pipe(sizes), Outbound()
    for number, (header, payload) in enumerate(messages):
        outbound.put(header, payload or None, checksum(payload) if number % 2 else None)
        outbound.heartbeat()
    while not outbound.flush(pipe):  # type: ignore[arg-type]
        pass
    assert not outbound
    return bytes(pipe.data)


def received(inbound: Inbound, data: bytes, sizes: list[int]) -> list[Received]:
    """All of it, payloads copied."""
    pipe, found = Pipe(sizes, data), []
    while True:
        message = inbound.receive(pipe)  # type: ignore[arg-type]
        inbound.readable = True
        if message is None:
            if not pipe.data:
                return found
            continue
        payload = bytes(message.payload) if message.payload is not None else None
        found.append(replace(message, header=bytes(message.header), payload=payload))


@settings(deadline=None, database=None)
@given(MESSAGES, SIZES, SIZES)
def test_messages_arrive_as_they_were_however_the_stream_is_cut(
    messages: list[tuple[bytes, bytes]], sends: list[int], reads: list[int]
) -> None:
    inbound = Inbound(LIMIT)
    got = received(inbound, sent(messages, sends), reads)
    assert [(each.header, each.payload or b"") for each in got] == messages
    assert all(each.checksum == each.sent_checksum == checksum(each.payload) for each in got if each.payload)
    assert inbound.heartbeats == len(messages)


@settings(deadline=None, database=None)
@given(MESSAGES, SIZES, st.integers(1, 7))
def test_payloads_go_where_they_are_wanted(messages: list[tuple[bytes, bytes]], reads: list[int], pieces: int) -> None:
    rooms: list[bytearray] = []

    def place(header: Buffer, size: int) -> Placement:
        rooms.append(bytearray(size))
        step = -(-size // pieces)
        return Placement(OWNER, [memoryview(rooms[-1])[at : at + step] for at in range(0, size, step)])

    got = received(Inbound(LIMIT, place), sent(messages, [1 << 20]), reads)
    assert all(each.payload is None for each in got)
    assert rooms == [payload for _, payload in messages if payload]
    sums = [(each.checksum, each.sent_checksum) for each in got if each.payload_bytes]
    assert sums == [(checksum(room), checksum(room)) for room in rooms]


@settings(deadline=None, database=None)
@given(st.integers(1, 3 * _WRITE_BYTES), st.lists(st.integers(0, 600_000), min_size=1, max_size=5).filter(any))
def test_large_payloads_go_piece_by_piece_however_little_is_accepted(size: int, sizes: list[int]) -> None:
    payload = bytes(range(251)) * (size // 251 + 1)
    (message,) = received(Inbound(len(payload)), sent([(b"a", payload)], sizes), sizes)
    assert message.payload == payload
    assert message.checksum == message.sent_checksum == checksum(payload)


def test_many_small_messages_are_sent_in_calls_that_a_kernel_accepts() -> None:
    outbound, calls = Outbound(), list[int]()

    class Accepting(Pipe):
        def write(self, views: Sequence[memoryview]) -> int:
            calls.append(len(views))
            return super().write(views)

    pipe = Accepting([1 << 20])
    for number in range(3000):
        outbound.put(f"{number}".encode())
    assert outbound.flush(pipe)  # type: ignore[arg-type]
    assert max(calls) <= 1024  # IOV_MAX
    got = received(Inbound(LIMIT), bytes(pipe.data), [1 << 20])
    assert [each.header for each in got] == [f"{number}".encode() for number in range(3000)]


def test_a_wrong_checksum_of_a_sender_is_passed_on_to_be_compared() -> None:
    pipe, outbound = Pipe([1 << 20]), Outbound()
    outbound.put(b"a", b"payload", 7)
    assert outbound.flush(pipe)  # type: ignore[arg-type]
    (message,) = received(Inbound(LIMIT), bytes(pipe.data), [1 << 20])
    assert (message.sent_checksum, message.checksum) == (7, checksum(b"payload"))


def test_a_stream_that_gave_less_than_there_was_room_for_is_not_read_again() -> None:
    inbound, pipe = Inbound(LIMIT), Pipe([1 << 20], sent([(b"a", b"x" * 9000)], [1 << 20]))
    while inbound.receive(pipe) is None:  # type: ignore[arg-type]
        pass
    before = pipe.reads
    assert inbound.receive(pipe) is None  # type: ignore[arg-type]
    assert pipe.reads == before


def test_a_diverted_payload_goes_nowhere_and_is_not_delivered() -> None:
    room = bytearray(6000)
    inbound = Inbound(LIMIT, lambda header, _: Placement(OWNER, [memoryview(room)]) if header == b"a" else None)
    pipe = Pipe([0, 3000], sent([(b"a", b"x" * 6000), (b"b", b"y" * 10)], [1 << 20]))
    while not any(room):
        assert inbound.receive(pipe) is None  # type: ignore[arg-type]
        inbound.readable = True
    inbound.divert(object())  # another owner
    inbound.divert(OWNER)
    before = bytes(room)
    assert 0 in before
    (message,) = received(inbound, bytes(pipe.data), [5000])
    assert (message.header, message.payload) == (b"b", b"y" * 10)
    assert room == before


def test_a_payload_that_is_kept_is_not_overwritten() -> None:
    inbound, pipe = Inbound(LIMIT), Pipe([1 << 20], sent([(b"a", b"x" * 10), (b"b", b"y" * 10)], [1 << 20]))
    first = inbound.receive(pipe)  # type: ignore[arg-type]
    assert first is not None
    inbound.keep()
    assert inbound.receive(pipe) is not None  # type: ignore[arg-type]
    assert first.payload == b"x" * 10


@pytest.mark.parametrize("bit", range(len(HEARTBEAT) * 8))
def test_no_flipped_bit_of_a_prefix_goes_unnoticed(bit: int) -> None:
    data = bytearray(sent([(b"header", b"payload")], [1 << 20]))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        received(Inbound(LIMIT), bytes(data), [1 << 20])


@pytest.mark.parametrize("sizes", [(MAX_MESSAGE_BYTES + 1, 0), (1, LIMIT + 1), (0, 1)])
def test_a_message_that_is_too_large_or_makes_no_sense_is_refused_before_it_comes(sizes: tuple[int, int]) -> None:
    with pytest.raises(WireError):
        received(Inbound(LIMIT), prefix(*sizes), [1 << 20])


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("kv://10.0.0.3:7100", ("10.0.0.3", 7100)),
        ("kv://[::1]:7100", ("::1", 7100)),
        ("kv://name:*", ("name", 0)),
        *((bad, None) for bad in ("", "10.0.0.3:7100", "kv://:7100", "kv://host", "kv://host:70000", "kv://host:x")),
    ],
)
def test_addresses(address: str, found: tuple[str, int] | None) -> None:
    if found is not None:
        assert host_and_port(address) == found
    else:
        with pytest.raises(OSError, match="is not an address"):
            host_and_port(address)


def test_numbers_need_no_name_server_and_names_prefer_ipv4() -> None:
    assert numeric("127.0.0.1", 5) == [(socket.AF_INET, ("127.0.0.1", 5))]
    assert numeric("localhost", 5) == []
    assert resolve("localhost", 5)[0] == (socket.AF_INET, ("127.0.0.1", 5))
    with pytest.raises(OSError):  # noqa: PT011
        resolve("a" * 70 + ".b", 5)


@pytest.mark.parametrize("rig", ["kv"], indirect=True)
def test_a_name_server_that_is_silent_holds_up_no_other_link(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, requested = threading.Event(), []

    def slow(host: str, port: int) -> list[SocketAddress]:
        requested.append(host)
        silent.wait(20)
        raise OSError("no answer")

    exporter = rig.endpoint(address="kv://localhost:*")  # which is a name, too
    assert exporter.address.startswith("kv://localhost:")
    importer = rig.endpoint(limits=PullLimits(connect_timeout_s=8.0))
    rig.transfer(exporter, importer, "first")
    monkeypatch.setattr(tcp_transport, "resolve", slow)
    rig.load(importer, rig.handle([], 40, "named", endpoints=("kv://far.invalid:7",)))
    for number in range(5):  # each before the link to the name has ended
        assert rig.transfer(exporter, importer, f"t{number}").transfer_id == f"t{number}"
    assert rig.result().error.startswith("unreachable")
    assert requested == ["far.invalid"]  # once, however often the link tried
    silent.set()


def test_idle_endpoints_cost_nothing_that_can_be_measured(rig: Rig) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint()
    rig.transfer(exporter, importer)
    threads = [each for each in threading.enumerate() if each.name in ("kv-puller", "kv-server")]
    before = [_cpu_s(thread.native_id) for thread in threads]
    threading.Event().wait(2.0)
    spent = [_cpu_s(thread.native_id) - at for thread, at in zip(threads, before, strict=True)]
    assert max(spent) < 0.02  # of 2 s: a hundredth of a core, on a machine that is busy


def _cpu_s(thread: int | None) -> float:
    with open(f"/proc/{os.getpid()}/task/{thread}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def wait_for(transport: TcpTransport, condition: Callable[[], bool], within_s: float = 10.0) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s
        transport.wait(0.05)


def test_a_peer_that_accepts_and_sends_nothing_is_never_connected() -> None:
    transport = TcpTransport()
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = transport.connect(f"kv://127.0.0.1:{server.getsockname()[1]}")
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            transport.wait(0.05)
            assert not link.connected
    transport.close()


def test_a_link_finds_an_exporter_that_comes_later_and_again_after_it_has_gone() -> None:
    ours, theirs = TcpTransport(), TcpTransport()
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"kv://127.0.0.1:{reserved.getsockname()[1]}"
    link = ours.connect(address)
    for _ in range(5):
        ours.wait(0.05)
    assert (link.connected, link.losses) == (False, 0)
    for losses in range(2):
        theirs.listen(address)
        wait_for(ours, lambda theirs=theirs: bool(theirs.wait(0.0)) or link.connected)
        assert link.losses == losses
        theirs.close()
        wait_for(ours, lambda: bool(link.receive()) or not link.connected)
        theirs = TcpTransport()
    theirs.close()
    ours.close()


def messages_of(listener: TcpListener) -> list[bytes]:
    found = []
    while (message := listener.receive()) is not None:
        found.append(message[1])
    return found


def test_a_message_that_lingers_goes_behind_the_next_one_or_alone_soon_after() -> None:
    ours, theirs = TcpTransport(), TcpTransport()
    listener = theirs.listen("kv://127.0.0.1:*")
    link, got = ours.connect(listener.address), list[bytes]()
    wait_for(ours, lambda: bool(theirs.wait(0.0)) or link.connected)

    def arrived(count: int) -> bool:
        theirs.wait(0.0)
        got.extend(messages_of(listener))
        return len(got) == count

    link.send(b"confirm 1", lingers=True)
    link.send(b"confirm 2", lingers=True)
    link.send(b"pull")
    wait_for(theirs, lambda: arrived(3))  # our transport is not even waited on
    assert got == [b"pull", b"confirm 1", b"confirm 2"]
    got.clear()
    link.send(b"confirm 3", lingers=True)
    wait_for(ours, lambda: arrived(1))
    assert got == [b"confirm 3"]
    got.clear()
    link.send(b"confirm 4", lingers=True)
    ours.close()
    wait_for(theirs, lambda: arrived(1))
    assert got == [b"confirm 4"]
    theirs.close()


def test_a_payload_that_trickles_in_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far less at a time than the kernel wakes us for, from a peer that answers no heartbeat meanwhile."""
    monkeypatch.setattr(tcp_transport, "_BEAT_S", 0.2)
    monkeypatch.setattr(tcp_transport, "_SILENCE_S", 2.0)
    transport, payload = TcpTransport(), bytes(100_000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = transport.connect(f"kv://127.0.0.1:{server.getsockname()[1]}")
        link.send(b"hello")
        near, _ = server.accept()
        with near:
            near.sendall(HEARTBEAT)
            wait_for(transport, lambda: link.connected)
            data = framed([b"header", payload])
            message = None
            for start in range(0, len(data), 4000):
                near.sendall(data[start : start + 4000])
                end = time.monotonic() + 0.1
                while time.monotonic() < end:
                    transport.wait(0.05)
                    message = message or link.receive()
            assert message is not None
            assert bytes(message.payload or b"") == payload
            assert (link.connected, link.losses) == (True, 0)
    transport.close()
