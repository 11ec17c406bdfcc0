"""The database locked, gone, read-only, too large, on a full disk: serving never waits; it is written again."""

import asyncio
import sqlite3
import time
from contextlib import closing

from lab.chaos.arena import Arena
from lab.chaos.clusters import BACKLOG, KEPT_ROWS
from lab.chaos.scenario import Scenario
from services.launcher.suite import until
from shared.domain.job import Phase
from shared.store.tables import requests

AWAY_S = 4.0
_WRITTEN_S = 10.0
BACKLOG_ROWS = 20 * KEPT_ROWS
_OLD_S = 3_600.0  # the age of the rows of a backlog
_PRUNED_S = 30.0


async def locked(arena: Arena) -> None:
    """Another process holds the write lock."""
    async with arena.database.locked():
        await asyncio.sleep(AWAY_S)
    await _written_again(arena)


async def gone(arena: Arena) -> None:
    """The file is removed under those who have it open."""
    arena.database.remove()
    await asyncio.sleep(AWAY_S)
    await _written_again(arena)


async def read_only(arena: Arena) -> None:
    """SQLite refuses every write."""
    arena.switches.read_only(*arena.database.users)
    await asyncio.sleep(AWAY_S)
    arena.switches.restore()
    await _written_again(arena)


async def disk_full(arena: Arena) -> None:
    """No file can grow: database, journal and logs."""
    arena.database.fill_disk()
    await asyncio.sleep(AWAY_S)
    arena.database.restore()
    await _written_again(arena)


async def gone_and_restarted(arena: Arena) -> None:
    """The file is removed, and then everybody who writes to it is killed."""
    arena.database.remove()
    with arena.away():
        await arena.processes.back(arena.processes.kill(*arena.database.users))
    await _written_again(arena)


async def backlog(arena: Arena) -> None:
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


def _answered(arena: Arena, since_mono: float) -> int:
    """Answers to requests that were sent after that moment."""
    assert arena.load is not None
    return sum(began >= since_mono for began, _, _, _ in arena.load.ended)


def _fill(arena: Arena) -> None:
    """Requests that ended long ago, as a scheduler of the past has left them."""
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
    """Of requests that arrived after that moment."""
    return _number(arena, "SELECT count(*) FROM requests WHERE arrived_s >= ?", since_s)


def _pages(arena: Arena) -> int:
    return _number(arena, "PRAGMA page_count")


def _number(arena: Arena, query: str, *values: float) -> int:
    with closing(sqlite3.connect(f"file:{arena.database.file}?mode=ro", uri=True, timeout=_WRITTEN_S)) as connection:
        return int(connection.execute(query, values).fetchone()[0])


async def _written_again(arena: Arena) -> None:
    """Wait until a job that ended after now is in the file."""
    since_s = time.time()
    await until(lambda: _rows_since(arena, since_s), _WRITTEN_S, "jobs in the database again")


def _rows_since(arena: Arena, since_s: float) -> bool:
    if not arena.database.file.exists():
        return False
    try:
        with closing(sqlite3.connect(f"file:{arena.database.file}?mode=ro", uri=True, timeout=1.0)) as connection:
            found = connection.execute("SELECT count(*) FROM requests WHERE updated_s > ?", (since_s,)).fetchone()
    except sqlite3.Error:
        return False
    return bool(found[0])


DATABASE = (
    Scenario("database-locked", "somebody else holds the write lock for 4 s", locked),
    Scenario("database-gone", "the file is removed while it is in use", gone),
    Scenario("database-read-only", "every write is refused for 4 s", read_only),
    Scenario("database-disk-full", "no file can grow for 4 s", disk_full),
    Scenario(
        "database-backlog", f"{BACKLOG_ROWS:,} rows where {KEPT_ROWS:,} are kept, pruned under load", backlog, BACKLOG
    ),
    Scenario("database-gone-restart", "the file is removed and its writers are killed", gone_and_restarted),
)
