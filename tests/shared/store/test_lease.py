"""Leases: one holder at a time, whoever asks and whenever, in both kinds of databases."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.store.database import open_engine
from shared.store.lease import Held, LeaseStore
from shared.store.migrate import migrate
from shared.store.reading import read_request
from shared.store.tables import requests
from shared.store.write_behind import WriteBehind
from shared.wire.api.scheduler import StoredRequest
from tests.shared.store.rows import request_row

Until = Callable[..., Any]
LENGTH_S = 1.0
PATIENCE_S = 20.0


@pytest.fixture
async def lease(engine: AsyncEngine, url: str) -> AsyncIterator[LeaseStore]:
    await migrate(engine)
    store = LeaseStore(url, "monitor", PATIENCE_S)
    yield store
    await store.close()


async def test_it_is_taken_kept_and_taken_over(lease: LeaseStore) -> None:
    assert await lease.read() is None
    first = await lease.acquire(None, "a", "http://a", LENGTH_S)
    assert first is not None
    assert await lease.read() == first
    assert await lease.acquire(None, "b", "http://b", LENGTH_S) is None
    renewed = first.next_attempt()
    assert renewed.renewals == 1
    assert await lease.renew(renewed)
    assert await lease.read() == renewed
    assert await lease.acquire(first, "b", "http://b", LENGTH_S) is None  # it was renewed since it was seen
    second = await lease.acquire(renewed, "b", "http://b", LENGTH_S)
    assert second is not None
    assert second.epoch > first.epoch
    assert not await lease.renew(renewed.next_attempt())
    await lease.give_back(renewed)  # not its own any more
    assert await lease.read() == second
    await lease.give_back(second)
    freed = await lease.read()
    assert freed is not None
    assert (freed.holder, freed.epoch) == ("", second.epoch)


async def test_of_many_who_saw_the_same_one_gets_it(lease: LeaseStore) -> None:
    for _ in range(3):
        seen = await lease.read()
        took = await asyncio.gather(*(lease.acquire(seen, f"m{n}", "", LENGTH_S) for n in range(5)))
        assert sum(one is not None for one in took) == 1


async def test_an_epoch_rises_whatever_the_clock_says(lease: LeaseStore) -> None:
    later = await lease.acquire(None, "a", "", LENGTH_S)
    assert later is not None
    ahead = Held("a", "", later.epoch + 3_600_000, 0, LENGTH_S)  # taken when the clock was an hour ahead
    assert await lease._put(later, ahead)
    next_one = await lease.acquire(ahead, "b", "", LENGTH_S)
    assert next_one is not None
    assert next_one.epoch == ahead.epoch + 1


async def test_an_epoch_is_above_what_was_received_from_the_cluster(lease: LeaseStore) -> None:
    ahead = (await lease.acquire(None, "a", "", LENGTH_S, above_epoch=2**61)) or Held("", "", 0, 0, 0.0)
    assert ahead.epoch == 2**61 + 1
    later = await lease.acquire(ahead, "b", "", LENGTH_S, above_epoch=5)
    assert later is not None
    assert later.epoch == ahead.epoch + 1


async def test_a_number_is_written_once_and_only_rises(lease: LeaseStore) -> None:
    mine = await lease.acquire(None, "a", "", LENGTH_S)
    assert mine is not None
    first = mine.next_attempt()
    second = first.next_attempt()
    assert await lease.renew(second)
    assert not await lease.renew(second)  # repeated
    assert not await lease.renew(first)  # it has arrived late
    assert await lease.read() == second


async def test_after_the_row_was_lost_its_holder_has_it_again(lease: LeaseStore) -> None:
    mine = Held("a", "", 7, 3, LENGTH_S)
    assert not await lease.renew(mine)
    assert await lease.put_back(mine)
    assert not await lease.put_back(mine)
    assert await lease.read() == mine


async def test_what_an_old_holder_has_to_write_is_not_written(
    lease: LeaseStore, engine: AsyncEngine, until: Until
) -> None:
    old = await lease.acquire(None, "a", "", LENGTH_S)
    assert old is not None
    fence = partial(lease.allows, epoch=old.epoch)
    store = WriteBehind(engine, CollectorRegistry(), soon_s=0.01, fence=fence)
    task = asyncio.get_running_loop().create_task(store.run(migrated=True))
    store.put(requests, request_row("before"))
    await until(lambda: not store.queued, "written while it is the holder")
    assert await lease.acquire(await lease.read(), "b", "", LENGTH_S)
    store.put(requests, request_row("after"))
    await until(lambda: store._failures._value.get() >= 1, "refused")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await read_request(engine, StoredRequest, "before") is not None
    assert await read_request(engine, StoredRequest, "after") is None
    assert store.dropped["shutdown"] == 1


async def test_who_takes_over_writes_after_what_the_one_before_it_was_writing(
    lease: LeaseStore, url: str, until: Until
) -> None:
    """Frozen within a transaction: it ends before or after all that the other one writes, never between."""
    old = await lease.acquire(None, "a", "", LENGTH_S)
    assert old is not None
    others, frozen, engine = LeaseStore(url, "monitor", PATIENCE_S), open_engine(url, idle_s=0.3), open_engine(url)
    connection = await frozen.connect()
    assert await lease.allows(connection, old.epoch)
    new = await others.acquire(old, "b", "", LENGTH_S)
    assert new is not None
    store = WriteBehind(engine, CollectorRegistry(), soon_s=0.01, fence=partial(others.allows, epoch=new.epoch))
    task = asyncio.get_running_loop().create_task(store.run(migrated=True))
    store.put(requests, request_row("new"))
    if url.startswith("postgresql"):  # which has ended the frozen one's
        with pytest.raises(DBAPIError):
            await connection.commit()
    else:
        assert store.queued
        await connection.commit()
    await until(lambda: not store.queued, "the new one's rows are written")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await connection.invalidate()
    for each in (connection.close, frozen.dispose, engine.dispose, others.close):
        await each()


async def test_a_frozen_writer_does_not_keep_it_from_others(lease: LeaseStore, url: str) -> None:
    old = await lease.acquire(None, "a", "", LENGTH_S)
    assert old is not None
    frozen, other = open_engine(url, idle_s=0.3), LeaseStore(url, "monitor", PATIENCE_S)
    connection = await frozen.connect()
    assert await lease.allows(connection, old.epoch)
    taken = await other.acquire(old, "b", "", LENGTH_S)
    assert taken is not None
    assert await other.renew(taken.next_attempt())
    await connection.invalidate()
    for each in (connection.close, frozen.dispose, other.close):
        await each()
