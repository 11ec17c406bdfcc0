"""How much slower an instance's steps get while other instances of its host are busy, and share its cores."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Curve = tuple[float, ...]  # at [k]: how many times longer a step takes while k other instances of the host are busy

NEAR = 0.25  # a step counts for the curve at k if on average k others were busy, give or take so many
_MIN_STEPS = 20  # of a point of the curve


def others_busy(intervals: Mapping[str, tuple[Floats, Floats]]) -> dict[str, Floats]:
    """How many other instances were busy on average during each step of each instance.

    intervals: starts and ends of the instances' steps, shape [n] each, in order of time; one clock for all.
    """
    busy = {name: _busy_until(*times) for name, times in intervals.items()}
    found = {}
    for name, (starts, ends) in intervals.items():
        total = np.zeros(len(starts))
        for other, (moments, seconds) in busy.items():
            if other != name and len(moments):
                total += np.interp(ends, moments, seconds) - np.interp(starts, moments, seconds)
        found[name] = total / np.maximum(ends - starts, 1e-9)
    return found


def _busy_until(starts: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Seconds of work done by each start and end. Steps of one engine do not overlap; their clocks may."""
    starts = np.maximum(starts, np.concatenate(([-np.inf], np.maximum.accumulate(ends)[:-1])))
    ends = np.maximum(ends, starts)
    moments = np.stack((starts, ends), axis=1).ravel()
    done = np.cumsum(ends - starts)
    return moments, np.stack((done - (ends - starts), done), axis=1).ravel()


def slowdown_curve(others: Floats, seconds: Floats, alone_s: Floats) -> Curve:
    """The curve that follows from steps, shape [n] each: other busy instances, the time taken, and the time alone.

    It starts at 1, does not fall, and ends at the most other instances that enough steps have seen.
    """
    curve = [1.0]
    for count in range(1, int(others.max(initial=0.0) + NEAR) + 1):
        near = np.abs(others - count) <= NEAR
        if near.sum() < _MIN_STEPS:
            break
        curve.append(max(curve[-1], float(seconds[near].sum() / alone_s[near].sum())))
    return tuple(curve)


def slowdown_at(curve: Curve, others: Floats) -> Floats:
    """The curve at any number of other instances, shape [n]; beyond its end it continues with its last slope."""
    reach = len(curve) - 1
    slope = curve[-1] - curve[-2] if reach else 0.0
    within = np.asarray(np.interp(others, np.arange(reach + 1), curve), dtype=np.float64)
    return np.asarray(within + slope * np.maximum(0.0, others - reach))
