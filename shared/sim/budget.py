"""How many prompt tokens an engine's next step may compute."""

from collections.abc import Iterable
from math import inf

from shared.domain.rates import StepRates
from shared.policy.step_budget import StepLoad, gap_target_s, joining_gap_s, prefill_tokens
from shared.sim.group import DecodeGroup
from shared.sim.request import Leg
from shared.sim.spec import EngineLimits


def prompt_budget(
    limits: EngineLimits,
    rates: StepRates | None,
    group: DecodeGroup,
    running: Iterable[Leg],
    prefilling: dict[Leg, None],
    coming: Iterable[Leg],
    joined: Iterable[Leg],
    stream: Leg | None,
    next_prompt: Leg | None,
    now: float,
) -> int:
    """What the decodes leave of the step's tokens, or less for the sake of their TPOT and gap targets, and of those of
    the streams that join: of `joined`, whose first step here this is, of `coming`, whose KV is under way, and of the
    next that waits; and for those that may be handed over while prompts are computed that are to decode here.
    """
    most = limits.batched_tokens - group.count
    if not limits.step_budget:
        return most
    ends = [leg for leg in prefilling if leg.missing == 1 and leg.computed]  # a token after some context: a decode
    prompts = [leg for leg in prefilling if leg.decodes and leg not in ends]
    if len(prefilling) == len(ends) and next_prompt is not None and next_prompt.decodes:
        prompts = [next_prompt]
    here = [leg for leg in joined if leg.started]
    decodes = [leg for leg in running if leg not in prefilling and leg not in here]
    decodes += [leg for leg in ends if leg.decodes and leg not in here]
    joining = [leg for leg in coming if leg.started]
    joining += [stream] if stream is not None else []
    gaps_s = [gap_target_s(leg.request.job.slo) for leg in (*prompts, *decodes)]
    gaps_s += [joining_gap_s(leg.request.job.slo, _waited_s(leg, now), here=True) for leg in here]
    gaps_s += [joining_gap_s(leg.request.job.slo, _waited_s(leg, now), here=False) for leg in joining]
    before = max((leg.computed for leg in prefilling if leg not in ends), default=0)
    context = group.context_tokens + sum(leg.computed for leg in ends if leg.decodes)
    context += sum(leg.tokens for leg in joining)
    load = StepLoad(len(decodes) + len(here) + len(joining), context, min(gaps_s, default=inf), before)
    return prefill_tokens(rates, load, max(0, most - len(ends))) + len(ends)


def _waited_s(leg: Leg, now: float) -> float:
    """Since it was handed over; of one that was preempted here nothing is counted."""
    return now - leg.last_token_s if leg.remote else 0.0
