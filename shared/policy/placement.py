"""Placement: where a job runs. Filter the instances, score, pick; then split, and dispatch where needed."""

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Protocol

import msgspec

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import Reason, Route
from shared.errors import Delayed, InvalidRequest
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.dispatch import Choice, DispatchPolicy, choose_decode, context_of, ref_of, usable, why_none
from shared.policy.index import ClusterIndex, queued_prefill_s
from shared.policy.prefix_index import saved_tokens
from shared.policy.split import CronusSplit, Split

HELD_S = 0.05, 0.25  # least and most until a held job asks again
LOOK = 2  # instances of each class of speed: the best and a runner-up


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
    job: JobView, index: ClusterIndex, policies: Policies, now: float, rng: Random, exclude: Collection[str] = ()
) -> Route:
    """The route of `job`.

    Without a ready prefill instance the decode instance that dispatch chooses does it all; in a coupled cluster the
    one that placement chooses does. Raises Unavailable when no decode instance can take it, InvalidRequest
    when it is too long for all of them or makes no sense, Delayed while the split (`CronusSplit.max_prefills`) wants
    the job to wait.
    """
    if job.prompt_tokens < 1 or job.max_tokens < 0:
        raise InvalidRequest(f"a job of {job.prompt_tokens} prompt and {job.max_tokens} output tokens")
    case = _Case(job, index, policies, now, rng, exclude)
    if job.local_only and not index.coupled:
        return case.local("local_only: one instance must compute it whole")
    chosen = _chosen(job, index, policies, now, rng, exclude)
    if chosen is None:
        why = why_none(job, index.placing, index, exclude)
        if index.coupled:
            raise why
        return case.local(f"local: {why.message}")
    if chosen.instance.role is Role.DECODE:
        return case.whole(chosen)
    if chosen.split is not None and chosen.decode is not None:  # decided on together
        return case.decided(chosen, Choice(chosen.decode), chosen.split)
    if chosen.decode is not None or policies.split.needs_decode:
        return case.pair(chosen)
    return case.prefill_only(chosen)


def _chosen(
    job: JobView, index: ClusterIndex, policies: Policies, now: float, rng: Random, exclude: Collection[str]
) -> Choice | None:
    """Raises Delayed where the split lets all instances that could take the job take no more prompts for now."""
    split = policies.split
    most = split.max_prefills if isinstance(split, CronusSplit) and job.can_wait and not job.begun else 0
    full = [view for view in index.prefill.views if view.load.queued_prefill >= most] if most else []
    if not full:
        return _placed(job, index, policies, now, rng, exclude)
    context = context_of(job, Role.PREFILL)
    without = {*exclude, *(view.instance_id for view in full)}
    held = [view for view in full if usable(view, context, exclude)]
    if held and not any(usable(view, context, without) for view in index.prefill.views):
        soonest_s = min(queued_prefill_s(view) / view.load.queued_prefill for view in held)
        said = f"each prefill instance has at least {most} requests (split: {split.name})"
        raise Delayed(said, cause="prefills", retry_after_s=min(HELD_S[1], max(HELD_S[0], soonest_s)))
    return _placed(job, index, policies, now, rng, without)


def _placed(
    job: JobView, index: ClusterIndex, policies: Policies, now: float, rng: Random, exclude: Collection[str]
) -> Choice | None:
    placement, split, dispatch = policies.placement, policies.split, policies.dispatch
    if not isinstance(placement, Adaptive):
        return placement.choose(job, index, exclude, now, rng)
    free_split, free_dispatch = isinstance(split, AdaptiveSplit), isinstance(dispatch, AdaptiveDispatch)
    fixed = None if free_split else split, None if free_dispatch else dispatch
    return placement.decide(job, index, *fixed, exclude, now, rng)


