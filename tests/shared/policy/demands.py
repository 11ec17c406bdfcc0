"""Demands, and instances with step times, for tests of what roles make of a demand."""

import msgspec

from shared.domain.demand import Demand
from shared.domain.rates import LinkRate, Rates, StepForm, StepRates


def rates(slower: float = 1.0) -> Rates:
    """Some accelerator: 10,000 prompt tokens a second, decode steps of 10 ms and more."""
    first = StepForm(0.01 * slower, 1e-4 * slower)
    step = StepForm(0.01 * slower, 0.0, 0.0, 1e-4 * slower, 1e-7 * slower)
    mixed = StepForm(0.012 * slower, 1.1e-4 * slower, 0.0, 1e-4 * slower, 1e-7 * slower)
    return Rates(step=StepRates(first, step, mixed), link=LinkRate(2e9, 1e-3))


DEMAND = Demand(
    rate=20.0,
    burstiness=1.0,
    prompt_tokens=1_000.0,
    fresh_tokens=1_000.0,
    fresh_squares=2e6,
    output_tokens=100.0,
    ttft_s=1.0,
    tpot_s=0.05,
)
FULL = {"split_least": 1.0, "split_most": 1.0}


def demand_of(**changes: float) -> Demand:
    return msgspec.structs.replace(DEMAND, **changes)
