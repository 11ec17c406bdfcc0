"""The monitor's HTTP API."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, field_validator

from services.cluster_monitor import history
from services.cluster_monitor.edge import DrainIn, FlipIn, HappenedIn, LeaveIn, NewsIn, OperationIn, Registration
from services.cluster_monitor.events import EventKind
from services.cluster_monitor.history import Grid
from services.cluster_monitor.registry import Record
from services.cluster_monitor.settings import ScrapeTarget
from services.cluster_monitor.state import State, Turns
from shared.domain.instance import Role
from shared.domain.numbers import infinite_in
from shared.domain.route import PolicySpec
from shared.errors import PolyphaseError, Unavailable
from shared.runtime.actor import actor
from shared.runtime.settings import Name
from shared.wire.clients.http import JsonClient


async def _state(request: Request) -> State:
    turns: Turns = request.app.state.turns
    return turns.acting()


Monitor = Annotated[State, Depends(_state)]
Who = Annotated[str, Depends(actor)]
router = APIRouter()


@router.post("/instances")
async def register(monitor: Monitor, body: Registration) -> dict[str, Any]:
    """Join the cluster; 409 with the reason when the instance does not fit."""
    try:
        record = monitor.registry.register(body.to_info(), body.role)
    except PolyphaseError as error:
        monitor.events.refused(body.instance_id, body.role.value, error.message)
        raise
    monitor.memory.drop(record.instance_id)
    return {"instance_id": record.instance_id, "state": record.state.value}


@router.get("/instances")
async def list_instances(monitor: Monitor) -> list[dict[str, Any]]:
    """All instances; dead ones until they return or are forgotten."""
    return [r.describe() for r in sorted(monitor.registry.all(), key=lambda r: r.instance_id)]


@router.get("/instances/{instance_id}")
async def get_instance(monitor: Monitor, instance_id: str) -> dict[str, Any]:
    """One instance."""
    return monitor.registry.get(instance_id).describe()


@router.delete("/instances/{instance_id}")
async def forget(monitor: Monitor, instance_id: str, who: Who) -> dict[str, str]:
    """Count a dead instance no longer."""
    monitor.registry.forget(instance_id, f"by {who}")
    return {"forgotten": instance_id}


@router.post("/instances/{instance_id}/leave")
async def leave(monitor: Monitor, instance_id: str, body: LeaveIn) -> dict[str, str]:
    """An instance says that it stops, so that nobody takes it for dead."""
    monitor.registry.leave(instance_id, body.generation)
    return {"left": instance_id}


@router.post("/instances/{instance_id}/drain")
async def drain(monitor: Monitor, instance_id: str, who: Who, body: DrainIn | None = None) -> dict[str, Any]:
    """Give it no new work; answers when it has none left."""
    wanted = body or DrainIn()
    asked = wanted.to_asked(who)
    return await monitor.operations.drain(instance_id, asked, force=wanted.force, timeout_s=wanted.timeout_s)


@router.post("/instances/{instance_id}/resume")
async def resume(monitor: Monitor, instance_id: str, who: Who, body: OperationIn | None = None) -> dict[str, Any]:
    """Give it work again."""
    return await monitor.operations.resume(instance_id, (body or OperationIn()).to_asked(who))


@router.post("/instances/{instance_id}/flip")
async def flip(monitor: Monitor, instance_id: str, who: Who, body: FlipIn | None = None) -> dict[str, Any]:
    """Change its role; answers when it works in the new one, with drain and flip times apart."""
    wanted = body or FlipIn()
    asked = wanted.to_asked(who)
    return await monitor.operations.flip(
        instance_id, asked, force=wanted.force, drain_timeout_s=wanted.drain_timeout_s, to=wanted.to_role
    )


@router.get("/operations/{operation_id}")
async def operation(monitor: Monitor, operation_id: str) -> dict[str, Any]:
    """How an operation stands: running, succeeded, failed, refused, expired, or unknown after the monitor's own end."""
    return monitor.operations.describe(operation_id)


@router.get("/flips")
async def flips(monitor: Monitor, limit: Annotated[int, Query(ge=1, le=1_000)] = 100) -> list[dict[str, Any]]:
    """The audit of flips, drains and resumes, newest first."""
    return monitor.audit.newest(limit)


