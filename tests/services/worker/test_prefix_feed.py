"""The prefix cache as schedulers see it: blocks of the cluster's size, a snapshot and then changes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker import prefix_feed
from services.worker.engines.base import BlocksCleared, BlocksKept, BlocksRemoved, BlocksStored
from services.worker.kv import lossy_salt
from services.worker.prefix_feed import FEW_S, MANY, PERIOD_S, HeldPrefixes, PrefixFeed
from shared.domain.prompt import BLOCK_TOKENS, MediaItem, PrefixDelta, begun_in, block_hashes
from shared.policy.prefix_index import PrefixIndex
from shared.wire.messages import PrefixesRequest
from shared.wire.rpc_server import ServerCall
from tests.services.control_plane import until

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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
def test_items_are_part_of_the_blocks_in_which_they_begin(size: int) -> None:
    """Whatever the size of the engine's blocks: the names are those that a gateway computes."""
    prompt = [5] * 48
    items = [MediaItem("image", "a", 1, 5), MediaItem("image", "b", 7, 9), MediaItem("image", "c", 30, 3)]
    held = HeldPrefixes(block_tokens=OURS)
    parent: bytes | None = None
    for first in range(0, len(prompt), 2 * size):  # two blocks at a time
        count = min(2, (len(prompt) - first) // size)
        names = [f"{first + at * size}".encode() for at in range(count)]
        tokens = prompt[first : first + count * size]
        held.apply(BlocksStored(names, parent, tokens, begun=begun_in(items, first, len(tokens))))
        parent = names[-1]
    hashes = block_hashes(prompt, items=items, block_tokens=OURS)
    assert set(held.reachable.blocks) == set(hashes)
    assert not set(hashes) & set(block_hashes(prompt, block_tokens=OURS))


def test_what_follows_an_unknown_block_is_left_out() -> None:
    held = HeldPrefixes(OURS)
    held.apply(BlocksStored([b"2"], b"1", list(range(4))))
    held.apply(BlocksRemoved([b"1", b"2", b"3"]))
    held.apply(BlocksStored([b"1", b"2"], None, list(range(7))))  # tokens of no whole number of blocks
    assert not held.reachable.blocks
    assert len(held) == 0


def test_a_block_that_stays_in_host_memory_is_held_until_it_leaves_that_too() -> None:
    held, known = HeldPrefixes(OURS), list[int]()
    held.apply(BlocksStored([b"1"], None, list(range(OURS))))
    for event, holds in (
        (BlocksKept([b"1", b"of another group"], host=True), True),
        (BlocksRemoved([b"1"]), True),
        (BlocksStored([b"1"], None, list(range(OURS))), True),  # loaded back
        (BlocksRemoved([b"1"]), True),
        (BlocksRemoved([b"1"], host=True), False),
        (BlocksKept([b"1"]), False),  # of a block that is not known
    ):
        held.apply(event)
        known.append(len(held.reachable.blocks))
        assert known[-1] == holds, event
    assert len(held) == 0


PROMPT = list(range(10 * BLOCK_TOKENS))


def stored(first: int, last: int) -> BlocksStored:
    ids = PROMPT[first * BLOCK_TOKENS : last * BLOCK_TOKENS]
    return BlocksStored(list(range(first, last)), first - 1 if first else None, ids)


class Caller:
    def __init__(self) -> None:
        self.items: list[PrefixDelta] = []
        self.index = PrefixIndex()

    def send(self, item: PrefixDelta) -> None:
        self.items.append(item)
        assert self.index.apply("w", item)

    @property
    def held(self) -> int:
        return self.index.held_tokens("w", block_hashes(PROMPT)) // BLOCK_TOKENS


@asynccontextmanager
async def calling(feed: PrefixFeed) -> AsyncIterator[Caller]:
    caller = Caller()
    task = asyncio.create_task(feed.prefixes(PrefixesRequest(), cast(ServerCall, cast(Any, caller))))
    await until(lambda: caller.items, "the account begins")
    try:
        yield caller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_changes_of_a_while_are_one_message_and_silence_costs_nothing() -> None:
    feed = PrefixFeed(7)
    async with calling(feed) as caller:
        assert caller.items == [PrefixDelta(7, 0, starts=True)]
        began_mono = asyncio.get_running_loop().time()
        feed.receive([stored(0, 3)])
        feed.receive([stored(3, 5)])
        feed.receive([BlocksRemoved([4])])
        assert len(caller.items) == 1
        await until(lambda: len(caller.items) == 2, "a delta")
        assert asyncio.get_running_loop().time() - began_mono > 0.09
        assert caller.items[1] == PrefixDelta(7, 1, added=list(block_hashes(PROMPT[: 4 * BLOCK_TOKENS])))
        assert feed._alarm._timer is None
        feed.receive([BlocksRemoved([99])])
        feed.receive([stored(4, 5)])
        feed.receive([BlocksRemoved([4])])  # it came and went between two messages
        await until(lambda: feed._alarm._timer is None, "the time of the next message")
        assert len(caller.items) == 2


async def test_few_changes_wait_longer_for_others_than_many() -> None:
    feed, now_mono, alarms = PrefixFeed(7), [100.0], list[float]()
    feed._loop = cast(Any, SimpleNamespace(time=lambda: now_mono[0], create_future=feed._loop.create_future))
    feed._alarm = cast(Any, SimpleNamespace(by=alarms.append, cancel=lambda: None))
    async with calling(feed) as caller:
        feed.receive([stored(0, 1)])  # the first after a while: as soon as many would be
        assert alarms == [100.1]
        now_mono[0] = 100.1
        feed._publish()
        now_mono[0] = 100.2
        feed.receive([stored(1, 2)])
        feed.receive([stored(2, 1 + MANY)])
        assert alarms[1:] == [100.1 + FEW_S, 100.2 + PERIOD_S]
        feed._publish()
        assert caller.held == 1 + MANY


async def test_it_says_which_blocks_lie_in_host_memory() -> None:
    """A block on the accelerator that follows one in host memory counts as there."""
    feed = PrefixFeed(7, tiered=True)
    prefix = block_hashes(PROMPT)

    def hosted(caller: Caller) -> int:
        held = caller.index.held_tokens("w", prefix)
        return caller.index.hosted_tokens("w", prefix, held) // BLOCK_TOKENS

    async with calling(feed) as caller:
        feed.receive([stored(0, 6), BlocksKept([4, 5], host=True), BlocksRemoved([4])])
        await until(lambda: caller.held == 6, "blocks of both tiers")
        assert hosted(caller) == 2
        async with calling(feed) as late:
            assert (late.held, hosted(late)) == (6, 2)
        feed.receive([stored(4, 5)])  # loaded back
        await until(lambda: not hosted(caller), "all is on the accelerator")
        feed.receive([BlocksRemoved([5])])
        await until(lambda: hosted(caller) == 1, "the last block is in host memory alone")
        feed.receive([BlocksRemoved([5], host=True)])
        await until(lambda: caller.held == 5, "the last block is gone")
        assert not hosted(caller)


async def test_who_comes_late_gets_all_and_then_the_same_as_the_others() -> None:
    feed = PrefixFeed(7)
    feed.receive([stored(0, 2)])
    async with calling(feed) as early:
        assert early.held == 2
        feed.receive([stored(2, 4)])
        async with calling(feed) as late:  # before the delta was due
            assert late.held == early.held == 4
            feed.receive([BlocksRemoved([3])])
            await until(lambda: late.held == early.held == 3, "both hear of it")
        feed.receive([stored(3, 6)])
        await until(lambda: early.held == 6, "who stays hears on")
        assert late.held == 3
    feed.receive([BlocksRemoved([5])])
    assert feed._alarm._timer is None  # no scheduler has subscribed
    async with calling(feed) as again:
        assert again.held == 5


async def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_feed, "MAX_MESSAGE_BLOCKS", 4)
    feed = PrefixFeed(7)
    feed.receive([stored(0, 10)])
    async with calling(feed) as caller:
        assert caller.held == 10
        assert [len(item.added) for item in caller.items] == [4, 4, 2]
        feed.receive([BlocksRemoved(list(range(1, 10)))])
        await until(lambda: caller.held == 1, "removals")
        assert [len(item.removed) for item in caller.items[3:]] == [4, 4, 1]
