"""A run in figures, and the highest rate that a cluster serves within its SLO.

TTFT, TPOT, JCT and ITL (see the glossary) are of completed requests. A request meets a target if it completed and its
time does not exceed the target; with fewer than two tokens there is no TPOT to miss. It meets the ITL target if at most
one in a hundred of its gaps is longer. SLO attainment counts every request of the workload: refused, impossible and
unfinished requests miss.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.domain.job import Slo
from shared.errors import InvalidRequest
from shared.sim.outcomes import Outcomes, SimResult, Status
from shared.sim.workload import Times

_PERCENTILES = (50, 90, 99)
_DOUBLINGS = 40  # of the search for a rate that is too high


@dataclass(frozen=True, slots=True)
class Attainment:
    """Shares of all requests, 0..1, that met the target of TTFT, of TPOT, of ITL, and all three (`every`)."""

    ttft: float
    tpot: float
    itl: float
    every: float


def attainment(outcomes: Outcomes, slo: Slo) -> Attainment:
    ttft, tpot, itl = outcomes.ttft_met(slo), outcomes.tpot_met(slo), outcomes.itl_met(slo)
    return Attainment(*(float(met.mean()) for met in (ttft, tpot, itl, ttft & tpot & itl)))


def summary(result: SimResult, slo: Slo) -> dict[str, float]:
    """A run's figures by name; the suffix is the unit, shares are 0..1, and what does not exist is NaN.

    {ttft,tpot,jct,itl}_{mean,p50,p90,p99}_s; longest_gap_{mean,p50,p90,p99,max}_s, of each request's longest gap
    between two tokens; requests and how they ended; requests_per_s, output_tokens_per_s and tokens_per_s (prompts of
    completed requests included) over the run's duration; attainment_{ttft,tpot,itl} and attainment (all three);
    utilisation of each instance (share of the duration with a step under way) and its mean; cost and what it buys, when
    each instance is paid for the whole duration, busy or not; resource_s: busy seconds times accelerators, summed
    (TetriInfer's resource usage time); bytes over links; and counts of preemptions, resumes and flips.
    """
    outcomes, instances, duration_s = result.outcomes, result.instances, result.duration_s
    met = attainment(outcomes, slo)
    done: NDArray[np.bool_] = outcomes.completed
    requests, output = float(done.sum()), float(outcomes.output_tokens[done].sum())
    tokens = output + float(outcomes.prompt_tokens[done].sum())
    endings = np.bincount(outcomes.status, minlength=len(Status))
    shares = {f"utilisation_{use.instance_id}": _ratio(use.busy_s, duration_s) for use in instances}
    usd = sum(use.price_per_hour for use in instances) * duration_s / 3600.0
    return {
        **_latencies(result, done),
        "requests": float(len(outcomes)),
        **{status.name.lower(): float(endings[status]) for status in Status},
        "resumed": float((outcomes.attempts > 1).sum()),
        "preemptions": float(outcomes.preemptions.sum()),
        "requests_per_s": _ratio(requests, duration_s),
        "output_tokens_per_s": _ratio(output, duration_s),
        "tokens_per_s": _ratio(tokens, duration_s),
        "attainment_ttft": met.ttft,
        "attainment_tpot": met.tpot,
        "attainment_itl": met.itl,
        "attainment": met.every,
        "utilisation_mean": float(np.mean(list(shares.values()))) if shares else float("nan"),
        **shares,
        "resource_s": sum(use.busy_s * use.accelerators for use in instances),
        "flips": float(sum(use.flips for use in instances)),
        "kv_gb": result.kv_bytes / 1e9,
        "cost_usd": usd,
        "usd_per_million_output_tokens": _ratio(usd, output / 1e6),
        "usd_per_million_tokens": _ratio(usd, tokens / 1e6),
        "requests_per_usd": _ratio(requests, usd),
        "output_tokens_per_usd": _ratio(output, usd),
        "duration_s": duration_s,
        "events": float(result.events),
    }


def _latencies(result: SimResult, done: NDArray[np.bool_]) -> dict[str, float]:
    outcomes = result.outcomes
    tpot, gaps = outcomes.tpot_s[done], outcomes.longest_gap_s[np.isfinite(outcomes.longest_gap_s)]
    figures = {
        **_spread("ttft", outcomes.ttft_s[done]),
        **_spread("tpot", tpot[np.isfinite(tpot)]),
        **_spread("jct", outcomes.jct_s[done]),
        **_spread("longest_gap", gaps),
        "longest_gap_max_s": float(gaps.max()) if len(gaps) else float("nan"),
        "itl_mean_s": result.gaps.mean_s,
    }
    return figures | {f"itl_p{share}_s": result.gaps.percentile_s(share / 100.0) for share in _PERCENTILES}


def _spread(name: str, values: Times) -> dict[str, float]:
    """Mean and percentiles (linear between ranks, numpy's default)."""
    keys = [f"{name}_mean_s", *(f"{name}_p{share}_s" for share in _PERCENTILES)]
    if not len(values):
        return dict.fromkeys(keys, float("nan"))
    return dict(zip(keys, [float(values.mean()), *np.percentile(values, _PERCENTILES).tolist()], strict=True))


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest rate (requests a second) that was found to meet the target, its attainment, and all rates tried.

    rate is 0 when even the lowest rate tried misses the target; attainment is then that rate's. bounded: whether a rate
    that misses the target was found; otherwise the true goodput may be higher.
    """

    rate: float
    attainment: float
    bounded: bool
    tried: tuple[tuple[float, float], ...]  # (rate, attainment), in the order of the search


def goodput(
    run: Callable[[float], SimResult],
    slo: Slo,
    target: float = 0.9,
    low: float = 0.1,
    high: float | None = None,
    tolerance: float = 0.02,
) -> Goodput:
    """The highest rate of requests a second at which SLO attainment is at least `target`, by bisection.

    run: simulates a workload at a rate. low, high: rates to search between; without `high` the rate is doubled from
    `low` until the target is missed. tolerance: relative width of the last interval, whose lower end is returned.
    Assumes that attainment does not rise with the rate. Where it does in places (small workloads; bursts that fall
    differently), the answer is a rate that meets the target just below one that misses it, perhaps not the highest.
    The workload must be long enough: one that a cluster serves at any rate has no goodput, and is not `bounded`.
    """
    if not 0.0 < target <= 1.0 or not tolerance > 0 or not low > 0 or (high is not None and high < low):
        raise InvalidRequest(
            "goodput needs 0 < target <= 1, tolerance > 0 and 0 < low <= high, "
            f"not target {target}, tolerance {tolerance}, low {low}, high {high}"
        )
    tried: dict[float, float] = {}

    def meets(rate: float) -> bool:
        tried[rate] = attainment(run(rate).outcomes, slo).every
        return tried[rate] >= target

    def found(rate: float, share: float, bounded: bool) -> Goodput:
        return Goodput(rate, share, bounded, tuple(tried.items()))

    if not meets(low):
        return found(0.0, tried[low], bounded=True)
    best, missed = low, high
    if high is not None and meets(high):
        return found(high, tried[high], bounded=False)
    for _ in range(_DOUBLINGS if missed is None else 0):
        if not meets(2.0 * best):
            missed = 2.0 * best
            break
        best *= 2.0
    if missed is None:
        return found(best, tried[best], bounded=False)
    while missed - best > tolerance * missed:
        middle = (best + missed) / 2.0
        if meets(middle):
            best = middle
        else:
            missed = middle
    return found(best, tried[best], bounded=True)