class _Case:
    """One question and all it rests on."""

    __slots__ = ("exclude", "index", "job", "now", "policies", "rng")

    def __init__(
        self, job: JobView, index: ClusterIndex, policies: Policies, now: float, rng: Random, exclude: Collection[str]
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

    def decided(self, prefill: Choice, decode: Choice, split: int) -> Route:
        """Placement decided on everything."""
        return self._route(prefill, decode, split, prefill.reasons)

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
        assert placed is not None
        return Route(
            prefill=ref_of(prefill.instance) if prefill else None,
            decode=ref_of(decode.instance) if decode else None,
            split=split,
            policy=self.policies.placement.name,
            reasons=(self._filters(), *reasons),
            work=placed.work,
            prefill_saved=self._saved(prefill, split),
            decode_saved=self._saved(decode, self.job.prompt_tokens),
            answer_tokens=self.index.ledger.answers.bound(self.job),
            lead_steps=placed.lead_steps,
            ttft_s=placed.ttft_s,
            hold_s=placed.hold_s,
            has_room=placed.has_room,
        )

    def _saved(self, chosen: Choice | None, tokens: int) -> int:
        if chosen is None or not self.job.prefix:
            return 0
        return saved_tokens(self.index.prefixes, chosen.instance, self.job, tokens)

    def _filters(self) -> Reason:
        index = self.index
        figures: dict[str, float | str] = {
            "broadcast": index.sequence,
            "instances": index.size,
            "ready_prefill": len(index.prefill),
            "ready_decode": len(index.decode),
            "context_tokens": self.job.prompt_tokens + self.job.max_tokens,
        }
        if index.coupled:
            figures["coupled"] = "every instance computes whole jobs"
        if self.exclude:
            figures["excluded"] = ", ".join(sorted(self.exclude))
        return Reason("filter: ready, not excluded, context fits", figures)


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """The instance that would finish this prefill first.

    score = backlog + k_p * prompt + b_p, in seconds (tokens where no rate is measured). Of each class of speed
    the two shortest backlogs are scored, so a decision costs O(classes), not O(instances); within a class
    speeds differ by 10 % at most, and so may the job's own time from the least. In a coupled cluster decodes slow
    the prefill of their instance down (see `backlog.chunked_rate`).
    Source: TetriInfer 3.2 (least load); Cronus eq. 2 for the cost of a prefill, eq. 3 beside decodes.
    """

    name: ClassVar[str] = "least_load"

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        backlog, get, tokens = index.backlog, index.candidates.get, job.prompt_tokens
        context = context_of(job, index.placing)
        scored: list[tuple[float, int, InstanceView]] = []
        for keys in backlog.classes():
            looked = 0
            for waits_s, _, instance_id in keys:
                view = get(instance_id)
                if view is not None and usable(view, context, exclude):
                    scored.append((waits_s + backlog.cost_s(instance_id, tokens), len(scored), view))
                    looked += 1
                    if looked == LOOK:
                        break
        if not scored:
            return None
        scored.sort()
        score, _, chosen = scored[0]
        figures: dict[str, float | str] = {"chosen": chosen.info.instance_id, "score": round(score, 6)}
        if len(scored) > 1:
            figures["runner_up"] = scored[1][2].info.instance_id
            figures["runner_up_score"] = round(scored[1][0], 6)
        return Choice(chosen, (Reason("placement:least_load", figures),))


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each candidate in turn, by id; the index counts the turns."""

    name: ClassVar[str] = "round_robin"

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        views, context = index.candidates.views, context_of(job, index.placing)
        for step in range(len(views)):
            view = views[(index.turn + step) % len(views)]
            if usable(view, context, exclude):
                figures: dict[str, float | str] = {"chosen": view.instance_id, "turn": index.turn}
                return Choice(view, (Reason("placement:round_robin", figures),))
        return None


@dataclass(frozen=True, slots=True)
class Weighted:
    """Each candidate in turn, as often as its `rates.weight` says, spread evenly over the turns.

    Source: Huawei 5.2, WRR. F: the order of the turns (see `ledger.Rotation`).
    """

    name: ClassVar[str] = "weighted"

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        candidates, context = index.candidates, context_of(job, index.placing)
        weights = index.cached(
            self.name, lambda: {view.info.instance_id: view.info.rates.weight for view in candidates.views}
        )
        for instance_id in index.ledger.rotation(self.name, weights).order():
            view = candidates.get(instance_id)
            if view is not None and usable(view, context, exclude):
                figures: dict[str, float | str] = {"chosen": instance_id, "weight": weights[instance_id]}
                return Choice(view, (Reason("placement:weighted", figures),))
        return None


@dataclass(frozen=True, slots=True)
class Single:
    """All jobs on one instance: the one named, or the first by id; on the next one only while it cannot take them.

    Source: Huawei 5.2, SI.
    """

    name: ClassVar[str] = "single"
    instance: str = ""

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        candidates, context = index.candidates, context_of(job, index.placing)
        named = candidates.get(self.instance)
        for view in candidates.views if named is None else (named, *candidates.views):
            if usable(view, context, exclude):
                return Choice(view, (Reason("placement:single", {"chosen": view.instance_id}),))
        return None
