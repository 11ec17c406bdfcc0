"""Opening the database: SQLite by default, PostgreSQL by URL; the file of a SQLite database; its schema revision."""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
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
END_S = 2.0  # for the thread of a connection that failed
INITIAL = "initial"  # the first schema revision
LAST_FORMER = "0010"  # the last of the revisions that `INITIAL` replaced; it has the same tables
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgres": "postgresql+asyncpg", "postgresql": "postgresql+asyncpg"}


def parse_url(url: str) -> URL:
    """The URL with the driver for it. Raises InvalidRequest for a text that is no URL, or one of another database."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # its message repeats a part of the URL, which may have a password
        raise InvalidRequest("this is no database URL: sqlite:///PATH or postgresql://USER:…@HOST:PORT/NAME") from None
    driver = _DRIVERS.get(parsed.get_backend_name())
    if driver is None:
        raise InvalidRequest(f"database URL must start with sqlite: or postgresql:, not {parsed.drivername}:")
    return parsed.set(drivername=driver)


def open_engine(url: str, *, patience_s: float | None = None, idle_s: float | None = None) -> AsyncEngine:
    """An engine for `sqlite:///path` or `postgresql://…`. Connects on first use.

    Raises InvalidRequest for another kind of URL. Only `migrate` creates a SQLite file: SQLite itself would create an
    empty one wherever it is missing, beside the log of a file that was removed.
    patience_s: for each statement, and for the locks of other processes. idle_s: PostgreSQL ends a transaction that is
    idle for this long, because its process is frozen.
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
    """Connect, with asyncpg's errors as errors of the database: SQLAlchemy does not translate those of a connection
    attempt, such as that of a server which is starting or stopping.
    """
    try:
        return dialect.connect(*arguments, **named)
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise dialect.loaded_dbapi.OperationalError(f"{type(error).__name__}: {error}") from error


async def _sqlite(*args: Any, **options: Any) -> aiosqlite.Connection:
    """A connection and its thread. When the attempt fails or is cancelled, it waits for the end of the thread, which
    reports to this loop: the loop may be closed a moment later.
    """
    connection = _Connection(partial(sqlite3.connect, *args, **options), iter_chunk_size=64)
    connection._thread.daemon = True  # as for connections that SQLAlchemy makes itself
    try:
        return await connection
    except BaseException:
        await asyncio.to_thread(connection._thread.join, END_S)
        raise


class _Connection(aiosqlite.Connection):
    """Has few turns between its thread and the loop, because each wakes both: a statement is one turn with its cursor
    and its rows, and a rollback without a transaction is none.
    """

    async def cursor(self) -> Any:  # type: ignore[override]
        return _Cursor(self)

    async def rollback(self) -> None:
        if self.in_transaction:
            await super().rollback()


class _Cursor:
    """Executes one statement, for SQLAlchemy, which reads all rows at once and closes the cursor then."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._rows: list[Any] = []
        self.description: Any = None
        self.lastrowid: int | None = None
        self.rowcount = -1

    async def execute(self, operation: str, parameters: Any = ()) -> None:
        await self._run(sqlite3.Cursor.execute, operation, parameters)

    async def executemany(self, operation: str, parameters: Iterable[Any]) -> None:
        await self._run(sqlite3.Cursor.executemany, operation, parameters)

    async def fetchall(self) -> list[Any]:
        return self._rows

    async def close(self) -> None:
        """The cursor of SQLite is closed already."""

    async def _run(self, execute: Callable[..., sqlite3.Cursor], operation: str, parameters: Any) -> None:
        def turn() -> None:
            with closing(self._connection._conn.cursor()) as cursor:
                execute(cursor, operation, parameters)
                self.description, self.lastrowid, self.rowcount = cursor.description, cursor.lastrowid, cursor.rowcount
                self._rows = cursor.fetchall() if cursor.description else []

        await self._connection._execute(turn)  # type: ignore[no-untyped-call]


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


_BESIDE = ("-wal", "-shm", "-journal")

Identity = tuple[int, int]


def path_of(engine: AsyncEngine) -> Path | None:
    """The file of a SQLite database; None for another database."""
    name = engine.url.database
    if engine.dialect.name != "sqlite" or not name or name == ":memory:":
        return None
    return Path(name)


def identity(engine: AsyncEngine) -> Identity | None:
    """Distinguishes a file from another of the same name; None without a file."""
    path = path_of(engine)
    try:
        found = os.stat(path) if path is not None else None
    except FileNotFoundError:
        return None
    return (found.st_dev, found.st_ino) if found else None


def make(engine: AsyncEngine) -> None:
    """Create an empty SQLite file if there is none; the caller holds the migration lock.

    A log that a removed file left behind is deleted first: SQLite would replay it into the new one.
    """
    path = path_of(engine)
    if path is None or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    for ending in _BESIDE:
        path.with_name(path.name + ending).unlink(missing_ok=True)
    path.touch()


def why_refused(database: object, revision: str) -> str:
    """The error for a schema revision that neither `migrate` nor this version of Polyphase knows."""
    if revision.isdecimal() and revision < LAST_FORMER:
        return (
            f"{database} has schema revision {revision}; this version of Polyphase upgrades {LAST_FORMER} and later "
            f"ones: run `polyphase migrate` of a version whose newest revision is {LAST_FORMER} first, or move the "
            "database away to start with an empty one"
        )
    return f"{database} has schema revision {revision}, of a newer version: use that version, or another database"


def refused_file(path: Path) -> str:
    """Why the SQLite file cannot be upgraded, from its revision; empty when it can, or is no database yet."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone() or (INITIAL,)
    except sqlite3.Error:
        return ""
    return why_refused(path, revision) if revision.isdecimal() and revision < LAST_FORMER else ""
