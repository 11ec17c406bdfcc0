"""Placement, split and dispatch as one decision: the least harm of a few candidates, by one estimate."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.answers import UNKNOWN_LENGTHS, within
from shared.policy.choice import Choice, context_of, usable
from shared.policy.dispatch import DispatchPolicy
from shared.policy.estimate import DecodeSide, PrefillSide, usual_wait_s
from shared.policy.index import ClusterIndex, ReadySet
from shared.policy.options import Option, figures_of, kept_to, local, options, total_of
from shared.policy.prefix_index import saved_tokens
from shared.policy.split import Split, SplitChoice

HOLDERS, LOOKED_AT = 2, 6  # of the prompt's prefix: so many candidates of a role, among so many of both
RANDOM = 2  # decode instances that are looked at beside the least pressed ones


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Of a few candidates and splits (none, balanced, all) the least harm.

    Candidates are the prefill instance of each class of speed that would be through first, and the least pressed decode
    instance of each class, at most `candidates` of each; the two of either role that hold most of the prompt; and two
    decode instances at random. Harm is how likely targets are missed by the job itself, and how much likelier by those
    whom it delays (see `estimate`): prefill queue, links, decodes, room.
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
        own, usual = answers.expected(job), answers.all
        others = index.ledger.needs.others(job.slo, now)
        if dispatch is None:
            views = _decodes(job, index, exclude, rng, self.candidates)
        else:
            chosen = dispatch.choose(job, index.decode.views, exclude, now, rng)
            views = [chosen.instance] if chosen is not None else []
        if not views:
            return None
        found = [] if index.coupled else _prefills(job, index, exclude, self.candidates)
        prefills = [PrefillSide.of(view, saved_at(index, view, job)) for view in found]
        spread_s = usual_wait_s(prefills)
        decodes = [DecodeSide.of(view, job, own, usual, saved_at(index, view, job), others, spread_s) for view in views]
        if split is None or not prefills:
            ways = options(job, own, prefills, decodes)
        else:
            ways = kept_to(split, job, own, prefills, decodes, now, rng)
        return _choice(min(ways, key=total_of), len(prefills), len(decodes))


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
        sides = [DecodeSide.of(view, job, own, UNKNOWN_LENGTHS, job.prompt_tokens) for view in able]
        best = min((local(job, side) for side in sides), key=total_of)
        figures: dict[str, float | str] = {"chosen": best.decode.view.info.instance_id, **figures_of(best)}
        return Choice(best.decode.view, (Reason("dispatch:adaptive", figures),))


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


def _prefills(job: JobView, index: ClusterIndex, exclude: Collection[str], most: int) -> list[InstanceView]:
    """The best of each class of speed, at most `most`, by when they would have computed the prompt."""
    backlog, get, tokens = index.backlog, index.prefill.get, job.prompt_tokens
    context = context_of(job, Role.PREFILL)
    scored: list[tuple[float, int, InstanceView]] = []
    for keys in backlog.classes():
        for waits_s, _, instance_id in keys:
            view = get(instance_id)
            if view is not None and usable(view, context, exclude):
                scored.append((waits_s + backlog.cost_s(instance_id, tokens), len(scored), view))
                break
    scored.sort()
    found = {view.info.instance_id: view for _, _, view in scored[:most]}
    for view in _holders(job, index, index.prefill, context, exclude):
        found[view.info.instance_id] = view
    return list(found.values())


def _decodes(job: JobView, index: ClusterIndex, exclude: Collection[str], rng: Random, most: int) -> list[InstanceView]:
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
    for view in _holders(job, index, index.decode, context, exclude):
        found[view.info.instance_id] = view
    for _ in range(RANDOM):
        view = views[int(rng.random() * len(views))]
        if usable(view, context, exclude):
            found[view.info.instance_id] = view
    return list(found.values())


def saved_at(index: ClusterIndex, view: InstanceView, job: JobView) -> int:
    """Prompt tokens whose KV the instance holds."""
    return saved_tokens(index.prefixes, view, job) if job.prefix else 0


def _holders(
    job: JobView, index: ClusterIndex, of: ReadySet, context: int, exclude: Collection[str]
) -> list[InstanceView]:
    """Those of one role that hold most of the prompt."""
    if not job.prefix:
        return []
    known = (of.get(instance_id) for instance_id, _ in index.prefixes.holders(job.prefix, LOOKED_AT))
    return [view for view in known if view is not None and usable(view, context, exclude)][:HOLDERS]


def _some(views: Sequence[InstanceView], most: int, rng: Random) -> Sequence[InstanceView]:
    return views if len(views) <= most else rng.sample(views, most)


def _choice(best: Option, prefills: int, decodes: int) -> Choice:
    looked: dict[str, float | str] = {"prefill_candidates": prefills, "decode_candidates": decodes}
    reasons = (Reason("placement:adaptive", {"split": best.split, **figures_of(best), **looked}),)
    decode = best.decode.view
    if best.prefill is None:
        return Choice(decode, reasons)
    return Choice(best.prefill.view, reasons, decode=decode, split=best.split)


def _check(name: str, candidates: int) -> None:
    if candidates < 1:
        raise InvalidRequest(f"{name}: candidates must be at least 1, not {candidates}")
