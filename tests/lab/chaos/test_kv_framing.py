from random import Random

from hypothesis import given
from hypothesis import strategies as st

from lab.chaos.framing import KvSplitter, Message, said
from services.worker.kv.wire.tcp_framing import HEARTBEAT, Outbound
from tests.services.worker.kv.wire.test_tcp_framing import Pipe

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
def test_any_pieces_of_a_stream_give_its_messages(messages: list[tuple[bytes, bytes]], size: int) -> None:
    pipe, outbound = Pipe([1 << 20]), Outbound()
    for header, payload in messages:
        outbound.put(header, payload or None)
        outbound.heartbeat()
    outbound.flush(pipe)
    data = bytes(pipe.data)
    assert data == b"".join(said(header, payload) + HEARTBEAT for header, payload in messages)
    found = fed(data, size)
    assert b"".join(each.encode() for each in found) == data
    assert [(each.header, each.payload) for each in found if not each.is_command] == messages
    assert sum(each.is_command for each in found) == len(messages)


@given(st.binary(min_size=1, max_size=60), st.binary(max_size=300), st.integers())
def test_one_bit_of_a_message_flips_and_the_framing_stays(header: bytes, payload: bytes, seed: int) -> None:
    (message,) = fed(said(header, payload), 1 << 20)
    before, after = message.encode(), message.flipped(Random(seed)).encode()
    assert sum((a ^ b).bit_count() for a, b in zip(before, after, strict=True)) == 1
    assert before[:16] == after[:16]


@given(st.binary(max_size=200), st.integers(1, 50))
def test_what_is_no_framing_of_ours_passes_as_it_comes(data: bytes, size: int) -> None:
    strange = b"\x16\x03\x01" + data  # TLS
    splitter, passed = KvSplitter(), b""
    for start in range(0, len(strange), size):
        _, pieces = splitter.feed(strange[start : start + size])
        passed += b"".join(piece.encode() for piece in pieces)
    assert passed == strange
