"""The ways in which a job can be served by a few candidates, and what each would come to."""

from collections.abc import Sequence
from random import Random

import msgspec

from shared.domain.job import FirstTokenOut, JobView
from shared.policy.answers import Lengths
from shared.policy.estimate import DecodeSide, DecodeTerms, Part, PrefillSide, link_harm
from shared.policy.harm import harm
from shared.policy.split import Split

HOLD_S = 0.02  # a wait for room that is not worth waiting for in the gateway: there is room
ROUNDING = 1e-9  # by which sums in another order may differ


class Option(msgspec.Struct, frozen=True, gc=False):
    """One way to serve the job, and what it would come to. In `total` harm to others counts by their weight.

    own_pause: harm of a pause between the first token and the second. begins_s: until its KV may take blocks. hold_s:
    after which the job should begin, so that its KV finds room when it is computed.
    """

    total: float
    prefill: PrefillSide | None
    decode: DecodeSide
    split: int
    ttft_s: float
    tpot_s: float
    own_ttft: float
    own_tpot: float
    own_pause: float
    begins_s: float
    hold_s: float
    others_prefill: float
    others_link: float
    others_decode: float
    memory: float


def options(job: JobView, own: Lengths, prefills: Sequence[PrefillSide], decodes: Sequence[DecodeSide]) -> list[Option]:
    """What there is to choose from: every decode instance with none of the prompt, each prefill instance with all of it
    and the best decode instance, the best one with each of these, and the balanced part for the most promising pairs.
    """
    prompt = job.prompt_tokens
    nones = _nones(job, decodes)
    if not prefills:
        return nones
    after = [(decode, decode.terms(prompt)) for decode in decodes]
    slo = decodes[0].slo
    parts = [(prefill, prefill.part(prompt, slo)) for prefill in prefills]
    parts.sort(key=lambda one: one[1].ready_s + one[1].others * slo.ttft_s)
    alls = _alls(job, own, parts, after)
    return [*nones, *alls, *_balanced(job, own, nones, alls)]


def _nones(job: JobView, decodes: Sequence[DecodeSide]) -> list[Option]:
    """None of the prompt: each decode instance, but for those whose harm to others is more than the best's in all."""
    found: list[Option] = []
    best, weight = float("inf"), decodes[0].slo.weight / job.slo.weight
    for decode in decodes:
        terms = decode.terms(0)
        if weight * (terms.others + terms.memory) - ROUNDING > best:
            continue
        option = local(job, decode, terms)
        found.append(option)
        best = min(best, option.total)
    return found


def _alls(
    job: JobView,
    own: Lengths,
    parts: Sequence[tuple[PrefillSide, Part]],
    after: Sequence[tuple[DecodeSide, DecodeTerms]],
) -> list[Option]:
    """All of the prompt: the first prefill instance with each decode instance, the others with the best of these.

    A pair is left out where what does not depend on the link is more than all of the best so far.
    """
    (prefill, part), *others = parts
    decode, terms = after[0]
    best, partner = pair(job, own, prefill, part, decode, terms), 0
    found, weight = [best], decode.slo.weight / job.slo.weight
    surely = harm(part.ready_s / job.slo.ttft_s) + weight * part.others - ROUNDING
    for at in range(1, len(after)):
        decode, terms = after[at]
        if surely + weight * (terms.others + terms.memory) > best.total:
            continue
        option = pair(job, own, prefill, part, decode, terms)
        found.append(option)
        if option.total < best.total:
            best, partner = option, at
    decode, terms = after[partner]
    harmed = weight * (terms.others + terms.memory) - ROUNDING
    for prefill, part in others:
        if harm(part.ready_s / job.slo.ttft_s) + weight * part.others + harmed <= best.total:
            found.append(pair(job, own, prefill, part, decode, terms))
    return found


def _balanced(job: JobView, own: Lengths, nones: Sequence[Option], alls: Sequence[Option]) -> list[Option]:
    """The balanced parts: of the best prefill instance with the best decode instances of either extreme."""
    best, found = min(alls, key=total_of), []
    partners = {id(one.decode): one.decode for one in (min(nones, key=total_of), best)}
    prefill = best.prefill
    assert prefill is not None
    for decode in partners.values():
        split = balanced(job.prompt_tokens, prefill, decode)
        if 0 < split < job.prompt_tokens:
            part, terms = prefill.part(split, decode.slo), decode.terms(split)
            found.append(pair(job, own, prefill, part, decode, terms))
    return found


