"""Fairness between callers: who has had how much, and whose turn it is.

Source: virtual token counters, Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: a
prompt token counts 1, an output token 2, over the caller's weight; who was idle gains no credit.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")
PROMPT_COST, OUTPUT_COST = 1.0, 2.0
SLACK_TOKENS = 4096.0  # by which a caller may be ahead: a few requests
CREDIT_TOKENS = 4.0 * SLACK_TOKENS  # the most by which one who asks, but for little, may be behind
ACTIVE_S = 10.0  # after its last request a caller still counts as one who asks
HEARD_S = 0.1  # so often at most it is looked at what a caller has had elsewhere


class Ledger(Protocol):
    """What callers have had of all who serve them side by side, in tokens as they count, before any weight."""

    def note(self, caller: str, tokens: float) -> None:
        """It was served so much more here."""
        ...

    def elsewhere(self, caller: str) -> float:
        """What the others have served it; it falls when one of them begins anew."""
        ...


class _Least:
    """Names by counters that only grow, in O(log n): an entry that was overtaken is put right when it comes up."""

    def __init__(self, counter: Callable[[str], float | None]) -> None:
        """counter: of a name, as it is now; None: it is to be forgotten."""
        self._counter = counter
        self._heap: list[tuple[float, int, str]] = []
        self._numbers: dict[str, int] = {}  # in the order in which the names came
        self._added = 0

    def add(self, name: str, counter: float) -> None:
        """From now on, unless it is there."""
        if name not in self._numbers:
            self._added += 1
            self._numbers[name] = self._added
            heappush(self._heap, (counter, self._added, name))

    def forget(self, name: str) -> None:
        """No more."""
        self._numbers.pop(name, None)

    def first(self) -> str | None:
        """The name with the least counter; of several the one that was added first."""
        heap = self._heap
        while heap:
            was, number, name = heap[0]
            if self._numbers.get(name) != number:
                heappop(heap)
                continue
            counter = self._counter(name)
            if counter is None:
                heappop(heap)
                self.forget(name)
            elif counter > was:
                heapreplace(heap, (counter, number, name))
            else:
                return name
        return None

    def first_beside(self, name: str) -> str | None:
        """The first one that is not `name`."""
        first = self.first()
        if first != name:
            return first
        own = heappop(self._heap)
        second = self.first()
        heappush(self._heap, own)
        return second


@dataclass(slots=True)
class _Caller:
    weight: float
    tokens: float = 0.0  # the virtual counter
    open: int = 0
    asked_s: float = float("-inf")
    elsewhere: float = 0.0  # of the ledger, as far as it is in the counter
    heard_s: float = 0.0  # when that was


class Shares:
    """Virtual token counters of those who ask at one gateway. Times are seconds of any one clock.

    With a `ledger` a caller is charged for what others have served it, too, from its first request here. A request
    costs O(log n) of the callers that asked lately.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, ledger: Ledger | None = None) -> None:
        self._weights = dict(weights or {})
        self._callers: dict[str, _Caller] = {}
        self._ledger = ledger
        self._now = 0.0
        self._active = _Least(self._while_active)

    def came(self, caller: str, now: float) -> None:
        """One more job of the caller."""
        one = self._callers.get(caller)
        if one is None:
            one = self._callers[caller] = _Caller(self._weights.get(caller, 1.0), heard_s=now)
            one.elsewhere = self._ledger.elsewhere(caller) if self._ledger is not None else 0.0
        self._hear(caller, one, now)
        if not one.open:
            idle = now - one.asked_s > ACTIVE_S
            self.lift(caller, self._least_beside(caller, now) or 0.0, 0.0 if idle else CREDIT_TOKENS)
        one.open += 1
        one.asked_s = now
        self._active.add(caller, one.tokens)

    def charge(self, caller: str, prompt_tokens: int, output_tokens: int) -> None:
        """It has been served so much."""
        one = self._callers[caller]
        cost = PROMPT_COST * prompt_tokens + OUTPUT_COST * output_tokens
        one.tokens += cost / one.weight
        if self._ledger is not None:
            self._ledger.note(caller, cost)

    def left(self, caller: str, now: float) -> None:
        """A job of it is over, however it ended."""
        one = self._callers[caller]
        one.open -= 1
        one.asked_s = now

    def lift(self, caller: str, least: float, credit: float = 0.0) -> None:
        """Who begins to ask again is behind the others by `credit` at most, for the time that it did not."""
        one = self._callers[caller]
        one.tokens = max(one.tokens, least - credit)

    def tokens(self, caller: str) -> float:
        """Its counter."""
        return self._callers[caller].tokens

    def over(self, caller: str, now: float) -> bool:
        """Whether it has had more than another one who asks, by more than a few requests."""
        if len(self._callers) < 2:
            return False
        one = self._callers[caller]
        self._hear(caller, one, now)
        least = self._least_beside(caller, now)
        return least is not None and one.tokens > least + SLACK_TOKENS

    def _hear(self, name: str, one: _Caller, now: float) -> None:
        """Charge one for what it was served elsewhere meanwhile."""
        if self._ledger is None or now - one.heard_s < HEARD_S:
            return
        one.heard_s = now
        elsewhere = self._ledger.elsewhere(name)
        one.tokens += max(0.0, elsewhere - one.elsewhere) / one.weight
        one.elsewhere = elsewhere

    def _least_beside(self, caller: str, now: float) -> float | None:
        """The least counter of the others who ask."""
        self._now = now
        name = self._active.first_beside(caller)
        return self._callers[name].tokens if name is not None else None

    def _while_active(self, name: str) -> float | None:
        one = self._callers[name]
        if not one.open and self._now - one.asked_s > ACTIVE_S:
            return None
        self._hear(name, one, self._now)
        return one.tokens


class FairLine(Generic[Item]):
    """Items that wait, each of a caller: the next is the oldest of the caller with the least tokens.

    `shares` knows each caller. The head stays the head until it is taken or leaves.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._waiting: dict[str, deque[Item]] = {}
        self._order = _Least(self._while_waiting)
        self._head: tuple[str, Item] | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, item: Item, caller: str) -> None:
        """Add one."""
        if caller not in self._waiting:
            first = self._order.first()
            self._shares.lift(caller, self._shares.tokens(first) if first is not None else 0.0)
            self._waiting[caller] = deque()
            self._order.add(caller, self._shares.tokens(caller))
        self._waiting[caller].append(item)
        self._count += 1

    def head(self) -> Item | None:
        """Whose turn it is, until it is removed; None when nobody waits."""
        if self._head is None and (caller := self._order.first()) is not None:
            self._head = caller, self._waiting[caller][0]
        return self._head[1] if self._head is not None else None

    def remove(self, item: Item, caller: str) -> bool:
        """Take one out, the head or another; False when it is not here."""
        waiting = self._waiting.get(caller)
        if waiting is None or item not in waiting:
            return False
        waiting.remove(item)
        self._count -= 1
        if not waiting:
            del self._waiting[caller]
            self._order.forget(caller)
        if self._head is not None and self._head[1] is item:
            self._head = None
        return True

    def _while_waiting(self, caller: str) -> float | None:
        return self._shares.tokens(caller) if caller in self._waiting else None
