"""The monitor's HTTP API."""

import time
from collections import Counter
from math import inf
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request

from services.cluster_monitor.edge import DrainIn, FlipIn, LeaveIn, NewsIn, OperationIn, Registration
from services.cluster_monitor.events import EventKind
from services.cluster_monitor.state import State
from services.cluster_monitor.turns import Turns
from shared.domain.instance import Role
from shared.errors import PolyphaseError
from shared.runtime.actor import actor
from shared.runtime.settings import Name


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
