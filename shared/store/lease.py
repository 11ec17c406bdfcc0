"""Leases in the database: who acts, where several processes could and one is to.

No clock is compared with another, neither of two hosts nor the database's: a holder counts its renewals in the row. Who
stands by and has seen no renewal for the lease's length, by its own monotonic clock, may take it. The holder reckons
that length from before it asked for the renewal, by its own, so that it has stopped when anybody else can begin; for
that the rates of the two clocks have to agree within a tenth. Each change of hands raises the epoch, which fences
what a holder does that was frozen meanwhile and knows nothing yet: see `LeaseStore.allows`.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.store.database import open_engine, parse_url
from shared.store.file import Identity, identity, make
from shared.store.migrate import locked
from shared.store.tables import leases as table

ENDING = ".lease"


@dataclass(frozen=True, slots=True)
class Held:
    """A row of leases. holder: empty when it was given back. url: where the holder is found."""

    holder: str
    url: str
    epoch: int
    renewals: int
    length_s: float


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
        async with self._connection() as connection:
            query = select(table).where(table.c.name == self._name)
            found = (await connection.execute(query)).mappings().first()
        return Held(**{key: value for key, value in found.items() if key != "name"}) if found is not None else None

    async def take(self, seen: Held | None, holder: str, url: str, length_s: float) -> Held | None:
        """Become its holder if it still is as it was seen; None when somebody else was first."""
        now_ms = int(time.time() * 1000)  # so that epochs rise even where the row was lost
        mine = Held(holder, url, now_ms if seen is None else max(seen.epoch + 1, now_ms), 0, length_s)
        return mine if await self._put(seen, mine) else None

    async def put_back(self, mine: Held) -> bool:
        """Have the row again, after somebody removed the database; False when there is one."""
        return await self._put(None, mine)

    async def renew(self, mine: Held) -> Held | None:
        """Count once more; None when it is not ours any more, or gone."""
        renewed = Held(mine.holder, mine.url, mine.epoch, mine.renewals + 1, mine.length_s)
        where = [table.c.epoch == mine.epoch, table.c.holder == mine.holder]
        return renewed if await self._update(where, renewals=renewed.renewals) else None

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
            async with self._connection() as connection:
                await connection.execute(insert(table).values(name=self._name, **_columns(mine)))
        except IntegrityError:
            return False
        return True

    async def _update(self, where: Sequence[Any], **values: Any) -> bool:
        async with self._connection() as connection:
            done = await connection.execute(update(table).where(table.c.name == self._name, *where).values(**values))
        return bool(done.rowcount)

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
