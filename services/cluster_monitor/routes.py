"""The monitor's HTTP API. Only the acting monitor answers; a standby refuses and names the one that acts."""

import time
from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response

from services.cluster_monitor import history
from services.cluster_monitor.edge import (
    DrainIn,
    EventIn,
    FlipIn,
    FollowIn,
    LeaveIn,
    LoadIn,
    MoveIn,
    NewsIn,
    OperationIn,
    PolicyIn,
    Registration,
    UnloadIn,
    ended_of,
)
from services.cluster_monitor.history import Grid
from services.cluster_monitor.registry import Record
from services.cluster_monitor.settings import ScrapeTarget
from services.cluster_monitor.state import Leadership, State
from shared.domain.instance import Role
from shared.domain.route import PolicySpec
from shared.errors import PolyphaseError, Unavailable
from shared.runtime.actor import actor
from shared.runtime.http import json_response
from shared.runtime.settings import Name
from shared.wire.api import DemandProfile, EventKind, OperationKind
from shared.wire.api.monitor import ClusterSummary, NewsAccepted, Registered
from shared.wire.api.worker import InstanceDetails, LogLines, MonitoredDetails
from shared.wire.clients.http import Answer, JsonClient
from shared.wire.messages import AdaptersRequest, LoadRequest, UnloadRequest

