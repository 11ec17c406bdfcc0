"""Reading rows as plain dicts."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, CursorResult, Select, or_, select
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
    """The rows of a query. Raises Unavailable when the database fails."""
    return await _read(engine, query, lambda result: [dict(row) for row in result.mappings()])


async def tuples_of(engine: AsyncEngine, query: Any) -> list[tuple[Any, ...]]:
    """The rows as tuples, which is faster for many. Raises Unavailable when the database fails."""
    return await _read(engine, query, lambda result: [tuple(row) for row in result])


async def _read(engine: AsyncEngine, query: Any, take: Callable[[CursorResult[Any]], list[Row]]) -> list[Row]:
    try:
        async with asyncio.timeout(READ_S), engine.connect() as connection:
            return take(await connection.execute(query))
    except (SQLAlchemyError, OSError, TimeoutError) as error:
        raise Unavailable(f"the database does not answer: {type(error).__name__}: {error}"[:300]) from error


SHOWN = [column for column in requests.columns if column.name != "timeline"]
LAST = "\U0010ffff"  # sorts after all characters of ids


class Order(StrEnum):
    """The order of search results."""

    NEWEST = "newest"
    SLOWEST_TTFT = "slowest_ttft"
    SLOWEST_TPOT = "slowest_tpot"
    LONGEST_GAP = "longest_gap"  # between two of its tokens
    LONGEST = "longest"  # from arrival to the last report


@dataclass(frozen=True, slots=True)
class RequestSearch:
    """A search for requests; empty and None: any. job: prefix of the id. instance: of either phase. Unix seconds."""

    job: str = ""
    caller: str = ""
    slo: str = ""
    instance: str = ""
    outcome: str = ""
    phase: str = ""
    missed: bool | None = None
    since_s: float | None = None
    until_s: float | None = None
    order: Order = Order.NEWEST
    limit: int = 100
    offset: int = 0


async def search_requests(engine: AsyncEngine, search: RequestSearch) -> tuple[list[dict[str, Any]], bool]:
    """Rows without timelines, and whether there are more. Raises Unavailable when the database fails."""
    found = await rows_of(engine, query_of(search))
    return found[: search.limit], len(found) > search.limit


def query_of(search: RequestSearch) -> Select[Any]:
    """The search as SQL, with one row more than `search.limit`."""
    query = select(*SHOWN).where(*_conditions(search))
    return query.order_by(*_order(search.order)).limit(search.limit + 1).offset(search.offset)


def _conditions(search: RequestSearch) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    for name in ("caller", "slo", "outcome", "phase"):
        if value := getattr(search, name):
            found.append(requests.c[name] == value)
    if search.job:
        found += [requests.c.job_id >= search.job, requests.c.job_id < search.job + LAST]
    if search.instance:
        its = search.instance
        found.append(or_(requests.c.prefill_instance == its, requests.c.decode_instance == its))
    if search.missed is not None:
        found.append(requests.c.slo_met.is_(not search.missed))
    if search.since_s is not None:
        found.append(requests.c.arrived_s >= search.since_s)
    if search.until_s is not None:
        found.append(requests.c.arrived_s < search.until_s)
    match search.order:
        case Order.SLOWEST_TTFT:
            found.append(requests.c.ttft_s.is_not(None))
        case Order.SLOWEST_TPOT:
            found.append(requests.c.tpot_s.is_not(None))
        case Order.LONGEST_GAP:
            found.append(requests.c.longest_gap_s.is_not(None))
    return found


def _order(order: Order) -> tuple[ColumnElement[Any], ...]:
    match order:
        case Order.SLOWEST_TTFT:
            return (requests.c.ttft_s.desc(),)
        case Order.SLOWEST_TPOT:
            return (requests.c.tpot_s.desc(),)
        case Order.LONGEST_GAP:
            return (requests.c.longest_gap_s.desc(),)
        case Order.LONGEST:
            return ((requests.c.updated_s - requests.c.arrived_s).desc(),)
    return (requests.c.arrived_s.desc(),)
