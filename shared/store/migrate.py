"""Schema upgrades: create the database and bring it to the newest revision, at the start of a process that uses it.

The revisions are in `migrations/versions`, `initial` first; it replaced the former ones, 0001 to 0010. A database of
revision 0010 has the tables of `initial` and is upgraded; an older one is refused (`why_refused`).
"""

import asyncio
import fcntl
import os
import warnings
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Connection, Table, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.errors import Conflict, Unavailable
from shared.runtime.logs import get_log
from shared.store.database import INITIAL, LAST_FORMER, make, open_engine, path_of, why_refused
from shared.store.tables import metadata

log = get_log(__name__)
LOCK_S = 30.0
RETRY_S = 1.0
CONVERT_BYTES = 256 << 20
_POLL_S = 0.05
_ADDED_SINCE_INITIAL = {  # columns
    ("flips", "origin"),
    ("events", "origin"),
    ("flips", "job_id"),
    ("flips", "to_instance"),
    ("requests", "predicted_ttft_s"),
    ("requests", "predicted_tpot_s"),
}
_TABLES_SINCE_INITIAL = {"adapters"}
_ADVISORY_KEY = zlib.crc32(b"polyphase.migrations")


async def migrate(engine: AsyncEngine) -> None:
    """Create the database if it does not exist, and upgrade it to the newest revision.

    Any number of processes may do so at once: one works, the others wait. Raises Unavailable when the lock is not free
    within `LOCK_S`, Conflict when the database has a revision that cannot be upgraded, and errors of the database.
    """
    async with locked(engine):
        make(engine)
        async with engine.connect() as connection:
            await connection.run_sync(_upgrade, engine.url.render_as_string(hide_password=True))
            await connection.commit()
        await _return_pages(engine)


async def _return_pages(engine: AsyncEngine) -> None:
    """Let a SQLite file return free pages to the disk, which takes one rewrite of the file.

    A file above `CONVERT_BYTES` is left as it is, because writers would wait for long, and so is one for whose copy the
    disk has no room: it stays at its largest size, and its free pages are used again.
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
    """Upgrade the database at `url`, and retry until it answers. Raises Conflict as `migrate` does."""
    engine = open_engine(url)
    try:
        while True:
            try:
                await migrate(engine)
            except (SQLAlchemyError, OSError, TimeoutError, Unavailable) as error:
                log.error("the database is not ready; retrying", error=f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(RETRY_S)
            else:
                return
    finally:
        await engine.dispose()


def _upgrade(connection: Connection, database: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision == LAST_FORMER:
        differing = [one for one in _differences(connection) if not _added_since_initial(one)]
        if differing:
            raise Conflict(
                f"the tables of {database} are not those of its schema revision {revision} ({differing[0]}, …): move "
                "it away, so that an empty one is created, or correct its tables"
            )
        connection.execute(text("UPDATE alembic_version SET version_num = :initial"), {"initial": INITIAL})
    elif revision is not None:
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if revision not in known:
            raise Conflict(why_refused(database, revision))
    command.upgrade(config, "head")


def _differences(connection: Connection) -> list[object]:
    """What differs between the tables of the database and those of the code, as Alembic describes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SQLite's indexes on expressions cannot be compared
        return list(compare_metadata(MigrationContext.configure(connection), metadata))


def _added_since_initial(difference: object) -> bool:
    """Whether the difference is a table or a column that a revision after `initial` adds."""
    match difference:
        case ("add_column", _, str(table), Column(name=column)):
            return (table, column) in _ADDED_SINCE_INITIAL
        case ("add_table", Table(name=table)):
            return table in _TABLES_SINCE_INITIAL
    return False


@asynccontextmanager
async def locked(engine: AsyncEngine) -> AsyncIterator[None]:
    """The lock of the one process that may create the database or change its schema. Raises Unavailable after `LOCK_S`,
    for PostgreSQL TimeoutError.
    """
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
            try:
                async with asyncio.timeout(LOCK_S):
                    while not _try_lock(handle):  # noqa: ASYNC110 - another process frees it; there is no event
                        await asyncio.sleep(_POLL_S)
            except TimeoutError as error:
                raise Unavailable(f"another process holds the migration lock of {path}") from error
            yield
        finally:
            os.close(handle)  # frees the lock
    else:
        yield


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