def kept_to(
    split: Split,
    job: JobView,
    own: Lengths,
    prefills: Sequence[PrefillSide],
    decodes: Sequence[DecodeSide],
    now: float,
    rng: Random,
) -> list[Option]:
    """The options that a fixed policy for splits leaves."""
    found = []
    for prefill in prefills:
        for decode in decodes:
            tokens = split.choose(job, prefill.view, decode.view, now, rng).tokens
            if tokens > 0:
                part, terms = prefill.part(tokens, decode.slo), decode.terms(tokens)
                found.append(pair(job, own, prefill, part, decode, terms))
            else:
                found.append(local(job, decode, decode.terms(0)))
    return found


def balanced(prompt: int, prefill: PrefillSide, decode: DecodeSide) -> int:
    """The split for which both sides take about as long, their queues included. Source: Cronus 4.2, in closed form."""
    each_s = prefill.own_s(prompt) / prompt
    split = (decode.wait_s - prefill.wait_s + prompt * decode.token_s) / (each_s + decode.token_s)
    return max(0, min(prompt, round(split)))


def local(job: JobView, decode: DecodeSide, terms: DecodeTerms) -> Option:
    """The decode instance does it all; `terms` are those without a part computed elsewhere."""
    slo = job.slo
    ttft_s = terms.room_s + terms.rest_s
    own_ttft, own_tpot = harm(ttft_s / slo.ttft_s), harm(terms.tpot_s / slo.tpot_s)
    total = own_ttft + own_tpot + decode.slo.weight / slo.weight * (terms.others + terms.memory)
    return Option(
        total,
        None,
        decode,
        0,
        ttft_s,
        terms.tpot_s,
        own_ttft,
        own_tpot,
        0.0,
        0.0,
        terms.room_s,
        0.0,
        0.0,
        terms.others,
        terms.memory,
    )


def pair(
    job: JobView, own: Lengths, prefill: PrefillSide, part: Part, decode: DecodeSide, terms: DecodeTerms
) -> Option:
    """The prefill instance does a part of the prompt, or all of it, and the decode instance the rest."""
    slo, ttft_s, tpot_s = job.slo, part.ready_s, terms.tpot_s
    waits_s, moves_s = decode.transfer_s(prefill, part.tokens - decode.saved)
    # Chunks leave while the prompt is computed; the last one after it.
    arrives_s = max(part.ready_s + moves_s * part.last_share, waits_s + moves_s)
    own_pause = 0.0
    hold_s = max(0.0, terms.room_s - part.begins_s)
    if part.tokens >= job.prompt_tokens:
        pause_s = arrives_s - part.ready_s
        ttft_s += hold_s
        if slo.first_token is FirstTokenOut.SMOOTH:
            ttft_s += pause_s
        else:
            tpot_s += pause_s / own.brief
            own_pause = harm(pause_s / slo.itl_s)
    else:
        ttft_s = max(arrives_s, terms.room_s) + terms.rest_s
    link = link_harm(waits_s, moves_s, tpot_s, decode.usual.brief, decode.slo) if waits_s > 0.0 else 0.0
    own_ttft, own_tpot = harm(ttft_s / slo.ttft_s), harm(tpot_s / slo.tpot_s)
    harmed = part.others + link + terms.others + terms.memory
    total = own_ttft + own_tpot + own_pause + decode.slo.weight / slo.weight * harmed
    return Option(
        total,
        prefill,
        decode,
        part.tokens,
        ttft_s,
        tpot_s,
        own_ttft,
        own_tpot,
        own_pause,
        part.begins_s,
        hold_s,
        part.others,
        link,
        terms.others,
        terms.memory,
    )


def has_room(option: Option) -> bool:
    """Whether its KV finds room to the end of the answer when it comes to its decode instance."""
    return option.hold_s <= HOLD_S


def total_of(option: Option) -> float:
    """Its harm in all."""
    return option.total


def figures_of(option: Option) -> dict[str, float | str]:
    """What was predicted, and the terms of its harm."""
    return {
        "ttft_s": round(option.ttft_s, 4),
        "tpot_s": round(option.tpot_s, 5),
        "harm": round(option.total, 6),
        "own_ttft": round(option.own_ttft, 6),
        "own_tpot": round(option.own_tpot, 6),
        "own_pause": round(option.own_pause, 6),
        "others_prefill": round(option.others_prefill, 6),
        "others_link": round(option.others_link, 6),
        "others_decode": round(option.others_decode, 6),
        "memory": round(option.memory, 6),
    }
