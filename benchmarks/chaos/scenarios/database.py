"""Scenarios of the database: it is locked, removed, read-only, too large, or on a full disk.

Serving must not wait for it, and rows must be written when the fault is over.
"""

import asyncio
import sqlite3
import time
from contextlib import closing
from functools import partial

from benchmarks.chaos.faults import FAULT_S
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.testbeds import BACKLOG, KEPT_ROWS
from benchmarks.chaos.under_test import SuiteUnderTest
from services.launcher.suite import until
from shared.store.tables import requests

database = partial(scenario, "database")

_WRITTEN_S = 10.0
BACKLOG_ROWS = 20 * KEPT_ROWS
_OLD_S = 3_600.0  # the age of the rows of a backlog
_PRUNED_S = 30.0


async def _break_database(kind: str, suite: SuiteUnderTest) -> None:
    async with suite.database.broken(kind):
        await asyncio.sleep(FAULT_S)
    await _written_again(suite)


for _kind, _text in {
    "locked": "another connection holds the write lock for 4 s",
    "gone": "the file is removed while it is in use",
    "read-only": "every write is refused for 4 s",
    "disk-full": "no file can grow for 4 s",
}.items():
    database(f"database-{_kind}", _text, partial(_break_database, _kind))


@database("database-backlog", f"{BACKLOG_ROWS:,} rows where {KEPT_ROWS:,} are kept, pruned under load", bed=BACKLOG)
async def _backlog(suite: SuiteUnderTest) -> None:
    scheduler, _ = suite.named("scheduler")
    await asyncio.to_thread(_fill, suite)
    before = await asyncio.to_thread(_pages, suite)
    since_s, since_mono = time.time(), time.monotonic()
    await suite.processes.back(suite.processes.stop(scheduler))

    async def pruned() -> bool:
        rows, pages = await asyncio.to_thread(_rows, suite, 0.0), await asyncio.to_thread(_pages, suite)
        return rows <= KEPT_ROWS + _answered(suite, since_mono) and pages < before // 2

    await until(pruned, _PRUNED_S, f"the database to come down from {BACKLOG_ROWS:,} rows and {before:,} pages")
    took_s, pages = time.monotonic() - since_mono, await asyncio.to_thread(_pages, suite)
    suite.notes.append(f"{BACKLOG_ROWS:,} rows pruned in {took_s:.1f} s, {before:,} pages down to {pages:,}")
    answered = _answered(suite, since_mono)
    what = f"the rows of all {answered} requests that ran meanwhile"
    await until(lambda: _rows(suite, since_s) >= answered, _WRITTEN_S, what)


@database("database-gone-restart", "the file is removed and its writers are killed")
async def _gone_and_restarted(suite: SuiteUnderTest) -> None:
    suite.database.remove()
    with suite.outage():
        await suite.kill_until_back(*suite.database.writers)
    await _written_again(suite)


def _answered(suite: SuiteUnderTest, since_s: float) -> int:
    """Answers to requests that were sent after that moment of the monotonic clock."""
    assert suite.load is not None
    return sum(each.began_mono >= since_s for each in suite.load.answered)


def _fill(suite: SuiteUnderTest) -> None:
    """Add BACKLOG_ROWS copies of a finished request, under other ids and with the times of an hour ago."""
    ended_s = f"{time.time() - _OLD_S} + number * 1e-3"
    own = {
        "job_id": "'past-' || number",
        "scheduler_id": "'past'",
        "gateway_id": "'past'",
        "arrived_s": ended_s,
        "updated_s": f"{ended_s} + 1.0",
        "timeline": "NULL",
    }
    columns = requests.c.keys()
    copy = f"""
        INSERT INTO requests ({", ".join(columns)})
        WITH RECURSIVE numbers(number) AS
            (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < {BACKLOG_ROWS})
        SELECT {", ".join(own.get(column, column) for column in columns)}
        FROM numbers, (SELECT * FROM requests WHERE final LIMIT 1)
    """
    with closing(sqlite3.connect(suite.database.file, timeout=_WRITTEN_S)) as connection, connection:
        added = connection.execute(copy).rowcount
    assert added == BACKLOG_ROWS, f"{added} rows were added: no request has ended before"


def _rows(suite: SuiteUnderTest, since_s: float) -> int:
    return _number(suite, "SELECT count(*) FROM requests WHERE arrived_s >= ?", since_s)


def _pages(suite: SuiteUnderTest) -> int:
    return _number(suite, "PRAGMA page_count")


def _number(suite: SuiteUnderTest, query: str, *values: float, timeout_s: float = _WRITTEN_S) -> int:
    with closing(sqlite3.connect(f"file:{suite.database.file}?mode=ro", uri=True, timeout=timeout_s)) as connection:
        return int(connection.execute(query, values).fetchone()[0])


async def _written_again(suite: SuiteUnderTest) -> None:
    """Wait until a job that ended after this moment is in the database."""
    since_s = time.time()

    def written() -> bool:
        if not suite.database.file.exists():
            return False
        try:
            return _number(suite, "SELECT count(*) FROM requests WHERE updated_s > ?", since_s, timeout_s=1.0) > 0
        except sqlite3.Error:
            return False

    await until(written, _WRITTEN_S, "jobs in the database again")
