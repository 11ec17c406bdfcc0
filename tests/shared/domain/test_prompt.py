"""Prompts as bytes: the same tokens come out, and what is no prompt is refused by name."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.job import Generation, JobView
from shared.domain.prompt import beginning, block_hashes, hashes_of, length, packed, unpacked
from shared.wire.messages import DecodeRequest, PrefillRequest

tokens = st.lists(st.integers(0, (1 << 31) - 1), max_size=300)


@given(tokens, st.integers(0, 400))
def test_the_tokens_come_out_again(prompt: list[int], count: int) -> None:
    data = packed(prompt)
    assert unpacked(data) == prompt
    assert length(data) == len(prompt)
    assert unpacked(beginning(data, count)) == prompt[:count]
    assert hashes_of(data, "s") == block_hashes(prompt, "s")


def test_the_bytes_are_the_same_on_every_machine() -> None:
    assert packed([1, 0x01020304]) == b"\1\0\0\0\4\3\2\1"


def test_no_vocabulary_has_such_tokens() -> None:
    with pytest.raises(OverflowError):
        packed([1 << 31])


def test_bytes_that_are_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes"):
        unpacked(bytes(7))


@pytest.mark.parametrize("kind", [PrefillRequest, DecodeRequest])
def test_no_message_brings_such_bytes(kind: type[PrefillRequest | DecodeRequest]) -> None:
    fields = {"job": JobView("j", 1, 1), "transfer_id": "t", "prompt": b"abc", "generation": Generation(b"", 0.0)}
    with pytest.raises(msgspec.ValidationError, match="3 bytes"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=kind)
