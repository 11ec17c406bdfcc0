"""Input that no peer of the protocol sends: the endpoint drops it, counts it, and goes on."""

import asyncio
import socket
import struct
import threading

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.rank_control import SocketControl, _controls
from services.worker.kv.rank_messages import Answer, Control, RankStats, StagedChunk, StagingFailed, Stats
from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.protocol import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Confirm,
    Credit,
    Failed,
    Frame,
    Unread,
    checksum,
    decode_reply,
    encode_message,
    opened,
    sealed,
)
from services.worker.kv.wire.tcp_streams import HEARTBEAT
from services.worker.kv.wire.tcp_transport import TcpListener, TcpTransport, host_and_port
from tests.services.worker.kv.rig import KEY, Rig, model_kv, stage
from tests.services.worker.kv.wire.peers import (
    NESTED,
    NOT_UTF8,
    NOT_UTF8_REPLY,
    SEALED_NESTED,
    Stranger,
    next_pull,
    pull,
)


def connect(endpoint: KvEndpoint) -> socket.socket:
    return socket.create_connection(host_and_port(endpoint.address))


def test_garbage_is_dropped_and_counted(rig: Rig) -> None:
    exporter = rig.endpoint()
    garbage = [b"", b"\xff" * 100, b"\x93\x01\x02\x03", msgspec.msgpack.encode(pull())[:-3]]
    garbage += [*map(sealed, garbage), NOT_UTF8, SEALED_NESTED, encode_message(pull())[:-3]]
    messages = [each for each in garbage if each]  # an empty message is a heartbeat
    with Stranger(exporter.address) as peer:
        for message in messages:
            peer.send(message)
        peer.send(encode_message(pull(generation=1)))
        for _ in messages:
            assert isinstance(decode_reply(peer.receive()[0]), Unread)
        assert decode_reply(peer.receive()[0]).fault == "stale_generation"  # after the garbage, in order
    assert exporter.stats().dropped_messages == len(messages)
    rig.transfer(exporter, name="after")


@pytest.mark.parametrize(
    "changes",
    [
        {"token_start": 5, "token_end": 5},
        {"token_start": -1},
        {"layer_end": 4},
        {"layer_start": -1},
        {"layer_start": 2, "layer_end": 2},
        {"head_end": 5},
        {"head_start": -1},
        {"credit_bytes": 0},
        {"credit_bytes": 1 << 40},
        {"timeout_s": -1.0},
        {"timeout_s": 1e9},
    ],
)
def test_pulls_out_of_range_are_refused(rig: Rig, changes: dict[str, object]) -> None:
    with Stranger(rig.endpoint().address) as peer:
        peer.send(encode_message(pull(**changes)))
        assert decode_reply(peer.receive()[0]).fault == "invalid_request"


def test_oversized_messages_and_raw_bytes_cost_their_sender_the_connection(rig: Rig) -> None:
    exporter = rig.endpoint()
    with Stranger(exporter.address) as peer:
        peer.send(TOO_LARGE)
        with pytest.raises(ConnectionError):
            peer.receive()
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, bytes(range(256)) * 64, struct.pack(">Q", 2**63)):
        with connect(exporter) as plain:
            plain.sendall(noise)
    rig.transfer(exporter)


def true_frame(rig: Rig, exporter: KvEndpoint) -> tuple[Frame, bytes]:
    stage(exporter, model_kv(40))
    with Stranger(exporter.address) as peer:
        peer.send(encode_message(pull(credit_bytes=1 << 20)))
        header, payload = peer.receive()
    frame = decode_reply(header)
    assert isinstance(frame, Frame)
    return msgspec.structs.replace(frame, checksum=checksum(payload)), payload


def answer(listener: TcpListener, peer: bytes, parts: list[bytes]) -> None:
    listener.send(peer, parts[0], parts[1] if len(parts) > 1 else None)


async def test_garbage_answers_do_not_end_the_workers_own_side(rig: Rig) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as rank:
        port = rank.bind_to_random_port("tcp://127.0.0.1")
        async with SocketControl((f"tcp://127.0.0.1:{port}",), KEY, answer_s=20) as worker:
            waiting = asyncio.create_task(worker.call(Stats()))
            peer, request = await rank.recv_multipart()
            control = opened(_controls, request)
            assert isinstance(control, Control)
            not_utf8 = sealed(msgspec.msgpack.encode(Answer(control.call, "~~")).replace(b"~~", b"\xff\xfe"))
            for garbage in (not_utf8, SEALED_NESTED, b"", sealed(b"")):
                await rank.send_multipart([peer, garbage])
            await rank.send_multipart([peer, b"a", b"b"])
            await rank.send_multipart([peer, encode_message(Answer(control.call, "", RankStats(3)))])
            assert (await waiting)[0].rank == 3


async def test_garbage_events_are_dropped_and_counted(rig: Rig) -> None:
    async with rig.events() as events:
        with zmq.Context() as context, context.socket(zmq.PUSH) as rank:
            rank.connect(rig.events_address)
            not_utf8 = msgspec.msgpack.encode(StagingFailed("~~", 0, "")).replace(b"~~", b"\xff\xfe")
            for garbage in (not_utf8, NESTED, b"", b"\x81\xa4type\xa9PullEnded"):
                rank.send(garbage)
            rank.send(msgspec.msgpack.encode(StagedChunk("t", 0, 1, True, 1)))
            assert await asyncio.wait_for(events.get(), 10) == StagedChunk("t", 0, 1, True, 1)
        assert events.dropped == 4


