"""How many prompt tokens an engine's next step may compute."""

from collections.abc import Iterable
from math import inf

from shared.domain.rates import StepRates
from shared.policy.step_budget import StepLoad, gap_target_s, prefill_tokens
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
    stream: Leg | None,
) -> int:
    """What the decodes leave of the step's tokens, or less for the sake of their TPOT and gap targets, and of those of
    the streams that are about to join: of `coming`, whose KV is under way, and of the next that waits.
    """
    most = limits.batched_tokens - group.count
    if not limits.step_budget:
        return most
    joining = [leg for leg in coming if leg.started]
    joining += [stream] if stream is not None else []
    decodes = (leg for leg in running if leg not in prefilling)
    gap_s = min((gap_target_s(leg.request.job.slo) for leg in (*decodes, *joining)), default=inf)
    before = max((leg.computed for leg in prefilling), default=0)
    context = group.context_tokens + sum(leg.tokens for leg in joining)
    load = StepLoad(group.count + len(joining), context, gap_s, before)
    return prefill_tokens(rates, load, most)
