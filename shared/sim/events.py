"""Virtual time: what is to happen when."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

NEVER = float("inf")

Handler = Callable[[Any, float], None]


class EventLoop:
    """Events in order of time. `now_s`: of the one that is being handled. `handled`: how many were."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.handled = 0
        self._heap: list[tuple[float, int, Handler, Any]] = []
        self._made = 0

    @property
    def pending(self) -> int:
        """Events to come."""
        return len(self._heap)

    def at(self, time_s: float, handler: Handler, subject: Any) -> None:
        """Call `handler(subject, time_s)` then. Events of one moment come in the order in which they were made.

        Raises RuntimeError for a time that is over: time only goes forward.
        """
        if not time_s >= self.now_s:
            what = getattr(handler, "__qualname__", repr(handler))
            raise RuntimeError(f"{what}: an event for {time_s!r} s was made at {self.now_s!r} s")
        self._made += 1
        heappush(self._heap, (time_s, self._made, handler, subject))

    def run(self, over: Callable[[], bool]) -> None:
        """Handle events until there are none, or until `over`."""
        heap = self._heap
        while heap and not over():
            self.now_s, _, handler, subject = heappop(heap)
            self.handled += 1
            handler(subject, self.now_s)
