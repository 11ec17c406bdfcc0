"""Placement: the route of a job. Filter the instances, score them, pick one; then split, and dispatch where needed.

`place` is the entry point. A placement policy picks the prefill instance (in a coupled cluster the decode instance that
computes the whole job), a split policy the number of prompt tokens computed there, and a dispatch policy the decode
instance, where the route has to name it. A joint placement policy decides on all three at once.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.domain.route import PrefixPull, Reason, Route
from shared.errors import Delayed, InvalidRequest
from shared.policy.dispatch import Choice, DispatchPolicy, Figures, choose_decode, why_none
from shared.policy.estimate import DecodeSide, Option, PrefillSide
from shared.policy.index import ClusterIndex, InstanceIds, context_of, queued_prefill_s, usable
from shared.policy.saved_tokens import saved_of, saved_tokens
from shared.policy.split import Split

MIN_DELAY_S, MAX_DELAY_S = 0.05, 0.25  # bounds of the retry time of a job that waits for `Split.max_prefills`
PER_CLASS = 2  # instances that are scored of each class of speed: the best and a runner-up


class Placement(Protocol):
    """Picks one of `index.candidates`, or None when none of them can take the job. `now` is unix seconds.

    The candidates are the prefill instances, in a coupled cluster the decode instances. A chosen decode instance
    computes the whole job. A choice of a prefill instance may name the decode instance, too.
    """

    name: ClassVar[str]

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: InstanceIds, now: float, rng: Random
    ) -> Choice | None: ...


def wants_prefixes(placement: Placement) -> bool:
    """Whether a placement policy looks at prefix caches: it declares that by a class variable `uses_prefixes`."""
    return bool(getattr(placement, "uses_prefixes", False))


class Policies(msgspec.Struct, frozen=True):
    """The three policies that make a route."""

    placement: Placement
    split: Split
    dispatch: DispatchPolicy


class JointPlacement(ABC):
    """Base of the placement policies that decide on the split and the decode instance as well.

    Such a policy implements `Placement`, too. A policy that only picks an instance needs nothing but `Placement`.
    """

    __slots__ = ()

    @abstractmethod
    def choose_jointly(
        self, job: JobView, index: ClusterIndex, policies: Policies, exclude: InstanceIds, now: float, rng: Random
    ) -> Choice | None:
        """Called instead of `Placement.choose`. The choice keeps to what the split and the dispatch policy say, except
        to those that leave their part of the decision to this policy.
        """


class Placed(NamedTuple):
    """A route, and the estimate of it if the placement policy made one."""

    route: Route
    estimate: Option | None


def place(
    job: JobView, index: ClusterIndex, policies: Policies, now: float, rng: Random, exclude: InstanceIds = ()
) -> Placed:
    """The route of `job`.

    Without a ready prefill instance, the decode instance that dispatch chooses computes the whole job; in a coupled
    cluster, the instance that placement chooses does. Raises Unavailable when no decode instance can take the job,
    InvalidRequest when the job is too long for all of them or malformed, and Delayed while the split
    (`Split.max_prefills`) wants the job to wait.
    """
    if job.prompt_tokens < 1 or job.max_tokens < 0:
        raise InvalidRequest(f"a job of {job.prompt_tokens} prompt and {job.max_tokens} output tokens")
    return _RouteBuilder(job, index, policies, now, rng, exclude).route()


@dataclass(slots=True)
class _RouteBuilder:
    """Builds the route of one job."""

    job: JobView
    index: ClusterIndex
    policies: Policies
    now: float
    rng: Random
    exclude: InstanceIds

    def route(self) -> Placed:
        job, index, split = self.job, self.index, self.policies.split
        if job.local_only and not index.coupled:
            return self._whole(self._choose_decode(), Reason("local_only: one instance must compute it whole"))
        chosen = self._choose_first()
        if chosen is None:
            why = why_none(job, index.placing, index, self.exclude)
            if index.coupled:
                raise why
            return self._whole(self._choose_decode(), Reason(f"local: {why.message}"))
        if chosen.instance.role is Role.DECODE or chosen.keep_tokens:
            return self._whole(chosen)
        if chosen.split is not None and chosen.decode is not None:  # placement decided on all three
            return self._build(chosen, Choice(chosen.decode), chosen.split, chosen.reasons)
        if chosen.decode is not None or split.needs_decode:
            return self._pair(chosen)
        # The dispatcher of the prefill instance chooses the decode instance, from fresher loads.
        self._require_decode()
        part = split.choose(job, chosen.instance, None, self.rng)
        return self._build(chosen, None, part.tokens, chosen.reasons + part.reasons)

    def _choose_first(self) -> Choice | None:
        """The choice of the placement policy: the first instance of the route, and what else the policy decides on."""
        exclude, placement = self._exclude_full(), self.policies.placement
        if isinstance(placement, JointPlacement):
            return placement.choose_jointly(self.job, self.index, self.policies, exclude, self.now, self.rng)
        return placement.choose(self.job, self.index, exclude, self.now, self.rng)

    def _exclude_full(self) -> InstanceIds:
        """The excluded instances, and the prefill instances that have as many prompts as the split allows.

        Raises Delayed when that leaves no prefill instance of those that could take the job.
        """
        job, ready, split = self.job, self.index.prefill.views, self.policies.split
        if split.max_prefills == 0 or job.begun or not job.can_wait:
            return self.exclude
        full = [view for view in ready if view.load.queued_prefill >= split.max_prefills]
        if not full:
            return self.exclude
        exclude = {*self.exclude, *(view.instance_id for view in full)}
        context = context_of(job, Role.PREFILL)
        held = [view for view in full if usable(view, context, self.exclude)]
        if held and not any(usable(view, context, exclude) for view in ready):
            soonest_s = min(queued_prefill_s(view) / view.load.queued_prefill for view in held)
            raise Delayed(
                f"each prefill instance has at least {split.max_prefills} requests (split: {split.name})",
                cause="prefills",
                retry_after_s=min(MAX_DELAY_S, max(MIN_DELAY_S, soonest_s)),
            )
        return exclude

    def _pair(self, prefill: Choice) -> Placed:
        """The route over a prefill and a decode instance: the split depends on both, or placement chose both."""
        prompt, bound = self.job.prompt_tokens, prefill.decode
        decode = Choice(bound) if bound is not None else self._choose_decode()
        split = self.policies.split.choose(self.job, prefill.instance, decode.instance, self.rng)
        reasons = prefill.reasons + split.reasons
        if split.tokens <= 0:
            return self._build(None, decode, 0, reasons + decode.reasons)
        if split.tokens >= prompt and bound is None:
            # The split needs no decode instance after all: the loads will be fresher when the dispatcher chooses one.
            return self._build(prefill, None, prompt, reasons)
        return self._build(prefill, decode, min(split.tokens, prompt), reasons + decode.reasons)

    def _whole(self, decode: Choice, *why: Reason) -> Placed:
        """The route on which a decode instance computes the whole job."""
        return self._build(None, decode, 0, (*why, *decode.reasons))

    def _choose_decode(self) -> Choice:
        return choose_decode(self.policies.dispatch, self.job, self.index, self.exclude, self.now, self.rng)

    def _require_decode(self) -> None:
        """Raises the error of `why_none` when no decode instance can take the job."""
        context = context_of(self.job, Role.DECODE)
        for view in self.index.decode.views:  # in most cases the first one can
            if usable(view, context, self.exclude):
                return
        raise why_none(self.job, Role.DECODE, self.index, self.exclude)

    def _build(self, prefill: Choice | None, decode: Choice | None, split: int, reasons: tuple[Reason, ...]) -> Placed:
        first = prefill or decode  # the choice of the placement policy, if that chose the instance
        assert first is not None
        estimate = first.estimate
        route = Route(
            prefill=prefill.ref if prefill else None,
            decode=decode.ref if decode else None,
            split=split,
            policy=self.policies.placement.name,
            reasons=(self._filter_reason(), *reasons),
            work=first.work,
            prefill_saved=self._saved(prefill, split, estimate.prefill if estimate is not None else None),
            decode_saved=0
            if _mixed(prefill, decode)
            else self._saved(decode, self.job.prompt_tokens, estimate.decode if estimate is not None else None),
            answer_tokens=self.index.ledger.output_lengths.bound(self.job),
            lead_steps=estimate.lead_steps if estimate is not None else 0,
            ttft_s=estimate.ttft_s - estimate.hold_s if estimate is not None else 0.0,
            hold_s=estimate.hold_s if estimate is not None else 0.0,
            has_room=first.has_room,
            pull=_pull_of(estimate),
            keep_tokens=first.keep_tokens,
            affinity=first.affinity,
            estimated=estimate.estimated if estimate is not None else None,
        )
        return Placed(route, estimate)

    def _saved(self, chosen: Choice | None, tokens: int, estimated: PrefillSide | DecodeSide | None) -> int:
        """Of the first `tokens` of the prompt, those that the instance holds: as reported, or as it was estimated."""
        if chosen is None or not self.job.prefix:
            return 0
        saved = saved_tokens(self.index.prefixes, chosen.instance, self.job, tokens)
        if estimated is not None and self.job.session:  # with what its session's last turn left there
            saved = max(saved, saved_of(estimated.saved, chosen.instance, tokens))
        return saved

    def _filter_reason(self) -> Reason:
        index = self.index
        figures: Figures = {
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


def _pull_of(estimate: Option | None) -> PrefixPull | None:
    pull = estimate.pull if estimate is not None else None
    return PrefixPull(Choice(pull.holder).ref, pull.tokens) if pull is not None else None


def _mixed(prefill: Choice | None, decode: Choice | None) -> bool:
    """Whether KV goes between instances of two precisions: it then does not join the decode instance's own prefixes."""
    precisions = {choice.instance.info.precision for choice in (prefill, decode) if choice is not None}
    return len(precisions) > 1


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """The instance that would finish this prefill first.

    score = backlog + k_p * prompt + b_p, in seconds (tokens where no rate is measured). Of each class of speed the two
    shortest backlogs are scored, so that a decision costs O(classes), not O(instances); within a class speeds differ
    by 10 % at most, and so does the job's own time. In a coupled cluster, decodes slow the prefill of their instance
    down (`index.chunked_rate`).
    Source: TetriInfer 3.2 (least load); Cronus eq. 2 for the cost of a prefill, eq. 3 beside decodes.
    """

    name: ClassVar[str] = "least_load"

    def choose(self, job: JobView, index: ClusterIndex, exclude: InstanceIds, now: float, rng: Random) -> Choice | None:
        context = context_of(job, index.placing)
        scored = index.backlog.soonest(index.candidates, job.prompt_tokens, context, exclude, PER_CLASS)
        if not scored:
            return None
        score, chosen = scored[0]
        figures: Figures = {"chosen": chosen.info.instance_id, "score": round(score, 6)}
        if len(scored) > 1:
            score, runner_up = scored[1]
            figures["runner_up"], figures["runner_up_score"] = runner_up.info.instance_id, round(score, 6)
        return Choice(chosen, (Reason("placement:least_load", figures),))


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each candidate in turn, by id; the index counts the turns."""

    name: ClassVar[str] = "round_robin"

    def choose(self, job: JobView, index: ClusterIndex, exclude: InstanceIds, now: float, rng: Random) -> Choice | None:
        views, context = index.candidates.views, context_of(job, index.placing)
        for step in range(len(views)):
            view = views[(index.turn + step) % len(views)]
            if usable(view, context, exclude):
                figures: Figures = {"chosen": view.instance_id, "turn": index.turn}
                return Choice(view, (Reason("placement:round_robin", figures),))
        return None
