"""Virtual time: planned events, in order."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

NEVER = float("inf")

Handler = Callable[[Any, float], None]


class EventLoop:
    """Events in order of time. `now_s`: the time of the event that is being handled. `handled`: how many were."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.handled = 0
        self._heap: list[tuple[float, int, Handler, Any]] = []
        self._planned = 0

    @property
    def pending(self) -> int:
        return len(self._heap)

    def at(self, time_s: float, handler: Handler, subject: Any) -> None:
        """Call `handler(subject, time_s)` at that time. Events of one time are handled in the order of their planning.

        Raises RuntimeError for a time before `now_s`.
        """
        if not time_s >= self.now_s:
            what = getattr(handler, "__qualname__", repr(handler))
            raise RuntimeError(f"{what}: an event for {time_s!r} s was planned at {self.now_s!r} s")
        self._planned += 1
        heappush(self._heap, (time_s, self._planned, handler, subject))

    def run(self, over: Callable[[], bool]) -> None:
        heap = self._heap
        while heap and not over():
            self.now_s, _, handler, subject = heappop(heap)
            self.handled += 1
            handler(subject, self.now_s)
