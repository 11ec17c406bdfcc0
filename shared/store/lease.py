"""Leases in the database: who acts, where several processes could and one is to.

No clock is compared with another, neither of two hosts nor the database's: a holder writes a number into the row with
each renewal. A standby that has seen the same row for the lease's length, by its own monotonic clock, may take the
lease. The holder reckons that length from before it sent the renewal, by its own clock, so that it has stopped when
another process can begin; for that the rates of the two clocks have to agree within a tenth.

Every attempt of a holder has a number of its own, and the number in the row only rises. So a renewal that was carried
out but whose answer was lost, a repeated one and a delayed one cannot leave the row as a standby saw it before, which
is what the holder's reckoning relies on.

Each change of hands raises the epoch, which fences what a holder does that was frozen meanwhile and does not know of
the change yet: see `LeaseStore.allows`. An epoch is also higher than each one that the new holder has received from the
cluster, so that epochs rise where the row was lost and the clock was set back.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Executable, RowMapping, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.store.database import Identity, identity, make, open_engine, parse_url
from shared.store.migrate import locked
from shared.store.tables import leases as table

ENDING = ".lease"
MAX_EPOCH = 2**62  # far above any clock, and the column holds it


@dataclass(frozen=True, slots=True)
class Held:
    """A row of leases. holder: empty when it was given back. url: where the holder is found. renewals: the number of
    the holder's attempt that wrote the row.
    """

    holder: str
    url: str
    epoch: int
    renewals: int
    length_s: float

    def next_attempt(self) -> "Held":
        """The row that the next attempt writes, with a number that no attempt before it had."""
        return replace(self, renewals=self.renewals + 1)


class LeaseStore:
    """One lease of a database, for one process. Errors of the database pass through.

    SQLite's is in a file of its own beside the database, `….lease`: who is frozen within a transaction keeps all others
    from writing, and writes of a lease are one statement each, so that this takes the database from them but not the
    lease. PostgreSQL ends such transactions.
    """

    def __init__(self, database_url: str, name: str, patience_s: float) -> None:
        """patience_s: for each statement. Raises InvalidRequest."""
        url = parse_url(database_url)
        self._apart = url.drivername.startswith("sqlite")
        said = url.set(database=f"{url.database}{ENDING}") if self._apart else url
        said = said.set(drivername=url.get_backend_name())
        self._engine = open_engine(said.render_as_string(hide_password=False), patience_s=patience_s)
        self._name = name
        self._file: Identity | None = None

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.dispose()

    async def read(self) -> Held | None:
        """The row as it is now."""
        _, found = await self._execute(select(table).where(table.c.name == self._name))
        return Held(**{key: value for key, value in found.items() if key != "name"}) if found is not None else None

    async def take(
        self, seen: Held | None, holder: str, url: str, length_s: float, above_epoch: int = 0
    ) -> Held | None:
        """Become its holder if the row still is as it was seen; None when another process was first.

        above_epoch: the highest epoch that is known from elsewhere. A row that was lost remembers none.
        """
        now_ms = int(time.time() * 1000)  # rises where both the row and what was known from elsewhere are lost
        before = max(above_epoch, seen.epoch if seen is not None else 0)
        mine = Held(holder, url, max(before + 1, now_ms), 0, length_s)
        return mine if await self._put(seen, mine) else None

    async def put_back(self, mine: Held) -> bool:
        """Write the row again, after the database was removed; False when there is one. `mine`: of a new attempt."""
        return await self._put(None, mine)

    async def renew(self, mine: Held) -> bool:
        """Write the number of this attempt; False when the lease is not ours any more, or its row is gone.

        False also where an attempt of a higher number was written already: this one has arrived late.
        """
        where = [table.c.epoch == mine.epoch, table.c.holder == mine.holder, table.c.renewals < mine.renewals]
        return await self._update(where, renewals=mine.renewals)

    async def give_back(self, mine: Held) -> None:
        """Let who stands by take it at once."""
        await self._update([table.c.epoch == mine.epoch], holder="")

    async def allows(self, connection: AsyncConnection, epoch: int) -> bool:
        """Whether the lease is that of `epoch`, for what the connection's transaction is going to write.

        Who takes it over writes after that transaction has ended, and not before.
        """
        where = table.c.name == self._name, table.c.epoch == epoch
        held = await connection.execute(update(table).where(*where).values(epoch=epoch))  # of no row it locks, too
        if not self._apart:
            return bool(held.rowcount)
        row = await self.read()
        return row is not None and row.epoch == epoch

    async def _put(self, seen: Held | None, mine: Held) -> bool:
        if seen is not None:
            as_seen = [table.c.epoch == seen.epoch, table.c.renewals == seen.renewals, table.c.holder == seen.holder]
            return await self._update(as_seen, **_columns(mine))
        try:
            await self._execute(insert(table).values(name=self._name, **_columns(mine)))
        except IntegrityError:
            return False
        return True

    async def _update(self, where: Sequence[Any], **values: Any) -> bool:
        changed, _ = await self._execute(update(table).where(table.c.name == self._name, *where).values(**values))
        return bool(changed)

    async def _execute(self, statement: Executable) -> tuple[int, RowMapping | None]:
        """Run one statement; how many rows it changed, and the first row that it found."""
        async with self._connection() as connection:
            done = await connection.execute(statement)
            return done.rowcount, done.mappings().first() if done.returns_rows else None

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection]:
        """One whose statements are transactions by themselves: between two nothing is locked."""
        if self._apart:
            await self._follow_file()
        async with self._engine.connect() as connection:
            yield await connection.execution_options(isolation_level="AUTOCOMMIT")

    async def _follow_file(self) -> None:
        """Make it where it is missing; connections to one that was removed would go on writing to no file at all."""
        now = identity(self._engine)
        if now is not None and now == self._file:
            return
        await self._engine.dispose()
        async with locked(self._engine):
            make(self._engine)
            async with self._engine.begin() as connection:
                await connection.run_sync(table.create, checkfirst=True)
        self._file = identity(self._engine)


def _columns(held: Held) -> dict[str, Any]:
    return {
        "holder": held.holder,
        "url": held.url,
        "epoch": held.epoch,
        "renewals": held.renewals,
        "length_s": held.length_s,
    }
