"""Deleting rows that are too old."""

import asyncio
import time
from collections.abc import Mapping

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.runtime.logs import get_log
from shared.store.tables import AGE, metadata

log = get_log(__name__)


async def prune(engine: AsyncEngine, keep_s: Mapping[str, float], now: float) -> dict[str, int]:
    """Delete rows older than `keep_s` seconds, by table; gives back how many. `now` is unix seconds."""
    deleted = {}
    async with engine.begin() as connection:
        for name, age_s in keep_s.items():
            table = metadata.tables[name]
            result = await connection.execute(delete(table).where(table.c[AGE[name]] < now - age_s))
            deleted[name] = result.rowcount
    return deleted


class Retention:
    """Prunes by fixed ages; one `step` is one pass, and a database that fails only costs a log line."""

    def __init__(self, engine: AsyncEngine, keep_s: Mapping[str, float], ready: asyncio.Event) -> None:
        self._engine = engine
        self._ready = ready
        self._keep_s = dict(keep_s)

    async def step(self) -> None:
        """One pass, once the schema is there."""
        if not self._ready.is_set():
            return
        try:
            deleted = await prune(self._engine, self._keep_s, time.time())
        except Exception as error:  # a boundary: housekeeping may fail, serving goes on
            log.warning("retention failed", error=f"{type(error).__name__}: {error}"[:300])
            return
        if any(deleted.values()):
            log.info("old rows deleted", **deleted)
