"""How long tokens of a stream wait for the next ones, so that they share an event: the busier the process, the longer.

An event costs more than a token: its JSON, a write to a socket, and the client's reading of it. A process that has
time to spare sends each token as it comes.
"""

import time
from collections.abc import Callable

PERIOD_S = 0.1  # between two looks at how busy the process is
LEAST_S = 0.005
_RELAXED, _BUSY = 0.55, 0.75  # shares of its time
_WORTH = 0.25  # one that computes less than this share has nothing to save, whoever keeps it waiting
_FACTOR = 1.5  # by which the interval grows or shrinks with each look
_MOST_S = 1.0


class Pace:
    """`interval_s`: seconds between two events of a stream, 0 while there is no need.

    Call `look` every PERIOD_S while there are tokens, and `begin` when that begins anew; `end` when there are none.

    Busy is a thread that computes most of the time, or one that is not called when it wants to be: then others compute.
    """

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, used_s: Callable[[], float] = time.thread_time
    ) -> None:
        self.interval_s = 0.0
        self._now_s = now_s
        self._used_s = used_s
        self._looked_s, self._used_before_s = now_s(), used_s()

    def begin(self) -> None:
        """Look from now on."""
        self._looked_s, self._used_before_s = self._now_s(), self._used_s()

    def end(self) -> None:
        """There are no tokens, and no need."""
        self.interval_s = 0.0

    def look(self) -> None:
        """Go by the time since the last look."""
        now, used = self._now_s(), self._used_s()
        passed, computed = max(now - self._looked_s, 1e-6), used - self._used_before_s
        self._looked_s, self._used_before_s = now, used
        late = max(0.0, passed - PERIOD_S)
        busy = (computed + late) / max(passed, PERIOD_S)
        if computed < passed * _WORTH:
            busy = 0.0
        if busy > _BUSY:
            self.interval_s = min(_MOST_S, max(LEAST_S, self.interval_s * _FACTOR))
        elif busy < _RELAXED:
            shorter = self.interval_s / _FACTOR
            self.interval_s = shorter if shorter >= LEAST_S else 0.0
