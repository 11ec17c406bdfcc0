"""Comparison of policies: goodput on a ladder of rates (of one policy, of the best in a scenario, of the best over all
scenarios), and latencies side by side at one rate.

The search relies on monotony: a policy that misses the target at a rate misses it at every higher rate. One run just
above the best policy's goodput therefore shows that another policy is not better.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isfinite, log
from statistics import fmean, median
from typing import Any

import numpy as np

from shared.domain.job import Slo
from shared.sim.metrics import attainment, summary
from shared.sim.outcomes import SimResult
from tools.calibrate.target import Sample

LOWEST = 0.02  # of the rate from which a search sets out: what serves less counts as nothing
STRIDE = 1.25  # times the rate, the first of a search
SCREENED_AT = 0.85  # of the rate from which a race sets out
AT_ONCE = 4  # scenarios
Meets = Callable[[float], bool]  # whether the target is met at a rate


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rates step^rung; a search sets out from the rung `start`."""

    step: float
    start: int

    @classmethod
    def near(cls, rate: float, step: float) -> "Ladder":
        return cls(step, round(log(rate) / log(step)))

    @property
    def lowest(self) -> int:
        return self.start + floor(log(LOWEST) / log(self.step))

    def rate(self, rung: int) -> float:
        """Requests a second; 0 below the lowest rung."""
        return float(self.step**rung) if rung >= self.lowest else 0.0

    def rungs(self, times: float) -> int:
        """From a rate to so many times as much; at least one."""
        return max(1, ceil(log(times) / log(self.step)))


@dataclass(frozen=True, slots=True)
class Bracket:
    """What is known of a goodput: the target is met at the rung `low`, missed at `high`.

    low is below the ladder while nothing was met, high is None while nothing was missed.
    """

    ladder: Ladder
    low: int
    high: int | None = None

    @classmethod
    def unknown(cls, ladder: Ladder) -> "Bracket":
        return cls(ladder, ladder.lowest - 1)

    @property
    def exact(self) -> bool:
        """Whether no rung is left between."""
        return self.high is not None and self.high - self.low <= 1

    @property
    def least(self) -> float:
        return self.ladder.rate(self.low)

    @property
    def most(self) -> float:
        return self.ladder.rate(self.high - 1) if self.high is not None else float("inf")

    @property
    def next(self) -> int:
        """The rung to try: outwards from the start, further each time, then by halves."""
        start, stride, met = self.ladder.start, self.ladder.rungs(STRIDE), self.low >= self.ladder.lowest
        if self.high is None:
            return self.low + max(stride, self.low - start) if met else start
        if not met and self.high > self.ladder.lowest:
            return max(self.ladder.lowest, self.high - max(stride, start - self.high))
        return (self.low + self.high) // 2

    def tried(self, rung: int, meets: Meets) -> "Bracket":
        """After a run at a rung between the two; unchanged where the bracket already answers it."""
        if rung <= self.low or (self.high is not None and rung >= self.high):
            return self
        return replace(self, low=rung) if meets(self.ladder.rate(rung)) else replace(self, high=rung)

    def settled(self, meets: Meets) -> "Bracket":
        found = self
        while not found.exact:
            found = found.tried(found.next, meets)
        return found


def goodput(meets: Meets, near: float, step: float) -> float:
    """The highest rate of a ladder at which the target is met, just below one at which it is missed; 0 if none is."""
    return Bracket.unknown(Ladder.near(near, step)).settled(meets).least


def race(policies: Iterable[str], meets: Callable[[str], Meets], ladder: Ladder) -> dict[str, Bracket]:
    """Brackets of all, in which the highest goodput is exact and none of the others can be higher.

    All are tried at SCREENED_AT of the ladder's start, then, the survivors first, at the rung above the best so far:
    a policy that misses it is out, a policy that meets it is the best so far.
    """
    screen = ladder.start - ladder.rungs(1.0 / SCREENED_AT)
    brackets = {policy: Bracket.unknown(ladder).tried(screen, meets(policy)) for policy in policies}
    best: Bracket | None = None
    for policy in sorted(brackets, key=lambda policy: -brackets[policy].low):
        found = brackets[policy]
        if best is not None:
            found = found.tried(best.low + 1, meets(policy))
        if best is None or found.low > best.low:
            best = found = found.settled(meets(policy))
        brackets[policy] = found
    return brackets


