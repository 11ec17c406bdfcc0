"""The account that a worker gives of its prefix cache: whole, then changes, and silence while there are none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from services.worker import prefix_feed
from services.worker.engines.base import BlocksRemoved, BlocksStored
from services.worker.prefix_feed import PrefixFeed
from shared.domain.prompt import BLOCK_TOKENS, PrefixDelta, block_hashes
from shared.policy.prefix_index import PrefixIndex
from shared.wire.messages import PrefixesRequest
from shared.wire.rpc_server import ServerCall
from tests.services.control_plane import until

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
        feed.receive([stored(0, 3)])
        feed.receive([stored(3, 5)])
        feed.receive([BlocksRemoved([4])])
        assert len(caller.items) == 1
        began_s = asyncio.get_running_loop().time()
        await until(lambda: len(caller.items) == 2, "a delta")
        assert asyncio.get_running_loop().time() - began_s > 0.09
        assert caller.items[1] == PrefixDelta(7, 1, added=list(block_hashes(PROMPT[: 4 * BLOCK_TOKENS])))
        assert feed._timer is None
        feed.receive([BlocksRemoved([99])])
        feed.receive([stored(4, 5), BlocksRemoved([4])])  # comes and goes between two messages
        if feed._timer is not None:
            await until(lambda: feed._timer is None, "the time of the next message")
        assert len(caller.items) == 2


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
    assert feed._timer is None  # nobody listens
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
