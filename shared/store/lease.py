"""Leases in the database: the one of several processes that acts.

No two clocks are compared, neither of hosts nor of the database: the holder writes a number into the row with each
renewal. A standby that has seen the same row for the lease's length, by its own monotonic clock, may take the lease.
The holder counts that length from before it sent the renewal, by its own clock, so that it has stopped before another
process can begin; for that the rates of the two clocks have to agree within a tenth.

Each attempt of a holder has a number of its own, and the number in the row only rises. So a renewal that was carried
out but whose answer was lost, a repeated one and a delayed one cannot leave the row as a standby saw it before, which
the holder's count relies on.

Each change of the holder raises the epoch, which fences writes of a former holder that was frozen and does not know of
the change yet (`LeaseStore.allows`). The new epoch is also higher than all epochs that the new holder has received from
the cluster, so that epochs rise even where the row was lost and the clock was set back.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
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
    """A row of the table. holder: empty after the lease was given back. url: of the holder. renewals: the number of the
    holder's attempt that wrote the row.
    """

    holder: str
    url: str
    epoch: int
    renewals: int
    length_s: float

    def next_attempt(self) -> "Held":
        """The row of the next attempt, with a new number."""
        return replace(self, renewals=self.renewals + 1)


class LeaseStore:
    """A lease of a database, for one process. Errors of the database pass through.

    With SQLite the lease has a file of its own beside the database, `….lease`: a process that is frozen in a
    transaction blocks all other writers of the database, but not the lease, whose writes are single statements.
    PostgreSQL ends such transactions.
    """

    def __init__(self, database_url: str, name: str, patience_s: float) -> None:
        """patience_s: for each statement. Raises InvalidRequest."""
        url = parse_url(database_url)
        self._apart = url.drivername.startswith("sqlite")
        lease_url = url.set(database=f"{url.database}{ENDING}") if self._apart else url
        lease_url = lease_url.set(drivername=url.get_backend_name())
        self._engine = open_engine(lease_url.render_as_string(hide_password=False), patience_s=patience_s)
        self._name = name
        self._file: Identity | None = None

    async def close(self) -> None:
        await self._engine.dispose()

    async def read(self) -> Held | None:
        """The row as it is now."""
        _, found = await self._execute(select(table).where(table.c.name == self._name))
        return Held(**{key: value for key, value in found.items() if key != "name"}) if found is not None else None

    async def acquire(
        self, seen: Held | None, holder: str, url: str, length_s: float, above_epoch: int = 0
    ) -> Held | None:
        """Become the holder if the row is as it was seen; None when another process was first.

        above_epoch: the highest epoch known from the cluster, because the row may have been lost.
        """
        now_ms = int(time.time() * 1000)  # rises even where both the row and the cluster's knowledge are lost
        before = max(above_epoch, seen.epoch if seen is not None else 0)
        mine = Held(holder, url, max(before + 1, now_ms), 0, length_s)
        return mine if await self._put(seen, mine) else None

    async def put_back(self, mine: Held) -> bool:
        """Write the row again after the database was removed; False when there is a row. `mine`: of a new attempt."""
        return await self._put(None, mine)

    async def renew(self, mine: Held) -> bool:
        """Write the number of this attempt. False when the lease belongs to another process, its row is gone, or an
        attempt with a higher number was already written.
        """
        where = [table.c.epoch == mine.epoch, table.c.holder == mine.holder, table.c.renewals < mine.renewals]
        return await self._update(where, renewals=mine.renewals)

    async def give_back(self, mine: Held) -> None:
        """Give the lease back, so that a standby can take it at once."""
        await self._update([table.c.epoch == mine.epoch], holder="")

    async def allows(self, connection: AsyncConnection, epoch: int) -> bool:
        """Whether the lease has this epoch, for the writes of the connection's transaction. A new holder can take the
        lease only after the transaction has ended.
        """
        where = table.c.name == self._name, table.c.epoch == epoch
        held = await connection.execute(update(table).where(*where).values(epoch=epoch))  # it locks the row
        if not self._apart:
            return bool(held.rowcount)
        row = await self.read()
        return row is not None and row.epoch == epoch

    async def _put(self, seen: Held | None, mine: Held) -> bool:
        if seen is not None:
            as_seen = [table.c.epoch == seen.epoch, table.c.renewals == seen.renewals, table.c.holder == seen.holder]
            return await self._update(as_seen, **asdict(mine))
        try:
            await self._execute(insert(table).values(name=self._name, **asdict(mine)))
        except IntegrityError:
            return False
        return True

    async def _update(self, where: Sequence[Any], **values: Any) -> bool:
        changed, _ = await self._execute(update(table).where(table.c.name == self._name, *where).values(**values))
        return bool(changed)

    async def _execute(self, statement: Executable) -> tuple[int, RowMapping | None]:
        """Run a statement; returns the number of changed rows, and the first row that it found."""
        async with self._connection() as connection:
            done = await connection.execute(statement)
            return done.rowcount, done.mappings().first() if done.returns_rows else None

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection]:
        """A connection whose statements are transactions of their own: nothing is locked between two."""
        if self._apart:
            await self._follow_file()
        async with self._engine.connect() as connection:
            yield await connection.execution_options(isolation_level="AUTOCOMMIT")

    async def _follow_file(self) -> None:
        """Create the file if it is missing; connections to a removed file would write to no file at all."""
        now = identity(self._engine)
        if now is not None and now == self._file:
            return
        await self._engine.dispose()
        async with locked(self._engine):
            make(self._engine)
            async with self._engine.begin() as connection:
                await connection.run_sync(table.create, checkfirst=True)
        self._file = identity(self._engine)
