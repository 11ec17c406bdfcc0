"""KV sockets under drawn messages: nothing that arrives ends a thread."""

import socket

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.protocol import (
    Cancel,
    Confirm,
    Credit,
    Failed,
    Frame,
    decode_reply,
    encode_message,
    sealed,
)
from services.worker.kv.wire.tcp_framing import HEARTBEAT
from services.worker.kv.wire.tcp_streams import host_and_port
from services.worker.kv.wire.tcp_transport import TcpTransport
from tests.services.worker.kv.rig import Rig, model_kv, stage
from tests.services.worker.kv.wire.hostile import (
    NESTED,
    NOT_UTF8,
    NOT_UTF8_REPLY,
    Stranger,
    assert_serves,
    next_pull,
    pull,
    say,
    true_frame,
)

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
