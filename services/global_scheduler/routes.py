"""The scheduler's HTTP API: the status table of requests, and the policies that it follows."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy.ext.asyncio import AsyncEngine

from services.global_scheduler.placer import Placer
from services.global_scheduler.reports import Reports, row_of
from shared.domain.job import Phase, job_name
from shared.domain.policies import ROUTING
from shared.errors import NotFound
from shared.runtime.http import json_response
from shared.store.reading import Order, RequestSearch, read_request, read_requests, read_timeline, search_requests
from shared.store.write_behind import WriteBehind
from shared.wire.api.scheduler import FollowedPolicies, RequestPage, StoredRequest


@dataclass(frozen=True, slots=True)
class State:
    """What the routes work on; built in the lifespan."""

    placer: Placer
    reports: Reports
    engine: AsyncEngine
    store: WriteBehind


async def _state(request: Request) -> State:
    state: State = request.app.state.scheduler
    return state


Scheduler = Annotated[State, Depends(_state)]
Text = Annotated[str, Query(max_length=256)]
Moment = Annotated[float | None, Query(ge=0, allow_inf_nan=False)]
router = APIRouter()


@router.get("/requests")
async def list_requests(
    scheduler: Scheduler,
    phase: Phase | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    source: Annotated[str, Query(pattern="^(memory|database)$")] = "memory",
) -> Response:
    """The newest jobs: this scheduler's from memory, or all schedulers' from the database."""
    if source == "database":
        return json_response(await read_requests(scheduler.engine, StoredRequest, phase=phase, limit=limit))
    return json_response(scheduler.reports.newest(phase, limit))


@router.get("/requests/search")
async def search(
    scheduler: Scheduler,
    job: Text = "",
    caller: Text = "",
    slo: Text = "",
    instance: Text = "",
    outcome: Text = "",
    phase: Phase | None = None,
    missed: bool | None = None,
    since: Moment = None,
    until: Moment = None,
    order: Order = Order.NEWEST,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
    offset: Annotated[int, Query(ge=0, le=100_000)] = 0,
) -> Response:
    """Jobs of all schedulers, from the database. job: the beginning of its id, in which a client's name may be as it
    was sent; instance: of either phase; missed: whether it missed a target; since, until: unix seconds of the arrival.
    """
    named = phase.value if phase else ""
    search = RequestSearch(
        job=job_name(job),
        caller=caller,
        slo=slo,
        instance=instance,
        outcome=outcome,
        phase=named,
        missed=missed,
        since_s=since,
        until_s=until,
        order=order,
        limit=limit,
        offset=offset,
    )
    return json_response(RequestPage(*await search_requests(scheduler.engine, StoredRequest, search)))


@router.get("/requests/{job_id}")
async def get_request(scheduler: Scheduler, job_id: str) -> Response:
    """One job's row."""
    report = scheduler.reports.get(job_id)
    row = row_of(report) if report is not None else await read_request(scheduler.engine, StoredRequest, job_id)
    if row is None:
        raise NotFound(f"no job {job_id!r}")
    return json_response(row)


@router.get("/requests/{job_id}/timeline")
async def get_timeline(scheduler: Scheduler, job_id: str) -> Response:
    """The RequestTimeline of a job, as far as it is known."""
    report = scheduler.reports.get(job_id)
    known = await read_timeline(scheduler.engine, job_id) if report is None else report.timeline_json
    if known:
        return Response(known, media_type="application/json")
    exists = report is not None or await read_request(scheduler.engine, StoredRequest, job_id) is not None
    raise NotFound(f"no timeline of job {job_id!r}" + (" yet" if exists else ""))


@router.get("/predictions")
async def get_predictions(scheduler: Scheduler) -> Response:
    """How true the estimates of this scheduler's placements were lately, by instance and by kind of request."""
    return json_response(scheduler.placer.predictions)


@router.get("/policies")
async def get_policies(scheduler: Scheduler) -> Response:
    """The policies that this scheduler follows; the monitor changes them."""
    policies, trouble = scheduler.placer.followed
    followed = {kind: policies.spec(kind) for kind in ROUTING}
    return json_response(FollowedPolicies(policies.revision, trouble, **followed))
