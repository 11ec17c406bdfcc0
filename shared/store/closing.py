"""Ending rows that nobody will end any more."""

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.domain.job import LOST, Phase
from shared.store.tables import requests


async def close_lost(engine: AsyncEngine, scheduler_id: str, before_s: float) -> int:
    """Mark as lost what this scheduler's former life left open and nobody has told of since; gives back how many.

    Errors of the database pass through.
    """
    left = (requests.c.scheduler_id == scheduler_id, requests.c.final.is_(False), requests.c.updated_s < before_s)
    ended = {"phase": Phase.FAILED.value, "final": True, "outcome": LOST, "slo_met": False}
    async with engine.begin() as connection:
        return (await connection.execute(update(requests).where(*left).values(**ended))).rowcount