@router.get("/events")
async def events(
    monitor: Monitor,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
    since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0,
    kind: Annotated[list[EventKind] | None, Query()] = None,
    instance: Name | None = None,
    before: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
) -> list[dict[str, Any]]:
    """What happened, newest first: later than `since` and before `before` (unix seconds), of some kinds or of one
    instance only if any is named.
    """
    return monitor.events.newest(limit, since, kind or (), instance or "", inf if before is None else before)


@router.get("/slo")
async def slo(monitor: Monitor) -> list[dict[str, Any]]:
    """Attainment and percentiles by class and window."""
    return monitor.slo.describe()


@router.post("/schedulers/{scheduler_id}/news")
async def take_news(monitor: Monitor, scheduler_id: Name, body: NewsIn) -> dict[str, int]:
    """What a scheduler says: how requests ended (each job counts once), what its clients asked for, second by second,
    and which policies it goes by. Answers how many outcomes and seconds were of use.
    """
    monitor.followers.hear(scheduler_id, body.revision, body.trouble)
    monitor.judge.peers.hear(scheduler_id, body.gateways, body.left, leaving=body.leaving)
    for outcome in body.outcomes:
        if outcome.losses:
            lost = [(loss.position, loss.instance_id) for loss in outcome.losses]
            monitor.events.request_refused(outcome.job_id, outcome.ended_s, lost)
    return {
        "outcomes": monitor.slo.take((outcome.job_id, outcome.to_ended()) for outcome in body.outcomes),
        "demand": monitor.demand.take(second.to_second() for second in body.demand),
    }


@router.get("/demand")
async def demand(monitor: Monitor) -> dict[str, Any]:
    """What clients ask for over all schedulers, since the last shift and at most for the last minute; null while that
    is not known. Beside it the last five minutes second by second, the shifts in them, and the roles that would serve
    it best.
    """
    return monitor.demand.describe(monitor.flips.wanted())


@router.get("/demand/profile")
async def demand_profile(
    monitor: Monitor, least_requests: Annotated[int, Query(ge=1, le=100_000)] = 20
) -> dict[str, Any]:
    """What clients ask for, as soon as so many requests are known since the last shift, else null; when that shift was
    noticed; and what people's flips forbid: instances that are kept in their roles, roles that none may be given.
    """
    held, shift = monitor.flips.held(), monitor.demand.last_shift
    return {
        "demand": msgspec.to_builtins(monitor.demand.profile(least_requests)),
        "shift": {"at_s": shift[0], **msgspec.to_builtins(shift[1])} if shift else None,
        "kept": sorted(held.kept),
        "barred": sorted(role.value for role in held.barred),
    }


@router.get("/cluster")
async def cluster(monitor: Monitor) -> dict[str, Any]:
    """A summary for dashboards."""
    records = list(monitor.registry.all())
    alive = [record for record in records if record.alive]
    states = {role.value: Counter(r.state.value for r in records if r.role is role) for role in Role}
    totals = {
        name: sum(getattr(r.load, name) for r in alive)
        for name in ("queued_prefill", "queued_prefill_tokens", "running", "waiting", "decoding", "inflight")
    }
    return {
        "time_s": time.time(),
        "sequence": monitor.broadcaster.sequence,
        "model": alive[0].info.model if alive else "",
        "compatibility": msgspec.to_builtins(alive[0].info.compatibility) if alive else None,
        "instances": states,
        "known": {role.value: sum(states[role.value].values()) for role in Role},  # dead ones included
        "totals": totals,
        "operations": {r.instance_id: r.operation for r in records if r.operation},
        "slo": monitor.slo.describe(),
    }


# MERGED console_routes.py
# What a console shows of the cluster: the verdict, its history, and what an instance tells of itself.


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
Minutes = Annotated[int, Query(ge=5, le=1_440)]
Points = Annotated[int, Query(ge=2, le=720)]


@router.get("/verdict")
async def verdict(monitor: Monitor) -> Response:
    """How the cluster does: a Verdict of `shared.domain.verdict`, of the shortest SLO window."""
    return _json(msgspec.json.encode(monitor.judge.verdict(monitor.policies.policies)))


