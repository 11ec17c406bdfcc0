import asyncio
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, insert, select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.errors import InvalidRequest, Unavailable
from shared.store.database import open_engine
from shared.store.migrate import migrate
from shared.store.reading import read_request
from shared.store.retention import CHUNK_ROWS, Limit, Retention, close_lost, prune, prune_fine, shrink
from shared.store.tables import load_steps, loads, requests
from shared.wire.api.scheduler import StoredRequest
from tests.shared.store.rows import load_row, request_row

# The full size, by hand: POLYPHASE_TEST_RETENTION_ROWS=100000, which is 100,000 rows and 200 MB.
ROWS = int(os.environ.get("POLYPHASE_TEST_RETENTION_ROWS", "2000"))
BYTES = 2_000 * ROWS
TIMES = 10


@contextmanager
def longest_transaction(engine: AsyncEngine) -> Iterator[list[int]]:
    """Rows that the longest transaction so far deleted or changed, in a list of one."""
    longest, current = [0], [0]

    def count(_: Any, cursor: Any, statement: str, *__: Any) -> None:
        if statement.startswith(("DELETE", "UPDATE")):
            current[0] += cursor.rowcount
            longest[0] = max(longest[0], current[0])

    def ended(_: Any) -> None:
        current[0] = 0

    event.listen(engine.sync_engine, "after_cursor_execute", count)
    event.listen(engine.sync_engine, "commit", ended)
    yield longest
    event.remove(engine.sync_engine, "after_cursor_execute", count)
    event.remove(engine.sync_engine, "commit", ended)


