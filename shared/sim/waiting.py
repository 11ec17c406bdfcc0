"""The legs that wait at one engine."""

from collections import deque

from shared.policy.prefill_order import Fcfs, OrderedQueue, PrefillOrder
from shared.sim.request import Leg


class WaitingLegs:
    """Legs that wait, in the order of a policy; preempted ones come first. `count`: how many."""

    __slots__ = ("_front", "_ordered", "_plain", "count")

    def __init__(self, order: PrefillOrder) -> None:
        self.count = 0
        self._front: deque[Leg] = deque()
        # In order of arrival a plain queue does: windows would change nothing.
        self._plain: deque[Leg] | None = deque() if isinstance(order, Fcfs) else None
        self._ordered: OrderedQueue[Leg] = OrderedQueue(order)

    def push(self, leg: Leg) -> None:
        """Add at the end."""
        self.count += 1
        if self._plain is None:
            self._ordered.push(leg.request.job, leg)
        else:
            self._plain.append(leg)

    def push_front(self, leg: Leg) -> None:
        """Put back at the head."""
        self.count += 1
        self._front.appendleft(leg)

    def peek(self, now: float) -> Leg | None:
        """The next one, which stays."""
        if not self.count:
            return None
        if self._front:
            return self._front[0]
        if self._plain is not None:
            return self._plain[0]
        self._front.append(self._ordered.pop(now)[1])
        return self._front[0]

    def pop(self) -> Leg:
        """Take what `peek` gave."""
        self.count -= 1
        if self._front:
            return self._front.popleft()
        assert self._plain is not None
        return self._plain.popleft()

    def remove(self, leg: Leg) -> bool:
        """Take an leg out, wherever it waits; False when it is not here."""
        found = self._remove(leg)
        self.count -= found
        return found

    def _remove(self, leg: Leg) -> bool:
        for queue in (self._front, self._plain):
            if queue is not None and leg in queue:
                queue.remove(leg)
                return True
        return self._plain is None and self._ordered.remove(leg.request.job.job_id) is not None
