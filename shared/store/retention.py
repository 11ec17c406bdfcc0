"""What time ends: rows that are too old, and rows that nobody will end any more."""

import asyncio
import time
from collections.abc import Mapping

from sqlalchemy import and_, delete, or_, update
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.domain.job import LOST, Phase
from shared.runtime.logs import get_log
from shared.store.tables import AGE, load_steps, metadata, requests, served

log = get_log(__name__)
FINE_S = 60
ABANDONED_S = 86_400.0  # longer than any job should take; of one that is told of later the row is put right


async def prune(engine: AsyncEngine, keep_s: Mapping[str, float], now: float) -> dict[str, int]:
    """Delete rows older than `keep_s` seconds, by table; gives back how many. `now` is unix seconds."""
    deleted = {}
    async with engine.begin() as connection:
        for name, age_s in keep_s.items():
            table = metadata.tables[name]
            result = await connection.execute(delete(table).where(table.c[AGE[name]] < now - age_s))
            deleted[name] = result.rowcount
    return deleted


async def prune_fine(engine: AsyncEngine, keep_s: float, now: float) -> int:
    """Delete steps shorter than a minute that are older than that; gives back how many. `now` is unix seconds."""
    deleted = 0
    async with engine.begin() as connection:
        for table in (load_steps, served):
            old = (table.c.step_s < FINE_S, table.c.time_s < now - keep_s)
            deleted += (await connection.execute(delete(table).where(*old))).rowcount
    return deleted


class Retention:
    """Prunes by fixed ages; one `step` is one pass, and a database that fails only costs a log line.

    fine_s: the age of steps shorter than a minute, where the process keeps any.
    """

    def __init__(
        self, engine: AsyncEngine, keep_s: Mapping[str, float], ready: asyncio.Event, fine_s: float | None = None
    ) -> None:
        self._engine = engine
        self._ready = ready
        self._fine_s = fine_s
        self._keep_s = dict(keep_s)

    async def step(self) -> None:
        """One pass, once the schema is there."""
        if not self._ready.is_set():
            return
        try:
            deleted = await prune(self._engine, self._keep_s, time.time())
            if self._fine_s is not None:
                deleted["fine steps"] = await prune_fine(self._engine, self._fine_s, time.time())
        except Exception as error:  # a boundary: housekeeping may fail, serving goes on
            log.warning("retention failed", error=f"{type(error).__name__}: {error}"[:300])
            return
        if any(deleted.values()):
            log.info("old rows deleted", **deleted)


async def close_lost(engine: AsyncEngine, scheduler_id: str, before_s: float) -> int:
    """Mark as lost what this scheduler's former life left open and nobody has told of since; gives back how many.

    What any scheduler left open ABANDONED_S before that is lost, too: one that was made anew has another id. Errors of
    the database pass through.
    """
    old = (requests.c.updated_s < before_s, requests.c.scheduler_id == scheduler_id)
    left = (requests.c.final.is_(False), or_(and_(*old), requests.c.updated_s < before_s - ABANDONED_S))
    ended = {"phase": Phase.FAILED.value, "final": True, "outcome": LOST, "slo_met": False}
    async with engine.begin() as connection:
        return (await connection.execute(update(requests).where(*left).values(**ended))).rowcount
