"""The adaptive policies: placement, split and dispatch as one decision, the option with the least SLO cost of a few.

The candidates come from the routing index, the options and their costs from `estimate`.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf
from random import Random
from typing import ClassVar

import msgspec

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import Affinity, Reason
from shared.errors import InvalidRequest
from shared.policy.dispatch import Choice, Figures
from shared.policy.estimate import (
    HOLD_S,
    DecodeSide,
    JobContext,
    Option,
    PrefillSide,
    fixed_split_options,
    kept_options,
    local,
    mean_wait_s,
    options,
    total_of,
)
from shared.policy.index import ClusterIndex, InstanceIds, ReadySet, context_of, usable
from shared.policy.output_lengths import UNKNOWN_LENGTHS, within
from shared.policy.placement import JointPlacement, Policies
from shared.policy.prefix_pull import Holder, holders_of, offer_pulls, pull_of
from shared.policy.saved_tokens import saved_of
from shared.policy.split import SplitChoice

HOLDERS_PER_ROLE, HOLDERS_LOOKED_UP = 2, 6  # candidates that hold most of the prompt's prefix, among so many of both
KEPT_GAIN = 0.2  # by which the SLO cost has to be less for an answer to be kept: it stays for long
RANDOM_DECODES = 2  # decode candidates that are drawn at random, less those that hold some of the prompt


@dataclass(frozen=True, slots=True)
class Adaptive(JointPlacement):
    """The option with the least SLO cost, over a few candidates and splits (none, balanced, all).

    Candidates are, of each class of speed, the prefill instance that would finish first and the decode instance with
    the least pressure, at most `candidates` of each role; of either role the two that hold most of the prompt; and,
    where no decode instance holds any of it, two at random. The SLO cost says how likely the job misses its targets,
    and how much more likely the requests that it delays miss theirs: in the prefill queue, on the links, in decode
    steps and for lack of KV memory. With `pull`, the instance that computes the beginning of the prompt may pull its
    prefix from a holder (`prefix_pull`). With `sessions`, the instances of the last turn of the job's session are
    candidates, too, and hold what that turn left there also before they have reported it (`sessions`). With
    `host_tier`, prefixes in the host memory of an instance count as held there, at the time of their loading; without
    it they do not count. With `keep`, the best prefill instance may decode the answer of a job that can migrate, or its
    first tokens.
    Beside another split or dispatch policy than the adaptive ones, it keeps to what that policy says and decides on
    the rest.
    Source: ours. Cronus 4.2 for the balanced split, TetriInfer 3.3.4 for few candidates and memory.
    """

    name: ClassVar[str] = "adaptive"
    uses_prefixes: ClassVar[bool] = True
    candidates: int = 4
    pull: bool = True
    sessions: bool = True
    host_tier: bool = True
    keep: bool = True

    def __post_init__(self) -> None:
        _check(self.name, self.candidates)

    def choose(self, job: JobView, index: ClusterIndex, exclude: InstanceIds, now: float, rng: Random) -> Choice | None:
        return self.choose_jointly(job, index, Policies(self, AdaptiveSplit(), AdaptiveDispatch()), exclude, now, rng)

    def choose_jointly(
        self, job: JobView, index: ClusterIndex, policies: Policies, exclude: InstanceIds, now: float, rng: Random
    ) -> Choice | None:
        split, dispatch = policies.split, policies.dispatch
        reported, hosted = _reported(job, index, host_tier=self.host_tier)
        last = index.ledger.sessions.held(job, index.prefixes, now) if self.sessions and job.session else {}
        holders = _merged(reported, last) if last else reported
        if isinstance(dispatch, AdaptiveDispatch):
            views = _decode_candidates(job, index, holders, exclude, rng, self.candidates)
        else:
            chosen = dispatch.choose(job, index.decode.views, exclude, now, rng)
            views = [chosen.instance] if chosen is not None else []
        if not views:
            return None
        places = [] if index.coupled else _prefill_candidates(job, index, holders, exclude, self.candidates)
        if holders:
            prefills = [PrefillSide(view, *_saved(job, index, view, holders, hosted)) for view in places]
        else:
            prefills = [PrefillSide(view) for view in places]
        spread_s = mean_wait_s(prefills)
        context = JobContext.learned(job, index.ledger, now, limited=index.limited, spread_s=spread_s)
        if holders:
            mixed, decodes = _mixed_shares(views, holders) if index.coupled else {}, []
            for view in views:
                saved, loaded = _saved(job, index, view, holders, hosted)
                decodes.append(DecodeSide(view, context, saved, mixed.get(view.info.instance_id), loaded))
        else:
            decodes = [DecodeSide(view, context) for view in views]
        pulls = (
            holders_of(index, holders, exclude, hosted or {}) if self.pull and holders and not job.local_only else []
        )
        if pulls:
            offer_pulls(pulls, prefills, context)
            offer_pulls(pulls, decodes, context)

        keeps = self.keep and job.migrates and isinstance(dispatch, AdaptiveDispatch)

        def best_of(sides: Sequence[DecodeSide]) -> Option:
            if isinstance(split, AdaptiveSplit) or not prefills:
                found = options(prefills, sides)
                if keeps:
                    found += _kept_options(job, found, exclude)
                return min(found, key=total_of)
            return min(fixed_split_options(split, prefills, sides, rng), key=total_of)

        best = best_of(decodes)
        if best.hold_s > HOLD_S and job.can_wait and not job.begun:
            best = _best_with_room(job, best_of, decodes) or best
        figures: Figures = {"split": best.split}
        if best.keep_tokens:
            figures["keep_tokens"] = best.keep_tokens
        figures |= best.figures
        figures["prefill_candidates"], figures["decode_candidates"] = len(prefills), len(decodes)
        figures |= _comparison(best, index, prefills)
        if pulls:
            figures |= _pulls(best, pulls)
        choice = _choice(best, (Reason("placement:adaptive", figures),))
        if last:
            candidates = {view.info.instance_id for view in (*views, *(side.view for side in prefills))}
            choice = _with_affinity(choice, best, last, holders, candidates)
        return choice


@dataclass(frozen=True, slots=True)
class AdaptiveDispatch:
    """The decode half of `Adaptive`, for jobs whose prompt is computed: the least SLO cost of a few random instances,
    in a small cluster of all.
    """

    name: ClassVar[str] = "adaptive"
    candidates: int = 6

    def __post_init__(self) -> None:
        _check(self.name, self.candidates)

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: InstanceIds, now: float, rng: Random
    ) -> Choice | None:
        context, count = context_of(job, Role.DECODE), self.candidates
        drawn = candidates if len(candidates) <= count else rng.sample(candidates, count)
        able = [view for view in drawn if usable(view, context, exclude)]
        able = able or [view for view in candidates if usable(view, context, exclude)][:count]
        if not able:
            return None
        job_context = _without_history(job, job.answer_tokens)
        sides = [DecodeSide(view, job_context) for view in able]
        best = min((local(side, side.terms(job.prompt_tokens)) for side in sides), key=total_of)
        figures: Figures = {"chosen": best.decode.view.info.instance_id, **best.figures}
        return Choice(best.decode.view, (Reason("dispatch:adaptive", figures),), has_room=best.has_room)


@dataclass(frozen=True, slots=True)
class AdaptiveSplit:
    """None, the balanced part or all of the prompt: the least SLO cost on a pair that other policies have chosen."""

    name: ClassVar[str] = "adaptive"
    needs_decode: ClassVar[bool] = True
    max_prefills: ClassVar[int] = 0

    def choose(self, job: JobView, prefill: InstanceView, decode: InstanceView | None, rng: Random) -> SplitChoice:
        assert decode is not None
        best = min(options([PrefillSide(prefill)], [DecodeSide(decode, _without_history(job))]), key=total_of)
        return SplitChoice(best.split, (Reason("split:adaptive", {"tokens": best.split, **best.figures}),))


def _without_history(job: JobView, bound: int = 0) -> JobContext:
    """The context of a job where nothing is known of earlier answers and other classes."""
    own = within(job.prediction) if job.prediction is not None else UNKNOWN_LENGTHS
    return JobContext(job, own, UNKNOWN_LENGTHS, others=job.slo, bound=bound)


def _prefill_candidates(
    job: JobView, index: ClusterIndex, holders: Mapping[str, int], exclude: InstanceIds, count: int
) -> list[InstanceView]:
    soonest = _soonest(job, index, exclude, count)
    if not holders:
        return soonest
    found = {view.info.instance_id: view for view in soonest}
    found |= _usable_holders(holders, index.prefill, context_of(job, Role.PREFILL), exclude)
    return list(found.values())


def _decode_candidates(
    job: JobView, index: ClusterIndex, holders: Mapping[str, int], exclude: InstanceIds, rng: Random, count: int
) -> list[InstanceView]:
    context, views = context_of(job, Role.DECODE), index.decode.views
    if len(views) <= count + RANDOM_DECODES:
        return [view for view in views if usable(view, context, exclude)]
    least = sorted(
        (pressure_s, view.info.instance_id, view)
        for pressure_s, view in index.pressures.candidates(index.decode, context, exclude)
    )
    found = {instance_id: view for _, instance_id, view in least[:count]}
    if index.coupled:  # they compute all prompts, too
        found |= {view.info.instance_id: view for view in _soonest(job, index, exclude, 1)}
    holding = _usable_holders(holders, index.decode, context, exclude) if holders else {}
    found |= holding
    for _ in range(RANDOM_DECODES - len(holding)):
        view = views[int(rng.random() * len(views))]
        if usable(view, context, exclude):
            found[view.info.instance_id] = view
    return list(found.values())


def _soonest(job: JobView, index: ClusterIndex, exclude: InstanceIds, count: int) -> list[InstanceView]:
    """Of the instances that compute prompts, the best of each class of speed, by when they would have computed this
    prompt; at most `count`.
    """
    context = context_of(job, index.placing)
    scored = index.backlog.soonest(index.candidates, job.prompt_tokens, context, exclude)
    return [view for _, view in scored[:count]]


def _usable_holders(
    holders: Mapping[str, int], ready: ReadySet, context: int, exclude: InstanceIds
) -> dict[str, InstanceView]:
    """The first `HOLDERS_PER_ROLE` usable instances of one role among `holders`."""
    found: dict[str, InstanceView] = {}
    for instance_id in holders:
        view = ready.get(instance_id)
        if view is not None and usable(view, context, exclude):
            found[instance_id] = view
            if len(found) == HOLDERS_PER_ROLE:
                break
    return found


Hosted = Mapping[str, int] | None  # by instance, held tokens in host memory; None: these do not count as held


def _reported(job: JobView, index: ClusterIndex, *, host_tier: bool) -> tuple[dict[str, int], Hosted]:
    """The instances that hold most of the prompt's prefix, the longest run first."""
    if not job.prefix:
        return {}, {}
    held = dict(index.prefixes.holders(job.prefix, HOLDERS_LOOKED_UP))
    found = ((one, index.prefixes.hosted_tokens(one, job.prefix, tokens)) for one, tokens in held.items())
    hosted = {one: tokens for one, tokens in found if tokens}
    if host_tier:
        return held, hosted
    return _merged({one: tokens - hosted.get(one, 0) for one, tokens in held.items()} if hosted else held, {}), None


