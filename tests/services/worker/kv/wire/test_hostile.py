"""Input that no peer of the protocol sends: the endpoint drops it, counts it, and goes on."""

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

from services.worker.kv.rank_links import (
    Answer,
    Control,
    RankStats,
    SocketControl,
    StagedChunk,
    StagingFailed,
    Stats,
    _controls,
)
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.protocol import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Confirm,
    Credit,
    Failed,
    Frame,
    Unread,
    decode_reply,
    encode_message,
    opened,
    sealed,
)
from services.worker.kv.wire.tcp_framing import HEARTBEAT
from services.worker.kv.wire.tcp_streams import host_and_port
from services.worker.kv.wire.tcp_transport import TcpTransport
from tests.services.worker.kv.rig import KEY, Rig, model_kv, stage
from tests.services.worker.kv.wire.hostile import (
    NESTED,
    NOT_UTF8,
    NOT_UTF8_REPLY,
    SEALED_NESTED,
    Stranger,
    assert_serves,
    next_pull,
    not_utf8,
    pull,
    renumbered,
    say,
    true_frame,
)


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
            assert isinstance(decode_reply(peer.recv_multipart()[0]), Unread)
        assert decode_reply(peer.recv_multipart()[0]).fault == "stale_generation"  # after the garbage, in order
    assert exporter.server_counters.dropped == len(messages)
    assert_serves(rig, exporter)


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
    exporter = rig.endpoint()
    with Stranger(exporter.address) as peer:
        peer.send(encode_message(pull(**changes)))
        assert decode_reply(peer.recv_multipart()[0]).fault == "invalid_request"


def test_oversized_messages_cost_their_sender_the_connection(rig: Rig) -> None:
    exporter = rig.endpoint()
    with Stranger(exporter.address) as peer:
        peer.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ConnectionError):
            peer.recv_multipart()
    assert_serves(rig, exporter)


def test_raw_bytes_on_the_port_do_no_harm(rig: Rig) -> None:
    exporter = rig.endpoint()
    host, port = host_and_port(exporter.address)
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, bytes(range(256)) * 64, struct.pack(">Q", 2**63)):
        with socket.create_connection((host, port)) as plain:
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
    transport = TcpTransport()
    listener = transport.listen(f"{rig.scheme}://127.0.0.1:*")
    exporter, importer = rig.endpoint(), rig.endpoint()
    handle = rig.handle([exporter], 40, endpoints=(listener.address,))
    frame = true_frame(rig, exporter)
    lies = [[b"\xff\xff"], [NOT_UTF8_REPLY], [SEALED_NESTED], [b"x" * (MAX_MESSAGE_BYTES + 1)]]
    lies += [[frame[0]], [frame[0], frame[1][:-4]], [frame[0], b""]]
    for lie in lies:
        got = rig.load(importer, handle, timeout_s=1.0)
        peer, request = next_pull(transport, listener)
        header = decode_reply(lie[0])
        parts = lie if header is None else [renumbered(header, request.pull_id), *lie[1:]]
        say(listener, peer, parts)
        result = rig.result()
        assert not result.ok
        assert not got.writes
    transport.close()
    assert_serves(rig, exporter)


async def test_garbage_answers_do_not_end_the_workers_own_side(rig: Rig) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as rank:
        port = rank.bind_to_random_port("tcp://127.0.0.1")
        async with SocketControl((f"tcp://127.0.0.1:{port}",), KEY) as control:
            waiting = asyncio.create_task(control.call(Stats(), timeout_s=10))
            peer, request = await rank.recv_multipart()
            control = opened(_controls, request)
            assert isinstance(control, Control)
            call = control.call
            for garbage in (not_utf8(Answer(call, "~~")), SEALED_NESTED, b"", sealed(b"")):
                await rank.send_multipart([peer, garbage])
            await rank.send_multipart([peer, b"a", b"b"])
            await rank.send_multipart([peer, encode_message(Answer(call, "", RankStats(3)))])
            assert (await waiting)[0].rank == 3


