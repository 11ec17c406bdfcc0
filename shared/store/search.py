"""Searching the status table."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Select, or_, select
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.store.reading import rows_of
from shared.store.tables import requests

SHOWN = [column for column in requests.columns if column.name != "timeline"]
LAST = "\U0010ffff"  # after any character that an id begins with


class Order(StrEnum):
    """What comes first."""

    NEWEST = "newest"
    SLOWEST_TTFT = "slowest_ttft"
    SLOWEST_TPOT = "slowest_tpot"
    LONGEST_GAP = "longest_gap"  # between two of its tokens
    LONGEST = "longest"  # from arrival to the last that was heard of it


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which requests; empty and None: any. job: how its id begins. instance: of either phase. Unix seconds."""

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


async def search_requests(engine: AsyncEngine, wanted: Wanted) -> tuple[list[dict[str, Any]], bool]:
    """Rows without timelines, and whether there are more. Raises Unavailable when the database fails."""
    found = await rows_of(engine, query_of(wanted))
    return found[: wanted.limit], len(found) > wanted.limit


def query_of(wanted: Wanted) -> Select[Any]:
    """As SQL; of one row more than is wanted."""
    query = select(*SHOWN).where(*_conditions(wanted))
    return query.order_by(*_order(wanted.order)).limit(wanted.limit + 1).offset(wanted.offset)


def _conditions(wanted: Wanted) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    for name in ("caller", "slo", "outcome", "phase"):
        if value := getattr(wanted, name):
            found.append(requests.c[name] == value)
    if wanted.job:
        found += [requests.c.job_id >= wanted.job, requests.c.job_id < wanted.job + LAST]
    if wanted.instance:
        its = wanted.instance
        found.append(or_(requests.c.prefill_instance == its, requests.c.decode_instance == its))
    if wanted.missed is not None:
        found.append(requests.c.slo_met.is_(not wanted.missed))
    if wanted.since_s is not None:
        found.append(requests.c.arrived_s >= wanted.since_s)
    if wanted.until_s is not None:
        found.append(requests.c.arrived_s < wanted.until_s)
    match wanted.order:
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
