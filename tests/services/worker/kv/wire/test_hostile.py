"""What the endpoint does with input that no peer of ours sends: drop, count, and go on."""

import asyncio
import socket
import struct
import threading

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import KEY, Rig, model_kv, stage

from services.worker.kv.control import SocketControl
from services.worker.kv.events import KvEvents, StagedChunk, StagingFailed
from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.frames import (
    MAX_MESSAGE_BYTES,
    Answer,
    Cancel,
    Confirm,
    Credit,
    Failed,
    Frame,
    Pull,
    RankStats,
    decode_reply,
    decode_request,
    encode_message,
)
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.transport import ZmqListener, ZmqTransport


# Well-framed messages on which msgspec raises what is no error of its own.
def not_utf8(message: bytes) -> bytes:
    return message.replace(b"~~", b"\xff\xfe")


NOT_UTF8 = not_utf8(encode_message(Confirm("~~", 7, 0, 1)))
NOT_UTF8_REPLY = not_utf8(encode_message(Failed(1, "~~", "")))
NESTED = b"\x93\xa6Cancel\x01" + b"\x91" * 60_000 + b"\xc0"


def assert_serves(rig: Rig, exporter: KvEndpoint) -> None:
    """It still does its work."""
    kv = model_kv(40)
    stage(exporter, kv, "after")
    got = rig.load(rig.endpoint(), rig.handle([exporter], 40, "after"))
    assert rig.result().ok
    assert torch.equal(got.kv, kv)


def dealer(context: zmq.Context, endpoint: KvEndpoint) -> zmq.Socket:  # type: ignore[type-arg]
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 1000)
    made.connect(endpoint.address)
    return made


def pull(**changes: object) -> Pull:
    fields = {
        "pull_id": 1, "transfer_id": "t", "generation": 7, "fingerprint": "model", "token_start": 0, "token_end": 40,
        "head_start": 0, "head_end": 4, "rank": 0, "ranks": 1, "consumers": 1, "credit_bytes": 1000, "timeout_s": 5.0,
    }  # fmt: skip
    return Pull(**(fields | changes))  # type: ignore[arg-type]


def test_garbage_is_dropped_and_counted(rig: Rig) -> None:
    exporter = rig.endpoint()
    garbage = [[b""], [b"\xff" * 100], [b"a", b"b"], [b"\x93\x01\x02\x03"], [encode_message(pull())[:-3]]]
    garbage += [[NOT_UTF8], [NESTED]]
    with zmq.Context() as context, dealer(context, exporter) as peer:
        for parts in garbage:
            peer.send_multipart(parts)
        peer.send(encode_message(pull(generation=1)))
        assert decode_reply(peer.recv()).fault == "stale_generation"  # after the garbage, in order
    assert exporter.server_counters.dropped == len(garbage)
    assert_serves(rig, exporter)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_start": 5, "token_end": 5}, {"token_start": -1}, {"head_end": 5}, {"head_start": -1},
        {"credit_bytes": 0}, {"credit_bytes": 1 << 40}, {"timeout_s": -1.0}, {"timeout_s": 1e9},
    ],
)  # fmt: skip
def test_pulls_out_of_range_are_refused(rig: Rig, changes: dict[str, object]) -> None:
    exporter = rig.endpoint()
    with zmq.Context() as context, dealer(context, exporter) as peer:
        peer.send(encode_message(pull(**changes)))
        assert decode_reply(peer.recv()).fault == "invalid_request"


def test_oversized_messages_cost_their_sender_the_connection(rig: Rig) -> None:
    exporter = rig.endpoint()
    with zmq.Context() as context, dealer(context, exporter) as peer:
        monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        assert monitor.poll(5000)
        peer.disable_monitor()
    assert_serves(rig, exporter)


def test_raw_bytes_on_the_port_do_no_harm(rig: Rig) -> None:
    exporter = rig.endpoint()
    host, _, port = exporter.address.removeprefix("tcp://").rpartition(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, bytes(range(256)) * 64, struct.pack(">Q", 2**63)):
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(noise)
    assert_serves(rig, exporter)


