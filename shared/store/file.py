"""The file under a SQLite database: whether it is there, and whether it is still the same."""

import os
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

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
