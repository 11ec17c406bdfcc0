"""Scenarios of the database: locked, removed, read-only, too large, and on a full disk.

Serving must not wait for the database, and rows must be written when the fault is over.
"""

import asyncio
import sqlite3
import time
from contextlib import closing

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.clusters import BACKLOG, KEPT_ROWS
from benchmarks.chaos.faults import FAULT_S
from benchmarks.chaos.scenario import Scenario
from services.launcher.suite import until
from shared.domain.job import Phase
from shared.store.tables import requests

_WRITTEN_S = 10.0
BACKLOG_ROWS = 20 * KEPT_ROWS
_OLD_S = 3_600.0  # the age of the rows of a backlog
_PRUNED_S = 30.0


async def _locked(arena: Arena) -> None:
    async with arena.database.locked():
        await asyncio.sleep(FAULT_S)
    await _written_again(arena)


async def _gone(arena: Arena) -> None:
    arena.database.remove()
    await asyncio.sleep(FAULT_S)
    await _written_again(arena)


async def _read_only(arena: Arena) -> None:
    arena.switches.read_only(*arena.database.users)
    await asyncio.sleep(FAULT_S)
    arena.switches.restore()
    await _written_again(arena)


async def _disk_full(arena: Arena) -> None:
    arena.database.fill_disk()
    await asyncio.sleep(FAULT_S)
    arena.database.restore()
    await _written_again(arena)


async def _gone_and_restarted(arena: Arena) -> None:
    arena.database.remove()
    with arena.outage():
        await arena.processes.back(arena.processes.kill(*arena.database.users))
    await _written_again(arena)


async def _backlog(arena: Arena) -> None:
    """A scheduler starts with twenty times the rows that are kept, and the oldest are deleted under load."""
    scheduler, _ = arena.named("scheduler")
    await asyncio.to_thread(_fill, arena)
    before = await asyncio.to_thread(_pages, arena)
    since_s, since_mono = time.time(), time.monotonic()
    await arena.processes.back(arena.processes.stop(scheduler))

    async def pruned() -> bool:
        rows, pages = await asyncio.to_thread(_rows, arena, 0.0), await asyncio.to_thread(_pages, arena)
        return rows <= KEPT_ROWS + _answered(arena, since_mono) and pages < before // 2

    await until(pruned, _PRUNED_S, f"the database to come down from {BACKLOG_ROWS:,} rows and {before:,} pages")
    took_s, pages = time.monotonic() - since_mono, await asyncio.to_thread(_pages, arena)
    arena.notes.append(f"{BACKLOG_ROWS:,} rows pruned in {took_s:.1f} s, {before:,} pages down to {pages:,}")
    answered = _answered(arena, since_mono)
    await until(
        lambda: _rows(arena, since_s) >= answered, _WRITTEN_S, f"the rows of all {answered} requests that ran meanwhile"
    )


def _answered(arena: Arena, since_s: float) -> int:
    """Answers to requests that were sent after that moment of the monotonic clock."""
    assert arena.load is not None
    return sum(each.began_s >= since_s for each in arena.load.answered)


def _fill(arena: Arena) -> None:
    """Add rows of requests that ended long ago."""
    old_s = time.time() - _OLD_S
    row = {
        "scheduler_id": "past",
        "gateway_id": "past",
        "caller": "",
        "phase": Phase.COMPLETED.value,
        "final": 1,
        "prompt_tokens": 100,
        "output_tokens": 24,
        "prefill_instance": "prefill-0",
        "decode_instance": "decode-0",
        "split": 100,
        "slo": "default",
        "outcome": "",
        "ttft_s": 0.1,
        "tpot_s": 0.04,
        "longest_gap_s": 0.08,
        "gaps": 23,
        "gaps_over": 0,
        "slo_met": 1,
        "timeline": None,
    }
    names = ("job_id", "arrived_s", "updated_s", *row)
    assert set(names) == set(requests.c.keys())
    rows = [
        (f"past-{number}", old_s + number * 1e-3, old_s + number * 1e-3 + 1.0, *row.values())
        for number in range(BACKLOG_ROWS)
    ]
    insert = f"INSERT INTO requests ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    with closing(sqlite3.connect(arena.database.file, timeout=_WRITTEN_S)) as connection, connection:
        connection.executemany(insert, rows)


def _rows(arena: Arena, since_s: float) -> int:
    return _number(arena, "SELECT count(*) FROM requests WHERE arrived_s >= ?", since_s)


def _pages(arena: Arena) -> int:
    return _number(arena, "PRAGMA page_count")


def _number(arena: Arena, query: str, *values: float, timeout_s: float = _WRITTEN_S) -> int:
    with closing(sqlite3.connect(f"file:{arena.database.file}?mode=ro", uri=True, timeout=timeout_s)) as connection:
        return int(connection.execute(query, values).fetchone()[0])


async def _written_again(arena: Arena) -> None:
    """Wait until a job that ended after this moment is in the database."""
    since_s = time.time()

    def written() -> bool:
        if not arena.database.file.exists():
            return False
        try:
            return _number(arena, "SELECT count(*) FROM requests WHERE updated_s > ?", since_s, timeout_s=1.0) > 0
        except sqlite3.Error:
            return False

    await until(written, _WRITTEN_S, "jobs in the database again")


DATABASE = (
    Scenario("database-locked", "somebody else holds the write lock for 4 s", _locked),
    Scenario("database-gone", "the file is removed while it is in use", _gone),
    Scenario("database-read-only", "every write is refused for 4 s", _read_only),
    Scenario("database-disk-full", "no file can grow for 4 s", _disk_full),
    Scenario(
        "database-backlog", f"{BACKLOG_ROWS:,} rows where {KEPT_ROWS:,} are kept, pruned under load", _backlog, BACKLOG
    ),
    Scenario("database-gone-restart", "the file is removed and its writers are killed", _gone_and_restarted),
)
