"""The database locked, gone, read-only, and on a full disk: serving never waits for it; it is written again."""

import asyncio
import sqlite3
import time
from contextlib import closing

from lab.chaos.arena import Arena
from lab.chaos.scenario import Scenario
from services.launcher.suite import until

AWAY_S = 4.0
_WRITTEN_S = 10.0


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
    Scenario("database-gone-restart", "the file is removed and its writers are killed", gone_and_restarted),
)