def _saved(
    job: JobView, index: ClusterIndex, view: InstanceView, holders: Mapping[str, int], hosted: Hosted
) -> tuple[int, int]:
    """Prompt tokens whose KV the instance holds, and of these the ones that it loads from host memory.

    The prefix index is searched only when `holders` is full: a shorter list names every instance that holds any.
    """
    instance_id = view.info.instance_id
    held, loaded = holders.get(instance_id, 0), hosted.get(instance_id, 0) if hosted else 0
    if not held and len(holders) >= HOLDERS_LOOKED_UP:
        held = index.prefixes.held_tokens(instance_id, job.prefix)
        loaded = index.prefixes.hosted_tokens(instance_id, job.prefix, held)
        if hosted is None:
            held, loaded = held - loaded, 0
    saved = saved_of(held, view, job.prompt_tokens) if held else 0
    return saved, min(saved, loaded)


def _merged(reported: Mapping[str, int], last: Mapping[str, int]) -> dict[str, int]:
    """The holders of a prompt by their reports and by the session's last turn, the longest run first."""
    found = {one: max(reported.get(one, 0), last.get(one, 0)) for one in (*last, *reported)}
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _with_affinity(
    choice: Choice, best: Option, last: Mapping[str, int], holders: Mapping[str, int], candidates: Set[str]
) -> Choice:
    """The choice, with whether it is an instance of the session's last turn, and why not."""
    views = [best.decode.view] if best.prefill is None else [best.prefill.view, best.decode.view]
    back = [name for view in views if (name := view.info.instance_id) in last]
    figures: Figures = {"last": ", ".join(last), "held_tokens": max(holders[one] for one in last)}
    if back:
        affinity, figures["back"] = Affinity.BACK, ", ".join(back)
    else:
        affinity = Affinity.ELSEWHERE if candidates & last.keys() else Affinity.IMPOSSIBLE
    reasons = (*choice.reasons, Reason(f"session:{affinity.value}", figures))
    return msgspec.structs.replace(choice, reasons=reasons, affinity=affinity)