async def test_garbage_events_are_dropped_and_counted(rig: Rig) -> None:
    async with rig.events() as events:
        with zmq.Context() as context, context.socket(zmq.PUSH) as rank:
            rank.connect(rig.events_address)
            for garbage in (
                msgspec.msgpack.encode(StagingFailed("~~", 0, "")).replace(b"~~", b"\xff\xfe"),
                NESTED,
                b"",
                b"\x81\xa4type\xa9PullEnded",
            ):
                rank.send(garbage)
            rank.send(msgspec.msgpack.encode(StagedChunk("t", 0, 1, True, 1)))
            assert await asyncio.wait_for(events.get(), 10) == StagedChunk("t", 0, 1, True, 1)
        assert events.dropped == 4


def test_a_flood_holds_up_nobody_else(rig: Rig) -> None:
    exporter, stop = rig.endpoint(), threading.Event()

    def flood() -> None:
        with Stranger(exporter.address) as peer:
            while not stop.is_set():
                peer.send(NOT_UTF8)

    flooder = threading.Thread(target=flood)
    flooder.start()
    try:
        assert_serves(rig, exporter)
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


BODIES = UNREADABLE | MESSAGES.map(msgspec.msgpack.encode)


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    """A message of ours with some bytes changed, cut out or put in."""
    message = bytearray(draw(BODIES))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(message)))
        message[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(message)


NOISE = st.binary(max_size=200) | TAGGED | mutants()  # most of it sealed, so that it is read at all


PARTS = st.lists(NOISE | NOISE.map(sealed) | NOISE.map(sealed), min_size=1, max_size=3)


def test_no_message_ends_the_server(rig: Rig) -> None:
    exporter = rig.endpoint()
    with Stranger(exporter.address) as peer:

        @settings(max_examples=100, deadline=None, database=None)
        @given(PARTS)
        def send(parts: list[bytes]) -> None:
            peer.send(parts[0])

        send()
        answers_to_itself(peer)
    assert_serves(rig, exporter)


def answers_to_itself(peer: Stranger) -> None:
    """All that was sent before has been read: it answers a pull that comes after it."""
    peer.send(encode_message(pull(pull_id=2**40, generation=1)))
    while getattr(decode_reply(peer.recv_multipart()[0]), "pull_id", 0) != 2**40:
        pass


def test_no_bytes_on_the_port_end_the_server(rig: Rig) -> None:
    exporter = rig.endpoint()
    host, port = host_and_port(exporter.address)

    @settings(max_examples=50, deadline=None, database=None)
    @given(st.booleans(), st.lists(st.binary(max_size=300), max_size=5))
    def send(greets: bool, parts: list[bytes]) -> None:
        with socket.create_connection((host, port)) as plain:
            plain.sendall(b"".join([HEARTBEAT if greets else b"", *parts]))

    send()
    assert_serves(rig, exporter)


def test_no_answer_ends_the_puller(rig: Rig) -> None:
    """An exporter that answers pulls with anything at all: the imports fail, later ones succeed."""
    transport = TcpTransport()
    listener = transport.listen(f"{rig.scheme}://127.0.0.1:*")
    exporter, importer = rig.endpoint(), rig.endpoint(limits=PullLimits(stall_s=5.0))
    header = decode_reply(true_frame(rig, exporter)[0])
    assert isinstance(header, Frame)
    fields = st.sampled_from(header.__struct_fields__)

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.lists(PARTS, max_size=3), fields, VALUES, st.binary(max_size=100))
    def answer(noise: list[list[bytes]], field: str, value: object, payload: bytes) -> None:
        rig.load(importer, rig.handle([exporter], 40, endpoints=(listener.address,)))
        peer, request = next_pull(transport, listener)
        true = msgspec.structs.replace(header, pull_id=request.pull_id)
        lie = msgspec.structs.replace(true, **{field: value})
        for parts in (*noise, [_encoded(lie), payload], [encode_message(true), b"short"]):
            say(listener, peer, parts)
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
