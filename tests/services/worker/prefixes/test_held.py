"""From the engine's blocks to ours: what others are told is what a request would find, whatever the sizes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engines.base import BlocksCleared, BlocksRemoved, BlocksStored
from services.worker.kv import lossy_salt
from services.worker.prefix_feed import HeldPrefixes
from shared.domain.prompt import block_hashes

OURS = 4


class Cache:
    """An engine's prefix cache, as plainly as can be: blocks are all tokens up to their end."""

    def __init__(self, size: int, told: HeldPrefixes) -> None:
        self.size = size
        self.told = told
        self.copies: Counter[bytes] = Counter()

    def name(self, prompt: list[int], salt: str, block: int) -> bytes:
        return repr((salt, prompt[: (block + 1) * self.size])).encode()

    def hit_tokens(self, prompt: list[int], salt: str) -> int:
        count = 0
        while (count + 1) * self.size <= len(prompt) and self.copies[self.name(prompt, salt, count)]:
            count += 1
        return count * self.size

    def compute(self, prompt: list[int], salt: str, chunk: int) -> None:
        """Store what was not found, `chunk` blocks at a time: some are there already, behind one that is not."""
        blocks = list(range(self.hit_tokens(prompt, salt) // self.size, len(prompt) // self.size))
        for at in range(0, len(blocks), chunk):
            some = blocks[at : at + chunk]
            names = [self.name(prompt, salt, block) for block in some]
            parent = self.name(prompt, salt, some[0] - 1) if some[0] else None
            ids = prompt[some[0] * self.size : (some[-1] + 1) * self.size]
            self.copies.update(names)
            self.told.apply(BlocksStored(names, parent, ids, salt if parent is None else ""))

    def evict(self, number: int) -> None:
        held = [name for name, copies in self.copies.items() if copies]
        if held:
            name = held[number % len(held)]
            self.copies[name] -= 1
            self.told.apply(BlocksRemoved([name]))

    def clear(self) -> None:
        self.copies.clear()
        self.told.apply(BlocksCleared())


def known(held: HeldPrefixes, prompt: list[int], salt: str) -> int:
    blocks = held.reachable.blocks
    hashes = block_hashes(prompt, salt, block_tokens=OURS)
    return next((at for at, block in enumerate(hashes) if block not in blocks), len(hashes)) * OURS


prompts = st.builds(
    lambda length, fork, at: [0] * at + [fork] * (length - at) if at < length else [0] * length,
    st.integers(1, 20),
    st.integers(0, 1),
    st.integers(0, 12),
)
computes = st.tuples(st.just("compute"), prompts, st.sampled_from(["", "", "", "s"]), st.integers(1, 3))
evicts = st.tuples(st.just("evict"), st.integers(0, 99))
works = st.lists(st.one_of(computes, computes, evicts, evicts, evicts, st.tuples(st.just("clear"))), max_size=40)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
@settings(max_examples=200)
@given(works)
def test_it_tells_of_what_a_request_would_find(size: int, work: list[tuple[object, ...]]) -> None:
    held = HeldPrefixes(OURS)
    cache, seen = Cache(size, held), set[tuple[tuple[int, ...], str]]()
    for what, *arguments in work:
        getattr(cache, str(what))(*arguments)
        if what == "compute":
            prompt, salt, _ = arguments
            assert isinstance(prompt, list)
            seen.add((tuple(prompt), str(salt)))
        for one, salt in seen:
            for asked in (salt, "", "other"):
                found = cache.hit_tokens(list(one), asked)
                told = known(held, list(one), asked)
                assert told >= found // OURS * OURS
                assert told // size * size <= found  # an engine finds whole blocks: see `saved_tokens`
    while any(cache.copies.values()):
        cache.evict(0)
    assert len(held) == 0
    assert not held.reachable.blocks


def test_far_behind_its_start_a_prompt_is_not_told_of() -> None:
    held = HeldPrefixes(OURS, max_blocks=3)
    cache, prompt = Cache(2, held), list(range(40))
    cache.compute(prompt, "", 5)
    assert len(held.reachable.blocks) == 3
    assert len(held) <= 7
    while any(cache.copies.values()):
        cache.evict(0)
    assert len(held) == 0


def test_approximate_kv_is_told_of_to_nobody() -> None:
    held = HeldPrefixes(OURS)
    cache, prompt = Cache(OURS, held), list(range(12))
    cache.compute(prompt, lossy_salt("j0/1"), 3)
    assert not held.reachable.blocks
    assert len(held) == 0
    cache.compute(prompt, "", 3)
    assert known(held, prompt, "") == 12


def test_what_follows_an_unknown_block_is_left_out() -> None:
    held = HeldPrefixes(OURS)
    held.apply(BlocksStored([b"2"], b"1", list(range(4))))
    held.apply(BlocksRemoved([b"1", b"2", b"3"]))
    held.apply(BlocksStored([b"1", b"2"], None, list(range(7))))  # tokens of no whole number of blocks
    assert not held.reachable.blocks
    assert len(held) == 0
