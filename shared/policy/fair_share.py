"""Fair queueing between callers: counters of served tokens, and a queue in which the caller with the fewest is next.

Source: virtual token counters, Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: a
prompt token counts 1, an output token 2, over the caller's weight; idle callers gain no credit.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")
PROMPT_COST, OUTPUT_COST = 1.0, 2.0
SLACK_TOKENS = 4096.0  # by which a caller may be ahead: a few requests
CREDIT_TOKENS = 4.0 * SLACK_TOKENS  # by which an active caller with few requests may be behind
ACTIVE_S = 10.0  # for which a caller counts as active after its last request
LEDGER_S = 0.1  # between two reads of the ledger for a caller


class Ledger(Protocol):
    """The tokens served to callers by several gateways side by side, by their cost, before weights."""

    def note(self, caller: str, tokens: float) -> None:
        """Count tokens served here."""
        ...

    def elsewhere(self, caller: str) -> float:
        """Tokens served by the other gateways; it falls when one of them restarts."""
        ...


class LeastFirst:
    """The member with the smallest key among many, where keys only rise: O(log n), amortised over the rises.

    A heap holds one entry for each member. The key of an entry may be outdated: it is then too small, so that the entry
    surfaces and is corrected. The entry of a member that has left is dropped when it surfaces.
    """

    def __init__(self, key: Callable[[str], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, str]] = []  # the number keeps the order of arrival among equals
        self._entered: set[str] = set()
        self._numbers = itertools.count()

    def add(self, name: str) -> None:
        if name not in self._entered:
            self._entered.add(name)
            heappush(self._heap, (self._key(name), next(self._numbers), name))

    def first(self, is_member: Callable[[str], bool], without: str | None = None) -> str | None:
        """The member with the smallest key except `without`; None without another member."""
        set_aside = None
        try:
            while self._heap:
                entry = key, number, name = self._heap[0]
                if not is_member(name):
                    heappop(self._heap)
                    self._entered.discard(name)
                elif name == without:
                    set_aside = heappop(self._heap)
                elif (now := self._key(name)) > key:
                    heapreplace(self._heap, (now, number, name))
                else:
                    return entry[2]
            return None
        finally:
            if set_aside is not None:
                heappush(self._heap, set_aside)


@dataclass(slots=True)
class _Caller:
    weight: float
    tokens: float = 0.0  # the virtual counter
    open: int = 0
    last_s: float = float("-inf")  # of its last request's arrival or end
    elsewhere: float = 0.0  # of the ledger, as far as it is in the counter
    ledger_read_s: float = float("-inf")


class TokenCounters:
    """Virtual token counters of the callers of one gateway. Times are seconds of any one clock.

    weights: may change; a caller's weight is read at each of its requests. With a `ledger`, a caller is also charged
    for the tokens that other gateways have served since its first request here. All methods cost O(log n) in the number
    of callers, amortised.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, ledger: Ledger | None = None) -> None:
        self._weights = weights or {}
        self._callers: dict[str, _Caller] = {}
        self._ledger = ledger
        self._now = float("-inf")
        self._least = LeastFirst(self._charged)

    def came(self, caller: str, now: float) -> None:
        """Count one more job of the caller."""
        one = self._callers.get(caller)
        if one is None:
            one = self._callers[caller] = _Caller(self._weights.get(caller, 1.0))
            one.elsewhere = self._ledger.elsewhere(caller) if self._ledger is not None else 0.0
        one.weight = self._weights.get(caller, 1.0)
        self._now = now
        self._charged(caller)
        if not one.open:
            idle = now - one.last_s > ACTIVE_S
            other = self._least.first(self._active, without=caller)
            if other is not None:
                self.lift(caller, other, 0.0 if idle else CREDIT_TOKENS)
        one.open += 1
        one.last_s = now
        self._least.add(caller)

    def charge(self, caller: str, prompt_tokens: int, output_tokens: int) -> None:
        """Charge the caller for served tokens."""
        one = self._callers[caller]
        cost = PROMPT_COST * prompt_tokens + OUTPUT_COST * output_tokens
        one.tokens += cost / one.weight
        if self._ledger is not None:
            self._ledger.note(caller, cost)

    def left(self, caller: str, now: float) -> None:
        """Report that a job of the caller has ended."""
        one = self._callers[caller]
        one.open -= 1
        one.last_s = now

    def lift(self, caller: str, other: str, credit: float = 0.0) -> None:
        """Raise the counter of a caller that becomes active to that of `other`, less `credit`."""
        one = self._callers[caller]
        one.tokens = max(one.tokens, self._callers[other].tokens - credit)

    def tokens(self, caller: str) -> float:
        return self._callers[caller].tokens

    def over(self, caller: str, now: float) -> bool:
        """Whether the caller is ahead of another active caller by more than `SLACK_TOKENS`."""
        if len(self._callers) < 2:
            return False
        self._now = now
        other = self._least.first(self._active, without=caller)
        return other is not None and self._charged(caller) > self._callers[other].tokens + SLACK_TOKENS

    def _charged(self, caller: str) -> float:
        """The caller's counter, with the tokens that other gateways served; the ledger is read every `LEDGER_S`."""
        one = self._callers[caller]
        if self._ledger is not None and self._now - one.ledger_read_s >= LEDGER_S:
            one.ledger_read_s = self._now
            elsewhere = self._ledger.elsewhere(caller)
            one.tokens += max(0.0, elsewhere - one.elsewhere) / one.weight
            one.elsewhere = elsewhere
        return one.tokens

    def _active(self, caller: str) -> bool:
        one = self._callers[caller]
        return bool(one.open) or self._now - one.last_s <= ACTIVE_S


class CallerQueue(Generic[Item]):
    """A queue of items of callers: the next is the oldest item of the caller with the fewest tokens.

    `counters` knows each caller. The head stays the head until it is removed. Items are compared by identity.
    """

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._waiting: dict[str, dict[int, Item]] = {}  # by caller, then by the item's id, in order of arrival
        self._callers = LeastFirst(counters.tokens)
        self._head: tuple[str, Item] | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, item: Item, caller: str) -> None:
        if caller not in self._waiting:
            least = self._callers.first(self._waiting.__contains__)
            if least is not None:
                self._counters.lift(caller, least)
            self._waiting[caller] = {}
            self._callers.add(caller)
        self._waiting[caller][id(item)] = item
        self._count += 1

    def head(self) -> Item | None:
        """The next item, the same one until it is removed; None when the queue is empty."""
        if self._head is None:
            caller = self._callers.first(self._waiting.__contains__)
            if caller is not None:
                self._head = caller, next(iter(self._waiting[caller].values()))
        return self._head[1] if self._head is not None else None

    def remove(self, item: Item, caller: str) -> bool:
        """Remove an item; False when it is not in the queue."""
        waiting = self._waiting.get(caller)
        if waiting is None or waiting.pop(id(item), None) is None:
            return False
        self._count -= 1
        if not waiting:
            del self._waiting[caller]
        if self._head is not None and self._head[1] is item:
            self._head = None
        return True
