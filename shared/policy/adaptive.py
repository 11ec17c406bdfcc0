"""Placement, split and dispatch as one decision: the least harm of a few candidates, by one estimate."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.answers import UNKNOWN_LENGTHS, within
from shared.policy.dispatch import Choice, DispatchPolicy, context_of, usable
from shared.policy.estimate import (
    HOLD_S,
    DecodeSide,
    Option,
    PrefillSide,
    figures_of,
    has_room,
    kept_to,
    local,
    options,
    total_of,
    usual_wait_s,
)
from shared.policy.index import ClusterIndex, ReadySet
from shared.policy.prefix_index import saved_of, saved_tokens
from shared.policy.split import Split, SplitChoice

HOLDERS, LOOKED_AT = 2, 6  # of the prompt's prefix: so many candidates of a role, among so many of both
RANDOM = 2  # decode instances that are looked at beside the least pressed ones, less those that hold some of the prompt


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Of a few candidates and splits (none, balanced, all) the least harm.

    Candidates are the prefill instance of each class of speed that would be through first, and the least pressed decode
    instance of each class, at most `candidates` of each; the two of either role that hold most of the prompt; where no
    decode instance holds any, two at random. Harm is how likely targets are missed by the job itself, and how much
    likelier by those whom it delays (see `estimate`): prefill queue, links, decodes, room.
    Beside a fixed policy for splits or for dispatch it decides on the rest, and keeps to what that one says.
    Source: ours. Cronus 4.2 for the balanced split, TetriInfer 3.3.4 for few candidates and memory.
    """

    name: ClassVar[str] = "adaptive"
    uses_prefixes: ClassVar[bool] = True
    candidates: int = 4

    def __post_init__(self) -> None:
        _check(self.name, self.candidates)

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`; split and dispatch are adaptive, too."""
        return self.decide(job, index, None, None, exclude, now, rng)

    def decide(
        self,
        job: JobView,
        index: ClusterIndex,
        split: Split | None,
        dispatch: DispatchPolicy | None,
        exclude: Collection[str],
        now: float,
        rng: Random,
    ) -> Choice | None:
        """The same; `split` and `dispatch` are fixed policies to keep to, None where the decision is free."""
        answers = index.ledger.answers
        own, usual, bound = answers.expected(job), answers.all, answers.bound(job)
        others = index.ledger.needs.others(job.slo, now)
        holders = _holders(job, index)
        if dispatch is None:
            views = _decodes(job, index, holders, exclude, rng, self.candidates)
        else:
            chosen = dispatch.choose(job, index.decode.views, exclude, now, rng)
            views = [chosen.instance] if chosen is not None else []
        if not views:
            return None
        found = [] if index.coupled else _prefills(job, index, holders, exclude, self.candidates)
        prefills = [PrefillSide.of(view, _saved(job, index, view, holders)) for view in found]
        spread_s = usual_wait_s(prefills)
        mixed, limited = _mixed_shares(views, holders) if index.coupled and holders else {}, index.limited
        decodes, kept = [], index.ledger.claims.before(job, now)
        for view in views:
            name = view.info.instance_id
            saved, share, claimed = _saved(job, index, view, holders), mixed.get(name), kept.get(name, ())
            decodes.append(
                DecodeSide.of(view, job, own, usual, saved, others, spread_s, limited, share, bound, claimed)
            )

        def best_of(sides: Sequence[DecodeSide]) -> Option:
            if split is None or not prefills:
                return min(options(job, own, prefills, sides), key=total_of)
            return min(kept_to(split, job, own, prefills, sides, now, rng), key=total_of)

        best = best_of(decodes)
        if best.hold_s > HOLD_S and job.can_wait and not job.begun:
            best = _at_once(job, best_of, decodes) or best
        return _choice(best, prefills, decodes, index)


@dataclass(frozen=True, slots=True)
class AdaptiveDispatch:
    """The decode half of `Adaptive`, for jobs whose prompt is computed: the least harm of a few drawn at random.

    Of a small cluster all are looked at.
    """

    name: ClassVar[str] = "adaptive"
    candidates: int = 6

    def __post_init__(self) -> None:
        _check(self.name, self.candidates)

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `DispatchPolicy`."""
        context = context_of(job, Role.DECODE)
        able = [view for view in _some(candidates, self.candidates, rng) if usable(view, context, exclude)]
        able = able or [view for view in candidates if usable(view, context, exclude)][: self.candidates]
        if not able:
            return None
        own = within(job.prediction) if job.prediction is not None else UNKNOWN_LENGTHS
        sides = [DecodeSide.of(view, job, own, UNKNOWN_LENGTHS, bound=job.answer_tokens) for view in able]
        best = min((local(job, side, side.terms(job.prompt_tokens)) for side in sides), key=total_of)
        figures: dict[str, float | str] = {"chosen": best.decode.view.info.instance_id, **figures_of(best)}
        return Choice(best.decode.view, (Reason("dispatch:adaptive", figures),), has_room=has_room(best))


@dataclass(frozen=True, slots=True)
class AdaptiveSplit:
    """None, the balanced part or all of the prompt, whichever does the least harm on a pair that others have chosen."""

    name: ClassVar[str] = "adaptive"
    needs_decode: ClassVar[bool] = True

    def choose(
        self, job: JobView, prefill: InstanceView, decode: InstanceView | None, now: float, rng: Random
    ) -> SplitChoice:
        """See `Split`."""
        assert decode is not None
        own = within(job.prediction) if job.prediction is not None else UNKNOWN_LENGTHS
        side = DecodeSide.of(decode, job, own, UNKNOWN_LENGTHS)
        best = min(options(job, own, [PrefillSide.of(prefill)], [side]), key=total_of)
        return SplitChoice(best.split, (Reason("split:adaptive", {"tokens": best.split, **figures_of(best)}),))


def _prefills(
    job: JobView, index: ClusterIndex, holders: Mapping[str, int], exclude: Collection[str], most: int
) -> list[InstanceView]:
    found = {view.info.instance_id: view for view in _soonest(job, index, exclude, most)}
    return list((found | _known(holders, index.prefill, context_of(job, Role.PREFILL), exclude)).values())


def _soonest(job: JobView, index: ClusterIndex, exclude: Collection[str], most: int) -> list[InstanceView]:
    """Of those that compute prompts the best of each class of speed, at most `most`, by when they would have computed
    this one.
    """
    backlog, get, tokens = index.backlog, index.candidates.get, job.prompt_tokens
    context = context_of(job, index.placing)
    scored: list[tuple[float, int, InstanceView]] = []
    for keys in backlog.classes():
        for waits_s, _, instance_id in keys:
            view = get(instance_id)
            if view is not None and usable(view, context, exclude):
                scored.append((waits_s + backlog.cost_s(instance_id, tokens), len(scored), view))
                break
    scored.sort()
    return [view for _, _, view in scored[:most]]


def _decodes(
    job: JobView, index: ClusterIndex, holders: Mapping[str, int], exclude: Collection[str], rng: Random, most: int
) -> list[InstanceView]:
    context, get, views = context_of(job, Role.DECODE), index.decode.get, index.decode.views
    if len(views) <= most + RANDOM:
        return [view for view in views if usable(view, context, exclude)]
    scored: list[tuple[float, str, InstanceView]] = []
    for keys in index.pressures.classes():
        for pressed_s, _, instance_id in keys:
            view = get(instance_id)
            if view is not None and usable(view, context, exclude):
                scored.append((pressed_s, instance_id, view))
                break
    scored.sort(key=lambda one: one[:2])
    found = {instance_id: view for _, instance_id, view in scored[:most]}
    if index.coupled:  # they compute all prompts, too
        found |= {view.info.instance_id: view for view in _soonest(job, index, exclude, 1)}
    known = _known(holders, index.decode, context, exclude)
    found |= known
    for _ in range(RANDOM - len(known)):
        view = views[int(rng.random() * len(views))]
        if usable(view, context, exclude):
            found[view.info.instance_id] = view
    return list(found.values())


def _mixed_shares(views: Sequence[InstanceView], holders: Mapping[str, int]) -> dict[str, float]:
    """Of holders' steps to come, the share that computes prompts, where every instance does: the usual one at most.

    By its last steps alone who holds a prompt's beginning would look bad for having computed it.
    """
    usual = sum(view.load.prefill_share for view in views) / len(views)
    return {
        view.info.instance_id: min(usual, view.load.prefill_share) for view in views if view.info.instance_id in holders
    }


def saved_at(index: ClusterIndex, view: InstanceView, job: JobView) -> int:
    """Prompt tokens whose KV the instance holds."""
    return saved_tokens(index.prefixes, view, job) if job.prefix else 0


def _holders(job: JobView, index: ClusterIndex) -> dict[str, int]:
    """Those that hold most of the prompt, of either role, with the tokens that they hold."""
    return dict(index.prefixes.holders(job.prefix, LOOKED_AT)) if job.prefix else {}


def _saved(job: JobView, index: ClusterIndex, view: InstanceView, holders: Mapping[str, int]) -> int:
    """`saved_at`, looked up only where `holders` leave it open: fewer than were asked for are all there are."""
    held = holders.get(view.info.instance_id, 0)
    if not held and len(holders) == LOOKED_AT:
        held = index.prefixes.held_tokens(view.info.instance_id, job.prefix)
    return saved_of(held, view, job.prompt_tokens) if held else 0


def _known(holders: Mapping[str, int], of: ReadySet, context: int, exclude: Collection[str]) -> dict[str, InstanceView]:
    """The first `HOLDERS` of one role."""
    found: dict[str, InstanceView] = {}
    for instance_id in holders:
        view = of.get(instance_id)
        if view is not None and usable(view, context, exclude):
            found[instance_id] = view
            if len(found) == HOLDERS:
                break
    return found


def _some(views: Sequence[InstanceView], most: int, rng: Random) -> Sequence[InstanceView]:
    return views if len(views) <= most else rng.sample(views, most)


def _at_once(
    job: JobView, best_of: Callable[[Sequence[DecodeSide]], Option], decodes: Sequence[DecodeSide]
) -> Option | None:
    """The best way among the decode instances that have room now, if the job meets its targets there.

    The best instance may be worth a wait for one job, but those behind it would wait, too, while the others stand idle.
    """
    roomy = [side for side in decodes if side.room_s <= HOLD_S]
    if not roomy:
        return None
    best = best_of(roomy)
    slo = job.slo
    return best if best.tpot_s <= slo.tpot_s and job.waited_s + best.ttft_s <= slo.ttft_s else None


def _choice(
    best: Option, prefills: Sequence[PrefillSide], decodes: Sequence[DecodeSide], index: ClusterIndex
) -> Choice:
    looked: dict[str, float | str] = {"prefill_candidates": len(prefills), "decode_candidates": len(decodes)}
    figures = {"split": best.split, **figures_of(best), **looked, **_compared(best, index)}
    reasons = (Reason("placement:adaptive", figures),)
    decode = best.decode.view
    if best.prefill is None:
        ttft_s = best.ttft_s - best.hold_s
        return Choice(decode, reasons, ttft_s=ttft_s, hold_s=best.hold_s, has_room=has_room(best))
    lead = int(best.begins_s / best.decode.after_s) if best.decode.after_s > 0.0 else 0
    ttft_s = best.ttft_s - best.hold_s
    return Choice(
        best.prefill.view,
        reasons,
        decode=decode,
        split=best.split,
        lead_steps=lead,
        ttft_s=ttft_s,
        hold_s=best.hold_s,
        has_room=has_room(best),
    )


def _compared(best: Option, index: ClusterIndex) -> dict[str, float | str]:
    """For people: what waits where the prompt begins, what is held of it there, and who else has least before it."""
    decode, prefill = best.decode, best.prefill
    side: PrefillSide | DecodeSide = prefill or decode
    figures: dict[str, float | str] = {
        "chosen": side.view.info.instance_id,
        "decode": decode.view.info.instance_id,
        "wait_s": round(side.wait_s, 4),
        "saved_tokens": side.saved,
    }
    if prefill is not None and (other := _next_best(prefill.instance_id, index)) is not None:
        figures["runner_up"], figures["runner_up_wait_s"] = other.instance_id, round(other.wait_s, 4)
    return figures


def _next_best(chosen: str, index: ClusterIndex) -> PrefillSide | None:
    """The prefill instance with least before it, but for the chosen one; of each class of speed two are looked at."""
    least: tuple[float, str] | None = None
    for keys in index.backlog.classes():
        for waits_s, _, instance_id in keys[:2]:
            if instance_id != chosen and (least is None or waits_s < least[0]):
                least = waits_s, instance_id
    view = index.prefill.get(least[1]) if least is not None else None
    return PrefillSide.of(view) if view is not None else None


def _check(name: str, candidates: int) -> None:
    if candidates < 1:
        raise InvalidRequest(f"{name}: candidates must be at least 1, not {candidates}")
