"""Streams cut at any place give the same messages, and a flipped bit leaves the framing intact."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.framing import (
    GREETING_BYTES,
    KvSplitter,
    Message,
    Part,
    Piece,
    ZmtpSplitter,
    flip_bit,
    kv_message,
)
from services.worker.kv.wire.tcp_streams import HEARTBEAT, Outbound
from tests.services.worker.kv.wire.test_tcp import Pipe

GREETING = bytes(range(GREETING_BYTES))


@given(st.lists(st.tuples(st.sampled_from([0, 1, 4]), st.binary(max_size=700))), st.integers(1, 97))
def test_any_pieces_of_a_zmtp_stream_give_its_frames(frames: list[tuple[int, bytes]], size: int) -> None:
    parts = [Part(flags, body) for flags, body in frames]
    stream = GREETING + b"".join(part.encode() for part in parts)
    splitter, greeting, found = ZmtpSplitter(), b"", list[Piece]()
    for start in range(0, len(stream), size):
        more, got = splitter.feed(stream[start : start + size])
        greeting += more
        found += got
    assert greeting == GREETING
    assert [part.body for part in found if isinstance(part, Part)] == [part.body for part in parts]
    assert b"".join(part.encode() for part in found) == stream[GREETING_BYTES:]


def test_the_greeting_is_not_held_back() -> None:
    # Each side sends the rest of its greeting only when it has seen the beginning of the other's.
    assert ZmtpSplitter().feed(GREETING[:10]) == (GREETING[:10], [])


@given(st.binary(min_size=1, max_size=100), st.integers())
def test_one_bit_flips(body: bytes, seed: int) -> None:
    changed = flip_bit(body, Random(seed))
    assert sum((a ^ b).bit_count() for a, b in zip(body, changed, strict=True)) == 1


MESSAGES = st.lists(st.tuples(st.binary(min_size=1, max_size=60), st.binary(max_size=3000)), max_size=6)


def fed(data: bytes, size: int) -> list[Message]:
    splitter, found = KvSplitter(), []
    for start in range(0, len(data), size):
        at_once, pieces = splitter.feed(data[start : start + size])
        assert not at_once
        for piece in pieces:
            assert isinstance(piece, Message)
            found.append(piece)
    return found


@given(MESSAGES, st.integers(1, 900))
def test_any_pieces_of_a_kv_stream_give_its_messages(messages: list[tuple[bytes, bytes]], size: int) -> None:
    pipe, outbound = Pipe([1 << 20]), Outbound()
    for header, payload in messages:
        outbound.put(header, payload or None)
        outbound.heartbeat()
    outbound.flush(pipe)
    data = bytes(pipe.data)
    assert data == b"".join(kv_message(header, payload) + HEARTBEAT for header, payload in messages)
    found = fed(data, size)
    assert b"".join(each.encode() for each in found) == data
    assert [(each.header, each.payload) for each in found if not each.is_command] == messages
    assert sum(each.is_command for each in found) == len(messages)


@given(st.binary(min_size=1, max_size=60), st.binary(max_size=300), st.integers())
def test_one_bit_of_a_kv_message_flips_and_the_framing_stays(header: bytes, payload: bytes, seed: int) -> None:
    (message,) = fed(kv_message(header, payload), 1 << 20)
    before, after = message.encode(), message.flipped(Random(seed)).encode()
    assert sum((a ^ b).bit_count() for a, b in zip(before, after, strict=True)) == 1
    assert before[:16] == after[:16]


@given(st.binary(max_size=200), st.integers(1, 50))
def test_bytes_of_another_framing_pass_as_read(data: bytes, size: int) -> None:
    strange = b"\x16\x03\x01" + data  # TLS
    splitter, passed = KvSplitter(), b""
    for start in range(0, len(strange), size):
        _, pieces = splitter.feed(strange[start : start + size])
        passed += b"".join(piece.encode() for piece in pieces)
    assert passed == strange