def _mixed_shares(views: Sequence[InstanceView], holders: Mapping[str, int]) -> dict[str, float]:
    """For holders of the prompt in a coupled cluster, the share of their coming steps that computes prompts: at most
    the mean share. By its last steps alone, a holder would look bad for having computed the prefix.
    """
    mean = sum(view.load.prefill_share for view in views) / len(views)
    return {
        view.info.instance_id: min(mean, view.load.prefill_share)
        for view in views
        if holders.get(view.info.instance_id)
    }


def _best_with_room(
    job: JobView, best_of: Callable[[Sequence[DecodeSide]], Option], decodes: Sequence[DecodeSide]
) -> Option | None:
    """The best option over the decode instances that have room now, if the job meets its targets there.

    A wait for the best instance may be worth it for this job, but the jobs behind it would wait, too, while the other
    instances are idle.
    """
    roomy = [side for side in decodes if side.room_s <= HOLD_S]
    if not roomy:
        return None
    best, slo = best_of(roomy), job.slo
    return best if best.tpot_s <= slo.tpot_s and job.waited_s + best.ttft_s <= slo.ttft_s else None


def _kept_options(job: JobView, found: Sequence[Option], exclude: InstanceIds) -> list[Option]:
    """Those of the best pair, if its prefill instance can hold the whole job, that cost clearly less than `found`."""
    limit = min(found, key=total_of).total - KEPT_GAIN
    pairs = [option for option in found if option.prefill is not None]
    if limit <= 0.0 or not pairs:
        return []
    best = min(pairs, key=total_of)
    assert best.prefill is not None
    if not usable(best.prefill.view, context_of(job, Role.DECODE), exclude):
        return []
    return [option for option in kept_options(best) if option.total < limit]


