"""Bring the database to the newest schema, at the start of every process that uses it."""

import asyncio
import fcntl
import os
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.errors import Unavailable
from shared.runtime.logs import get_log
from shared.store.database import make, open_engine, path_of

log = get_log(__name__)
LOCK_S = 30.0
AGAIN_S = 1.0
CONVERT_BYTES = 256 << 20
_POLL_S = 0.05
_ADVISORY_KEY = zlib.crc32(b"polyphase.migrations")


async def migrate(engine: AsyncEngine) -> None:
    """Make the database if need be, and upgrade it to the newest revision.

    Any number of processes may do so at once: one works, the others wait.

    Raises Unavailable when the lock is not to be had within 30 s; errors of the database pass through.
    """
    async with locked(engine):
        make(engine)
        async with engine.connect() as connection:
            await connection.run_sync(_upgrade)
            await connection.commit()
        await _return_pages(engine)


async def _return_pages(engine: AsyncEngine) -> None:
    """Let a SQLite file return free pages to the disk: a file can do so once it was written anew.

    A file above CONVERT_BYTES is left as it is, because writers would wait for long: its free pages are used again, so
    it stays at the largest size that it once had. That also holds where the disk has no room for the copy.
    """
    path = path_of(engine)
    if engine.dialect.name != "sqlite" or path is None:
        return
    async with engine.connect() as connection:
        mode = (await connection.execute(text("PRAGMA auto_vacuum"))).scalar_one()
        if mode or path.stat().st_size > CONVERT_BYTES:
            return
        await connection.rollback()
        alone = await connection.execution_options(isolation_level="AUTOCOMMIT")  # VACUUM runs in no transaction
        try:
            await alone.execute(text("PRAGMA auto_vacuum=INCREMENTAL"))
            await alone.execute(text("VACUUM"))
        except SQLAlchemyError as error:
            log.warning("the database file keeps its free pages", error=f"{type(error).__name__}: {error}"[:300])


async def migrated(url: str) -> None:
    """Try until it is done, for whoever has nothing to do before."""
    engine = open_engine(url)
    try:
        while True:
            try:
                await migrate(engine)
            except (SQLAlchemyError, OSError, TimeoutError, Unavailable) as error:
                log.error(
                    "the database could not be made ready; trying on", error=f"{type(error).__name__}: {error}"[:300]
                )
                await asyncio.sleep(AGAIN_S)
            else:
                return
    finally:
        await engine.dispose()


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


@asynccontextmanager
async def locked(engine: AsyncEngine) -> AsyncIterator[None]:
    """Be the only process that makes the database or changes its schema. Raises Unavailable after 30 s."""
    if engine.dialect.name == "postgresql":
        async with engine.connect() as connection:
            async with asyncio.timeout(LOCK_S):
                await connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _ADVISORY_KEY})
            try:
                yield
            finally:
                await connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _ADVISORY_KEY})
    elif (path := path_of(engine)) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(f"{path}.migrate.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            await _take(handle, path)
            yield
        finally:
            os.close(handle)  # frees the lock
    else:
        yield


async def _take(handle: int, database: Path) -> None:
    try:
        async with asyncio.timeout(LOCK_S):
            while not _try_lock(handle):  # noqa: ASYNC110 - another process frees it; there is no event to wait for
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise Unavailable(f"another process holds the migration lock of {database}") from error


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
