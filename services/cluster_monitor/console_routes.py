"""What a console shows of the cluster: the verdict, its history, and what an instance tells of itself."""

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Response

from services.cluster_monitor import history_page, instances_page
from services.cluster_monitor.edge import HappenedIn
from services.cluster_monitor.events import EventKind
from services.cluster_monitor.history_page import Grid
from services.cluster_monitor.routes import Monitor
from services.cluster_monitor.state import State
from shared.errors import Unavailable
from shared.runtime.settings import Name
from shared.wire.clients.http import JsonClient

ASK_S = 2.0  # for an instance to answer
MARKS = (
    EventKind.DEATH,
    EventKind.RESTARTED,
    EventKind.LEFT,
    EventKind.UNRESPONSIVE,
    EventKind.POLICIES_CHANGED,
    EventKind.PLAN_ACCEPTED,
    EventKind.PLAN_APPLIED,
    EventKind.GATEWAY_GONE,
    EventKind.SCHEDULER_GONE,
    EventKind.VERDICT,
)
MOST_MARKS = 500
router = APIRouter()
Minutes = Annotated[int, Query(ge=5, le=1_440)]
Points = Annotated[int, Query(ge=2, le=720)]


@router.get("/verdict")
async def verdict(monitor: Monitor) -> Response:
    """How the cluster does: a Verdict of `shared.domain.verdict`, of the shortest SLO window."""
    return _json(msgspec.json.encode(monitor.judge.verdict(monitor.policies.policies)))


@router.get("/history")
async def history(monitor: Monitor, minutes: Minutes = 60, points: Points = 120) -> Response:
    """Rates, latencies, attainment, load and where the time went, in columns; with what happened meanwhile."""
    grid = Grid.of(minutes, points, time.time())
    found = monitor.events.newest(MOST_MARKS, grid.from_s, MARKS)
    marks = history_page.marks_of(grid, found, monitor.audit.newest_first(), MOST_MARKS)
    return _json(await history_page.history(monitor.engine, grid, marks))


@router.get("/history/instances")
async def history_of_instances(
    monitor: Monitor, minutes: Minutes = 60, points: Points = 120, instance: Name | None = None
) -> Response:
    """Role, state and load of each instance in columns; null where nothing is known."""
    grid = Grid.of(minutes, points, time.time())
    return _json(await instances_page.instances(monitor.engine, grid, instance or ""))


@router.get("/instances/{instance_id}/details")
async def details(monitor: Monitor, instance_id: str) -> dict[str, Any]:
    """What the instance tells of itself, beside what the monitor knows; 503 or 504 where it does not answer."""
    told: dict[str, Any] = await _ask(monitor, instance_id, "/details", {})
    record = monitor.registry.get(instance_id)
    seen = monitor.events.newest(1_000, 0.0, (EventKind.RESTARTED,), instance_id)
    return {**told, "known": record.describe(), "restarts": len(seen)}


@router.get("/instances/{instance_id}/log")
async def log_tail(
    monitor: Monitor, instance_id: str, lines: Annotated[int, Query(ge=1, le=2_000)] = 200
) -> dict[str, Any]:
    """The last lines of its log, oldest first."""
    told: dict[str, Any] = await _ask(monitor, instance_id, "/log", {"lines": lines})
    return told


@router.post("/events")
async def happened(monitor: Monitor, body: HappenedIn) -> dict[str, bool]:
    """What became of a plan, as the planner tells; whether it is news."""
    return {"new": monitor.events.told(body.kind, body.text, body.subject, body.event_id)}


async def _ask(monitor: State, instance_id: str, path: str, params: dict[str, int]) -> Any:
    record = monitor.registry.get(instance_id)
    if not record.alive:
        raise Unavailable(f"{instance_id} is dead ({record.death}); it tells nothing of itself any more")
    async with JsonClient(record.info.http) as client:
        return await client.call("GET", path, params=params, timeout_s=ASK_S)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
