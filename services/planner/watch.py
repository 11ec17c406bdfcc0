"""Watches the running cluster: notices losses, returns and shifts, has its roles reviewed, and proposes."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

import msgspec

from services.planner.proposals import Cause, Proposal, Proposals
from services.planner.settings import PlannerSettings
from shared.cost.library import Library
from shared.domain.demand import Demand
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.errors import PolyphaseError, Unavailable
from shared.plan.running import Fleet, reviewed
from shared.policy.placement_policies import PlanRoute, parse_routes
from shared.runtime.logs import get_log
from shared.wire.clients.monitor import MonitorClient

# MERGED presence.py
# Who of the cluster is at work, who is lost and who has come, as the monitor's broadcasts tell it.


SILENT_S = 0.4  # an instance that does not answer counts as lost after so long: the monitor itself may have stood still
LOST_KEPT = 64
_AT_WORK = (InstanceState.READY, InstanceState.DRAINING)


class Presence:
    """loss_s: an instance must be gone for so long before it counts as lost. Times that are told are unix seconds."""

    def __init__(self, loss_s: float) -> None:
        self._loss_s = loss_s
        self._at_work: dict[str, InstanceView] | None = None  # and those who are away, as they were last seen
        self._away: dict[str, float] = {}  # since when, of those that do not count as lost yet
        self._there: frozenset[str] = frozenset()  # whom the monitor counts, at work or not
        self._states: tuple[tuple[str, object, object], ...] = ()
        self.changed_s = time.monotonic()  # of anybody's state or role
        self.lost: tuple[InstanceView, ...] = ()  # as they were last seen, the newest last

    def heard(self, view: ClusterView) -> list[str]:
        """A broadcast; who has come to work since the one before."""
        states = tuple((one.instance_id, one.state, one.role) for one in view.instances)
        if states != self._states:
            self._states, self.changed_s = states, time.monotonic()
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
        return sorted(name for name, one in here.items() if name not in before or _life(before[name]) != _life(one))

    def gone(self) -> dict[str, float]:
        """Who counts as lost from now on, and since when it is away; each is told once."""
        now_s, found = time.time(), {}
        for name, since_s in self._away.items():
            patience_s = max(self._loss_s, SILENT_S) if name in self._there else self._loss_s
            if now_s - since_s >= patience_s:
                found[name] = since_s
        for name in found:
            del self._away[name]
            assert self._at_work is not None
            last = self._at_work.pop(name)
            if last.state is not InstanceState.DRAINING:  # that one has left in good order
                self.lost = (*self.lost, last)[-LOST_KEPT:]
        return found


def _life(view: InstanceView) -> int:
    return view.info.generation


log = get_log(__name__)
NO_VIEW = "the monitor has told nothing yet"
NO_DEMAND = "too few requests for a profile of what clients ask for"
ALERT_REVIEW_S = 2.0  # between two reviews after news
SOLID = 50  # requests that a profile must rest on, except at a shift: what was before that is certainly wrong
SETTLED_S, RESTLESS_S = 0.3, 5.0  # who comes is thought about when nobody changes for so long; or after so long anyway
MEANWHILE = "the cluster changed while its roles were reviewed"
_NAMED, _LONGEST = 8, 400  # instances that news name, and characters of news that wait


@dataclass(frozen=True, slots=True)
class News:
    """What makes the planner look, and since when it is known (unix seconds)."""

    cause: Cause
    noticed_s: float
    text: str = ""


class _Shift(msgspec.Struct):
    at_s: float
    what: str
    before: float
    after: float


class _Profile(msgspec.Struct):
    """What the monitor tells of demand: see its `GET /demand/profile`."""

    demand: Demand | None
    shift: _Shift | None
    kept: frozenset[str]
    barred: frozenset[Role]


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
        self._looking = asyncio.Lock()
        self._presence = Presence(settings.loss_s)
        self._shift_s = time.time()
        self._reviewed_s = time.monotonic()
        self._held: tuple[frozenset[str], frozenset[Role]] = frozenset(), frozenset()
        self._unasked = self._unable = ""  # why the monitor did not tell of the demand; why there was no review
        self.view: ClusterView | None = None
        self.demand: Demand | None = None
        self.reviews = 0  # so far
        self._news_s = -inf  # when anything happened last, monotonic

    def heard(self, view: ClusterView) -> None:
        """A broadcast of the monitor."""
        self.view = view
        came = self._presence.heard(view)
        self._tell_of_losses()
        if came:
            self._tell(Cause.RETURN, f"{_named(came)} can work")

    @property
    def lost(self) -> tuple[InstanceView, ...]:
        """Instances that were at work and are not there any more, as they were last seen."""
        return self._presence.lost

    @property
    def trouble(self) -> str:
        """Why nothing can be proposed at the moment; empty when nothing stands against it."""
        unknown = NO_VIEW if self.view is None else NO_DEMAND if self.demand is None else ""
        return self._unasked or unknown or self._unable

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
        news = self._due()
        if news is None or self._proposals.applying is not None or self.view is None or self.demand is None:
            return  # the news wait
        self._news, self._unable = None, ""
        try:
            await self.look(news)
        except Unavailable as error:  # nobody is ready: whoever comes is news
            self._unable = error.message
            self._proposals.withdraw(error.message)
        except PolyphaseError as error:
            self._unable = f"the roles cannot be reviewed: {error.message}"
            log.warning("no review", cause=news.cause.value, error=error.message)

    async def look(self, news: News) -> tuple[Proposal | None, str]:
        """Review now: a new proposal, or none and why. One at a time.

        Raises Unavailable while too little is known or nobody is ready, and what `reviewed` raises.
        """
        async with self._looking:
            fleet = self.fleet()
            began, self._reviewed_s = time.time(), time.monotonic()
            turned = self._proposals.turned_lately if news.cause in (Cause.REVIEW, Cause.RETURN) else frozenset()
            found = await asyncio.to_thread(reviewed, fleet, self.in_force, [*self.fixed(fleet), *turned])
            took_s = time.time() - began
            self.reviews += 1
            if self._proposals.applying is not None or _who(fleet.views) != _who(self.ready()):
                if news.cause not in (Cause.REVIEW, Cause.ASKED):
                    self._news = self._news or news
                return None, MEANWHILE
            if not found.changes:
                self._proposals.withdraw("the situation has changed: " + found.why)
                return None, found.why
            made = self._proposals.make(Proposal.of(found, news.cause, news.text, news.noticed_s, took_s, time.time()))
            if made is None:
                return None, "it is proposed already, was refused not long ago, or has failed"
            self._proposed(made)
            return made, made.why

    def fleet(self, demand: Demand | None = None) -> Fleet:
        """The instances that are ready, under what clients ask for, or another demand. Raises Unavailable."""
        view, asked = self.view, demand or self.demand
        if view is None or asked is None:
            raise Unavailable(NO_VIEW if view is None else NO_DEMAND)
        ready = self.ready()
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

    def ready(self) -> tuple[InstanceView, ...]:
        """The instances that are; none before the first broadcast."""
        views = self.view.instances if self.view is not None else ()
        return tuple(one for one in views if one.state is InstanceState.READY)

    def _due(self) -> News | None:
        """What there is to think about now."""
        changed_s = self._presence.changed_s
        if (news := self._news) is not None:
            restless = news.cause is Cause.RETURN and time.monotonic() - changed_s < SETTLED_S
            return None if restless and time.time() - news.noticed_s < RESTLESS_S else news
        if time.monotonic() - max(self._reviewed_s, changed_s) >= self._pause_s:
            return News(Cause.REVIEW, time.time())
        return None

    @property
    def _pause_s(self) -> float:
        """Between two reviews: shorter after news, as those who are left show only then what they can do."""
        lately = time.monotonic() - self._news_s < self._settings.alert_s
        return min(ALERT_REVIEW_S, self._settings.review_s) if lately else self._settings.review_s

    def _tell_of_losses(self) -> None:
        if lost := self._presence.gone():
            self._tell(Cause.LOSS, f"{_named(lost)} gone", min(lost.values()))

    def _tell(self, cause: Cause, text: str, noticed_s: float | None = None) -> None:
        waiting = self._news
        if waiting is not None and waiting.cause in (Cause.LOSS, Cause.RETURN):
            text = f"{waiting.text}; {text}" if len(waiting.text) < _LONGEST else waiting.text
            cause = Cause.LOSS if waiting.cause is Cause.LOSS else cause
        self._news, self._news_s = News(cause, noticed_s or time.time(), text), time.monotonic()
        self._wake.set()

    async def _ask_for_demand(self) -> None:
        try:
            told = msgspec.convert(await self._monitor.demand_profile(), _Profile)
        except (PolyphaseError, msgspec.ValidationError) as error:
            self._unasked = f"the monitor does not say what clients ask for: {error}"
            return
        self._unasked, self._held = "", (told.kept, told.barred)
        shift = told.shift if told.shift is not None and told.shift.at_s > self._shift_s else None
        if told.demand is not None and (shift is not None or told.demand.requests >= SOLID):
            self.demand = told.demand
            if shift is not None:
                self._shift_s = shift.at_s
                text = f"{shift.what} went from {shift.before:.3g} to {shift.after:.3g}"
                self._tell(Cause.SHIFT, text, shift.at_s)


def _who(views: Sequence[InstanceView]) -> list[tuple[str, int, Role]]:
    return [(one.instance_id, one.info.generation, one.role) for one in views]


def _named(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    return ", ".join(known[:_NAMED]) + more