def test_with_curve_only_holders_of_the_key_get_anything(rig: Rig) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    exporter, importer = rig.endpoint(curve=(public, secret)), rig.endpoint(curve=(public, secret))
    stranger = rig.endpoint(limits=PullLimits(connect_timeout_s=0.5))
    kv = model_kv(40)
    stage(exporter, kv)
    rig.load(stranger, rig.handle([exporter], 40))
    assert not rig.result().ok
    got = rig.load(importer, rig.handle([exporter], 40))
    assert rig.result().ok
    assert torch.equal(got.kv, kv)


def test_an_exporter_that_lies_fails_the_pull_only(rig: Rig) -> None:
    """Headers without payload, frames of another transfer, text: the import fails closed, the puller lives."""
    transport = ZmqTransport()
    listener = transport.listen("tcp://127.0.0.1:*")
    exporter, importer = rig.endpoint(), rig.endpoint()
    handle = rig.handle([exporter], 40, endpoints=(listener.address,))
    frame = _true_frame(rig, exporter)
    lies = [[b"\xff\xff"], [NOT_UTF8_REPLY], [NESTED], [b"x" * (MAX_MESSAGE_BYTES + 1)]]
    lies += [[frame[0]], [frame[0], frame[1][:-4]], [frame[0], frame[1], b"more"], [frame[0], b""]]
    for lie in lies:
        got = rig.load(importer, handle, timeout_s=1.0)
        peer, request = _next_pull(transport, listener)
        header = decode_reply(lie[0])
        parts = lie if header is None else [_renumbered(header, request.pull_id), *lie[1:]]
        listener._router.send_multipart([peer, *parts])
        result = rig.result()
        assert not result.ok
        assert not got.writes
    transport.close()
    assert_serves(rig, exporter)


WORDS = st.sampled_from(["Pull", "Credit", "Cancel", "Confirm", "Control", "Frame", "Failed", "Answer", "t", "model"])
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 50) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | st.binary(max_size=20) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=40,
)
TAGGED = st.builds(lambda word, fields: msgspec.msgpack.encode([word, *fields]), WORDS, st.lists(VALUES, max_size=20))
MESSAGES = st.sampled_from(
    [
        encode_message(pull()), encode_message(Credit(1, 5)), encode_message(Cancel(1)),
        encode_message(Confirm("t", 7, 0, 1)), encode_message(Failed(1, "timeout", "text")),
        NOT_UTF8, NOT_UTF8_REPLY, NESTED[:200],
    ]
)  # fmt: skip


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    """A message of ours with some bytes changed, cut out or put in."""
    message = bytearray(draw(MESSAGES))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(message)))
        message[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(message)


PARTS = st.lists(st.binary(max_size=200) | TAGGED | mutants(), min_size=1, max_size=3)


def test_no_message_ends_the_server(rig: Rig) -> None:
    exporter = rig.endpoint()
    with zmq.Context() as context, dealer(context, exporter) as peer:

        @settings(max_examples=100, deadline=None, database=None)
        @given(PARTS)
        def send(parts: list[bytes]) -> None:
            peer.send_multipart(parts)

        send()
        answers_to_itself(peer)
    assert_serves(rig, exporter)


def answers_to_itself(peer: zmq.Socket) -> None:  # type: ignore[type-arg]
    """All that was sent before has been read: it answers a pull that comes after it."""
    peer.send(encode_message(pull(pull_id=2**40, generation=1)))
    peer.RCVTIMEO = 10_000
    while getattr(decode_reply(peer.recv_multipart()[0]), "pull_id", 0) != 2**40:
        pass


def test_no_bytes_on_the_port_end_the_server(rig: Rig) -> None:
    exporter = rig.endpoint()
    host, _, port = exporter.address.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)

    @settings(max_examples=50, deadline=None, database=None)
    @given(st.booleans(), st.lists(st.binary(max_size=300), max_size=5))
    def send(greets: bool, parts: list[bytes]) -> None:
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"".join([greeting if greets else b"", *parts]))

    send()
    assert_serves(rig, exporter)


