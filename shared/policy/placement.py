"""Placement: where a job runs. Filter the instances, score, pick; then split, and dispatch where needed."""

from collections.abc import Collection
from random import Random
from typing import ClassVar, Protocol

import msgspec

from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.domain.route import Reason, Route
from shared.errors import InvalidRequest
from shared.policy.availability import context_of, usable, why_none
from shared.policy.choice import Choice, ref_of
from shared.policy.dispatch import DispatchPolicy, choose_decode
from shared.policy.index import Assignment, ClusterIndex
from shared.policy.least_load import LeastLoad
from shared.policy.lengths import is_heavy
from shared.policy.rounds import RoundRobin
from shared.policy.split import Split

__all__ = ["LeastLoad", "Placement", "Policies", "RoundRobin", "assignments", "place"]


class Placement(Protocol):
    """Picks one of `index.candidates`, or None when none can take the job.

    These are the prefill instances; in a coupled cluster the decode instances, of which the chosen one does it all.
    A choice of a decode instance in another cluster means the same; one that names a decode instance beside a prefill
    instance binds the job to both.
    """

    name: ClassVar[str]

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """Decide. `now` is unix seconds."""
        ...


class Policies(msgspec.Struct, frozen=True):
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

    Without a ready prefill instance the decode instance that dispatch chooses does it all; in a coupled cluster the
    one that placement chooses does. Raises Busy or Unavailable when no decode instance can take it, InvalidRequest
    when it is too long for all of them or makes no sense.
    """
    if job.prompt_tokens < 1 or job.max_tokens < 0:
        raise InvalidRequest(f"a job of {job.prompt_tokens} prompt and {job.max_tokens} output tokens")
    case = _Case(job, index, policies, now, rng, exclude)
    if job.local_only and not index.coupled:
        return case.local("local_only: one instance must compute it whole")
    chosen = policies.placement.choose(job, index, exclude, now, rng)
    if chosen is None:
        why = why_none(job, index.placing, index, exclude)
        if index.coupled:
            raise why
        return case.local(f"local: {why.message}")
    if chosen.instance.role is Role.DECODE:
        return case.whole(chosen)
    if chosen.decode is not None or policies.split.needs_decode:
        return case.pair(chosen)
    return case.prefill_only(chosen)


def assignments(job: JobView, route: Route, now: float) -> tuple[Assignment, ...]:
    """What to book for a route, so that the next decisions count it."""
    booked = []
    if route.prefill is not None:
        booked.append(Assignment(route.prefill.instance_id, now, prefill_tokens=route.split))
    if route.decode is not None:
        tokens, heavy = job.prompt_tokens, is_heavy(job)
        booked.append(Assignment(route.decode.instance_id, now, tokens - route.split, tokens, heavy))
    return tuple(booked)


class _Case:
    """One question and all it rests on."""

    __slots__ = ("exclude", "index", "job", "now", "policies", "rng")

    def __init__(
        self,
        job: JobView,
        index: ClusterIndex,
        policies: Policies,
        now: float,
        rng: Random,
        exclude: Collection[str],
    ) -> None:
        self.job = job
        self.index = index
        self.policies = policies
        self.now = now
        self.rng = rng
        self.exclude = exclude

    def prefill_only(self, prefill: Choice) -> Route:
        """The prefill instance's dispatcher chooses the decode instance, from fresher loads."""
        self._require_decode()
        split = self.policies.split.choose(self.job, prefill.instance, None, self.now, self.rng)
        return self._route(prefill, None, split.tokens, prefill.reasons + split.reasons)

    def pair(self, prefill: Choice) -> Route:
        """Both are needed to decide the split, or placement chose both."""
        bound = prefill.decode
        decode = Choice(bound) if bound is not None else self._decode()
        split = self.policies.split.choose(self.job, prefill.instance, decode.instance, self.now, self.rng)
        reasons = prefill.reasons + split.reasons
        if split.tokens <= 0:
            return self._route(None, decode, 0, reasons + decode.reasons)
        if split.tokens >= self.job.prompt_tokens and bound is None:
            # No use for the decode instance: the dispatcher's loads will be fresher.
            return self._route(prefill, None, self.job.prompt_tokens, reasons)
        return self._route(prefill, decode, min(split.tokens, self.job.prompt_tokens), reasons + decode.reasons)

    def whole(self, chosen: Choice) -> Route:
        """The decode instance that placement chose does it all."""
        return self._route(None, chosen, 0, chosen.reasons)

    def local(self, why: str) -> Route:
        """The decode instance that dispatch chooses does it all."""
        decode = self._decode()
        return self._route(None, decode, 0, (Reason(why), *decode.reasons))

    def _decode(self) -> Choice:
        policy = self.policies.dispatch
        return choose_decode(policy, self.job, self.index, self.exclude, self.now, self.rng)

    def _require_decode(self) -> None:
        context = context_of(self.job, Role.DECODE)
        for view in self.index.decode.views:  # the first one nearly always does
            if usable(view, context, self.exclude):
                return
        raise why_none(self.job, Role.DECODE, self.index, self.exclude)

    def _route(self, prefill: Choice | None, decode: Choice | None, split: int, reasons: tuple[Reason, ...]) -> Route:
        placed = prefill or decode
        return Route(
            prefill=ref_of(prefill.instance) if prefill else None,
            decode=ref_of(decode.instance) if decode else None,
            split=split,
            policy=self.policies.placement.name,
            reasons=(self._filters(), *reasons),
            work=placed.work if placed else None,
        )

    def _filters(self) -> Reason:
        index = self.index
        figures: dict[str, float | str] = {
            "broadcast": index.view.sequence,
            "instances": len(index.view.instances),
            "ready_prefill": len(index.prefill),
            "ready_decode": len(index.decode),
            "context_tokens": self.job.prompt_tokens + self.job.max_tokens,
        }
        if index.coupled:
            figures["coupled"] = "every instance computes whole jobs"
        if self.exclude:
            figures["excluded"] = ", ".join(sorted(self.exclude))
        return Reason("filter: ready, not excluded, context fits", figures)
