"""One request inside one engine, and the queue in which it waits there."""

from collections import deque
from typing import TYPE_CHECKING

from shared.policy.prefill_order import Fcfs, OrderedQueue, PrefillOrder

if TYPE_CHECKING:
    from shared.sim.engine import Engine
    from shared.sim.flight import Flight


class Entry:
    """One leg of a request on one engine.

    tokens: tokens whose KV must be there before the next output token. computed: those that have it. left: output
    tokens to give here. remote: `computed` tokens come over the network, after blocks are reserved for all of `tokens`.
    """

    __slots__ = (
        "base", "blocks", "cancelled", "computed", "engine", "finish_step", "flight", "last_token_s", "left", "prefix",
        "remote", "tokens", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        flight: "Flight",
        tokens: int,
        left: int,
        computed: int = 0,
        *,
        remote: bool = False,
        prefix: tuple[int, ...] = (),
        last_token_s: float = -1.0,
    ) -> None:
        self.flight = flight
        self.tokens = tokens
        self.left = left
        self.computed = computed
        self.remote = remote
        self.prefix = prefix
        self.last_token_s = last_token_s  # of the output token before; negative when there is none
        self.blocks = 0
        self.base = 0  # while decoding: context less the group's steps
        self.finish_step = 0  # while decoding: the group's step after which it is done
        self.wanted = left
        self.engine: Engine | None = None
        self.cancelled = False

    @property
    def given(self) -> int:
        """Output tokens that it has given here; while it decodes, its group knows better."""
        return self.wanted - self.left

    @property
    def missing(self) -> int:
        """Tokens to compute before the next output token; 1 means that it decodes."""
        return self.tokens - self.computed


class EntryQueue:
    """Entries that wait, in the order of a policy; preempted ones come first. `count`: how many."""

    __slots__ = ("_front", "_ordered", "_plain", "count")

    def __init__(self, order: PrefillOrder) -> None:
        self.count = 0
        self._front: deque[Entry] = deque()
        # In order of arrival a plain queue does: windows would change nothing.
        self._plain: deque[Entry] | None = deque() if isinstance(order, Fcfs) else None
        self._ordered: OrderedQueue[Entry] = OrderedQueue(order)

    def push(self, entry: Entry) -> None:
        """Add at the end."""
        self.count += 1
        if self._plain is None:
            self._ordered.push(entry.flight.job, entry)
        else:
            self._plain.append(entry)

    def push_front(self, entry: Entry) -> None:
        """Put back at the head."""
        self.count += 1
        self._front.appendleft(entry)

    def peek(self, now: float) -> Entry | None:
        """The next one, which stays."""
        if not self.count:
            return None
        if self._front:
            return self._front[0]
        if self._plain is not None:
            return self._plain[0]
        self._front.append(self._ordered.pop(now)[1])
        return self._front[0]

    def pop(self) -> Entry:
        """Take what `peek` gave."""
        self.count -= 1
        if self._front:
            return self._front.popleft()
        assert self._plain is not None
        return self._plain.popleft()

    def remove(self, entry: Entry) -> bool:
        """Take an entry out, wherever it waits; False when it is not here."""
        found = self._remove(entry)
        self.count -= found
        return found

    def _remove(self, entry: Entry) -> bool:
        for queue in (self._front, self._plain):
            if queue is not None and entry in queue:
                queue.remove(entry)
                return True
        return self._plain is None and self._ordered.remove(entry.flight.job.job_id) is not None
