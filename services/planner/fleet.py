"""The running cluster as the planner shows it: roles, routes, what is expected of them, what is measured, what-if."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

import msgspec

from services.planner.edge import WhatIf
from services.planner.watch import Watch
from shared.domain.instance import InstanceState, InstanceView
from shared.errors import InvalidRequest, PolyphaseError
from shared.plan.plan import routes_of
from shared.plan.running import Fleet, review, routes_by_id, scaled, surviving_routes
from shared.policy.papers.thunderserve import PlanRoute
from shared.policy.role_flip import load_share
from shared.wire.clients.monitor import MonitorClient

FRESH_S = 0.5


def describe(watch: Watch, slo: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`GET /fleet` without the decider's part. slo: the monitor's windows."""
    view = watch.view
    found: dict[str, Any] = {
        "time_s": time.time(),
        "trouble": watch.problem,
        "instances": [_instance(one, one.state.value) for one in (view.instances if view is not None else ())]
        + [_instance(one, "lost") for one in watch.lost],
        "placement": view.policies.placement.name if view is not None else "",
        "routes_in_force": bool(watch.in_force),
        "routes": [],
        "demand": msgspec.to_builtins(watch.demand),
        "expected": None,
        "measured": _measured(slo, watch),
    }
    try:
        fleet = watch.fleet()
    except PolyphaseError as error:
        found["trouble"] = found["trouble"] or error.message
        return found
    routes = surviving_routes(fleet.views, watch.in_force)
    shown = routes or routes_of(fleet.estimate())
    found["routes"] = [route_json(one) for one in routes_by_id(fleet.views, shown)]
    found["expected"] = asdict(fleet.expected(routes=routes))
    return found


def what_if(watch: Watch, change: WhatIf) -> dict[str, Any]:
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
    best = {"flips": [msgspec.to_builtins(one) for one in found.flips], "expected": asdict(found.then)}
    return {
        "now": asdict(fleet.expected(routes=routes)),
        "then": asdict(then.expected(routes=left)),
        "best": best if found.flips else None,
        "why": found.why,
    }


def route_json(route: PlanRoute) -> dict[str, Any]:
    """As JSON, with null where there is no prefill instance."""
    return {"prefill": route.prefill or None, "decode": route.decode, "share": route.share}


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


def _instance(view: InstanceView, state: str) -> dict[str, Any]:
    info = view.info
    return {
        "instance_id": info.instance_id,
        "role": view.role.value,
        "state": state,
        "accelerator": info.accelerator,
        "tensor_parallel": info.tensor_parallel,
        "pipeline_parallel": info.pipeline_parallel,
        "load": load_share(view) if state != "lost" else 0.0,
    }


def _measured(slo: Sequence[Mapping[str, Any]], watch: Watch) -> dict[str, Any] | None:
    """In the shortest window: attainment over all classes, latencies of the class with the most requests."""
    shortest = min((one["window_s"] for one in slo), default=0.0)
    windows = [one for one in slo if one["window_s"] == shortest and one["requests"]]
    requests = sum(one["requests"] for one in windows)
    if not requests:
        return None
    most = max(windows, key=lambda one: one["requests"])
    return {
        "requests": requests,
        "window_s": shortest,
        "attainment": sum(one["requests"] * (one["attainment"] or 0.0) for one in windows) / requests,
        "ttft_p50_s": most["ttft_s"]["p50"],
        "tpot_p50_s": most["tpot_s"]["p50"],
        "rate": watch.demand.rate if watch.demand is not None else requests / shortest,
    }


class FleetPages:
    """`GET /fleet`, worked out once for all clients that ask within `FRESH_S`."""

    def __init__(self, monitor: MonitorClient, watch: Watch) -> None:
        self._monitor = monitor
        self._watch = watch
        self._describing = asyncio.Lock()
        self._page: dict[str, Any] = {}
        self._page_mono = -inf

    async def newest(self) -> dict[str, Any]:
        async with self._describing:
            if time.monotonic() - self._page_mono >= FRESH_S:
                try:
                    slo = await self._monitor.slo()
                except PolyphaseError:
                    slo = []  # the page's `trouble` says that the monitor is away
                self._page = await asyncio.to_thread(describe, self._watch, slo)
                self._page_mono = time.monotonic()
            return self._page
