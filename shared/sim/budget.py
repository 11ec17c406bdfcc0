"""How many prompt tokens an engine's next step may compute."""

from collections.abc import Iterable
from math import inf

from shared.domain.rates import StepRates
from shared.policy.step_budget import StepLoad, prefill_tokens
from shared.sim.group import DecodeGroup
from shared.sim.request import Leg
from shared.sim.spec import EngineLimits


def prompt_budget(
    limits: EngineLimits,
    rates: StepRates | None,
    group: DecodeGroup,
    running: Iterable[Leg],
    prefilling: dict[Leg, None],
) -> int:
    """What the decodes leave of the step's tokens, or less for the sake of their TPOT targets."""
    most = limits.batched_tokens - group.count
    if not limits.step_budget:
        return most
    targets = (leg.request.job.slo.tpot_s for leg in running if leg not in prefilling)
    before = max((leg.computed for leg in prefilling), default=0)
    load = StepLoad(group.count, group.context_tokens, min(targets, default=inf), before)
    return prefill_tokens(rates, load, most)
