"""Reading rows as plain dicts."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from sqlalchemy import CursorResult, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.errors import Unavailable
from shared.store.tables import events, flips, instances, plans, policies, proposals, requests

READ_S = 3.0
Row = TypeVar("Row")


async def read_requests(engine: AsyncEngine, *, phase: str | None, limit: int) -> list[dict[str, Any]]:
    """The newest rows of the status table, without timelines. Raises Unavailable when the database fails."""
    columns = [column for column in requests.columns if column.name != "timeline"]
    query = select(*columns).order_by(requests.c.arrived_s.desc()).limit(limit)
    return await rows_of(engine, query.where(requests.c.phase == phase) if phase else query)


async def read_request(engine: AsyncEngine, job_id: str) -> dict[str, Any] | None:
    """One row with its timeline (JSON text), or None. Raises Unavailable when the database fails."""
    found = await rows_of(engine, select(requests).where(requests.c.job_id == job_id))
    return found[0] if found else None


async def read_instances(engine: AsyncEngine) -> list[dict[str, Any]]:
    """All known instances. Raises Unavailable when the database fails."""
    return await rows_of(engine, select(instances))


async def read_flips(engine: AsyncEngine, limit: int) -> list[dict[str, Any]]:
    """The newest operations on instances, newest first. Raises Unavailable when the database fails."""
    return await rows_of(engine, select(flips).order_by(flips.c.started_s.desc()).limit(limit))


async def read_events(engine: AsyncEngine, limit: int) -> list[dict[str, Any]]:
    """The newest events, newest first. Raises Unavailable when the database fails."""
    return await rows_of(engine, select(events).order_by(events.c.time_s.desc()).limit(limit))


async def read_policies(engine: AsyncEngine) -> dict[str, Any] | None:
    """The row of the policies in force, if any was ever written. Raises Unavailable when the database fails."""
    found = await rows_of(engine, select(policies))
    return found[0] if found else None


async def read_plans(engine: AsyncEngine, limit: int, states: Collection[str] = ()) -> list[dict[str, Any]]:
    """The newest searches for plans, newest first; of `states`, if any. Raises Unavailable when the database fails."""
    wanted = select(plans).where(plans.c.state.in_(states)) if states else select(plans)
    return await rows_of(engine, wanted.order_by(plans.c.submitted_s.desc()).limit(limit))


async def read_plan(engine: AsyncEngine, plan_id: str) -> dict[str, Any] | None:
    """One search for a plan, or None. Raises Unavailable when the database fails."""
    found = await rows_of(engine, select(plans).where(plans.c.plan_id == plan_id))
    return found[0] if found else None


async def read_proposals(engine: AsyncEngine, limit: int) -> list[dict[str, Any]]:
    """The newest proposals, newest first. Raises Unavailable when the database fails."""
    return await rows_of(engine, select(proposals).order_by(proposals.c.made_s.desc()).limit(limit))


async def rows_of(engine: AsyncEngine, query: Any) -> list[dict[str, Any]]:
    """What a query finds. Raises Unavailable when the database fails."""
    return await _found(engine, query, lambda result: [dict(row) for row in result.mappings()])


async def tuples_of(engine: AsyncEngine, query: Any) -> list[tuple[Any, ...]]:
    """The same as tuples, for many rows. Raises Unavailable when the database fails."""
    return await _found(engine, query, lambda result: [tuple(row) for row in result])


async def _found(engine: AsyncEngine, query: Any, take: Callable[[CursorResult[Any]], list[Row]]) -> list[Row]:
    try:
        async with asyncio.timeout(READ_S), engine.connect() as connection:
            return take(await connection.execute(query))
    except (SQLAlchemyError, OSError, TimeoutError) as error:
        raise Unavailable(f"the database does not answer: {type(error).__name__}: {error}"[:300]) from error