@router.get("/history")
async def get_history(monitor: Monitor, minutes: Minutes = 60, points: Points = 120) -> Response:
    """Rates, latencies, attainment, load and where the time went, in columns; with what happened meanwhile."""
    grid = Grid.of(minutes, points, time.time())
    found = monitor.events.newest(MOST_MARKS, grid.from_s, MARKS)
    marks = history.marks_of(grid, found, monitor.audit.newest_first(), MOST_MARKS)
    return _json(await history.history(monitor.engine, grid, marks))


@router.get("/history/instances")
async def history_of_instances(
    monitor: Monitor, minutes: Minutes = 60, points: Points = 120, instance: Name | None = None
) -> Response:
    """Role, state and load of each instance in columns; null where nothing is known."""
    grid = Grid.of(minutes, points, time.time())
    return _json(await history.instances_over_time(monitor.engine, grid, instance or ""))


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


# MERGED policy_routes.py
# The monitor's HTTP API of policies.


class PolicyIn(BaseModel):
    """PolicySpec."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", frozen=True)

    name: str
    parameters: dict[str, Any] = {}

    @field_validator("parameters")
    @classmethod
    def _finite(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if where := infinite_in(parameters):
            raise ValueError(f"{where} must be a finite number")
        return parameters


@router.get("/policies")
async def get_policies(monitor: Monitor) -> dict[str, Any]:
    """The policies in force, what the cluster file says, who changed what, the choices, and who follows."""
    return _described(monitor)


@router.put("/policies")
async def put_policies(monitor: Monitor, who: Who, change: dict[str, PolicyIn | None]) -> dict[str, Any]:
    """Change the policies of the kinds that are named; null: back to the cluster file's."""
    wanted = {kind: PolicySpec(one.name, one.parameters) if one else None for kind, one in change.items()}
    await monitor.policies.change(wanted, who)
    return _described(monitor)


def _described(monitor: State) -> dict[str, Any]:
    return {**monitor.policies.describe(), "followers": monitor.followers.describe(monitor.policies.policies)}


# MERGED targets.py
# Whom Prometheus is to scrape: every process that this monitor knows, or was told of.


SERVICE, PROCESS, INSTANCE = "service", "process", "instance_id"  # labels; none of them ever changes for a process


def targets_router(told: Iterable[ScrapeTarget]) -> APIRouter:
    """The route that Prometheus' `http_sd_configs` ask."""
    router = APIRouter()

    @router.get("/sd/prometheus")
    async def prometheus(monitor: Monitor, request: Request) -> list[dict[str, Any]]:
        """Every process of the cluster that has metrics, with its service, its name and its instance id.

        503 from a monitor that stands by: Prometheus goes on with what it was told last.
        """
        return targets(told, monitor.registry.all(), request.url.netloc)

    return router


def targets(told: Iterable[ScrapeTarget], records: Iterable[Record], own_address: str) -> list[dict[str, Any]]:
    """As Prometheus' HTTP service discovery reads it.

    Dead instances are in it until they return or are forgotten: nobody is to miss that they are down. `own_address`:
    where the monitor was reached; it speaks for itself unless it was told of monitors.
    """
    known = list(told)
    if not any(each.service == "monitor" for each in known):
        known.append(ScrapeTarget(service="monitor", process="monitor", url=f"http://{own_address}"))
    return [*_of_told(known), *_of_instances(records)]


def _of_told(known: Iterable[ScrapeTarget]) -> Iterator[dict[str, Any]]:
    for each in known:
        yield _group(each.url, {SERVICE: each.service, PROCESS: each.process})


def _of_instances(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    for record in sorted(records, key=lambda each: each.instance_id):
        name = record.instance_id
        yield _group(record.info.http, {SERVICE: "worker", PROCESS: name, INSTANCE: name})


def _group(url: str, labels: dict[str, str]) -> dict[str, Any]:
    parts = urlsplit(url)
    scheme = {"__scheme__": parts.scheme} if parts.scheme != "http" else {}
    return {"targets": [parts.netloc], "labels": {**labels, **scheme}}
