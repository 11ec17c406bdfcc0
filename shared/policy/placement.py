"""Placement: where a job runs. Filter the instances, score, pick; then split, and dispatch where needed."""

from collections.abc import Collection
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from operator import itemgetter
from random import Random
from typing import ClassVar, Protocol

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import Reason, Route
from shared.errors import InvalidRequest
from shared.policy.availability import fits, why_none
from shared.policy.choice import Choice
from shared.policy.dispatch import DispatchPolicy, choose_decode
from shared.policy.index import Assignment, ClusterIndex, PrefillBacklog
from shared.policy.lengths import is_heavy
from shared.policy.split import Split


class Placement(Protocol):
    """Picks a prefill instance, or None when none can take the job."""

    name: ClassVar[str]

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """Decide. `now` is unix seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Policies:
    """The three that make a route."""

    placement: Placement
    split: Split
    dispatch: DispatchPolicy


def place(
    job: JobView,
    index: ClusterIndex,
    policies: Policies,
    now: float,
    rng: Random,
    exclude: Collection[str] = (),
) -> Route:
    """The route of `job`.

    Without a ready prefill instance the decode instance does it all. Raises Busy or Unavailable when no
    decode instance can take it, InvalidRequest when it is too long for all of them or makes no sense.
    """
    if job.prompt_tokens < 1 or job.max_tokens < 0:
        raise InvalidRequest(f"a job of {job.prompt_tokens} prompt and {job.max_tokens} output tokens")
    case = _Case(job, index, policies, now, rng, exclude)
    if job.local_only:
        return case.local("local_only: one instance must compute it whole")
    prefill = policies.placement.choose(job, index, exclude, now, rng)
    if prefill is None:
        return case.local(f"local: {why_none(job, Role.PREFILL, index, exclude).message}")
    if policies.split.needs_decode:
        return case.pair(prefill)
    return case.prefill_only(prefill)


def assignments(job: JobView, route: Route, now: float) -> tuple[Assignment, ...]:
    """What to book for a route, so that the next decisions count it."""
    booked = []
    if route.prefill is not None:
        booked.append(Assignment(route.prefill.instance_id, now, prefill_tokens=route.split))
    if route.decode is not None:
        tokens, heavy = job.prompt_tokens, is_heavy(job)
        booked.append(Assignment(route.decode.instance_id, now, decode_tokens=tokens, heavy=heavy))
    return tuple(booked)


@dataclass(frozen=True, slots=True)
class _Case:
    """One question and all it rests on."""

    job: JobView
    index: ClusterIndex
    policies: Policies
    now: float
    rng: Random
    exclude: Collection[str]

    def prefill_only(self, prefill: Choice) -> Route:
        """The prefill instance's dispatcher chooses the decode instance, from fresher loads."""
        self._require_decode()
        split = self.policies.split.choose(self.job, prefill.instance, None, self.now, self.rng)
        return self._route(prefill, None, split.tokens, prefill.reasons, split.reasons)

    def pair(self, prefill: Choice) -> Route:
        """Both are needed to decide the split."""
        decode = self._decode()
        split = self.policies.split.choose(self.job, prefill.instance, decode.instance, self.now, self.rng)
        if split.tokens <= 0:
            return self._route(None, decode, 0, split.reasons, decode.reasons)
        if split.tokens >= self.job.prompt_tokens:  # no use for it: the dispatcher's loads will be fresher
            return self._route(prefill, None, self.job.prompt_tokens, prefill.reasons, split.reasons)
        return self._route(prefill, decode, split.tokens, prefill.reasons, split.reasons, decode.reasons)

    def local(self, why: str) -> Route:
        """The decode instance does it all."""
        decode = self._decode()
        return self._route(None, decode, 0, (Reason(why),), decode.reasons)

    def _decode(self) -> Choice:
        policy = self.policies.dispatch
        return choose_decode(policy, self.job, self.index, self.exclude, self.now, self.rng)

    def _require_decode(self) -> None:
        for view in self.index.decode.views:  # the first one nearly always does
            if view.instance_id not in self.exclude and fits(self.job, view, Role.DECODE):
                return
        raise why_none(self.job, Role.DECODE, self.index, self.exclude)

    def _route(self, prefill: Choice | None, decode: Choice | None, split: int, *reasons: tuple[Reason, ...]) -> Route:
        return Route(
            prefill=prefill.ref if prefill else None,
            decode=decode.ref if decode else None,
            split=split,
            policy=self.policies.placement.name,
            reasons=(self._filters(), *(reason for step in reasons for reason in step)),
        )

    def _filters(self) -> Reason:
        figures: dict[str, float | str] = {
            "broadcast": self.index.view.sequence,
            "instances": len(self.index.view.instances),
            "ready_prefill": len(self.index.prefill),
            "ready_decode": len(self.index.decode),
            "context_tokens": self.job.prompt_tokens + self.job.max_tokens,
        }
        if self.exclude:
            figures["excluded"] = ", ".join(sorted(self.exclude))
        return Reason("filter: ready, not excluded, context fits", figures)


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """The instance that would finish this prefill first.

    score = backlog + k_p * prompt + b_p, in seconds (tokens where no rate is measured). Of each class of speed
    the two shortest backlogs are scored, so a decision costs O(classes), not O(instances); within a class
    speeds differ by 10 % at most, and so may the job's own time from the least.
    Source: TetriInfer 3.2 (least load); Cronus eq. 2 for the cost of a prefill.
    """

    name: ClassVar[str] = "least_load"

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        backlog = index.prefill
        scored = []
        for ordered in backlog.classes():
            usable = ((w, v) for w, v in ordered if v.instance_id not in exclude and fits(job, v, Role.PREFILL))
            for waits_s, view in islice(usable, 2):
                scored.append((waits_s + _cost(backlog, view, job), view))
        if not scored:
            return None
        best = nsmallest(2, scored, key=itemgetter(0))
        figures: dict[str, float | str] = {"chosen": best[0][1].instance_id, "score": round(best[0][0], 6)}
        if len(best) > 1:
            figures |= {"runner_up": best[1][1].instance_id, "runner_up_score": round(best[1][0], 6)}
        return Choice(best[0][1], (Reason("placement:least_load", figures),))


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each prefill instance in turn, by id; the index counts the turns."""

    name: ClassVar[str] = "round_robin"

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        views = index.prefill.views
        for step in range(len(views)):
            view = views[(index.turn + step) % len(views)]
            if view.instance_id not in exclude and fits(job, view, Role.PREFILL):
                figures: dict[str, float | str] = {"chosen": view.instance_id, "turn": index.turn}
                return Choice(view, (Reason("placement:round_robin", figures),))
        return None


def _cost(backlog: PrefillBacklog, view: InstanceView, job: JobView) -> float:
    return backlog.rate(view) * job.prompt_tokens + view.info.prefill_base_s
