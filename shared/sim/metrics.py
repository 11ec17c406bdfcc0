"""What a run amounts to, as figures; and the highest rate that a cluster serves within its SLO.

Definitions. TTFT: arrival to first token. TPOT: (last − first token's time) / (output tokens − 1), of a request with
two tokens or more. JCT: arrival to last token. ITL: one gap between tokens. The four are of completed requests.
A request meets a target if it completed and its time does not exceed it; with fewer than two tokens there is no TPOT to
miss. It meets the target for ITL if at most one of its gaps in a hundred is longer. SLO attainment counts every request
of the workload: refused, impossible and unfinished ones miss.
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
    """Shares of all requests, 0..1, that met the target of TTFT, of TPOT, of ITL, and all three."""

    ttft: float
    tpot: float
    itl: float
    every: float


def attainment(outcomes: Outcomes, slo: Slo) -> Attainment:
    """How many requests met their SLO."""
    ttft, tpot, itl = outcomes.ttft_met(slo), outcomes.tpot_met(slo), outcomes.itl_met(slo)
    return Attainment(*(float(met.mean()) for met in (ttft, tpot, itl, ttft & tpot & itl)))


def summary(result: SimResult, slo: Slo) -> dict[str, float]:
    """A run's figures by name; the suffix is the unit, shares are 0..1, and what does not exist is NaN.

    {ttft,tpot,jct,itl}_{mean,p50,p90,p99}_s; longest_gap_{mean,p50,p90,p99,max}_s, of each request's longest gap
    between two tokens; requests and how they ended; requests_per_s, output_tokens_per_s and
    tokens_per_s (prompts of completed requests included) over the run's duration; attainment_{ttft,tpot,itl}
    and attainment (all three); utilisation of each instance (share of the duration with a step under way) and its mean;
    cost and what it buys, see `_cost`; resource_s: busy seconds times accelerators, summed (TetriInfer's resource
    usage time); what went over links, and how often requests were preempted, resumed and instances flipped.
    """
    met = attainment(result.outcomes, slo)
    return {
        **_latencies(result),
        **_endings(result.outcomes),
        **_throughput(result),
        "attainment_ttft": met.ttft,
        "attainment_tpot": met.tpot,
        "attainment_itl": met.itl,
        "attainment": met.every,
        **_use(result),
        **_cost(result),
        "duration_s": result.duration_s,
        "events": float(result.events),
    }


def _latencies(result: SimResult) -> dict[str, float]:
    done, outcomes = result.outcomes.completed, result.outcomes
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


def _endings(outcomes: Outcomes) -> dict[str, float]:
    counts = np.bincount(outcomes.status, minlength=len(Status))
    figures = {"requests": float(len(outcomes))}
    figures |= {status.name.lower(): float(counts[status]) for status in Status}
    return figures | {"resumed": float((outcomes.attempts > 1).sum()), "preemptions": float(outcomes.preemptions.sum())}


def _throughput(result: SimResult) -> dict[str, float]:
    requests, output, total = _served(result.outcomes)
    return {
        "requests_per_s": _ratio(requests, result.duration_s),
        "output_tokens_per_s": _ratio(output, result.duration_s),
        "tokens_per_s": _ratio(total, result.duration_s),
    }


def _use(result: SimResult) -> dict[str, float]:
    shares = {f"utilisation_{use.instance_id}": _ratio(use.busy_s, result.duration_s) for use in result.instances}
    return {
        "utilisation_mean": float(np.mean(list(shares.values()))) if shares else float("nan"),
        **shares,
        "resource_s": sum(use.busy_s * use.accelerators for use in result.instances),
        "flips": float(sum(use.flips for use in result.instances)),
        "kv_gb": result.kv_bytes / 1e9,
    }


def _cost(result: SimResult) -> dict[str, float]:
    """Every instance is paid for the whole duration, busy or not; tokens and requests are those of completed ones."""
    requests, output, total = _served(result.outcomes)
    usd = sum(use.price_per_hour for use in result.instances) * result.duration_s / 3600.0
    return {
        "cost_usd": usd,
        "usd_per_million_output_tokens": _ratio(usd, output / 1e6),
        "usd_per_million_tokens": _ratio(usd, total / 1e6),
        "requests_per_usd": _ratio(requests, usd),
        "output_tokens_per_usd": _ratio(output, usd),
    }


def _served(outcomes: Outcomes) -> tuple[float, float, float]:
    """Completed requests, their output tokens, and those with their prompts' tokens."""
    done: NDArray[np.bool_] = outcomes.completed
    output = float(outcomes.output_tokens[done].sum())
    return float(done.sum()), output, output + float(outcomes.prompt_tokens[done].sum())


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest rate (requests a second) found to reach the target, its attainment, and all that was tried.

    rate is 0 when even the lowest rate tried misses the target; attainment is then that rate's. bounded: whether a
    rate that misses it was found; otherwise the true goodput may be higher.
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
    `low` until the target is missed. tolerance: relative width of the last interval, of which the lower end is given.
    Assumes that attainment does not rise with the rate. Where it does in places (small workloads; bursts that fall
    otherwise), the answer is a rate that reaches the target just below one that misses it, not surely the highest.
    A workload must be long enough: one that a cluster digests at any rate has no goodput, and is not `bounded`.
    """
    if not 0.0 < target <= 1.0 or not tolerance > 0 or not low > 0 or (high is not None and high < low):
        raise InvalidRequest(
            "goodput needs 0 < target <= 1, tolerance > 0 and 0 < low <= high, "
            f"not target {target}, tolerance {tolerance}, low {low}, high {high}"
        )
    search = _Search(run, slo, target)
    if not search.meets(low):
        return search.found(0.0, search.tried[-1][1], bounded=True)
    best, missed = search.bracket(low, high)
    if missed is None:
        return search.found(best, dict(search.tried)[best], bounded=False)
    while missed - best > tolerance * missed:
        middle = (best + missed) / 2.0
        if search.meets(middle):
            best = middle
        else:
            missed = middle
    return search.found(best, dict(search.tried)[best], bounded=True)


class _Search:
    def __init__(self, run: Callable[[float], SimResult], slo: Slo, target: float) -> None:
        self._run = run
        self._slo = slo
        self._target = target
        self.tried: list[tuple[float, float]] = []

    def meets(self, rate: float) -> bool:
        share = attainment(self._run(rate).outcomes, self._slo).every
        self.tried.append((rate, share))
        return share >= self._target

    def bracket(self, low: float, high: float | None) -> tuple[float, float | None]:
        """A rate that meets the target and one that misses it, None if there is none."""
        if high is not None:
            return (high, None) if self.meets(high) else (low, high)
        for _ in range(_DOUBLINGS):
            if not self.meets(2.0 * low):
                return low, 2.0 * low
            low *= 2.0
        return low, None

    def found(self, rate: float, share: float, bounded: bool) -> Goodput:
        return Goodput(rate, share, bounded, tuple(self.tried))
