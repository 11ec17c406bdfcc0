"""The running cluster as the planner shows it: roles, routes, what is expected of them, what is measured, what-if."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from math import inf

import msgspec
from msgspec.structs import replace

from services.planner.edge import WhatIf
from services.planner.proposals import Proposal
from services.planner.watch import Watch
from shared.domain.instance import InstanceState, InstanceView
from shared.domain.slo import SloReport
from shared.errors import InvalidRequest, PolyphaseError
from shared.plan.plan import routes_of
from shared.plan.running import Expected, Fleet, Flip, review, routes_by_id, scaled, surviving_routes
from shared.policy.papers.thunderserve import PlanRoute
from shared.policy.role_flip import load_share
from shared.wire.api import planner as api
from shared.wire.clients.monitor import MonitorClient

FRESH_S = 0.5


def describe(watch: Watch, slo: Sequence[SloReport]) -> api.Fleet:
    """`GET /fleet` without the decider's part. slo: the monitor's windows."""
    view = watch.view
    instances = [_instance(each, each.state.value) for each in (view.instances if view is not None else ())]
    instances += [_instance(each, "lost") for each in watch.lost]
    found = api.Fleet(
        time_s=time.time(),
        trouble=watch.problem,
        instances=instances,
        placement=view.policies.placement.name if view is not None else "",
        routes_in_force=bool(watch.in_force),
        routes=[],
        demand=watch.demand,
        expected=None,
        measured=_measured(slo, watch),
    )
    try:
        fleet = watch.fleet()
    except PolyphaseError as error:
        return replace(found, trouble=found.trouble or error.message)
    routes = surviving_routes(fleet.views, watch.in_force)
    shown = routes_by_id(fleet.views, routes or routes_of(fleet.estimate()))
    return replace(found, routes=route_shares(shown), expected=figures(fleet.expected(routes=routes)))


def what_if(watch: Watch, change: WhatIf) -> api.WhatIf:
    """The cluster with other instances or another demand. Raises InvalidRequest, Unavailable."""
    if ready := watch.ready():
        _with_changes(ready, change)  # a wrong name is refused, even while the demand is not known
    fleet = watch.fleet()
    routes = surviving_routes(fleet.views, watch.in_force)
    demand = scaled(fleet.demand, change.rate_factor, change.prompt_factor, change.output_factor)
    views = _with_changes(fleet.views, change)
    then = Fleet(views, demand, fleet.library, fleet.local, fleet.codec, fleet.target)
    left = surviving_routes(views, watch.in_force)
    found = review(then, watch.in_force, watch.fixed(then))
    return api.WhatIf(
        now=figures(fleet.expected(routes=routes)),
        then=figures(then.expected(routes=left)),
        best=api.BestFlips(role_changes(found.flips), figures(found.then)) if found.flips else None,
        why=found.why,
    )


def proposal_answer(proposal: Proposal) -> api.Proposal:
    """A proposal as HTTP answers have it."""
    own = {
        "flips": role_changes(proposal.flips),
        "routes": route_shares(proposal.routes),
        "now": figures(proposal.now),
        "then": figures(proposal.then),
    }
    return api.Proposal(**(msgspec.structs.asdict(proposal) | own))


def figures(expected: Expected) -> api.Figures:
    return api.Figures(expected.rate, expected.goodput, expected.attainment, expected.ttft_s, expected.tpot_s)


def role_changes(flips: Iterable[Flip]) -> list[api.RoleChange]:
    return [api.RoleChange(flip.instance_id, flip.from_role, flip.to_role) for flip in flips]


def route_shares(routes: Iterable[PlanRoute]) -> list[api.RouteShare]:
    return [api.RouteShare(route.prefill or None, route.decode, route.share) for route in routes]


def _with_changes(views: tuple[InstanceView, ...], change: WhatIf) -> tuple[InstanceView, ...]:
    known = {one.instance_id: one for one in views}
    named = [("lost", name) for name in change.lost] + [("added", more.like) for more in change.added]
    for field, name in named:
        if name not in known:
            raise InvalidRequest(f"{field}: no instance {name!r} is ready; there are {', '.join(sorted(known))}")
    found = [one for one in views if one.instance_id not in set(change.lost)]
    for position, more in enumerate(change.added):
        like = known[more.like]
        for number in range(more.count):
            info = msgspec.structs.replace(like.info, instance_id=f"new-{position}-{number}")
            found.append(InstanceView(info, more.role or like.role, InstanceState.READY))
    if not found:
        raise InvalidRequest("lost: no instance would be left")
    return tuple(found)


def _instance(view: InstanceView, state: str) -> api.FleetInstance:
    info = view.info
    return api.FleetInstance(
        instance_id=info.instance_id,
        role=view.role,
        state=state,
        accelerator=info.accelerator,
        tensor_parallel=info.tensor_parallel,
        pipeline_parallel=info.pipeline_parallel,
        load=load_share(view) if state != "lost" else 0.0,
    )


def _measured(slo: Sequence[SloReport], watch: Watch) -> api.Measured | None:
    """In the shortest window: attainment over all classes, latencies of the class with the most requests."""
    shortest_s = min((report.window_s for report in slo), default=0.0)
    windows = [report for report in slo if report.window_s == shortest_s and report.requests]
    requests = sum(report.requests for report in windows)
    if not requests:
        return None
    busiest = max(windows, key=lambda report: report.requests)
    return api.Measured(
        requests=requests,
        window_s=shortest_s,
        attainment=sum(report.requests * (report.attainment or 0.0) for report in windows) / requests,
        ttft_s=busiest.ttft_s["p50"],
        tpot_s=busiest.tpot_s["p50"],
        rate=watch.demand.rate if watch.demand is not None else requests / shortest_s,
    )


class FleetPages:
    """`GET /fleet`, computed once for all clients whose requests come within `FRESH_S`."""

    def __init__(self, monitor: MonitorClient, watch: Watch) -> None:
        self._monitor = monitor
        self._watch = watch
        self._describing = asyncio.Lock()
        self._page: api.Fleet | None = None
        self._page_mono = -inf

    async def newest(self) -> api.Fleet:
        async with self._describing:
            if self._page is None or time.monotonic() - self._page_mono >= FRESH_S:
                try:
                    slo = await self._monitor.slo()
                except PolyphaseError:
                    slo = []  # the page's `trouble` says that the monitor does not answer
                self._page = await asyncio.to_thread(describe, self._watch, slo)
                self._page_mono = time.monotonic()
            return self._page
