"""An accepted proposal is carried out by the monitor: flips with their drains, then the routes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from services.planner.proposal import Proposal, Step
from shared.domain.instance import Role
from shared.domain.route import PolicySpec
from shared.errors import PolyphaseError
from shared.plan.review import Flip
from shared.policy.plan_routes import PlanRoute
from shared.wire.clients.monitor import MonitorClient

PLACEMENT = "plan"


async def carry_out(
    proposal: Proposal,
    ready: Mapping[Role, int],
    monitor: MonitorClient,
    drain_timeout_s: float,
    note: Callable[[Step], None],
) -> str:
    """Flip, and route when all flips have succeeded; what went wrong, in words, or nothing.

    ready: instances by role at the moment. At most half of those of a role drain at once, so that the others serve.
    Never raises an error of the monitor: each is a step that failed, and later steps are left.
    """
    who = f"planner: proposal {proposal.proposal_id}, {proposal.who}"
    turns = {role: asyncio.Semaphore(max(1, ready.get(role, 0) // 2)) for role in Role}

    async def flip(one: Flip) -> str:
        async with turns[one.from_role]:
            what = f"flip {one.instance_id} to {one.to_role.value}"
            call = monitor.flip(one.instance_id, drain_timeout_s=drain_timeout_s, who=who, why=proposal.why)
            return await _step(what, call, note)

    async with asyncio.TaskGroup() as group:
        flips = [group.create_task(flip(one)) for one in _in_order(proposal.flips, ready)]
    failed = [task.result() for task in flips if task.result()]
    if failed:
        return "; ".join(failed)
    if proposal.changes_routes:
        call = monitor.set_policies({"placement": placement_of(proposal.routes)}, who=who)
        return await _step("change the routes", call, note)
    return ""


def placement_of(routes: tuple[PlanRoute, ...]) -> PolicySpec:
    """Placement along these routes."""
    return PolicySpec(PLACEMENT, {"routes": [[one.prefill, one.decode, round(one.share, 4)] for one in routes]})


def _in_order(flips: tuple[Flip, ...], ready: Mapping[Role, int]) -> list[Flip]:
    """Those first whose new role has fewer instances."""
    return sorted(flips, key=lambda one: ready.get(one.to_role, 0))


async def _step(what: str, call: Awaitable[dict[str, Any]], note: Callable[[Step], None]) -> str:
    try:
        answer = await call
    except PolyphaseError as error:
        note(Step(time.time(), what, False, error.message))
        return f"{what}: {error.message}"
    drain_s = answer.get("drain_s")
    note(Step(time.time(), what, True, f"drained in {drain_s:.2f} s" if drain_s is not None else ""))
    return ""