def best_mean(
    brackets: Mapping[str, Mapping[str, Bracket]],
    worth: Mapping[str, float],
    cost: Mapping[str, float],
    narrowed: Callable[[str, dict[str, Bracket]], Mapping[str, Bracket]],
) -> tuple[str, Mapping[str, Bracket]]:
    """The policy with the highest mean over scenarios of goodput times `worth`, and its goodput in each, exactly.

    brackets: by policy, then by scenario. Always the policy that may be the best by its upper bound is narrowed, by a
    run in each of the scenarios where its bracket is widest for what a run costs, until that policy's are exact: then
    the bounds of all others lie below.
    """
    known = {policy: dict(of) for policy, of in brackets.items()}

    def bound(policy: str) -> float:
        return fmean(worth[name] * bracket.most for name, bracket in known[policy].items())

    while True:
        first = max(known, key=bound)
        of = known[first]
        left = [name for name, bracket in of.items() if not bracket.exact]
        if not left:
            return first, of
        left.sort(key=lambda name: -worth[name] * (of[name].most - of[name].least) / cost[name])
        of |= narrowed(first, {name: of[name] for name in left[:AT_ONCE]})


# Policies side by side at one rate: latencies that readers of answers feel, one row a policy.

Row = dict[str, Any]  # by column; seconds, and shares in 0..1
COLUMNS = ("ttft_p50_s", "ttft_p90_s", "jct_p50_s", "jct_p90_s", "itl_p99_s", "longest_gap_p90_s", "longest_gap_max_s")


def of_result(head: Mapping[str, Any], result: SimResult, slo: Slo) -> Row:
    figures = summary(result, slo)
    return _row(head, {name: figures[name] for name in COLUMNS}, attainment(result.outcomes, slo).every)


def of_samples(head: Mapping[str, Any], samples: Sequence[Sample], slo: Slo) -> Row:
    """Of a live run, as its clients saw it."""
    longest = [gap_s for one in samples if (gap_s := one.longest_gap_s) is not None]
    figures = {
        **_shares("ttft", [one.ttft_s for one in samples], 50, 90),
        **_shares("jct", [one.jct_s for one in samples], 50, 90),
        **_shares("itl", [gap_s for one in samples for gap_s in one.gaps_s], 99),
        **_shares("longest_gap", longest, 90),
        "longest_gap_max_s": max(longest, default=float("nan")),
    }
    return _row(head, figures, share_within(samples, slo))


def share_within(samples: Sequence[Sample], slo: Slo) -> float:
    """The share of requests within their targets."""
    return sum(one.met(slo) for one in samples) / len(samples)


def faster(row: Row, factor: float) -> Row:
    """A row whose times are so many times as short."""
    short = {name: round(row[name] / factor, 4) for name in COLUMNS if row[name] is not None}
    return {**row, **short}


def median_of(rows: Sequence[Row]) -> Row:
    """By column; an empty cell where no row has a figure."""
    numbers = {name: [row[name] for row in rows if row[name] is not None] for name in rows[0]}
    return {name: round(median(values), 4) if values else None for name, values in numbers.items()}


def _shares(name: str, values: Sequence[float], *shares: int) -> dict[str, float]:
    return {f"{name}_p{share}_s": float(np.percentile(values, share)) if values else float("nan") for share in shares}


def _row(head: Mapping[str, Any], figures: Mapping[str, float], attained: float) -> Row:
    known = {name: round(value, 4) if isfinite(value := figures[name]) else None for name in COLUMNS}
    return {**head, "attainment": round(attained, 4), **known}
