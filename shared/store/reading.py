"""Reading rows as structs, whose fields have the names of columns. Where other packages define a struct, the caller
passes it. A row that does not fit its struct was written by another version: it is skipped and logged.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
from sqlalchemy import ColumnElement, CursorResult, Select, or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.errors import Unavailable
from shared.runtime.logs import get_log
from shared.store.tables import adapters, events, flips, instances, plans, policies, proposals, requests

log = get_log(__name__)
READ_S = 3.0
Row = TypeVar("Row")


class InstanceRecord(msgspec.Struct, frozen=True):
    """A row of `instances`. info: JSON of an InstanceInfo."""

    instance_id: str
    role: str
    state: str
    info: str


class KeptRow(msgspec.Struct, frozen=True):
    """The row of `policies`, or of `adapters`. content: JSON of what the monitor keeps."""

    cluster: str
    revision: int
    changed_s: float
    who: str
    content: str


class PlanRow(msgspec.Struct, frozen=True):
    """A row of `plans`. request, progress, result: JSON."""

    plan_id: str
    state: str
    who: str
    submitted_s: float
    ended_s: float | None
    request: str
    progress: str
    result: str | None
    error: str


class ProposalRow(msgspec.Struct, frozen=True):
    """A row of `proposals`. content: JSON of a proposal."""

    proposal_id: str
    content: str


async def read_requests(engine: AsyncEngine, struct: type[Row], *, phase: str | None, limit: int) -> list[Row]:
    """The newest rows of the status table. Raises Unavailable when the database fails, as all functions here do."""
    query = select(*SHOWN).order_by(requests.c.arrived_s.desc()).limit(limit)
    return await structs_of(engine, query.where(requests.c.phase == phase) if phase else query, struct)


async def read_request(engine: AsyncEngine, struct: type[Row], job_id: str) -> Row | None:
    return _single(await structs_of(engine, select(*SHOWN).where(requests.c.job_id == job_id), struct))


async def read_timeline(engine: AsyncEngine, job_id: str) -> str | None:
    """The timeline of a request as JSON; None where there is no row, or none yet."""
    row = _single(await tuples_of(engine, select(requests.c.timeline).where(requests.c.job_id == job_id)))
    return row[0] if row is not None else None


async def read_instances(engine: AsyncEngine) -> list[InstanceRecord]:
    """All known instances."""
    return await structs_of(engine, select(instances), InstanceRecord)


async def read_flips(engine: AsyncEngine, struct: type[Row], limit: int) -> list[Row]:
    """The newest operations on instances, newest first."""
    return await structs_of(engine, select(flips).order_by(flips.c.started_s.desc()).limit(limit), struct)


async def read_events(engine: AsyncEngine, struct: type[Row], limit: int) -> list[Row]:
    """The newest events, newest first."""
    return await structs_of(engine, select(events).order_by(events.c.time_s.desc()).limit(limit), struct)


async def read_policies(engine: AsyncEngine) -> KeptRow | None:
    """The policies in force, if any were ever written."""
    return _single(await structs_of(engine, select(policies), KeptRow))


async def read_adapters(engine: AsyncEngine) -> KeptRow | None:
    """The adapters that were loaded at run time, if any ever were."""
    return _single(await structs_of(engine, select(adapters), KeptRow))


async def read_plans(engine: AsyncEngine, limit: int, states: Collection[str] = ()) -> list[PlanRow]:
    """The newest searches for plans, newest first; of `states`, if any."""
    query = select(plans).where(plans.c.state.in_(states)) if states else select(plans)
    return await structs_of(engine, query.order_by(plans.c.submitted_s.desc()).limit(limit), PlanRow)


async def read_plan(engine: AsyncEngine, plan_id: str) -> PlanRow | None:
    """One search for a plan."""
    return _single(await structs_of(engine, select(plans).where(plans.c.plan_id == plan_id), PlanRow))


async def read_proposals(engine: AsyncEngine, limit: int) -> list[ProposalRow]:
    """The newest proposals, newest first."""
    return await structs_of(engine, select(proposals).order_by(proposals.c.made_s.desc()).limit(limit), ProposalRow)


async def structs_of(engine: AsyncEngine, query: Any, struct: type[Row]) -> list[Row]:
    """The rows of a query as structs, whose fields have the names of columns."""
    rows = await _read(engine, query, lambda result: [dict(row) for row in result.mappings()])
    return [decoded for row in rows if (decoded := _decoded(row, struct)) is not None]


def _decoded(row: Mapping[str, Any], struct: type[Row]) -> Row | None:
    try:
        return msgspec.convert({str(name): value for name, value in row.items()}, struct)
    except msgspec.ValidationError as error:
        name = f"{struct.__name__} {next(iter(row.values()), '')}"
        log.warning("a row of another version was skipped", row=name, error=str(error))
        return None


def _single(rows: list[Row]) -> Row | None:
    return rows[0] if rows else None


async def tuples_of(engine: AsyncEngine, query: Any) -> list[tuple[Any, ...]]:
    """The rows as tuples, which is faster for many."""
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


async def search_requests(engine: AsyncEngine, struct: type[Row], search: RequestSearch) -> tuple[list[Row], bool]:
    """The rows that it finds, and whether there are more."""
    found = await structs_of(engine, query_of(search), struct)
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
