"""Watches the running cluster: notices losses, returns and shifts, has its roles reviewed, and proposes."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec

from services.planner.proposal import Cause, Proposal
from services.planner.proposals import Proposals
from services.planner.settings import PlannerSettings
from shared.cost.library import Library
from shared.domain.demand import Demand
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.errors import PolyphaseError, Unavailable
from shared.plan.review import Finding, reviewed
from shared.plan.running import Fleet
from shared.policy.plan_routes import PlanRoute, parse_routes
from shared.runtime.logs import get_log
from shared.wire.clients.monitor import MonitorClient

log = get_log(__name__)
NO_VIEW = "the monitor has told nothing yet"
NO_DEMAND = "too few requests for a profile of what clients ask for"
ALERT_REVIEW_S = 2.0  # between two reviews after news
SOLID = 50  # requests that a profile must rest on, except at a shift: what was before that is certainly wrong
_AT_WORK = (InstanceState.READY, InstanceState.DRAINING)


@dataclass(frozen=True, slots=True)
class News:
    """What makes the planner look, and since when it is known (unix seconds)."""

    cause: Cause
    noticed_s: float
    text: str = ""


class Watch:
    """What is known of the cluster, and who thinks about it. proposed: is given each new proposal."""

    def __init__(
        self,
        settings: PlannerSettings,
        monitor: MonitorClient,
        proposals: Proposals,
        library: Library,
        proposed: Callable[[Proposal], None],
    ) -> None:
        self._settings = settings
        self._monitor = monitor
        self._proposals = proposals
        self._library = library
        self._proposed = proposed
        self._wake = asyncio.Event()
        self._news: News | None = None
        self._at_work: dict[str, Role] = {}
        self._gone: dict[str, float] = {}  # since when, of those that are not counted as lost yet
        self._shift_s = time.time()
        self._reviewed_s = self._unsettled_s = time.monotonic()  # last review, last change of anybody's state
        self._held: tuple[frozenset[str], frozenset[Role]] = frozenset(), frozenset()
        self.view: ClusterView | None = None
        self.demand: Demand | None = None
        self.lost: dict[str, InstanceView] = {}  # as they were last seen
        self.trouble = NO_VIEW
        self.reviews = 0  # so far
        self._news_s = -inf  # when anything happened last, monotonic

    def heard(self, view: ClusterView) -> None:
        """A broadcast of the monitor."""
        before, self.view = self.view, view
        if before is None or _states(before) != _states(view):
            self._unsettled_s = time.monotonic()
        at_work = {one.instance_id: one.role for one in view.instances if one.state in _AT_WORK}
        present = {one.instance_id for one in view.instances}
        if before is None:
            self._at_work = at_work
            return
        last = {one.instance_id: one for one in before.instances}
        for name in self._at_work.keys() - present:
            self._gone.setdefault(name, time.time())
            self.lost[name] = last.get(name) or self.lost[name]
        for name in [name for name in self._gone if name in present]:
            del self._gone[name]
        new = at_work.keys() - self._at_work.keys()
        self._at_work = at_work | {name: self._at_work[name] for name in self._gone if name in self._at_work}
        self._tell_of_losses()
        if new:
            for name in new:
                self.lost.pop(name, None)
            self._tell(Cause.RETURN, f"{', '.join(sorted(new))} can work")

    async def run(self) -> None:
        """Look whenever there is news, and every now and then."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.step_s):
                    await self._wake.wait()
            self._wake.clear()
            await self.step()

    async def step(self) -> None:
        """One look: what is asked for, whether anything has changed, and what would be best then."""
        self._tell_of_losses()
        await self._ask_for_demand()
        news = self._news
        quiet_s = time.monotonic() - max(self._reviewed_s, self._unsettled_s)
        if news is None and quiet_s >= self._pause_s:
            news = News(Cause.REVIEW, time.time())
        if news is None or self._proposals.applying is not None:
            return
        if self.view is None or self.demand is None:
            self.trouble = NO_VIEW if self.view is None else NO_DEMAND
            return  # the news wait
        self._news = None
        await self.look(news)

    async def look(self, news: News) -> tuple[Proposal | None, str]:
        """Review now: a new proposal, or none and why. Raises Unavailable while too little is known."""
        fleet = self.fleet()
        began, self._reviewed_s = time.time(), time.monotonic()
        found = await asyncio.to_thread(self._review, fleet)
        took_s = time.time() - began
        self.reviews += 1
        if not found.changes:
            self._proposals.withdraw("the situation has changed: " + found.why)
            return None, found.why
        made = self._proposals.make(Proposal.of(found, news.cause, news.text, news.noticed_s, took_s, time.time()))
        if made is None:
            return None, "it is proposed already, or was refused not long ago"
        self._proposed(made)
        return made, made.why

    def fleet(self, demand: Demand | None = None) -> Fleet:
        """The instances that are ready, under what clients ask for, or another demand. Raises Unavailable."""
        view, asked = self.view, demand or self.demand
        if view is None or asked is None:
            raise Unavailable(NO_VIEW if view is None else NO_DEMAND)
        ready = tuple(one for one in view.instances if one.state is InstanceState.READY)
        if not ready:
            raise Unavailable("no instance is ready")
        routes = self.in_force
        local = any(not route.prefill for route in routes) if routes else asked.split_least < 1.0
        return Fleet(ready, asked, self._library, local, self._settings.codec, self._settings.target)

    @property
    def in_force(self) -> tuple[PlanRoute, ...]:
        """The routes of placement `plan`; none while another is in force."""
        placement = self.view.policies.placement if self.view is not None else None
        if placement is None or placement.name != "plan":
            return ()
        return parse_routes("routes", placement.parameters.get("routes", []))

    def fixed(self, fleet: Fleet) -> list[str]:
        """Instances whose roles people's flips hold for a while."""
        kept, barred = self._held
        return [one.instance_id for one in fleet.views if one.instance_id in kept or one.role.other in barred]

    @property
    def _pause_s(self) -> float:
        """Between two reviews: shorter after news, as those who are left show only then what they can do."""
        lately = time.monotonic() - self._news_s < self._settings.alert_s
        return min(ALERT_REVIEW_S, self._settings.review_s) if lately else self._settings.review_s

    def _review(self, fleet: Fleet) -> Finding:
        return reviewed(fleet, self.in_force, self.fixed(fleet))

    def _tell_of_losses(self) -> None:
        now_s = time.time()
        lost = {name: since for name, since in self._gone.items() if now_s - since >= self._settings.loss_s}
        if lost:
            for name in lost:
                del self._gone[name]
                self._at_work.pop(name, None)
            self._tell(Cause.LOSS, f"{', '.join(sorted(lost))} gone", min(lost.values()))

    def _tell(self, cause: Cause, text: str, noticed_s: float | None = None) -> None:
        waiting = self._news
        if waiting is not None and waiting.cause in (Cause.LOSS, Cause.RETURN):
            text = f"{waiting.text}; {text}"
        self._news, self._news_s = News(cause, noticed_s or time.time(), text), time.monotonic()
        self._wake.set()

    async def _ask_for_demand(self) -> None:
        try:
            answer: dict[str, Any] = await self._monitor.demand_profile()
            demand = msgspec.convert(answer["demand"], Demand | None)
            self._held = frozenset(answer["kept"]), frozenset(Role(one) for one in answer["barred"])
        except (PolyphaseError, msgspec.ValidationError) as error:
            self.trouble = f"the monitor does not say what clients ask for: {error}"
            return
        shift = answer["shift"]
        shifted = shift is not None and shift["at_s"] > self._shift_s
        if demand is not None and (shifted or demand.requests >= SOLID):
            self.demand = demand
        self.trouble = "" if self.demand is not None else NO_DEMAND
        if shifted and demand is not None:
            self._shift_s = shift["at_s"]
            text = f"{shift['what']} went from {shift['before']:.3g} to {shift['after']:.3g}"
            self._tell(Cause.SHIFT, text, shift["at_s"])


def _states(view: ClusterView) -> list[tuple[str, InstanceState, Role]]:
    return [(one.instance_id, one.state, one.role) for one in view.instances]