INSTANCE_TIMEOUT_S = 2.0  # for an instance to answer questions about itself
MARKS = (  # kinds of events that are drawn across the history's charts
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
MAX_MARKS = 500
SUMMED_LOADS = ("queued_prefill", "queued_prefill_tokens", "running", "waiting", "decoding", "inflight")
Minutes = Annotated[int, Query(ge=5, le=1_440)]
Points = Annotated[int, Query(ge=2, le=720)]
Limit = Annotated[int, Query(ge=1, le=1_000)]


async def _state(request: Request) -> State:
    leadership: Leadership = request.app.state.leadership
    return leadership.acting()


Monitor = Annotated[State, Depends(_state)]
Who = Annotated[str, Depends(actor)]
router = APIRouter()


# Instances, and operations on them.


@router.post("/instances")
async def register(monitor: Monitor, body: Registration) -> Response:
    """Join the cluster; 409 with the reason when the instance does not fit."""
    try:
        record = monitor.registry.register(body.to_info(), body.role)
    except PolyphaseError as error:
        monitor.events.refused(body.instance_id, body.role.value, error.message)
        raise
    monitor.memory.drop(record.instance_id)
    return json_response(Registered(record.instance_id, record.state))


@router.get("/instances")
async def list_instances(monitor: Monitor) -> Response:
    """All instances; dead ones until they return or are forgotten."""
    records = sorted(monitor.registry.all(), key=lambda record: record.instance_id)
    return json_response([record.row() for record in records])


@router.get("/instances/{instance_id}")
async def get_instance(monitor: Monitor, instance_id: str) -> Response:
    """One instance."""
    return json_response(monitor.registry.get(instance_id).row())


@router.delete("/instances/{instance_id}")
async def forget(monitor: Monitor, instance_id: str, who: Who) -> dict[str, str]:
    """Stop counting a dead instance."""
    monitor.registry.forget(instance_id, f"by {who}")
    return {"forgotten": instance_id}


@router.post("/instances/{instance_id}/leave")
async def leave(monitor: Monitor, instance_id: str, body: LeaveIn) -> dict[str, str]:
    """An instance reports that it stops, so that it does not count as dead."""
    monitor.registry.leave(instance_id, body.generation)
    return {"left": instance_id}


@router.post("/instances/{instance_id}/drain")
async def drain(monitor: Monitor, instance_id: str, who: Who, body: DrainIn | None = None) -> Response:
    """Give the instance no new work; answers when it has none left."""
    request = (body or DrainIn()).to_request(OperationKind.DRAIN, instance_id, who)
    return json_response(await monitor.operations.run(request))


@router.post("/instances/{instance_id}/resume")
async def resume(monitor: Monitor, instance_id: str, who: Who, body: OperationIn | None = None) -> Response:
    """Give the instance work again."""
    request = (body or OperationIn()).to_request(OperationKind.RESUME, instance_id, who)
    return json_response(await monitor.operations.run(request))


@router.post("/instances/{instance_id}/flip")
async def flip(monitor: Monitor, instance_id: str, who: Who, body: FlipIn | None = None) -> Response:
    """Change the instance's role; answers when it works in the new one, with drain and flip times apart."""
    request = (body or FlipIn()).to_request(OperationKind.FLIP, instance_id, who)
    return json_response(await monitor.controller.run(request))


@router.post("/requests/{job_id}/move")
async def move(
    monitor: Monitor, job_id: Annotated[str, Path(max_length=256)], who: Who, body: MoveIn | None = None
) -> Response:
    """Let a request that decodes go on at another instance; answers when the instance on which it decodes has told its
    gateway, which then moves it.
    """
    return json_response(await monitor.operations.run((body or MoveIn()).to_request(job_id, who)))


@router.get("/operations/{operation_id}")
async def operation(monitor: Monitor, operation_id: str) -> Response:
    """How an operation stands: running, succeeded, failed, refused, expired, or unknown after the monitor's own end."""
    return json_response(monitor.operations.describe(operation_id))


@router.get("/flips")
async def flips(monitor: Monitor, limit: Limit = 100) -> Response:
    """The log of flips, drains, resumes and moves, newest first."""
    return json_response(monitor.operation_log.newest(limit))


@router.get("/instances/{instance_id}/details")
async def details(monitor: Monitor, instance_id: str) -> Response:
    """What the instance reports about itself, and what the monitor knows; 503 or 504 where it does not answer."""
    answer = await _query(monitor, instance_id, "/details", InstanceDetails)
    record = monitor.registry.get(instance_id)
    restarts = monitor.events.newest(1_000, kinds=(EventKind.RESTARTED,), instance_id=instance_id)
    reported = msgspec.structs.asdict(answer)
    return json_response(MonitoredDetails(**reported, known=record.row(), restarts=len(restarts)))


@router.get("/instances/{instance_id}/log")
async def log_tail(monitor: Monitor, instance_id: str, lines: Annotated[int, Query(ge=1, le=2_000)] = 200) -> Response:
    """The last lines of the instance's log, oldest first."""
    return json_response(await _query(monitor, instance_id, "/log", LogLines, lines=lines))


async def _query(monitor: State, instance_id: str, path: str, answer: type[Answer], **params: int) -> Answer:
    record = monitor.registry.get(instance_id)
    if not record.alive:
        raise Unavailable(f"{instance_id} is dead ({record.death}) and cannot answer")
    async with JsonClient(record.info.http) as client:
        return await client.get(path, answer, timeout_s=INSTANCE_TIMEOUT_S, **params)


# The cluster as a whole.


@router.get("/cluster")
async def cluster(monitor: Monitor) -> Response:
    """A summary for dashboards."""
    records = list(monitor.registry.all())
    alive = [record for record in records if record.alive]
    states = {role.value: Counter(r.state.value for r in records if r.role is role) for role in Role}
    summary = ClusterSummary(
        time_s=time.time(),
        sequence=monitor.broadcaster.sequence,
        model=alive[0].info.model if alive else "",
        compatibility=alive[0].info.compatibility if alive else None,
        instances=dict(states),
        known={role: counts.total() for role, counts in states.items()},
        totals={name: sum(getattr(record.load, name) for record in alive) for name in SUMMED_LOADS},
        operations={record.instance_id: record.operation for record in records if record.operation},
        slo=monitor.slo.reports(),
    )
    return json_response(summary)


@router.get("/verdict")
async def verdict(monitor: Monitor) -> Response:
    """The health of the cluster: a Verdict of `shared.domain.verdict`, over the shortest SLO window."""
    return json_response(monitor.judge.verdict(monitor.policies.policies))


@router.get("/slo")
async def slo(monitor: Monitor) -> Response:
    """Attainment and percentiles by class and window."""
    return json_response(monitor.slo.reports())


@router.get("/history")
async def get_history(monitor: Monitor, minutes: Minutes = 60, points: Points = 120) -> Response:
    """Rates, latencies, attainment, load and where the time went, in columns; and the events of that time."""
    grid = Grid.up_to(time.time(), minutes, points)
    events = monitor.events.newest(MAX_MARKS, grid.from_s, MARKS)
    marks = history.marks_of(grid, events, monitor.operation_log.newest_first(), MAX_MARKS)
    return Response(await history.history(monitor.engine, grid, marks), media_type="application/json")


@router.get("/history/instances")
async def history_of_instances(
    monitor: Monitor, minutes: Minutes = 60, points: Points = 120, instance: Name | None = None
) -> Response:
    """Role, state and load of each instance in columns; null where nothing is known."""
    grid = Grid.up_to(time.time(), minutes, points)
    page = await history.instances_over_time(monitor.engine, grid, instance or "")
    return Response(page, media_type="application/json")


@router.get("/events")
async def events(
    monitor: Monitor,
    limit: Limit = 100,
    since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0,
    kind: Annotated[list[EventKind] | None, Query()] = None,
    instance: Name | None = None,
    before: Annotated[float | None, Query(ge=0, allow_inf_nan=False)] = None,
) -> Response:
    """The cluster's log, newest first: later than `since` and before `before` (unix seconds), of some kinds or of one
    instance only if any is named.
    """
    return json_response(
        monitor.events.newest(limit, since, kind or (), instance or "", inf if before is None else before)
    )


@router.post("/events")
async def report_event(monitor: Monitor, body: EventIn) -> dict[str, bool]:
    """The planner reports what became of a plan; answers whether this is new."""
    return {"new": monitor.events.report(body.kind, body.text, body.subject, body.event_id)}


# Demand, and the schedulers that report it.


@router.post("/schedulers/{scheduler_id}/news")
async def scheduler_news(monitor: Monitor, scheduler_id: Name, body: NewsIn) -> Response:
    """A scheduler reports how requests ended (each job counts once), the demand of its clients, second by second, and
    which policies it follows. Answers how many outcomes and seconds were new.
    """
    monitor.followers.update(scheduler_id, body.revision, body.trouble)
    monitor.judge.peers.update(scheduler_id, body.gateways, body.left, leaving=body.leaving)
    for outcome in body.outcomes:
        if outcome.losses:
            monitor.events.request_refused(outcome.job_id, outcome.ended_s, outcome.losses)
    outcomes = monitor.slo.take((outcome.job_id, ended_of(outcome)) for outcome in body.outcomes)
    return json_response(NewsAccepted(outcomes, monitor.demand.take(body.demand)))


@router.get("/demand")
async def demand(monitor: Monitor) -> Response:
    """Demand over all schedulers, since the last shift and at most for the last minute; null while it is not known.
    Also the last five minutes second by second, the shifts in them, and the roles that would serve this demand best.
    """
    return json_response(monitor.demand.describe(monitor.controller.wanted()))


@router.get("/demand/profile")
async def demand_profile(monitor: Monitor, least_requests: Annotated[int, Query(ge=1, le=100_000)] = 20) -> Response:
    """Demand, as soon as so many requests are known since the last shift, else null; when that shift was noticed; and
    what operators' flips forbid.
    """
    facts, shift = monitor.controller.facts(), monitor.demand.last_shift
    return json_response(DemandProfile(monitor.demand.profile(least_requests), shift, facts.kept, facts.barred))


# Policies.


@router.get("/policies")
async def get_policies(monitor: Monitor) -> Response:
    """The policies in force, what the cluster file says, who changed what, the choices, and who follows."""
    return json_response(monitor.policies.describe(monitor.followers))


@router.put("/policies")
async def put_policies(monitor: Monitor, who: Who, change: dict[str, PolicyIn | None]) -> Response:
    """Change the policies of the kinds that are named; null: back to the cluster file's."""
    specs = {kind: PolicySpec(policy.name, policy.parameters) if policy else None for kind, policy in change.items()}
    await monitor.policies.change(specs, who)
    return await get_policies(monitor)


# LoRA adapters that are loaded while the cluster serves.


@router.get("/adapters")
async def get_adapters(monitor: Monitor) -> Response:
    """The adapters that were loaded at run time, and which instances and gateways serve them."""
    return json_response(monitor.adapters.describe())


@router.post("/adapters/load")
async def load_adapter(monitor: Monitor, who: Who, body: LoadIn) -> Response:
    """Load an adapter; answers when all ready instances and all gateways have it, with all loaded adapters."""
    return json_response(await monitor.adapters.load(LoadRequest(body.name, body.path, body.in_place, who)))


@router.post("/adapters/unload")
async def unload_adapter(monitor: Monitor, who: Who, body: UnloadIn) -> Response:
    """Accept no more requests for an adapter; answers when no gateway does, with the adapters that stay."""
    return json_response(await monitor.adapters.unload(UnloadRequest(body.name, who)))


@router.post("/adapters/follow")
async def follow_adapters(monitor: Monitor, body: FollowIn) -> Response:
    """A gateway reports which adapters it serves; answers when others are in force, or after `wait_s`."""
    request = AdaptersRequest(body.gateway_id, body.revision, tuple(body.in_use), body.wait_s)
    return json_response(await monitor.adapters.follow(request))


# What Prometheus is to scrape.


def targets_router(configured: Iterable[ScrapeTarget]) -> APIRouter:
    """The route for Prometheus' `http_sd_configs`. configured: processes that do not register here."""
    router = APIRouter()

    @router.get("/sd/prometheus")
    async def prometheus(monitor: Monitor, request: Request) -> Response:
        """Every process of the cluster that has metrics, with its service, its name and its instance id.

        A standby answers 503, and Prometheus keeps the targets that it was given last.
        """
        return json_response(targets(configured, monitor.registry.all(), request.url.netloc))

    return router


class TargetGroup(msgspec.Struct, frozen=True):
    """One entry of Prometheus' HTTP service discovery: addresses with the labels of their series."""

    targets: list[str]
    labels: dict[str, str]


def targets(configured: Iterable[ScrapeTarget], records: Iterable[Record], own_address: str) -> list[TargetGroup]:
    """As Prometheus' HTTP service discovery reads it.

    Dead instances are included until they return or are forgotten, so that an alert can see that they are down. The
    monitor at `own_address` is included unless monitors are configured.
    """
    known = list(configured)
    if not any(each.service == "monitor" for each in known):
        known.append(ScrapeTarget(service="monitor", process="monitor", url=f"http://{own_address}"))
    found = [_target(each.url, {"service": each.service, "process": each.process}) for each in known]
    for record in sorted(records, key=lambda each: each.instance_id):
        name = record.instance_id
        found.append(_target(record.info.http, {"service": "worker", "process": name, "instance_id": name}))
    return found


def _target(url: str, labels: dict[str, str]) -> TargetGroup:
    parts = urlsplit(url)
    scheme = {"__scheme__": parts.scheme} if parts.scheme != "http" else {}
    return TargetGroup([parts.netloc], {**labels, **scheme})
