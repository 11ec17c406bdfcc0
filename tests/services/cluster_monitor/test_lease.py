"""Which of several monitors acts: real leases in a database, short ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from services.cluster_monitor.lease import NAME, Lease
from shared.errors import Standby
from shared.store.lease import MAX_EPOCH, Held, LeaseStore
from tests.services.control_plane import sqlite, until

LENGTH_S = 1.5  # a busy machine stalls for a second: who holds it would lose it between two statements of a test


class Frail(LeaseStore):
    """A store that can be cut off from its database."""

    away = False

    async def read(self) -> Held | None:
        self._check()
        return await super().read()

    async def renew(self, mine: Held) -> bool:
        self._check()
        return await super().renew(mine)

    def _check(self) -> None:
        if self.away:
            raise OperationalError("", None, OSError("cut off"))


@dataclass
class Monitor:
    """One that wants to act."""

    lease: Lease
    store: Frail
    task: asyncio.Task[None]

    def die(self) -> None:
        """Renew nothing any more; what it believes stays."""
        self.task.cancel()

    def run(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self.lease.run())


@asynccontextmanager
async def monitors(folder: Path, *names: str) -> AsyncIterator[list[Monitor]]:
    """Waiting for the lease, in this order; none has it yet."""
    made, loop = [], asyncio.get_running_loop()
    for name in names:
        store = Frail(sqlite(folder), NAME, LENGTH_S / 3)
        lease = Lease(store, name, f"http://{name}", LENGTH_S, loop.time)  # it does not end while the machine pauses us
        made.append(Monitor(lease, store, loop.create_task(lease.run())))
    watch = loop.create_task(_never_two(made))
    try:
        yield made
        assert not watch.done() or watch.exception() is None
    finally:
        for one in (watch, *(monitor.task for monitor in made)):
            one.cancel()
        await asyncio.gather(watch, *(monitor.task for monitor in made), return_exceptions=True)
        for monitor in made:
            await monitor.store.close()


async def _never_two(made: list[Monitor]) -> None:
    while True:
        assert sum(monitor.lease.acting for monitor in made) <= 1
        await asyncio.sleep(0.001)


async def first_and_other(made: list[Monitor]) -> tuple[Monitor, Monitor]:
    await until(lambda: any(one.lease.acting for one in made), "somebody acts", timeout_s=20)
    first = next(one for one in made if one.lease.acting)
    return first, next(one for one in made if one is not first)


async def test_when_the_holder_dies_the_other_takes_over(tmp_path: Path) -> None:
    async with monitors(tmp_path, "a", "b") as made:
        first, other = await first_and_other(made)
        await until(lambda: "acts, as far as it has seen" in other.lease.describe(), "it has seen who acts")
        with pytest.raises(Standby, match=f"{other.lease.holder} does not act: {first.lease.holder} at http://"):
            other.lease.check()
        epoch = first.lease.epoch
        first.die()
        await asyncio.wait_for(other.lease.gained(), 20)
        other.lease.check()
        assert other.lease.epoch > epoch
        assert not first.lease.acting  # before it has looked
        first.run()  # it was only frozen
        await asyncio.wait_for(first.lease.lost(epoch), 20)
        assert first.lease.epoch == 0


async def test_who_gives_it_back_is_followed_at_once(tmp_path: Path) -> None:
    async with monitors(tmp_path, "a", "b") as made:
        first, other = await first_and_other(made)
        first.die()
        began = asyncio.get_running_loop().time()
        await first.lease.give_back()
        assert not first.lease.acting
        await asyncio.wait_for(other.lease.gained(), 20)
        print(f"taken {asyncio.get_running_loop().time() - began:.3f} s after it was given back")


async def test_who_loses_the_database_stops_and_another_takes_over(tmp_path: Path) -> None:
    async with monitors(tmp_path, "a", "b") as made:
        first, other = await first_and_other(made)
        epoch = first.lease.epoch
        first.store.away = True
        await until(lambda: not first.lease.acting, "it stops by itself", timeout_s=20)
        assert "could not renew" in first.lease.describe()
        await asyncio.wait_for(other.lease.gained(), 20)
        first.store.away = False
        await asyncio.wait_for(first.lease.lost(epoch), 20)
        assert other.lease.acting


async def test_where_nobody_else_has_it_a_late_holder_goes_on(tmp_path: Path) -> None:
    async with monitors(tmp_path, "a") as (only,):
        await asyncio.wait_for(only.lease.gained(), 20)
        epoch = only.lease.epoch
        only.store.away = True
        await until(lambda: not only.lease.acting, "it stops", timeout_s=20)
        with pytest.raises(Standby, match="could not renew its lease in time: OperationalError"):
            only.lease.check()
        only.store.away = False
        await until(lambda: only.lease.acting, "it goes on", timeout_s=20)
        assert only.lease.epoch == epoch  # nobody else has acted meanwhile


async def test_the_holder_has_it_again_when_the_database_was_removed_and_made_again(tmp_path: Path) -> None:
    async with monitors(tmp_path, "a", "b") as made:
        first, other = await first_and_other(made)
        epoch = first.lease.epoch
        await until(lambda: "acts, as far as it has seen" in other.lease.describe(), "it has seen who acts")
        for file in tmp_path.glob("polyphase.db*"):
            file.unlink()
        seen = LeaseStore(sqlite(tmp_path), NAME, LENGTH_S / 3)
        row = await until(seen.read, "the row is there again", timeout_s=20)
        assert row.epoch >= epoch
        await seen.close()


async def test_a_holder_takes_the_lease_again_above_an_epoch_that_the_cluster_has_obeyed(tmp_path: Path) -> None:
    """The row was lost and the clock set back: instances would refuse the only monitor."""
    async with monitors(tmp_path, "a") as (only,):
        first = await asyncio.wait_for(only.lease.gained(), 20)
        later = first.epoch + 3_600_000
        only.lease.note_epoch(later)
        only.lease.note_epoch(MAX_EPOCH + 1)  # no monitor's
        await asyncio.wait_for(only.lease.lost(first.epoch), 20)
        second = await asyncio.wait_for(only.lease.gained(), 20)
        assert second.epoch == later + 1
        second.check()
        with pytest.raises(Standby, match="a has begun another term"):
            first.check()


async def test_a_standby_takes_the_lease_above_an_epoch_that_the_cluster_has_obeyed(tmp_path: Path) -> None:
    async with monitors(tmp_path, "a") as (only,):
        only.lease.note_epoch(2**50)
        assert (await asyncio.wait_for(only.lease.gained(), 20)).epoch == 2**50 + 1
