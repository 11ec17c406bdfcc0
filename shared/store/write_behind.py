"""Write-behind: a bounded queue of rows in memory, and one task that writes them to the database."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as PrometheusCounter
from sqlalchemy import Table, TextClause, and_, bindparam, not_, or_, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql import ClauseElement

from shared.domain.job import LOST
from shared.errors import Unavailable
from shared.runtime.logs import get_log
from shared.runtime.tasks import Alarm
from shared.store.database import Identity, identity
from shared.store.migrate import migrate
from shared.store.tables import requests

log = get_log(__name__)
Row = dict[str, Any]
Key = tuple[str, ...]
Fence = Callable[[AsyncConnection], Awaitable[bool]]
BATCH = 500
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
LAST_S = 2.0  # at shutdown
BATCH_S = 15.0  # a batch that takes longer counts as failed
SOON_S = 0.2  # a transaction costs more than its rows


class _Removed(Exception):
    """Rows were written to a file that had been removed."""


class Fenced(Exception):
    """Another process acts, so that this one may not write."""


class WriteBehind:
    """Rows to upsert, the newest of each key. When the queue is full, the oldest row is dropped and counted.

    `run` is the only writer, for a background task: it migrates first, then writes, and retries without end. A SQLite
    file that was removed is created again; connections to the old one would write to no file at all. `fence`: called in
    each transaction, says whether this process may write; until it may, rows wait.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        registry: CollectorRegistry,
        *,
        capacity: int = 20_000,
        soon_s: float = SOON_S,
        fence: Fence | None = None,
    ) -> None:
        self._fence = fence
        self._engine = engine
        self._capacity = capacity
        self._soon_s = soon_s
        self._rows: dict[Key, tuple[Table, Row]] = {}
        self._key_columns: dict[str, tuple[str, ...]] = {}  # by table
        self._writing = 0
        self._awaited: dict[int, asyncio.Future[None]] = {}  # by the row's id
        self._wake = asyncio.Event()
        self._alarm = Alarm(self._wake.set)
        self._file: Identity | None = None
        self._statements: dict[str, Any] = {}
        self.ready = asyncio.Event()  # set once the schema is upgraded
        self.dropped: Counter[str] = Counter()
        self._dropped_total = PrometheusCounter(
            "polyphase_store_dropped", "Rows never written, by cause", ["cause"], registry=registry
        )
        self._failures = PrometheusCounter(
            "polyphase_store_failures", "Batches that failed and were tried again", registry=registry
        )
        self._written = PrometheusCounter("polyphase_store_written", "Rows written", ["table"], registry=registry)
        self._queued = Gauge("polyphase_store_queued", "Rows that wait to be written", registry=registry)
        self._queued.set_function(lambda: self.queued)

    def put(self, table: Table, row: Row, within_s: float | None = None) -> None:
        """Queue a full row of `table`, to be written within `within_s`, or `soon_s`. It neither waits nor fails."""
        names = self._key_columns.get(table.name)
        if names is None:
            names = self._key_columns[table.name] = tuple(column.name for column in table.primary_key)
        key = (table.name, *[str(row[name]) for name in names])
        if key in self._rows:
            del self._rows[key]  # it goes to the end: rows are in the order of their last change
        elif len(self._rows) >= self._capacity:
            del self._rows[next(iter(self._rows))]
            self._drop("queue_full", 1)
        self._rows[key] = (table, row)
        wait_s = self._soon_s if within_s is None else within_s
        if 2 * len(self._rows) >= self._capacity:
            wait_s = 0.0
        self._alarm.by(asyncio.get_running_loop().time() + wait_s)

    async def written(self, table: Table, row: Row, within_s: float) -> None:
        """Queue a full row and wait until the database has it. Raises Unavailable when that takes longer than
        `within_s` (the row stays in the queue), or when the database refuses the row.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited[id(row)] = done
        try:
            self.put(table, row, within_s=0.0)
            async with asyncio.timeout(within_s):
                await done
        except TimeoutError as error:
            raise Unavailable(f"the database did not take it within {within_s:g} s") from error
        finally:
            del self._awaited[id(row)]

    @property
    def queued(self) -> int:
        """Rows not yet written, including those of the transaction under way."""
        return len(self._rows) + self._writing

    async def run(self, *, migrated: bool = False) -> None:
        """Write until cancelled, then make a last, short attempt. migrated: the schema is already upgraded."""
        try:
            if migrated:
                self._begin()
            else:
                await self._until_done("migration", self._migrate)
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._until_done("write", self._flush_whole)
        finally:
            await self._last_attempt()

    async def flush(self) -> None:
        """Write all queued rows. On an error of the database, unwritten rows stay queued."""
        while self._rows:
            if identity(self._engine) != self._file:
                await self._make_again()
            taken = [(key, self._rows.pop(key)) for key in list(self._rows)[:BATCH]]
            self._writing = len(taken)
            try:
                async with asyncio.timeout(BATCH_S):
                    await self._write(taken)
                if identity(self._engine) != self._file:
                    raise _Removed("the database file was removed under this write")
                for _, (_, row) in taken:
                    self._settle(row)
            except BaseException:
                self._put_back(taken)
                raise
            finally:
                self._writing = 0

    async def _flush_whole(self) -> None:
        """Flush. A cancellation lets the transaction end first, which would otherwise hold SQLite's lock."""
        writing = asyncio.ensure_future(self.flush())
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing], timeout=LAST_S)
            writing.cancel()
            raise

    async def _migrate(self) -> None:
        await migrate(self._engine)
        self._begin()

    def _begin(self) -> None:
        self._file = identity(self._engine)
        self.ready.set()

    async def _make_again(self) -> None:
        log.error("the database file is gone: it is created again", database=self._engine.url.database)
        await self._engine.dispose()  # SQLite leaves the files beside a removed file as they are
        await self._migrate()

    async def _until_done(self, what: str, step: Any) -> None:
        attempt = 0
        while True:
            try:
                await step()
            except Exception as error:  # a boundary: whatever the driver raises, serving goes on
                self._failures.inc()
                wait_s = RETRY_S[min(attempt, len(RETRY_S) - 1)]
                log.error("database failed", step=what, error=_text(error), queued=self.queued, retry_s=wait_s)
                attempt += 1
                await asyncio.sleep(wait_s)
            else:
                return

    async def _write(self, taken: list[tuple[Key, tuple[Table, Row]]]) -> None:
        by_table: dict[str, tuple[Table, list[Row]]] = {}
        for _, (table, row) in taken:
            by_table.setdefault(table.name, (table, []))[1].append(row)
        async with self._engine.connect() as connection:
            await self._write_tables(connection, list(by_table.values()))

    async def _write_tables(self, connection: AsyncConnection, tables: list[tuple[Table, list[Row]]]) -> None:
        """Write the rows in one transaction; where the database refuses one of them, the others in several."""
        try:
            if self._fence is not None and not await self._fence(connection):
                raise Fenced("another process acts")
            for table, rows in tables:
                await connection.execute(self._statement(table), rows)
            await connection.commit()
        except DBAPIError as error:
            await connection.rollback()
            if isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated:
                raise
            if len(tables) > 1:
                parts = [[part] for part in tables]
            else:
                table, rows = tables[0]
                if len(rows) == 1:  # the row itself is invalid: retrying it would block all other rows
                    log.error("row refused by the database", table=table.name, error=_text(error))
                    self._settle(rows[0], Unavailable(f"the database refuses it: {_text(error)}"))
                    self._drop("refused", 1)
                    return
                parts = [[(table, [row])] for row in rows]
            for part in parts:
                await self._write_tables(connection, part)
            return
        for table, rows in tables:
            self._written.labels(table.name).inc(len(rows))

    def _statement(self, table: Table) -> Any:
        found = self._statements.get(table.name)
        if found is None:
            found = self._statements[table.name] = upsert(table, self._engine.dialect.name)
        return found

    def _put_back(self, taken: list[tuple[Key, tuple[Table, Row]]]) -> None:
        merged = {key: value for key, value in taken if key not in self._rows}
        merged.update(self._rows)
        excess = len(merged) - self._capacity
        for key in list(merged)[: max(0, excess)]:
            del merged[key]
        if excess > 0:
            self._drop("queue_full", excess)
        self._rows = merged
        self._wake.set()

    def _settle(self, row: Row, error: Unavailable | None = None) -> None:
        done = self._awaited.get(id(row))
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def _drop(self, cause: str, count: int) -> None:
        self.dropped[cause] += count
        self._dropped_total.labels(cause).inc(count)

    async def _last_attempt(self) -> None:
        if not self._rows:
            return
        try:
            async with asyncio.timeout(LAST_S):
                if not self.ready.is_set():
                    await self._migrate()
                await self.flush()
        except Exception as error:
            log.error("rows lost at shutdown", queued=self.queued, error=_text(error))
            self._drop("shutdown", self.queued)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def upsert(table: Table, dialect: str) -> Any:
    """A statement to execute with a list of full rows; an existing row with the same primary key is replaced.

    A report that was overtaken does not replace the row of a job in a final phase. The outcome "lost" is a scheduler's
    assumption: any other final report replaces it, and it does not replace a row that another scheduler wrote.
    """
    insert: Any = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(table)
    key = [column.name for column in table.primary_key]
    changed = {c.name: insert.excluded[c.name] for c in table.columns if c.name not in key}
    where: ClauseElement | None = None
    if table is requests:
        new = insert.excluded
        assumed = and_(new.final.is_(True), new.outcome == LOST)
        where = or_(
            and_(assumed, requests.c.final.is_(False), requests.c.scheduler_id == new.scheduler_id),
            and_(not_(assumed), or_(requests.c.final.is_(False), requests.c.outcome == LOST, new.final.is_(True))),
        )
    return _as_text(insert.on_conflict_do_update(index_elements=key, set_=changed, where=where), table, dialect)


def _as_text(statement: Any, table: Table, dialect: str) -> TextClause:
    """SQLAlchemy compiles an upsert again at each execution, which costs more than the transaction; it compiles a text
    once.
    """
    module = postgresql if dialect == "postgresql" else sqlite
    names = [column.name for column in table.columns]
    compiled = statement.compile(dialect=module.dialect(paramstyle="named"), column_keys=names)
    binds = (
        bindparam(name, None if name in names else bind.value, bind.type) for bind, name in compiled.bind_names.items()
    )
    return text(str(compiled)).bindparams(*binds)
