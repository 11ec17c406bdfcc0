"""Opening the database: SQLite by default, PostgreSQL by URL."""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
from sqlalchemy import URL, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import StaticPool

from shared.errors import InvalidRequest

CONNECT_S = 3
STATEMENT_S = 10
LOG_BYTES = 16 << 20
END_S = 2.0  # for the thread of a connection that came to nothing
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgres": "postgresql+asyncpg", "postgresql": "postgresql+asyncpg"}


def parse_url(url: str) -> URL:
    """The URL with the driver that we use for it. Raises InvalidRequest for what is no URL, or of another kind."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # which repeats a part of it; it may have a password
        raise InvalidRequest("this is no database URL: sqlite:///PATH or postgresql://USER:…@HOST:PORT/NAME") from None
    driver = _DRIVERS.get(parsed.get_backend_name())
    if driver is None:
        raise InvalidRequest(f"database URL must start with sqlite: or postgresql:, not {parsed.drivername}:")
    return parsed.set(drivername=driver)


def open_engine(url: str, *, patience_s: float | None = None, idle_s: float | None = None) -> AsyncEngine:
    """An engine for `sqlite:///path` or `postgresql://…`. Connects on first use.

    Raises InvalidRequest for another kind of URL. A SQLite file is made by `migrate` and by nothing else: SQLite itself
    would make an empty one wherever it is missing, beside the log of one that was removed.
    patience_s: for each statement, and for others' locks. idle_s: PostgreSQL ends a transaction that stands still for
    so long: its process is frozen.
    """
    parsed = parse_url(url)
    if parsed.drivername.startswith("postgresql"):
        timeouts: dict[str, Any] = {"timeout": CONNECT_S, "command_timeout": patience_s or STATEMENT_S}
        if idle_s is not None:
            timeouts["server_settings"] = {"idle_in_transaction_session_timeout": str(round(1000 * idle_s))}
        engine = create_async_engine(parsed, pool_size=2, max_overflow=3, pool_timeout=5, connect_args=timeouts)
        event.listen(engine.sync_engine, "do_connect", _postgres)
        return engine
    if not parsed.database or parsed.database == ":memory:":
        return create_async_engine(parsed, poolclass=StaticPool)
    options = {"timeout": patience_s or CONNECT_S, "async_creator_fn": _sqlite}
    engine = create_async_engine(parsed, connect_args=options)
    event.listen(engine.sync_engine, "do_connect", _only_what_exists(Path(parsed.database)))
    event.listen(engine.sync_engine, "connect", _tune_sqlite)
    return engine


def _postgres(dialect: Any, _: Any, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """SQLAlchemy leaves what asyncpg raises while it connects as it is: a server that starts or ends just now says so
    by such an error, and nobody would take it for one of the database.
    """
    try:
        return dialect.connect(*arguments, **named)
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise dialect.loaded_dbapi.OperationalError(f"{type(error).__name__}: {error}") from error


async def _sqlite(*args: Any, **options: Any) -> aiosqlite.Connection:
    """A connection and its thread. Where it fails or is cancelled the thread has ended, too: it reports its end to this
    loop, which may be closed a moment later.
    """
    connection = aiosqlite.connect(*args, **options)
    connection._thread.daemon = True  # as SQLAlchemy has it of those that it makes itself
    try:
        return await connection
    except BaseException:
        await asyncio.to_thread(connection._thread.join, END_S)
        raise


def _only_what_exists(file: Path) -> Callable[..., None]:
    def check(*_: Any) -> None:
        if not file.exists():
            raise sqlite3.OperationalError(f"no database file at {file}")

    return check


def _tune_sqlite(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")  # readers and the writer do not block each other
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute(f"PRAGMA journal_size_limit={LOG_BYTES}")  # of the write-ahead log once it is written back
    cursor.close()


# MERGED file.py
# The file under a SQLite database: whether it is there, and whether it is still the same.


_BESIDE = ("-wal", "-shm", "-journal")

Identity = tuple[int, int]


def path_of(engine: AsyncEngine) -> Path | None:
    """Where the database's file is; None for one that has none."""
    name = engine.url.database
    if engine.dialect.name != "sqlite" or not name or name == ":memory:":
        return None
    return Path(name)


def identity(engine: AsyncEngine) -> Identity | None:
    """Tells one file from another of the same name; None when there is none."""
    path = path_of(engine)
    try:
        found = os.stat(path) if path is not None else None
    except FileNotFoundError:
        return None
    return (found.st_dev, found.st_ino) if found else None


def make(engine: AsyncEngine) -> None:
    """Make an empty database where there is none. For the holder of the migration lock.

    A log that a removed file left behind goes first: SQLite would replay it into the new one.
    """
    path = path_of(engine)
    if path is None or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    for ending in _BESIDE:
        path.with_name(path.name + ending).unlink(missing_ok=True)
    path.touch()
