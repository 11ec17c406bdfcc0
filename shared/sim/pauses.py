"""Gaps between the tokens of each request, from counts of its engine's steps: no step touches a member of its batch.

All requests that decode get a token with each step, so that a step is a gap of every one of them. The longest step and
the number of steps over a target, between a member's joining and its leaving, are read from what is kept of all steps.
"""

from bisect import bisect_left
from math import ceil, floor, inf

from shared.sim.glide import Segment
from shared.sim.request import Leg


class Pauses:
    """The steps of one engine's batch. Adding steps costs O(targets), joining and leaving O(log n)."""

    __slots__ = ("_added", "_least_s", "_longest", "_over")

    def __init__(self) -> None:
        self._added = 0
        self._over: dict[float, int] = {}  # by target, in seconds: steps that took longer, so far
        self._least_s = inf  # of the targets
        # (when it was added, seconds) of steps that no later one exceeds: the first at or after a moment is the longest
        self._longest: list[tuple[int, float]] = []

    def join(self, leg: Leg) -> None:
        """Steps that are added from now on are gaps of it."""
        target_s = leg.request.job.slo.itl_s
        if target_s not in self._over:
            self._over[target_s] = 0
            self._least_s = min(self._least_s, target_s)
        leg.joined_at, leg.joined_over = self._added, self._over[target_s]

    def leave(self, leg: Leg) -> None:
        """Its request has had all steps since it joined; others are none of its gaps."""
        at = bisect_left(self._longest, (leg.joined_at, -1.0))
        if at < len(self._longest):
            over = self._over[leg.request.job.slo.itl_s] - leg.joined_over
            leg.request.paused(self._longest[at][1], over)

    def add(self, runs: tuple[Segment, ...]) -> None:
        """Steps of the batch, as they follow each other."""
        longest_s = max(max(first, last) for _, first, last in runs)
        kept = self._longest
        while kept and kept[-1][1] <= longest_s:
            kept.pop()
        kept.append((self._added, longest_s))
        self._added += 1
        if longest_s > self._least_s:
            for target_s in self._over:
                self._over[target_s] += sum(steps_over(run, target_s) for run in runs)

    def clear(self) -> None:
        """The batch is empty."""
        self._longest.clear()


def steps_over(run: Segment, target_s: float) -> int:
    """How many steps of a segment take longer than `target_s`."""
    length, first, last = run
    if max(first, last) <= target_s:
        return 0
    if min(first, last) > target_s or length == 1:
        return length
    at = (target_s - first) * (length - 1) / (last - first)  # of the step that takes just so long, from 0
    return length - 1 - floor(at) if last > first else ceil(at)


def without_first(runs: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The steps after the first one."""
    length, first, last = runs[0]
    if length == 1:
        return runs[1:]
    return ((length - 1, first + (last - first) / (length - 1), last), *runs[1:])
