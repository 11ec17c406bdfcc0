"""The planner's proposer: watches the running cluster, reviews its roles, and proposes better ones.

`Presence` derives from the monitor's broadcasts which instances are at work, lost or back. `Watch` reviews the roles
(`shared.plan.running.review`) when instances are lost or return, when the demand shifts, and from time to time.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from services.planner.proposals import Cause, Proposal, Proposals, in_words
from services.planner.settings import PlannerSettings
from shared.cost.library import Library
from shared.domain.demand import Demand
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.errors import PolyphaseError, Unavailable
from shared.plan.running import Fleet, review
from shared.policy.papers.thunderserve import PlanRoute, parse_routes
from shared.policy.role_flip import FlipContext
from shared.runtime.logs import get_log
from shared.wire.clients.monitor import MonitorClient

log = get_log(__name__)
SILENT_S = 0.4  # an unresponsive instance counts as lost after so long: the monitor itself may have stalled
LOST_KEPT = 64
NO_VIEW = "the monitor has broadcast nothing yet"
NO_DEMAND = "too few requests for a profile of the demand"
ALERT_REVIEW_S = 2.0  # between two reviews after an event
SOLID = 50  # requests that a profile must rest on, unless demand has shifted: the old profile is certainly wrong then
SETTLED_S, RESTLESS_S = 0.3, 5.0  # a return is reviewed once nothing changes for so long, or after so long anyway
MEANWHILE = "the cluster changed while its roles were reviewed"
_AT_WORK = (InstanceState.READY, InstanceState.DRAINING)
_MAX_NAMES, _MAX_TEXT = 8, 400  # instances that a reason names, and characters of a reason that waits


class Presence:
    """loss_s: an instance must be gone for so long before it counts as lost. Returned times are unix seconds."""

    def __init__(self, loss_s: float) -> None:
        self._loss_s = loss_s
        self._at_work: dict[str, InstanceView] | None = None  # with those that are away, as they were last seen
        self._away: dict[str, float] = {}  # since when; instances that do not count as lost yet
        self._there: frozenset[str] = frozenset()  # instances that the monitor counts, at work or not
        self._states: tuple[tuple[str, object, object], ...] = ()
        self.changed_mono = time.monotonic()  # when any state or role changed last
        self.lost: tuple[InstanceView, ...] = ()  # as they were last seen, the newest last

    def update(self, view: ClusterView) -> list[str]:
        """Apply a broadcast; returns the instances that have come to work since the one before."""
        states = tuple((one.instance_id, one.state, one.role) for one in view.instances)
        if states != self._states:
            self._states, self.changed_mono = states, time.monotonic()
        self._there = frozenset(one.instance_id for one in view.instances)
        here = {one.instance_id: one for one in view.instances if one.state in _AT_WORK}
        before, self._at_work = self._at_work, {**(self._at_work or {}), **here}
        for name in self._at_work.keys() - here.keys():
            self._away.setdefault(name, time.time())
        for name in self._away.keys() & here.keys():
            del self._away[name]
        self.lost = tuple(one for one in self.lost if one.instance_id not in here)
        if before is None:
            return []
        return sorted(
            name
            for name, one in here.items()
            if name not in before or before[name].info.generation != one.info.generation
        )

    def pop_lost(self) -> dict[str, float]:
        """Instances that count as lost from now on, and since when each is away. Each is returned once."""
        now_s, found = time.time(), {}
        for name, since_s in self._away.items():
            patience_s = max(self._loss_s, SILENT_S) if name in self._there else self._loss_s
            if now_s - since_s >= patience_s:
                found[name] = since_s
        for name in found:
            del self._away[name]
            assert self._at_work is not None
            last = self._at_work.pop(name)
            if last.state is not InstanceState.DRAINING:  # a draining instance has left in good order
                self.lost = (*self.lost, last)[-LOST_KEPT:]
        return found


@dataclass(frozen=True, slots=True)
class ReviewReason:
    """Why the roles are reviewed, and when the cause was noticed (unix seconds)."""

    cause: Cause
    noticed_s: float
    text: str = ""


class Watch:
    """Calls `on_proposal` with each new proposal."""

    def __init__(
        self,
        settings: PlannerSettings,
        monitor: MonitorClient,
        proposals: Proposals,
        library: Library,
        on_proposal: Callable[[Proposal], None],
    ) -> None:
        self._settings = settings
        self._monitor = monitor
        self._proposals = proposals
        self._library = library
        self._on_proposal = on_proposal
        self._wake = asyncio.Event()
        self._pending: ReviewReason | None = None
        self._reviewing = asyncio.Lock()
        self._presence = Presence(settings.loss_s)
        self._shift_s = time.time()
        self._reviewed_mono = time.monotonic()
        self._flip_context = FlipContext()  # what operators' flips forbid
        self._no_profile = self._no_review = ""  # why the monitor gave no demand profile; why there was no review
        self.view: ClusterView | None = None  # of the monitor's latest broadcast
        self.demand: Demand | None = None
        self.reviews = 0  # so far
        self._alert_mono = -inf  # when a review was requested last

    def update(self, view: ClusterView) -> None:
        """Apply a broadcast of the monitor."""
        self.view = view
        returned = self._presence.update(view)
        self._notice_losses()
        if returned:
            self._request_review(Cause.RETURN, f"{_listed(returned)} can work")

    @property
    def lost(self) -> tuple[InstanceView, ...]:
        """Instances that were at work and are gone, as they were last seen."""
        return self._presence.lost

    @property
    def problem(self) -> str:
        """Why nothing can be proposed at the moment; empty when proposals are possible."""
        unknown = NO_VIEW if self.view is None else NO_DEMAND if self.demand is None else ""
        return self._no_profile or unknown or self._no_review

    async def run(self) -> None:
        """Step when there is a reason to review the roles, and every `step_s`."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.step_s):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self.step()
            except Exception as defect:  # ends the process; the open proposal keeps the cause
                self._proposals.withdraw(in_words(defect))
                raise

    async def step(self) -> None:
        """Fetch the demand, and review the roles if there is a reason or a review is due."""
        self._notice_losses()
        await self._fetch_demand()
        reason = self._next_reason()
        if reason is None or self._proposals.applying is not None or self.view is None or self.demand is None:
            return  # the reason waits
        self._pending, self._no_review = None, ""
        try:
            await self.review(reason)
        except Unavailable as error:  # no instance is ready: the next one that returns is a reason
            self._no_review = error.message
            self._proposals.withdraw(error.message)
        except PolyphaseError as error:
            self._no_review = f"the roles cannot be reviewed: {error.message}"
            log.warning("no review", cause=reason.cause.value, error=error.message)

    async def review(self, reason: ReviewReason) -> tuple[Proposal | None, str]:
        """Review the roles now, one review at a time: a new proposal, or None, and why.

        Raises Unavailable while too little is known or no instance is ready, and what `reviewed` raises.
        """
        async with self._reviewing:
            fleet = self.fleet()
            began, self._reviewed_mono = time.time(), time.monotonic()
            flipped = self._proposals.flipped_lately if reason.cause in (Cause.REVIEW, Cause.RETURN) else frozenset()
            found = await asyncio.to_thread(review, fleet, self.in_force, [*self.fixed(fleet), *flipped])
            took_s = time.time() - began
            self.reviews += 1
            if self._proposals.applying is not None or _roles(fleet.views) != _roles(self.ready()):
                if reason.cause not in (Cause.REVIEW, Cause.ASKED):
                    self._pending = self._pending or reason
                return None, MEANWHILE
            if not found.changes:
                self._proposals.withdraw("the situation has changed: " + found.why)
                return None, found.why
            proposal = Proposal.from_finding(found, reason.cause, reason.text, reason.noticed_s, took_s)
            opened = self._proposals.make(proposal)
            if opened is None:
                return None, "it is proposed already, was refused not long ago, or has failed"
            self._on_proposal(opened)
            return opened, opened.why

    def fleet(self) -> Fleet:
        """The ready instances under the present demand. Raises Unavailable."""
        if self.view is None or self.demand is None:
            raise Unavailable(NO_VIEW if self.view is None else NO_DEMAND)
        ready = self.ready()
        if not ready:
            raise Unavailable("no instance is ready")
        routes = self.in_force
        local = any(not route.prefill for route in routes) if routes else self.demand.split_least < 1.0
        return Fleet(ready, self.demand, self._library, local, self._settings.codec, self._settings.target)

    @property
    def in_force(self) -> tuple[PlanRoute, ...]:
        """The routes of placement `plan`; none while another placement is in force."""
        placement = self.view.policies.placement if self.view is not None else None
        if placement is None or placement.name != "plan":
            return ()
        return parse_routes("routes", placement.parameters.get("routes", []))

    def fixed(self, fleet: Fleet) -> list[str]:
        """Instances whose roles people's flips fix for a while, and data-parallel ranks, which flip only together."""
        free = self._flip_context.may_flip
        return [one.instance_id for one in fleet.views if one.info.rank_of or not free(one)]

    def ready(self) -> tuple[InstanceView, ...]:
        """The ready instances; none before the first broadcast."""
        views = self.view.instances if self.view is not None else ()
        return tuple(one for one in views if one.state is InstanceState.READY)

    def _next_reason(self) -> ReviewReason | None:
        """The reason for a review now: what has happened, or that a review is due."""
        changed_mono = self._presence.changed_mono
        if (reason := self._pending) is not None:
            restless = reason.cause is Cause.RETURN and time.monotonic() - changed_mono < SETTLED_S
            return None if restless and time.time() - reason.noticed_s < RESTLESS_S else reason
        if time.monotonic() - max(self._reviewed_mono, changed_mono) >= self._pause_s:
            return ReviewReason(Cause.REVIEW, time.time())
        return None

    @property
    def _pause_s(self) -> float:
        """Between two reviews: shorter after an event, when the remaining instances show what they can do."""
        alert = time.monotonic() - self._alert_mono < self._settings.alert_s
        return min(ALERT_REVIEW_S, self._settings.review_s) if alert else self._settings.review_s

    def _notice_losses(self) -> None:
        if lost := self._presence.pop_lost():
            self._request_review(Cause.LOSS, f"{_listed(lost)} gone", min(lost.values()))

    def _request_review(self, cause: Cause, text: str, noticed_s: float | None = None) -> None:
        """Request a review. A loss or a return that already waits for one is named beside the new cause."""
        waiting = self._pending
        if waiting is not None and waiting.cause in (Cause.LOSS, Cause.RETURN):
            text = f"{waiting.text}; {text}" if len(waiting.text) < _MAX_TEXT else waiting.text
            cause = Cause.LOSS if waiting.cause is Cause.LOSS else cause
        self._pending, self._alert_mono = ReviewReason(cause, noticed_s or time.time(), text), time.monotonic()
        self._wake.set()

    async def _fetch_demand(self) -> None:
        try:
            profile = await self._monitor.demand_profile()
        except PolyphaseError as error:
            self._no_profile = f"the monitor does not report the demand: {error}"
            return
        self._no_profile, self._flip_context = "", FlipContext(kept=profile.kept, barred=profile.barred)
        shift = profile.shift if profile.shift is not None and profile.shift.at_s > self._shift_s else None
        if profile.demand is not None and (shift is not None or profile.demand.requests >= SOLID):
            self.demand = profile.demand
            if shift is not None:
                self._shift_s = shift.at_s
                self._request_review(
                    Cause.SHIFT, f"{shift.what} went from {shift.before:.3g} to {shift.after:.3g}", shift.at_s
                )


def _roles(views: Sequence[InstanceView]) -> list[tuple[str, int, Role]]:
    return [(one.instance_id, one.info.generation, one.role) for one in views]


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - _MAX_NAMES} more" if len(known) > _MAX_NAMES else ""
    return ", ".join(known[:_MAX_NAMES]) + more
