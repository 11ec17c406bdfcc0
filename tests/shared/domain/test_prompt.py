"""Prompts as bytes: the same tokens come out, and what is no prompt is refused by name."""

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.job import Generation, JobView
from shared.domain.prompt import (
    BLOCK_TOKENS,
    MAX_BLOCKS,
    MediaItem,
    beginning,
    block_hashes,
    hashes_of,
    length,
    modalities,
    packed,
    unpacked,
    whole_items,
)
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


# Hashes of a prompt's blocks: what two prompts have in common, and nothing else
prefix_tokens = st.lists(st.integers(0, 3), max_size=24)


def common(one: list[int], other: list[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@given(prefix_tokens, prefix_tokens, st.integers(1, 5))
def test_two_prompts_share_the_hashes_of_the_whole_blocks_that_they_share(
    a: list[int], b: list[int], size: int
) -> None:
    one, other = block_hashes(a, block_tokens=size), block_hashes(b, block_tokens=size)
    assert len(one) == len(a) // size
    shared = common(a, b) // size
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])


@given(prefix_tokens, st.text(max_size=3), st.text(max_size=3))
def test_another_salt_shares_nothing(prompt: list[int], salt: str, other: str) -> None:
    one, two = block_hashes(prompt, salt, block_tokens=2), block_hashes(prompt, other, block_tokens=2)
    assert one == two if salt == other else not set(one) & set(two)


@given(prefix_tokens, st.text(max_size=3), st.text(max_size=3), st.text(max_size=3), st.text(max_size=3))
def test_another_adapter_shares_nothing(prompt: list[int], salt: str, other_salt: str, name: str, other: str) -> None:
    one = block_hashes(prompt, salt, name, block_tokens=2)
    two = block_hashes(prompt, other_salt, other, block_tokens=2)
    assert one == two if (salt, name) == (other_salt, other) else not set(one) & set(two)


def test_they_are_64_bits_and_bounded_in_number() -> None:
    found = block_hashes(range(BLOCK_TOKENS * (MAX_BLOCKS + 7)))
    assert len(found) == len(set(found)) == MAX_BLOCKS
    assert all(0 <= one < 1 << 64 for one in found)
    assert max(found) > 1 << 60


def test_token_ids_beyond_32_bits_have_no_hashes() -> None:
    assert block_hashes([1 << 40] * 200) == ()


def test_they_are_the_same_in_every_process() -> None:
    """And in every version: instances and gateways are not upgraded at one moment."""
    said = "from shared.domain.prompt import block_hashes; print(block_hashes(range(130), 's'))"
    out = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(block_hashes(range(130), "s")) == "(11241549196322108863, 4722872189300414374)"


# Media items


def item(digest: str, start: int, tokens: int = 10) -> MediaItem:
    return MediaItem("image", digest, start, tokens)


@given(st.integers(0, 400), st.integers(1, 90), st.integers(0, 500))
def test_prompts_that_differ_in_an_item_differ_from_its_beginning_on(start: int, tokens: int, salt: int) -> None:
    prompt = [7] * 500
    one, other = (block_hashes(prompt, str(salt), items=[item(name, start, tokens)]) for name in "ab")
    whole = start // BLOCK_TOKENS
    assert one[:whole] == other[:whole] == block_hashes(prompt, str(salt))[:whole]
    assert not {*one[whole:]} & {*other[whole:]}
    assert not {*one[whole:]} & {*block_hashes(prompt, str(salt))[whole:]}


def test_the_place_and_the_order_of_items_count() -> None:
    prompt = [7] * 128
    placed = [
        [item("a", 3)],
        [item("a", 4)],
        [item("a", 67)],
        [item("a", 3), item("b", 20)],
        [item("b", 3), item("a", 20)],
        [item("a", 3), item("a", 20)],
    ]
    assert len({block_hashes(prompt, items=items)[1] for items in placed}) == len(placed)


@pytest.mark.parametrize(
    ("tokens", "whole"), [(0, 0), (4, 4), (5, 5), (6, 15), (14, 15), (15, 15), (16, 16), (20, 20), (21, 30), (99, 99)]
)
def test_a_prompt_is_not_cut_within_an_item(tokens: int, whole: int) -> None:
    assert whole_items(tokens, [item("a", 5), item("b", 20)]) == whole


def test_modalities_are_named_once() -> None:
    assert modalities([item("a", 0), MediaItem("video", "b", 20, 1), item("c", 30)]) == ("image", "video")