async def rows_of(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        return int((await connection.execute(select(func.count()).select_from(requests))).scalar_one())


async def size_of(engine: AsyncEngine) -> int:
    """Bytes of the database on disk; PostgreSQL's after its vacuum, which the server does by itself later."""
    async with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            await connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
            return os.path.getsize(str(engine.url.database))
        alone = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await alone.execute(text("VACUUM requests"))
        return int((await alone.execute(text("SELECT pg_total_relation_size('requests')"))).scalar_one())


def ended_rows(first: int, count: int, timeline: int) -> list[dict[str, Any]]:
    # PostgreSQL compresses long values: these do not compress.
    return [
        request_row(
            f"cmpl-{n:032d}",
            phase="completed",
            final=True,
            arrived_s=float(n),
            updated_s=n + 3.0,
            timeline=os.urandom(timeline // 2).hex(),
        )
        for n in range(first, first + count)
    ]


@pytest.mark.parametrize("timeline", [100, 3_000], ids=["rows", "bytes"])
async def test_ten_times_the_limit_leaves_the_limit(engine: AsyncEngine, timeline: int) -> None:
    """Small rows meet the limit of rows, long ones the limit of bytes."""
    await migrate(engine)
    limits = {"requests": Limit(rows=ROWS, bytes=BYTES)}
    sizes, kept = [], []
    with longest_transaction(engine) as longest:
        for turn in range(TIMES):
            for first in range(0, ROWS, 1_000):
                async with engine.begin() as connection:
                    chunk = ended_rows(turn * ROWS + first, min(1_000, ROWS - first), timeline)
                    await connection.execute(insert(requests), chunk)
            await prune(engine, limits, now=0.0)
            await shrink(engine)
            sizes.append(await size_of(engine))
            kept.append(await rows_of(engine))
    assert 0 < longest[0] <= CHUNK_ROWS
    assert max(kept) <= ROWS
    if timeline == 100:
        assert set(kept) == {ROWS}
    else:
        assert min(kept) > 0.25 * ROWS  # not far below what the limit allows
    assert max(sizes) < 1.6 * BYTES + 2 * ROWS * timeline  # the limit, and what one period adds
    assert sizes[-1] < 1.2 * max(sizes[2:5])  # it does not grow with what passes through
    async with engine.connect() as connection:
        newest = (await connection.execute(select(func.max(requests.c.arrived_s)))).scalar_one()
    assert newest == TIMES * ROWS - 1  # the oldest went


async def test_a_pass_that_is_cut_off_keeps_its_progress(engine: AsyncEngine) -> None:
    await migrate(engine)
    async with engine.begin() as connection:
        await connection.execute(insert(requests), ended_rows(0, 4 * CHUNK_ROWS, 10))
    commits, second = 0, asyncio.Event()

    def committing(_: Any) -> None:
        nonlocal commits
        commits += 1
        if commits == 2:  # the event precedes its commit: only the first one is known to be complete
            second.set()

    event.listen(engine.sync_engine, "commit", committing)
    task = asyncio.create_task(prune(engine, {"requests": Limit(1.0)}, now=1e9))
    await second.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 0 < await rows_of(engine) < 4 * CHUNK_ROWS


async def test_lost_requests_are_found_by_the_index_and_closed_in_chunks(engine: AsyncEngine) -> None:
    await migrate(engine)
    many = 2 * CHUNK_ROWS + 1
    async with engine.begin() as connection:
        await connection.execute(insert(requests), [request_row(f"j{n}") for n in range(many)])
        await connection.execute(insert(requests), [request_row("other", scheduler_id="s1")])
    with longest_transaction(engine) as longest:
        assert await close_lost(engine, "s0", 2_000.0) == many
    assert longest[0] == CHUNK_ROWS
    if engine.dialect.name == "sqlite":
        async with engine.connect() as connection:
            query = text("EXPLAIN QUERY PLAN SELECT job_id FROM requests WHERE final IS 0 AND updated_s < 1")
            assert "requests_open" in str((await connection.execute(query)).fetchall())


async def test_a_file_of_an_earlier_version_shrinks_after_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "old.db"
    with closing(sqlite3.connect(file)) as old:
        old.execute("CREATE TABLE earlier (x)")
        assert old.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    engine = open_engine(f"sqlite:///{file}")
    await migrate(engine)
    async with engine.begin() as connection:
        await connection.execute(insert(requests), ended_rows(0, 1_000, 3_000))
    full = await size_of(engine)
    await prune(engine, {"requests": Limit(rows=10)}, now=0.0)
    await shrink(engine)
    assert await size_of(engine) < full / 4
    await engine.dispose()


async def test_rows_older_than_their_age_go(engine: AsyncEngine) -> None:
    await migrate(engine)
    async with engine.begin() as connection:
        await connection.execute(insert(loads), [load_row("a", float(t)) for t in range(10)])
        await connection.execute(insert(requests), [request_row("old", arrived_s=1), request_row("new")])
    assert await prune(engine, {"loads": Limit(5.0), "requests": Limit(100.0)}, now=10.0) == {"loads": 5, "requests": 0}
    assert await prune(engine, {"requests": Limit(100.0)}, now=150.0) == {"requests": 1}
    async with engine.connect() as connection:
        left = (await connection.execute(select(loads.c.time_s).order_by(loads.c.time_s))).scalars().all()
    assert left == [5.0, 6.0, 7.0, 8.0, 9.0]
    assert await read_request(engine, StoredRequest, "old") is None


async def test_fine_steps_go_before_longer_ones(engine: AsyncEngine) -> None:
    await migrate(engine)
    rows = [
        {
            "step_s": step_s,
            "time_s": time_s,
            "life": "a",
            "samples": 1,
            "totals": "{}",
            "instances": "[]",
            "figures": b"",
        }
        for step_s in (10, 60)
        for time_s in (0, 600)
    ]
    async with engine.begin() as connection:
        await connection.execute(insert(load_steps), rows)
    assert await prune_fine(engine, 500.0, now=1_000.0) == 1
    async with engine.connect() as connection:
        left = [tuple(row) for row in await connection.execute(select(load_steps.c.step_s, load_steps.c.time_s))]
    assert sorted(left) == [(10, 600), (60, 0), (60, 600)]


async def test_housekeeping_survives_a_database_that_fails(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/empty.db")
    ready = asyncio.Event()
    retention = Retention(engine, {"loads": Limit(1.0)}, ready)
    await retention.step()  # not ready: nothing is tried
    ready.set()
    await retention.step()  # no such table: logged
    with pytest.raises(Unavailable, match="database does not answer"):
        await read_request(engine, StoredRequest, "j")
    await engine.dispose()


def test_only_known_databases() -> None:
    with pytest.raises(InvalidRequest, match="sqlite: or postgresql:"):
        open_engine("mysql://localhost/x")
