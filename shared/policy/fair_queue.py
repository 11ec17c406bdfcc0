"""The jobs that wait before placement: how many may, whose turn it is, and who steps aside. No clock and no waiting.

The gateway drives the queue with asyncio's timers and events, the simulator in virtual time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.domain.job import Slo
from shared.errors import Delayed
from shared.policy.fair_share import CallerQueue, TokenCounters
from shared.policy.overload import steps_aside

PLACE_RETRY_S = 0.5  # between two placements of the head of a line, where the scheduler names no time

Item = TypeVar("Item")


def excess_jobs(waiting: int, more: int, limit: int | None) -> int:
    """How many jobs too many wait if `more` join `waiting`; at most 0: they fit. None: no limit."""
    return 0 if limit is None else waiting + more - limit


def excess_tokens(waiting: int, more: int, limit: int | None) -> int:
    """The same for prompt tokens, if a job of `more` joins; a job with no other before it always fits."""
    return waiting + more - limit if waiting and limit is not None else 0


def retry_s(delay: Delayed) -> float:
    """The time until a job that was delayed may be placed again."""
    return delay.retry_after_s or PLACE_RETRY_S


@dataclass(slots=True, eq=False)
class Waiter(Generic[Item]):
    """A job that waits, or may have to. line: where it waits; None while it waits nowhere."""

    item: Item
    slo: Slo
    caller: str
    line: "Line[Item] | None" = None


class Line(Generic[Item]):
    """Jobs of one class in the order of fair queueing. Only the head is placed; after a delay the line rests."""

    __slots__ = ("aside", "resting", "waiters")

    def __init__(self, counters: TokenCounters, *, aside: bool) -> None:
        self.aside = aside  # its jobs stepped aside
        self.resting = False
        self.waiters: CallerQueue[Waiter[Item]] = CallerQueue(counters)

    def turn(self) -> Waiter[Item] | None:
        """The job to place now, the same one until it leaves the line or is delayed; None: there is none, or a rest."""
        return None if self.resting else self.waiters.head()


@dataclass(slots=True)
class _Lines(Generic[Item]):
    """The lines of a class."""

    first: Line[Item]
    aside: Line[Item]


class FairQueue(Generic[Item]):
    """Jobs that wait for placement: two lines for each SLO class, each fair between callers.

    A job whose first token will be late anyway steps aside for those behind it, which may still be in time: it moves
    to the class's second line (`shared.policy.overload.steps_aside`).

    The driver places `line.turn()` whenever a line has changed, and reports what came of it: `leave` or `delay`. A rest
    belongs to the line: it also delays the job that follows a head which gave up meanwhile.
    """

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._classes: dict[str, _Lines[Item]] = {}

    def is_waiting(self, slo: str) -> bool:
        """Whether a new job of the class has others before it."""
        return slo in self._classes and len(self._classes[slo].first.waiters) > 0

    def waiting(self, slo: str) -> int:
        """How many jobs of the class wait, including those that are being placed."""
        lines = self._classes.get(slo)
        return len(lines.first.waiters) + len(lines.aside.waiters) if lines is not None else 0

    def join(self, waiter: Waiter[Item]) -> Line[Item]:
        """Queue a job that was not placed yet, and return its line."""
        return self._push(waiter, self._lines(waiter.slo.name).first)

    def join_delayed(self, waiter: Waiter[Item]) -> Line[Item] | None:
        """Queue a job that found no others before it and was delayed. Returns its line if that rests for the delay."""
        return self._push_delayed(waiter, self._lines(waiter.slo.name).first)

    def delay(self, waiter: Waiter[Item], waited_s: float, again_s: float) -> Line[Item] | None:
        """The head of a line was delayed: it may be placed again in `again_s`. waited_s: since its arrival.

        Returns the line that rests until then (the driver calls `wake` at its end): its own one, or, if the job steps
        aside and no other job is before it there, the second. None if it waits behind others now.
        """
        line = waiter.line
        assert line is not None, "a job that waits nowhere was delayed"
        if line.aside or not steps_aside(waiter.slo, waited_s, again_s):
            line.resting = True
            return line
        self.leave(waiter)
        return self._push_delayed(waiter, self._lines(waiter.slo.name).aside)

    def wake(self, line: Line[Item]) -> None:
        """The rest of a line is over."""
        line.resting = False

    def leave(self, waiter: Waiter[Item]) -> Line[Item] | None:
        """The job is placed, or gives up. Returns the line that it left; None if it waited nowhere."""
        line, waiter.line = waiter.line, None
        if line is not None:
            line.waiters.remove(waiter, waiter.caller)
        return line

    def clear(self) -> Iterator[Item]:
        """Remove all jobs, in the order of their turns."""
        for lines in self._classes.values():
            for line in (lines.first, lines.aside):
                while (waiter := line.waiters.head()) is not None:
                    self.leave(waiter)
                    yield waiter.item

    def _lines(self, slo: str) -> _Lines[Item]:
        lines = self._classes.get(slo)
        if lines is None:
            first, aside = (Line[Item](self._counters, aside=aside) for aside in (False, True))
            lines = self._classes[slo] = _Lines(first, aside)
        return lines

    def _push(self, waiter: Waiter[Item], line: Line[Item]) -> Line[Item]:
        line.waiters.push(waiter, waiter.caller)
        waiter.line = line
        return line

    def _push_delayed(self, waiter: Waiter[Item], line: Line[Item]) -> Line[Item] | None:
        alone = not len(line.waiters)
        self._push(waiter, line)
        if alone:
            line.resting = True
        return line if alone else None
