"""Retention: deletes rows that are too old or too many, and closes requests that are no longer reported.

Each transaction changes at most `CHUNK_ROWS` rows, and other writers get a pause between two transactions. An aborted
pass keeps its deletions.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import (
    ColumnElement,
    FromClause,
    Integer,
    LargeBinary,
    Table,
    and_,
    case,
    cast,
    delete,
    func,
    literal_column,
    or_,
    select,
    text,
    true,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from shared.domain.job import LOST, Phase
from shared.runtime.logs import get_log
from shared.store.tables import AGE, load_steps, metadata, requests, served

log = get_log(__name__)
FINE_S = 60
ABANDONED_S = 86_400.0  # longer than any job should take; a later report corrects the row
CHUNK_ROWS = 500
PAUSE_S = 0.02  # between two transactions; a writer that waits for SQLite's lock retries within it
SPARE_PAGES = 0.1  # share of free pages, for new rows, above which a SQLite file is shrunk
_SHRINK_PAGES = 256  # of one transaction
_SAMPLE_ROWS = 256
_ROW_BYTES = 32  # of header and page, beside its columns
_ENTRY_BYTES = 16  # of one index entry, beside its columns


@dataclass(frozen=True, slots=True)
class Limit:
    """The part of a table that is kept: older rows, and the oldest beyond `rows` or `bytes`, are deleted. bytes: of
    the rows and their indexes.
    """

    age_s: float = math.inf
    rows: int | None = None
    bytes: int | None = None


async def prune(engine: AsyncEngine, limits: Mapping[str, Limit], now: float) -> dict[str, int]:
    """Delete the rows beyond `limits`, by table; returns how many were deleted. `now` is unix seconds."""
    deleted = {}
    for name, limit in limits.items():
        table, age = metadata.tables[name], metadata.tables[name].c[AGE[name]]
        deleted[name] = 0
        if math.isfinite(limit.age_s):
            deleted[name] = await _delete(engine, table, age < now - limit.age_s)
        if excess := await _excess(engine, table, limit):
            deleted[name] += await _delete(engine, table, None, excess)
    return deleted


async def prune_fine(engine: AsyncEngine, keep_s: float, now: float) -> int:
    """Delete steps shorter than a minute that are older than `keep_s`; returns how many. `now` is unix seconds."""
    deleted = 0
    for table in (load_steps, served):
        deleted += await _delete(engine, table, and_(table.c.step_s < FINE_S, table.c.time_s < now - keep_s))
    return deleted


async def shrink(engine: AsyncEngine) -> int:
    """Return free pages of a SQLite file beyond `SPARE_PAGES` to the disk; returns how many.

    A file without incremental vacuum keeps its pages, and new rows use them. PostgreSQL does this itself.
    """
    if engine.dialect.name != "sqlite":
        return 0
    returned = 0
    while True:
        async with engine.connect() as connection:
            mode, pages, free = [
                await _pragma(connection, name) for name in ("auto_vacuum", "page_count", "freelist_count")
            ]
            excess = min(_SHRINK_PAGES, free - round(SPARE_PAGES * pages))
            if mode != _INCREMENTAL or excess <= 0:
                return returned
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            # Every step of this statement frees one page; `execute` takes one step, a script takes them all.
            await driver.executescript(f"PRAGMA incremental_vacuum({excess})")
            left = await _pragma(connection, "freelist_count")
        if left >= free:
            return returned
        returned += free - left
        await asyncio.sleep(PAUSE_S)


class Retention:
    """Prunes to fixed limits, one pass for each `step`; a failing database is logged and otherwise ignored.

    fine_s: the largest age of steps shorter than a minute, where the process keeps any.
    """

    def __init__(
        self, engine: AsyncEngine, limits: Mapping[str, Limit], ready: asyncio.Event, fine_s: float | None = None
    ) -> None:
        self._engine = engine
        self._ready = ready
        self._fine_s = fine_s
        self._limits = dict(limits)

    async def step(self) -> None:
        """One pass, once the schema is upgraded."""
        if not self._ready.is_set():
            return
        try:
            deleted = await prune(self._engine, self._limits, time.time())
            if self._fine_s is not None:
                deleted["fine steps"] = await prune_fine(self._engine, self._fine_s, time.time())
            await shrink(self._engine)
        except Exception as error:  # a boundary: housekeeping may fail, serving goes on
            log.warning("retention failed", error=f"{type(error).__name__}: {error}"[:300])
            return
        if any(deleted.values()):
            log.info("rows deleted", **deleted)


async def close_lost(engine: AsyncEngine, scheduler_id: str, before_s: float) -> int:
    """Mark as lost the requests that the former process of this scheduler left open and that were not reported since.

    Requests of any scheduler that were left open `ABANDONED_S` before that are lost, too: a replaced scheduler has
    another id. Returns the number of closed requests; errors of the database pass through.
    """
    abandoned = requests.c.updated_s < before_s - ABANDONED_S
    # `updated_s < before_s` follows from the other conditions; it lets the database use the index of open requests.
    left = and_(
        requests.c.final.is_(False),
        requests.c.updated_s < before_s,
        or_(requests.c.scheduler_id == scheduler_id, abandoned),
    )
    ended = {"phase": Phase.FAILED.value, "final": True, "outcome": LOST, "slo_met": False}

    async def close(rows: int) -> int:
        chosen = select(requests.c.job_id).where(left).limit(rows)
        async with engine.begin() as connection:
            # The condition again: a report that ends a request between the two statements must win.
            changed = update(requests).where(requests.c.job_id.in_(chosen), left).values(**ended)
            return (await connection.execute(changed)).rowcount

    closed = 0
    while count := await close(CHUNK_ROWS):
        closed += count
        await asyncio.sleep(PAUSE_S)
    return closed


_INCREMENTAL = 2  # of SQLite's auto_vacuum


async def _delete(
    engine: AsyncEngine, table: Table, condition: ColumnElement[bool] | None, at_most: int | None = None
) -> int:
    """Delete the oldest rows that meet the condition, in transactions of at most `CHUNK_ROWS` rows."""
    age = table.c[AGE[table.name]]
    key = list(table.primary_key.columns)
    deleted = 0
    while at_most is None or deleted < at_most:
        rows = CHUNK_ROWS if at_most is None else min(CHUNK_ROWS, at_most - deleted)
        oldest = select(*key).order_by(age).limit(rows)
        if condition is not None:
            oldest = oldest.where(condition)
        async with engine.begin() as connection:
            gone = (await connection.execute(delete(table).where(tuple_(*key).in_(oldest)))).rowcount
        deleted += gone
        if gone < rows:  # there are no more, or another process deletes them
            break
        await asyncio.sleep(PAUSE_S)
    return deleted


async def _excess(engine: AsyncEngine, table: Table, limit: Limit) -> int:
    """The number of rows beyond the limits of rows and bytes."""
    if limit.rows is None and limit.bytes is None:
        return 0
    async with engine.connect() as connection:
        count = int((await connection.execute(select(func.count()).select_from(table))).scalar_one())
        keep = count if limit.rows is None else min(count, limit.rows)
        if limit.bytes is not None and count:
            row_bytes = await _row_bytes(connection, table, count)
            keep = min(keep, math.floor(limit.bytes / row_bytes))
    return count - keep


async def _row_bytes(connection: AsyncConnection, table: Table, count: int) -> float:
    """Mean bytes of a row and its index entries, from a sample that is spread over the whole table.

    A SQLite row of more than half a page takes pages of its own, so its size is rounded up to pages.
    """
    source: FromClause = table
    sample: ColumnElement[bool] = true()
    if connection.dialect.name == "sqlite":
        page = await _pragma(connection, "page_size")
        row_id: ColumnElement[int] = literal_column("rowid")  # index entries hold it: no row is read to count places
        place = func.row_number().over(order_by=table.c[AGE[table.name]])
        ranked = select(row_id.label("id"), place.label("place")).select_from(table).subquery()
        sample = row_id.in_(select(ranked.c.id).where(ranked.c.place % max(1, count // _SAMPLE_ROWS) == 0))
        sizes = {c.name: func.coalesce(func.length(cast(c, LargeBinary)), 1) for c in table.columns}
        content = _sum(sizes.values(), _ROW_BYTES)
        content = case((content * 2 > page, (content + (page - 1)) // page * page), else_=content)
    else:
        source = table.tablesample(func.system(min(100.0, 800.0 * _SAMPLE_ROWS / count)))
        sizes = {c.name: func.coalesce(func.pg_column_size(c), 1) for c in source.c}  # as stored: compressed
        content = _sum(sizes.values(), _ROW_BYTES)
    for names in (table.primary_key.columns, *(index.columns for index in table.indexes)):
        content = content + _sum((sizes[column.name] for column in names), _ENTRY_BYTES)
    mean = (await connection.execute(select(func.avg(content)).select_from(source).where(sample))).scalar_one()
    if mean is None:  # a sample of pages may have no row: then the whole table is read
        mean = (await connection.execute(select(func.avg(_content(table))))).scalar_one()
    return float(mean or _ROW_BYTES)


def _content(table: Table) -> ColumnElement[int]:
    sizes = {c.name: func.coalesce(func.pg_column_size(c), 1) for c in table.columns}
    return _sum([*sizes.values(), *(sizes[c.name] for index in table.indexes for c in index.columns)], _ROW_BYTES)


def _sum(sizes: Iterable[ColumnElement[int]], start: int) -> ColumnElement[int]:
    total: ColumnElement[int] = literal_column(str(start), Integer)
    for size in sizes:
        total = total + size
    return total


async def _pragma(connection: AsyncConnection, name: str) -> int:
    return int((await connection.execute(text(f"PRAGMA {name}"))).scalar_one())
