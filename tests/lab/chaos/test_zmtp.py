from random import Random

from hypothesis import given
from hypothesis import strategies as st

from lab.chaos.framing import GREETING_BYTES, Part, ZmtpSplitter, flip_bit

GREETING = bytes(range(GREETING_BYTES))


@given(st.lists(st.tuples(st.sampled_from([0, 1, 4]), st.binary(max_size=700))), st.integers(1, 97))
def test_any_pieces_of_a_stream_give_its_frames(frames: list[tuple[int, bytes]], size: int) -> None:
    parts = [Part(flags, body) for flags, body in frames]
    stream = GREETING + b"".join(part.encode() for part in parts)
    splitter, greeting, found = ZmtpSplitter(), b"", []
    for start in range(0, len(stream), size):
        more, got = splitter.feed(stream[start : start + size])
        greeting += more
        found += got
    assert greeting == GREETING
    assert [part.body for part in found] == [part.body for part in parts]
    assert b"".join(part.encode() for part in found) == stream[GREETING_BYTES:]


def test_the_greeting_is_not_held_back() -> None:
    # Each side sends the rest of its greeting only when it has seen the beginning of the other's.
    assert ZmtpSplitter().feed(GREETING[:10]) == (GREETING[:10], [])


@given(st.binary(min_size=1, max_size=100), st.integers())
def test_one_bit_flips(body: bytes, seed: int) -> None:
    changed = flip_bit(body, Random(seed))
    assert sum((a ^ b).bit_count() for a, b in zip(body, changed, strict=True)) == 1
