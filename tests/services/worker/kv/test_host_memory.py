from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv import KvError, KvFault
from services.worker.kv.staging import HeapMemory, PinnedMemory

TOKEN_BYTES = 2 * 3 * 2 * 4  # K and V, three layers, a head of two float32


def shape(tokens: int) -> tuple[int, ...]:
    return 3, 2, tokens, 1, 2


def pinned(tokens: int, segment: int = 8) -> PinnedMemory:
    """Of exactly so many tokens, in host memory that is not pinned."""

    def allocate(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    return PinnedMemory(shape, torch.float32, segment, tokens * TOKEN_BYTES, allocate)


def test_heap_memory_comes_in_segments() -> None:
    parts = HeapMemory(shape, torch.float16, 4).take(10)
    assert [part.shape[2] for part in parts] == [4, 4, 2]
    assert all(part.is_contiguous() and part.dtype == torch.float16 for part in parts)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30))
def test_places_are_had_by_one_at_a_time_and_none_is_lost(steps: list[tuple[int, bool]]) -> None:
    memory, held, number = pinned(64), list[tuple[int, list[torch.Tensor]]](), 0
    for tokens, drop in steps:
        if drop and held:
            value, parts = held.pop(tokens % len(held))
            assert all(bool((part == value).all()) for part in parts)
            del parts
        elif tokens <= memory.free_tokens:
            number += 1
            parts = memory.take(tokens)
            assert sum(part.shape[2] for part in parts) == tokens
            assert all(part.shape == shape(part.shape[2]) and part.is_contiguous() for part in parts)
            for part in parts:
                part.fill_(number)
            held.append((number, parts))
            del parts, part
        else:
            with pytest.raises(KvError) as raised:
                memory.take(tokens)
            assert raised.value.fault is KvFault.REFUSED
        assert memory.free_tokens == 64 - sum(part.shape[2] for _, parts in held for part in parts)
    held.clear()
    assert memory.free_tokens == 64


def coded(tokens: int) -> int:
    """A third of what tokens have, and something for each part."""
    return 8 + tokens * TOKEN_BYTES // 3


@given(st.lists(st.tuples(st.integers(1, 150), st.booleans()), max_size=30))
def test_bytes_of_coded_kv_are_had_by_one_at_a_time_and_none_is_lost(steps: list[tuple[int, bool]]) -> None:
    memory, held, number = pinned(64, segment=64), list[tuple[int, list[torch.Tensor]]](), 0
    for tokens, drop in steps:
        if drop and held:
            value, parts = held.pop(tokens % len(held))
            assert all(bool((part == value).all()) for part in parts)
            del parts
            continue
        taken: list[tuple[int, torch.Tensor]] = []
        free = memory.free_tokens
        with suppress(KvError):
            taken = memory.take_bytes(tokens, coded)
        if not taken:
            assert memory.free_tokens == free < 64  # an empty one has room for a third of 150 tokens
            continue
        number = (number + 1) % 256
        assert sum(part for part, _ in taken) == tokens
        assert all(place.numel() == coded(part) for part, place in taken)
        for _, place in taken:
            place.fill_(number)
        held.append((number, [place for _, place in taken]))
        del place
    held.clear()
    taken = []
    assert memory.free_tokens == 64


def test_where_holes_are_small_coded_parts_have_fewer_tokens() -> None:
    memory = pinned(64, segment=96)
    held = [memory.take(8) for _ in range(8)]
    del held[1], held[3]  # two holes of eight places
    with pytest.raises(KvError):
        memory.take_bytes(96, lambda tokens: tokens * TOKEN_BYTES // 2)
    assert memory.free_tokens == 16
    taken = memory.take_bytes(70, lambda tokens: tokens * TOKEN_BYTES // 5)
    assert [part for part, _ in taken] == [32, 38]


def test_a_view_keeps_its_places() -> None:
    memory = pinned(16)
    (part,) = memory.take(8)
    frame = part[1:2, :, 2:4].numpy().data
    del part
    assert memory.free_tokens == 8
    del frame
    assert memory.free_tokens == 16


def test_what_is_taken_is_cut_to_the_holes_that_there_are() -> None:
    memory = pinned(12, segment=4)
    first, middle, last = memory.take(12)
    del first, last
    parts = memory.take(8)
    assert [part.shape[2] for part in parts] == [4, 4]
    assert middle.shape[2] == 4


def test_a_chunk_takes_the_largest_hole_where_none_is_large_enough() -> None:
    memory = pinned(9, segment=8)
    parts = [memory.take(size)[0] for size in (2, 1, 3, 1, 2)]
    del parts[4], parts[2], parts[0]
    assert [part.shape[2] for part in memory.take(7)] == [3, 2, 2]


@pytest.mark.parametrize("limit", [1, 100 * TOKEN_BYTES + 1, (64 << 20) + 1])
def test_it_is_as_much_as_was_asked_for_at_least_in_slabs_that_are_no_larger_than_a_power_of_two(limit: int) -> None:
    sizes: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    memory = PinnedMemory(shape, torch.float32, 8, limit, allocate)
    assert limit <= memory.free_tokens * TOKEN_BYTES == sum(sizes)
    assert max(sizes) <= 64 << 20
