"""The search for goodput: the highest rate, on a ladder of rates, at which a target is met.

The search relies on monotony: an arm that misses the target at a rate misses it at each higher rate.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, inf, log

LOWEST = 0.02  # of the first rate of a search: what serves less counts as nothing
STRIDE = 1.25  # times the rate, the first of a search
Meets = Callable[[float], bool]  # whether the target is met at a rate


@dataclass(frozen=True, slots=True)
class Bracket:
    """What is known of a goodput on the ladder of rates step^rung: met at the rung `low`, missed at `high`.

    start: the first rung of the search. low is below the ladder while no rate was met, high is None while none was
    missed.
    """

    step: float
    start: int
    low: int
    high: int | None = None

    @classmethod
    def near(cls, rate: float, step: float) -> "Bracket":
        """Nothing is known; the search starts near that rate."""
        start = round(log(rate) / log(step))
        return cls(step, start, start + floor(log(LOWEST) / log(step)) - 1)

    @property
    def lowest(self) -> int:
        return self.start + floor(log(LOWEST) / log(self.step))

    @property
    def exact(self) -> bool:
        return self.high is not None and self.high - self.low <= 1

    @property
    def min_rate(self) -> float:
        return self.rate(self.low)

    @property
    def max_rate(self) -> float:
        return inf if self.high is None else self.rate(self.high - 1)

    @property
    def next(self) -> int:
        """The rung to try: outwards from the start, further each time, then by halves."""
        stride, met = self.rungs(STRIDE), self.low >= self.lowest
        if self.high is None:
            return self.low + max(stride, self.low - self.start) if met else self.start
        if not met and self.high > self.lowest:
            return max(self.lowest, self.high - max(stride, self.start - self.high))
        return (self.low + self.high) // 2

    def rate(self, rung: int) -> float:
        """Requests a second; 0 below the lowest rung."""
        return float(self.step**rung) if rung >= self.lowest else 0.0

    def rungs(self, times: float) -> int:
        """From a rate to so many times as much; at least one."""
        return max(1, ceil(log(times) / log(self.step)))

    def tried(self, rung: int, meets: Meets) -> "Bracket":
        """After a run at that rung; unchanged where the bracket already decides it."""
        if rung <= self.low or (self.high is not None and rung >= self.high):
            return self
        return replace(self, low=rung) if meets(self.rate(rung)) else replace(self, high=rung)

    def settled(self, meets: Meets) -> "Bracket":
        found = self
        while not found.exact:
            found = found.tried(found.next, meets)
        return found


def goodput(meets: Meets, near: float, step: float) -> float:
    """The highest rate of a ladder at which the target is met, just below one at which it is missed; 0 if none is."""
    return Bracket.near(near, step).settled(meets).min_rate