def _choice(best: Option, reasons: tuple[Reason, ...]) -> Choice:
    view, has_room = best.decode.view, best.has_room
    if best.prefill is None:
        return Choice(view, reasons, estimate=best, has_room=has_room, keep_tokens=best.keep_tokens)
    return Choice(best.prefill.view, reasons, decode=view, split=best.split, estimate=best, has_room=has_room)


def _comparison(best: Option, index: ClusterIndex, prefills: Sequence[PrefillSide]) -> Figures:
    """For people: the queue and the held prefix where the prompt begins, and the prefill instance with the next
    shortest queue; two of each class of speed are looked at.
    """
    decode, prefill = best.decode, best.prefill
    side: PrefillSide | DecodeSide = prefill or decode
    figures: Figures = {
        "chosen": side.view.info.instance_id,
        "decode": decode.view.info.instance_id,
        "wait_s": round(side.wait_s, 4),
        "saved_tokens": side.saved,
    }
    if side.loaded:
        load_s = side.view.info.rates.host_token_s * side.loaded
        figures |= {"host_tokens": side.loaded, "host_load_s": round(load_s, 6)}
    if prefill is None:
        return figures
    chosen, least_s, runner_up = prefill.instance_id, inf, ""
    for keys in index.backlog.classes():
        for waits_s, _, instance_id in keys[:2]:
            if instance_id != chosen:
                if waits_s < least_s or (waits_s == least_s and instance_id < runner_up):
                    least_s, runner_up = waits_s, instance_id
                break
    if runner_up:
        known = next((side for side in prefills if side.instance_id == runner_up), None)
        if known is None and (view := index.prefill.get(runner_up)) is not None:
            known = PrefillSide(view)
        if known is not None:
            figures |= {"runner_up": runner_up, "runner_up_wait_s": round(known.wait_s, 4)}
    return figures


def _pulls(best: Option, holders: Sequence[Holder]) -> Figures:
    """The pull that was chosen, or that the instance where the prompt begins could have made, and what the computation
    of the same tokens takes there.
    """
    if not holders:
        return {}
    side: PrefillSide | DecodeSide = best.prefill or best.decode
    pull = best.pull or pull_of(holders, side, best.decode.context)
    if pull is None:
        return {}
    prompt = best.decode.context.job.prompt_tokens
    return {
        "no_pull_from" if best.pull is None else "pull_from": pull.holder.info.instance_id,
        "pull_tokens": pull.lacks,
        "pull_s": round(pull.ready_s, 4),
        "compute_s": round(side.own_s(prompt) - side.own_s(prompt, pull.tokens), 4),
        "others_pull": round(pull.others, 6),
    }


def _check(name: str, candidates: int) -> None:
    if candidates < 1:
        raise InvalidRequest(f"{name}: candidates must be at least 1, not {candidates}")
