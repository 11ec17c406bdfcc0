"""Event loops for tests, whose clocks stop while the machine gives the process no turn.

A busy machine may pause a process for seconds. On a usual loop all timers of that time are then due at once, before the
sockets that would have been read meanwhile: deadlines pass, peers seem silent, and heartbeats to be late, although
nobody did anything wrong. Here a timer waits for as long as the process could have worked.
"""

import asyncio
import selectors
import time

PAUSE_S = 0.1  # what a usual turn never takes beyond the work that it does


class _Selector(selectors.DefaultSelector):
    """Measures how much later than it was to be the loop had its turns."""

    def __init__(self) -> None:
        super().__init__()
        self.lost_s = 0.0
        self._since_mono, self._worked_s = time.monotonic(), time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits as usual. A turn may also have taken longer than it computed for: it was paused, or blocked."""
        began_mono, worked_s = time.monotonic(), time.thread_time()
        self._lose(began_mono - self._since_mono - (worked_s - self._worked_s))
        events = super().select(timeout)
        self._since_mono, self._worked_s = time.monotonic(), time.thread_time()
        if timeout is not None:
            self._lose(self._since_mono - began_mono - max(0.0, timeout))
        return events

    def _lose(self, late_s: float) -> None:
        if late_s > PAUSE_S:
            self.lost_s += late_s


class PatientLoop(asyncio.SelectorEventLoop):
    """The usual loop, with that clock."""

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        self._turns = _Selector()
        super().__init__(selector or self._turns)

    def time(self) -> float:
        return super().time() - self._turns.lost_s


class PatientLoops(asyncio.DefaultEventLoopPolicy):
    """Makes every new loop a patient one."""

    _loop_factory = PatientLoop
