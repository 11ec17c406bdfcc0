"""Placement, split and dispatch as one decision: the least harm of a few candidates, by one estimate."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.policy.answers import Lengths
from shared.policy.choice import Choice, context_of, usable
from shared.policy.estimate import DecodeSide, DecodeTerms, PrefillSide, harm, link_harm, transfer_s
from shared.policy.index import ClusterIndex

RANDOM = 2  # decode instances that are looked at beside the least pressed ones


class Option(NamedTuple):
    """One way to serve the job, and what it would come to."""

    total: float
    prefill: PrefillSide | None
    decode: DecodeSide
    split: int
    ttft_s: float
    tpot_s: float
    own_ttft: float
    own_tpot: float
    others_prefill: float
    others_link: float
    others_decode: float
    memory: float


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Of a few candidates and splits (none, balanced, all) the least harm.

    Candidates are the prefill instance of each class of speed that would be through first, the least pressed decode
    instance of each class, and two at random; at most `candidates` of each. Harm is how likely targets are missed by
    the job itself, and how much likelier by those whom it delays (see `estimate`): prefill queue, links, decodes, room.
    Source: ours. Cronus 4.2 for the balanced split, TetriInfer 3.3.4 for few candidates and memory.
    """

    name: ClassVar[str] = "adaptive"
    candidates: int = 4

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
        answers = index.ledger.answers
        own, usual = answers.expected(job), answers.all
        decodes = [DecodeSide.of(v, usual) for v in _decodes(job, index, exclude, rng, self.candidates)]
        if not decodes:
            return None
        prefills = (
            [] if index.coupled else [PrefillSide.of(v) for v in _prefills(job, index, exclude, rng, self.candidates)]
        )
        best: Option | None = None
        for option in options(job, own, prefills, decodes):
            if best is None or option.total < best.total:
                best = option
        assert best is not None
        return _choice(best, len(prefills), len(decodes))


def options(job: JobView, own: Lengths, prefills: Sequence[PrefillSide], decodes: Sequence[DecodeSide]) -> list[Option]:
    """What there is to choose from."""
    prompt = job.prompt_tokens
    found = [_option(job, own, None, decode, 0, 0.0, decode.terms(job, own, 0)) for decode in decodes]
    for prefill in prefills:
        all_s = prefill.own_s(prompt)
        for decode in decodes:
            found.append(_option(job, own, prefill, decode, prompt, all_s, decode.terms(job, own, prompt)))
            split = balanced(prompt, prefill, decode, all_s)
            if 0 < split < prompt:
                terms = decode.terms(job, own, split)
                found.append(_option(job, own, prefill, decode, split, prefill.own_s(split), terms))
    return found


def balanced(prompt: int, prefill: PrefillSide, decode: DecodeSide, all_s: float) -> int:
    """The split for which both sides take about as long, their queues included. Source: Cronus 4.2, in closed form."""
    rates, budget = decode.rates, decode.budget
    token_s = rates.mixed_s(budget, prompt / 2.0, decode.running, decode.context) / budget
    wait_s = decode.queued * token_s
    each_s = all_s / prompt
    split = (wait_s - prefill.wait_s + prompt * token_s) / (each_s + token_s)
    return max(0, min(prompt, round(split)))


def _option(
    job: JobView,
    own: Lengths,
    prefill: PrefillSide | None,
    decode: DecodeSide,
    split: int,
    own_s: float,
    terms: DecodeTerms,
) -> Option:
    slo = job.slo
    others_prefill = others_link = ready_s = arrives_s = 0.0
    tpot_s = terms.tpot_s
    if prefill is not None:
        ready_s = prefill.wait_s + own_s
        others_prefill = prefill.harm(own_s, slo)
        waits_s, moves_s = transfer_s(prefill.view, decode.view, split)
        # Chunks leave while the prompt is computed; the last one after it.
        last_s = moves_s * min(1.0, prefill.chunk / split)
        arrives_s = max(ready_s + last_s, waits_s + moves_s)
        others_link = link_harm(waits_s, moves_s, tpot_s, decode.brief, slo)
    if prefill is not None and split >= job.prompt_tokens:
        ttft_s = ready_s
        tpot_s += max(terms.room_s, arrives_s - ready_s) / own.brief
    else:
        ttft_s = max(arrives_s, terms.room_s) + terms.rest_s
    own_ttft, own_tpot = harm(ttft_s / slo.ttft_s), harm(tpot_s / slo.tpot_s)
    total = own_ttft + own_tpot + others_prefill + others_link + terms.others + terms.memory
    return Option(
        total,
        prefill,
        decode,
        split,
        ttft_s,
        tpot_s,
        own_ttft,
        own_tpot,
        others_prefill,
        others_link,
        terms.others,
        terms.memory,
    )


def _prefills(
    job: JobView, index: ClusterIndex, exclude: Collection[str], rng: Random, most: int
) -> list[InstanceView]:
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
    return [view for _, _, view in scored[:most]]


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
    for _ in range(RANDOM):
        view = views[int(rng.random() * len(views))]
        if usable(view, context, exclude):
            found[view.info.instance_id] = view
    return list(found.values())


def _choice(best: Option, prefills: int, decodes: int) -> Choice:
    figures: dict[str, float | str] = {
        "split": best.split,
        "harm": round(best.total, 6),
        "ttft_s": round(best.ttft_s, 4),
        "tpot_s": round(best.tpot_s, 5),
        "own_ttft": round(best.own_ttft, 6),
        "own_tpot": round(best.own_tpot, 6),
        "others_prefill": round(best.others_prefill, 6),
        "others_link": round(best.others_link, 6),
        "others_decode": round(best.others_decode, 6),
        "memory": round(best.memory, 6),
        "prefill_candidates": prefills,
        "decode_candidates": decodes,
    }
    reasons = (Reason("placement:adaptive", figures),)
    decode = best.decode.view
    if best.prefill is None:
        return Choice(decode, reasons)
    return Choice(best.prefill.view, reasons, decode=decode, split=best.split)
