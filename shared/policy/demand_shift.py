"""Detects that the demand has changed beyond its noise, from sums over single seconds.

Source: ThunderServe 4 and appendix E (a profiler of prompt and output lengths, whose shifts reschedule the deployment);
arrivals and the detection of shifts are ours.
"""

from collections.abc import Sequence
from math import exp, log, sqrt
from typing import NamedTuple

from shared.domain.demand import DemandSecond, Shift

# Standard errors by which the seconds before and after a shift differ: many windows are compared, and requests are not
# independent. Answers that end together are even less independent: which ones end depends on their lengths.
DEVIATIONS, ANSWERS_DEVIATIONS = 6.0, 7.0
RECENT_S = (2, 15)  # the shortest and the longest recent stretch that is compared with the seconds before it
ANSWERS_RECENT_S = 25  # the longest for answers, which end later
BEFORE_S = 8  # the fewest seconds before it, for lengths
BEFORE_ARRIVALS_S = 20  # and for the rate, which varies more
BEFORE_REQUESTS, RECENT_REQUESTS = 30, 20
# Of answers that began together, the short ones end first: their lengths are compared only where arrivals varied by at
# most this (variance over mean), before and since.
STEADY = 4.0
BLOCK_S = 5  # arrivals in blocks of this length count together, as bursts do
# Standard errors are at least this, in logarithms: a change by less than 28 % (lengths) or 65 % (arrivals) is no shift,
# however certain; roles do not depend on it, or the profile follows by itself.
LENGTH_FLOOR, ARRIVAL_FLOOR = 0.05, 0.1

_SUMMED = ("requests", "prompt_logs", "prompt_log_squares", "ended", "ended_logs", "ended_log_squares")


class _Lengths(NamedTuple):
    """Number of lengths, and sums of their logarithms and of the squares of these."""

    number: float
    logs: float
    squares: float


class _Sums(NamedTuple):
    """Sums over some seconds; of prompts and outputs those of their logarithms."""

    seconds: float
    requests: float
    prompts: float
    prompt_squares: float
    ended: float
    outputs: float
    output_squares: float

    @classmethod
    def over(cls, rows: Sequence[DemandSecond]) -> "_Sums":
        return cls(len(rows), *(sum(getattr(row, name) for row in rows) for name in _SUMMED))

    def plus(self, other: "_Sums", sign: int) -> "_Sums":
        return _Sums(*(a + sign * b for a, b in zip(self, other, strict=True)))

    @property
    def prompt_lengths(self) -> _Lengths:
        return _Lengths(self.requests, self.prompts, self.prompt_squares)

    @property
    def output_lengths(self) -> _Lengths:
        return _Lengths(self.ended, self.outputs, self.output_squares)


class _Change(NamedTuple):
    """What changed, by how many standard errors, how many of them make a shift, and the figure before and after."""

    what: str
    deviations: float
    threshold: float
    before: float
    after: float


def find_shift(seconds: Sequence[DemandSecond]) -> tuple[Shift, int] | None:
    """The clearest change, and the number of seconds since then; None without a change.

    seconds: all since the last shift, oldest first. Source: ours; a likelihood scan for one change point, with
    variances of the lengths' logarithms from within both sides, and of the arrivals from blocks of seconds. Fewer
    arrivals are no shift: a lull does no harm, and the profile of the time between lulls is worth keeping.
    """
    rows = list(seconds)
    if len(rows) < BEFORE_S + RECENT_S[0]:
        return None
    whole, recent, found = _Sums.over(rows), _Sums.over(()), None
    for count in range(1, min(ANSWERS_RECENT_S, len(rows) - BEFORE_S) + 1):
        recent = recent.plus(_Sums.over(rows[-count : len(rows) - count + 1]), 1)
        if count < RECENT_S[0]:
            continue
        before = whole.plus(recent, -1)
        changes = []
        if count <= RECENT_S[1]:
            changes.append(_change("prompts", DEVIATIONS, before.prompt_lengths, recent.prompt_lengths))
        if before.seconds >= BEFORE_ARRIVALS_S and before.requests >= BEFORE_REQUESTS:
            dispersion = _dispersion(rows[:-count])
            if count <= RECENT_S[1]:
                changes.append(_change_of_arrivals(before, recent, dispersion))
            if dispersion <= STEADY and _dispersion(rows[-count:] if count >= 2 * BLOCK_S else rows) <= STEADY:
                changes.append(_change("outputs", ANSWERS_DEVIATIONS, before.output_lengths, recent.output_lengths))
        for change in changes:
            if change.deviations >= change.threshold and (found is None or change.deviations > found[0].deviations):
                found = Shift(change.what, change.before, change.after, float(count), change.deviations), count
    return found


def _change(what: str, threshold: float, before: _Lengths, recent: _Lengths) -> _Change:
    """The change of lengths, with both geometric means."""
    if before.number < BEFORE_REQUESTS or recent.number < RECENT_REQUESTS:
        return _Change(what, 0.0, threshold, 0.0, 0.0)
    was, now = before.logs / before.number, recent.logs / recent.number
    within = before.squares - before.number * was * was + recent.squares - recent.number * now * now
    variance = max(0.0, within) / (before.number + recent.number - 2.0)
    error = sqrt(variance / before.number + variance / recent.number + LENGTH_FLOOR**2)
    return _Change(what, abs(now - was) / error, threshold, exp(was), exp(now))


def _change_of_arrivals(before: _Sums, recent: _Sums, dispersion: float) -> _Change:
    was, now = before.requests / before.seconds, recent.requests / recent.seconds
    expected = was * recent.seconds
    # The variance of a count with mean `expected` is `dispersion` times that, by the seconds before.
    error = sqrt(dispersion / before.requests + dispersion / expected + ARRIVAL_FLOOR**2)
    return _Change("arrivals", log((recent.requests + 0.5) / (expected + 0.5)) / error, DEVIATIONS, was, now)


def _dispersion(rows: Sequence[DemandSecond]) -> float:
    """Variance over mean of the arrivals in blocks of `BLOCK_S` seconds, at least 1; 1 for Poisson arrivals."""
    blocks = [sum(row.requests for row in rows[at : at + BLOCK_S]) for at in range(0, len(rows) - BLOCK_S + 1, BLOCK_S)]
    mean = sum(blocks) / len(blocks)
    return max(1.0, sum((block - mean) ** 2 for block in blocks) / (len(blocks) - 1) / mean) if mean > 0 else 1.0
