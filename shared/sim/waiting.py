"""The legs that wait at one engine."""

from collections import deque

from shared.policy.prefill_order import Fcfs, OrderedQueue, PrefillOrder
from shared.sim.request import Leg


class WaitingLegs:
    """Legs that wait, preempted ones first. `count`: how many.

    Decodes, and requests that are computed whole where they decode, come first come, first served. Of prompts that are
    only computed here `batch` are in the engine at once, in the order of arrival, and a policy orders those beyond
    them: what a worker's prefill queue does. The next one also waits until its KV has room among `staging_tokens`,
    which it holds until it is sent; one that is longer than all of them holds none. Without a `batch` the engine itself
    takes the next prompt by the policy, whenever it has room for one.
    """

    __slots__ = (
        "_first",
        "_inside",
        "_ordered",
        "_preempted",
        "_room",
        "_staged",
        "_staging",
        "_staging_free",
        "count",
    )

    def __init__(self, order: PrefillOrder, batch: int | None = None, staging_tokens: int | None = None) -> None:
        self.count = 0
        self._preempted: deque[Leg] = deque()  # and one that a look at the ordered ones has taken out
        self._first: deque[Leg] = deque()  # first come, first served
        # In order of arrival, and without a bound, a plain queue does: windows would change nothing.
        plain = batch is None and isinstance(order, Fcfs)
        self._ordered: OrderedQueue[Leg] | None = None if plain else OrderedQueue(order)
        self._room = batch
        self._inside: set[Leg] = set()  # of the batch, until they are computed
        self._staging = self._staging_free = staging_tokens
        self._staged: dict[Leg, int] = {}  # until their KV is sent

    @property
    def decode_tokens(self) -> int:
        """Context of those that are to decode here."""
        return sum(leg.tokens for queue in (self._preempted, self._first) for leg in queue if leg.decodes)

    def push(self, leg: Leg, now: float) -> None:
        """Add at the end."""
        self.count += 1
        if self._ordered is None or leg.decodes:
            self._first.append(leg)
        else:
            self._ordered.push(leg.request.job, leg)
            self._let_in(now)

    def push_front(self, leg: Leg) -> None:
        """Put back at the head."""
        self.count += 1
        self._preempted.appendleft(leg)

    def peek(self, now: float) -> Leg | None:
        """The next one for the engine, which stays."""
        if not self.count:
            return None
        if self._preempted:
            return self._preempted[0]
        if self._first:
            return self._first[0]
        if self._room is not None or not self._ordered:
            return None
        self._preempted.append(self._ordered.pop(now)[1])
        return self._preempted[0]

    def pop(self) -> Leg:
        """Take what `peek` gave."""
        self.count -= 1
        return (self._preempted or self._first).popleft()

    def remove(self, leg: Leg) -> bool:
        """Take a leg out, wherever it waits; False when it is not here."""
        found = self._remove(leg)
        self.count -= found
        return found

    def gone(self, leg: Leg, now: float) -> None:
        """The leg is computed or given up: another one of the batch may enter the engine."""
        if leg in self._inside:
            self._inside.remove(leg)
            self._let_in(now)

    def sent(self, leg: Leg, now: float) -> bool:
        """Nothing of its KV is here any more. Whether there is room for that of another now."""
        if self._staging_free is None or leg not in self._staged:
            return False
        self._staging_free += self._staged.pop(leg)
        self._let_in(now)
        return bool(self._first)

    def _let_in(self, now: float) -> None:
        while self._room is not None and self._ordered and len(self._inside) < self._room:
            leg = self._ordered.peek(now)[1]
            if not self._stage(leg):
                return
            self._ordered.pop(now)
            self._inside.add(leg)
            self._first.append(leg)

    def _stage(self, leg: Leg) -> bool:
        if self._staging is None or self._staging_free is None or leg.request.decode_tokens == 0:
            return True
        tokens = leg.tokens if leg.tokens <= self._staging else 0
        if tokens > self._staging_free:
            return False
        self._staging_free -= tokens
        self._staged[leg] = tokens
        return True

    def _remove(self, leg: Leg) -> bool:
        for queue in (self._preempted, self._first):
            if leg in queue:
                queue.remove(leg)
                return True
        return self._ordered is not None and self._ordered.remove(leg.request.job.job_id) is not None
