"""An accepted proposal is carried out by the monitor: flips with their drains, then the routes."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from services.planner.proposal import Proposal, Step
from shared.domain.instance import Role
from shared.domain.route import PolicySpec
from shared.errors import NotFound, OutcomeUnknown, PolyphaseError, Unavailable
from shared.plan.review import Flip
from shared.policy.plan_routes import PlanRoute
from shared.wire.clients.monitor import SLACK_S, MonitorClient

PLACEMENT = "plan"
MOST_WHY = 2_000  # characters of it that the monitor is given
ASK_S = 0.25  # between two questions how a flip ended whose answer was lost


async def carry_out(
    proposal: Proposal,
    ready: Mapping[Role, int],
    monitor: MonitorClient,
    drain_timeout_s: float,
    note: Callable[[Step], None],
) -> str:
    """Flip, and route when all flips have succeeded; what went wrong, in words, or nothing.

    ready: instances by role at the moment. Never raises an error of the monitor: each is a step that failed; what is
    under way then ends, and nothing more is begun.
    """
    flips = _Flips(proposal, ready, monitor, drain_timeout_s, note)
    failed = await flips.run()
    if failed:
        return "; ".join(failed)
    if proposal.changes_routes:
        call = monitor.set_policies({"placement": placement_of(proposal.routes)}, who=flips.who)
        return await _step("change the routes", call, note)
    return ""


def placement_of(routes: tuple[PlanRoute, ...]) -> PolicySpec:
    """Placement along these routes."""
    return PolicySpec(PLACEMENT, {"routes": [[one.prefill, one.decode, round(one.share, 4)] for one in routes]})


class _Flips:
    """The flips of one proposal.

    At most half of the instances of a role drain at once, so that the others serve, and nobody leaves a role as its
    last one while another is still to come to it. Where two are to change places, who computes prompts goes first:
    meanwhile the others compute their own.
    """

    def __init__(
        self,
        proposal: Proposal,
        ready: Mapping[Role, int],
        monitor: MonitorClient,
        drain_timeout_s: float,
        note: Callable[[Step], None],
    ) -> None:
        self.who = f"planner: proposal {proposal.proposal_id}, {proposal.who}"
        self._proposal = proposal
        self._ready = Counter(ready)
        self._most = {role: max(1, ready.get(role, 0) // 2) for role in Role}
        self._monitor = monitor
        self._drain_timeout_s = drain_timeout_s
        self._note = note
        self._waiting = sorted(proposal.flips, key=lambda one: ready.get(one.to_role, 0))
        self._running: dict[asyncio.Task[str], Flip] = {}

    async def run(self) -> list[str]:
        """Each in its turn; what went wrong, in words."""
        failed: list[str] = []
        async with asyncio.TaskGroup() as group:
            while self._running or (self._waiting and not failed):
                if not failed:
                    self._begin_all(group)
                if not self._running:
                    return [f"{self._waiting[0].instance_id} is the last that decodes"]
                done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    one, wrong = self._running.pop(task), task.result()
                    self._ready[one.from_role if wrong else one.to_role] += 1
                    failed += [wrong] if wrong else []
        return failed

    def _begin_all(self, group: asyncio.TaskGroup) -> None:
        for one in list(self._waiting):
            draining = sum(other.from_role is one.from_role for other in self._running.values())
            if self._ready[one.from_role] > 1 and draining < self._most[one.from_role]:
                self._begin(group, one, force=False)
        if not self._running and self._ready[Role.DECODE]:
            last = next((one for one in self._waiting if one.from_role is Role.PREFILL), None)
            if last is not None:
                self._begin(group, last, force=True)

    def _begin(self, group: asyncio.TaskGroup, one: Flip, *, force: bool) -> None:
        self._waiting.remove(one)
        self._ready[one.from_role] -= 1
        self._running[group.create_task(self._flip(one, force))] = one

    async def _flip(self, one: Flip, force: bool) -> str:
        what = f"flip {one.instance_id} to {one.to_role.value}"
        return await _step(what, self._answered(one, force), self._note)

    async def _answered(self, one: Flip, force: bool) -> dict[str, Any]:
        """How the flip went, even if the monitor was started again meanwhile. Raises the monitor's error."""
        try:
            return await self._monitor.flip(
                one.instance_id,
                force=force,
                drain_timeout_s=self._drain_timeout_s,
                who=self.who,
                why=self._proposal.why[:MOST_WHY],
                to=one.to_role,
            )
        except OutcomeUnknown as error:
            return await self._found_out(error)

    async def _found_out(self, lost: OutcomeUnknown) -> dict[str, Any]:
        until_s = time.monotonic() + self._drain_timeout_s + SLACK_S
        while time.monotonic() < until_s:
            await asyncio.sleep(ASK_S)
            try:
                told = await self._monitor.operation(lost.operation_id)
            except NotFound:
                raise lost from None
            except PolyphaseError:
                continue  # it is away: the deadline ends this
            if told["result"] == "succeeded":
                return told
            if told["result"] != "running":
                raise Unavailable(told["error"] or lost.message)
        raise lost


async def _step(what: str, call: Awaitable[dict[str, Any]], note: Callable[[Step], None]) -> str:
    try:
        answer = await call
    except PolyphaseError as error:
        note(Step(time.time(), what, False, error.message))
        return f"{what}: {error.message}"
    drain_s = answer.get("drain_s")
    note(Step(time.time(), what, True, f"drained in {drain_s:.2f} s" if drain_s is not None else ""))
    return ""