def test_a_flood_holds_up_no_other_peer(rig: Rig) -> None:
    exporter, stop = rig.endpoint(), threading.Event()

    def flood() -> None:
        with Stranger(exporter.address) as peer:
            while not stop.is_set():
                peer.send(NOT_UTF8)

    flooder = threading.Thread(target=flood)
    flooder.start()
    try:
        rig.transfer(exporter)
    finally:
        stop.set()
        flooder.join()


WORDS = st.sampled_from(["Pull", "Credit", "Cancel", "Confirm", "Control", "Frame", "Failed", "Answer", "t", "model"])
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 50) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | st.binary(max_size=20) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=40,
)
TAGGED = st.builds(lambda word, fields: msgspec.msgpack.encode([word, *fields]), WORDS, st.lists(VALUES, max_size=20))
MESSAGES = st.sampled_from([pull(), Credit(1, 5), Cancel(1), Confirm("t", 7, 0, 1), Failed(1, "timeout", "text")])
_SEAL = len(sealed(b""))
UNREADABLE = st.sampled_from([NESTED[:200], NOT_UTF8[:-_SEAL], NOT_UTF8_REPLY[:-_SEAL]])
TOO_LARGE = b"x" * (MAX_MESSAGE_BYTES + 1)


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    """A message of ours with some bytes changed, cut out or put in."""
    message = bytearray(draw(UNREADABLE | MESSAGES.map(msgspec.msgpack.encode)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(message)))
        message[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(message)


NOISE = st.binary(max_size=200) | TAGGED | mutants()
PARTS = st.lists(NOISE | NOISE.map(sealed) | st.just(TOO_LARGE), min_size=1, max_size=3)  # sealed, most of it is read


def test_no_input_ends_the_server(rig: Rig) -> None:
    exporter = rig.endpoint()
    with Stranger(exporter.address) as peer:

        @settings(max_examples=100, deadline=None, database=None)
        @given(NOISE | NOISE.map(sealed))
        def send(message: bytes) -> None:
            peer.send(message)

        send()
        peer.send(encode_message(pull(pull_id=2**40, generation=1)))  # answered after everything before
        while getattr(decode_reply(peer.receive()[0]), "pull_id", 0) != 2**40:
            pass

    @settings(max_examples=50, deadline=None, database=None)
    @given(st.booleans(), st.lists(st.binary(max_size=300), max_size=5))
    def send_raw(greets: bool, parts: list[bytes]) -> None:
        with connect(exporter) as plain:
            plain.sendall(b"".join([HEARTBEAT if greets else b"", *parts]))

    send_raw()
    rig.transfer(exporter, name="after")  # the noise may have confirmed what it names


def test_no_answer_ends_the_puller(rig: Rig) -> None:
    """An exporter that answers pulls with anything at all: the imports fail, later ones succeed."""
    transport = TcpTransport()
    listener = transport.listen(f"{rig.scheme}://127.0.0.1:*")
    exporter, importer = rig.endpoint(), rig.endpoint(limits=PullLimits(stall_s=5.0))
    frame, _ = true_frame(rig, exporter)

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.lists(PARTS, max_size=3), st.sampled_from(frame.__struct_fields__), VALUES, st.binary(max_size=100))
    def lie(noise: list[list[bytes]], field: str, value: object, payload: bytes) -> None:
        rig.load(importer, rig.handle([], 40, endpoints=(listener.address,)))
        peer, request = next_pull(transport, listener)
        true = msgspec.structs.replace(frame, pull_id=request.pull_id)
        try:
            header = encode_message(msgspec.structs.replace(true, **{field: value}))
        except (OverflowError, msgspec.MsgspecError):  # a value that msgpack cannot hold
            header = b"\xc1"
        for parts in (*noise, [header, payload], [encode_message(true), b"short"]):
            answer(listener, peer, parts)
        assert not rig.result().ok

    lie()
    transport.close()
    rig.transfer(exporter, importer, "after")


def test_an_exporter_that_lies_fails_the_pull_only(rig: Rig) -> None:
    """Headers without payload, frames of another transfer, text: the import fails, the puller lives."""
    transport = TcpTransport()
    listener = transport.listen(f"{rig.scheme}://127.0.0.1:*")
    exporter, importer = rig.endpoint(), rig.endpoint()
    frame, payload = true_frame(rig, exporter)
    texts = [b"\xff\xff", NOT_UTF8_REPLY, SEALED_NESTED, b"x" * (MAX_MESSAGE_BYTES + 1)]
    for lie in [*([text] for text in texts), [b""], [b"", payload[:-4]], [b"", b""]]:
        got = rig.load(importer, rig.handle([], 40, endpoints=(listener.address,)), timeout_s=1.0)
        peer, request = next_pull(transport, listener)
        header = lie[0] or encode_message(msgspec.structs.replace(frame, pull_id=request.pull_id))
        answer(listener, peer, [header, *lie[1:]])
        assert not rig.result().ok
        assert not got.writes
    transport.close()
    rig.transfer(exporter, importer, "after")