def test_no_answer_ends_the_puller(rig: Rig) -> None:
    """An exporter that answers pulls with anything at all: the imports fail, later ones succeed."""
    transport = ZmqTransport()
    listener = transport.listen("tcp://127.0.0.1:*")
    exporter, importer = rig.endpoint(), rig.endpoint(limits=PullLimits(stall_s=5.0))
    header = decode_reply(_true_frame(rig, exporter)[0])
    assert isinstance(header, Frame)
    fields = st.sampled_from(header.__struct_fields__)

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.lists(PARTS, max_size=3), fields, VALUES, st.binary(max_size=100))
    def answer(noise: list[list[bytes]], field: str, value: object, payload: bytes) -> None:
        rig.load(importer, rig.handle([exporter], 40, endpoints=(listener.address,)))
        peer, request = _next_pull(transport, listener)
        true = msgspec.structs.replace(header, pull_id=request.pull_id)
        lie = msgspec.structs.replace(true, **{field: value})
        for parts in (*noise, [_encoded(lie), payload], [encode_message(true), b"short"]):
            listener._router.send_multipart([peer, *parts])
        assert not rig.result().ok

    answer()
    transport.close()
    assert_serves(rig, importer)
    kv = model_kv(40)
    stage(exporter, kv, "end")
    got = rig.load(importer, rig.handle([exporter], 40, "end"))
    assert rig.result().ok
    assert torch.equal(got.kv, kv)


def _encoded(lie: Frame) -> bytes:
    try:
        return encode_message(lie)
    except (OverflowError, msgspec.MsgspecError):  # a value that msgpack cannot say
        return b"\xc1"


async def test_garbage_answers_do_not_end_the_workers_own_side(rig: Rig) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as rank:
        port = rank.bind_to_random_port("tcp://127.0.0.1")
        async with SocketControl((f"tcp://127.0.0.1:{port}",), KEY) as control:
            waiting = asyncio.create_task(control.stats(timeout_s=10))
            peer, request = await rank.recv_multipart()
            call = msgspec.msgpack.decode(request)[1]
            garbage = not_utf8(encode_message(Answer(call, "~~")))
            for parts in ([garbage], [NESTED], [b""], [b"a", b"b"], [encode_message(Answer(call, "", RankStats(3)))]):
                await rank.send_multipart([peer, *parts])
            assert (await waiting)[0].rank == 3


async def test_garbage_events_are_dropped_and_counted(rig: Rig) -> None:
    address = f"ipc://{rig.folder}/events"
    async with KvEvents(address) as events:
        with zmq.Context() as context, context.socket(zmq.PUSH) as rank:
            rank.connect(address)
            for garbage in (
                not_utf8(msgspec.msgpack.encode(StagingFailed("~~", 0, ""))), NESTED, b"", b"\x81\xa4type\xa9PullEnded",
            ):  # fmt: skip
                rank.send(garbage)
            rank.send(msgspec.msgpack.encode(StagedChunk("t", 0, 1, True, 1)))
            assert await asyncio.wait_for(events.get(), 10) == StagedChunk("t", 0, 1, True, 1)
        assert events.dropped == 4


def test_a_flood_holds_up_nobody_else(rig: Rig) -> None:
    exporter, stop = rig.endpoint(), threading.Event()

    def flood() -> None:
        with zmq.Context() as context, dealer(context, exporter) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            while not stop.is_set():
                peer.send(NOT_UTF8)

    flooder = threading.Thread(target=flood)
    flooder.start()
    try:
        assert_serves(rig, exporter)
    finally:
        stop.set()
        flooder.join()


def _renumbered(header: Frame, pull_id: int) -> bytes:
    return encode_message(msgspec.structs.replace(header, pull_id=pull_id))


def _true_frame(rig: Rig, exporter: KvEndpoint) -> list[bytes]:
    stage(exporter, model_kv(40))
    with zmq.Context() as context, dealer(context, exporter) as peer:
        peer.send(encode_message(pull(credit_bytes=1 << 20)))
        return peer.recv_multipart()


def _next_pull(transport: ZmqTransport, listener: ZmqListener) -> tuple[bytes, Pull]:
    for _ in range(200):
        transport.wait(0.1)
        while (message := listener.receive()) is not None:
            request = decode_request(message[1][0])
            if isinstance(request, Pull):
                return message[0], request
    raise AssertionError("no pull came")
