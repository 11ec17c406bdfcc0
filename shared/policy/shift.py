"""Whether what clients ask for has changed, beyond its noise: the last seconds against those before them."""

from collections.abc import Sequence
from math import exp, log, sqrt
from typing import NamedTuple

from shared.domain.demand import DemandSecond, Shift

# Standard errors by which both must differ: many windows are looked at, and requests are not independent. Answers that
# end together are less so: which ones end is a matter of their lengths.
DEVIATIONS, ANSWERS_DEVIATIONS = 6.0, 7.0
RECENT_S = (2, 15)  # the shortest and the longest stretch that is compared with what was before it
ANSWERS_RECENT_S = 25  # the longest for answers: they end later
BEFORE_S = 8  # seconds before it, for lengths
BEFORE_ARRIVALS_S = 20  # and for the rate, which varies more
BEFORE_REQUESTS, RECENT_REQUESTS = 30, 20
# Of answers that began together the short ones end first: their lengths are compared where arrivals varied by no more
# than this (variance over mean), before and since.
STEADY = 4.0
BLOCK_S = 5  # arrivals of one burst count together
# Standard errors are no less than this, in logarithms: what differs by less than 28 % (lengths) or 65 % (arrivals) is
# no shift, however sure; roles do not depend on it, or the profile follows by itself.
LENGTH_FLOOR, ARRIVAL_FLOOR = 0.05, 0.1


_Scored = tuple[str, float, float, float]  # what, by how many standard errors, before, after


class _Sum(NamedTuple):
    seconds: float
    requests: float
    prompts: float
    prompt_squares: float
    ended: float
    outputs: float
    output_squares: float


def find_shift(seconds: Sequence[DemandSecond]) -> tuple[Shift, int] | None:
    """The clearest change, and how many of the newest seconds came after it; None when there is none.

    seconds: oldest first, all since the last shift. Source: ours; a likelihood scan for one change point, with
    variances of the lengths' logarithms from within both sides, and of the arrivals from blocks of seconds. Fewer
    arrivals are no shift: nobody is hurt by a lull, which is no reason to forget what is asked for between lulls.
    """
    rows = list(seconds)
    if len(rows) < BEFORE_S + RECENT_S[0]:
        return None
    whole, recent, found = _sum(rows), _sum(()), None
    for count in range(1, min(ANSWERS_RECENT_S, len(rows) - BEFORE_S) + 1):
        recent = _plus(recent, _sum(rows[-count : len(rows) - count + 1]), 1)
        if count < RECENT_S[0]:
            continue
        before = _plus(whole, recent, -1)
        scored = [(DEVIATIONS, _prompts(before, recent))] if count <= RECENT_S[1] else []
        if before.seconds >= BEFORE_ARRIVALS_S and before.requests >= BEFORE_REQUESTS:
            dispersion = _dispersion(rows[:-count])
            if count <= RECENT_S[1]:
                scored.append((DEVIATIONS, _arrivals(before, recent, dispersion)))
            if dispersion <= STEADY and _dispersion(rows[-count:] if count >= 2 * BLOCK_S else rows) <= STEADY:
                scored.append((ANSWERS_DEVIATIONS, _outputs(before, recent)))
        for least, (what, deviations, was, now) in scored:
            if deviations >= least and (found is None or deviations > found[0].deviations):
                found = Shift(what, was, now, float(count), deviations), count
    return found


def _prompts(before: _Sum, recent: _Sum) -> _Scored:
    was, now = before.requests, recent.requests
    squares = before.prompt_squares, recent.prompt_squares
    return "prompts", *_lengths((was, now), (before.prompts, recent.prompts), squares)


def _outputs(before: _Sum, recent: _Sum) -> _Scored:
    was, now = before.ended, recent.ended
    squares = before.output_squares, recent.output_squares
    return "outputs", *_lengths((was, now), (before.outputs, recent.outputs), squares)


def _lengths(
    counts: tuple[float, float], logs: tuple[float, float], squares: tuple[float, float]
) -> tuple[float, float, float]:
    """Deviations, and both geometric means, from counts and sums before and after."""
    if counts[0] < BEFORE_REQUESTS or counts[1] < RECENT_REQUESTS:
        return 0.0, 0.0, 0.0
    was, now = logs[0] / counts[0], logs[1] / counts[1]
    within = squares[0] - counts[0] * was * was + squares[1] - counts[1] * now * now
    variance = max(0.0, within) / (sum(counts) - 2.0)
    error = sqrt(variance / counts[0] + variance / counts[1] + LENGTH_FLOOR**2)
    return abs(now - was) / error, exp(was), exp(now)


def _arrivals(before: _Sum, recent: _Sum, dispersion: float) -> _Scored:
    was, now = before.requests / before.seconds, recent.requests / recent.seconds
    expected = was * recent.seconds
    # Of a count whose mean is `expected`, its variance `dispersion` times that: what was before says what is usual.
    error = sqrt(dispersion / before.requests + dispersion / expected + ARRIVAL_FLOOR**2)
    return "arrivals", log((recent.requests + 0.5) / (expected + 0.5)) / error, was, now


def _dispersion(rows: Sequence[DemandSecond]) -> float:
    """Variance over mean of the arrivals in blocks of some seconds; 1 for Poisson arrivals, and no less."""
    blocks = [sum(one.requests for one in rows[at : at + BLOCK_S]) for at in range(0, len(rows) - BLOCK_S + 1, BLOCK_S)]
    mean = sum(blocks) / len(blocks)
    return max(1.0, sum((block - mean) ** 2 for block in blocks) / (len(blocks) - 1) / mean) if mean > 0 else 1.0


def _sum(rows: Sequence[DemandSecond]) -> _Sum:
    return _Sum(
        len(rows),
        sum(one.requests for one in rows),
        sum(one.prompt_logs for one in rows),
        sum(one.prompt_log_squares for one in rows),
        sum(one.ended for one in rows),
        sum(one.ended_logs for one in rows),
        sum(one.ended_log_squares for one in rows),
    )


def _plus(one: _Sum, other: _Sum, sign: int) -> _Sum:
    return _Sum(*(a + sign * b for a, b in zip(one, other, strict=True)))
