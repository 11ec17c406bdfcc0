"""Fairness between callers: who has had how much, and whose turn it is.

Source: virtual token counters, Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: a
prompt token counts 1, an output token 2, over the caller's weight; who was idle gains no credit.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")
PROMPT_COST, OUTPUT_COST = 1.0, 2.0
SLACK_TOKENS = 4096.0  # by which a caller may be ahead: a few requests
CREDIT_TOKENS = 4.0 * SLACK_TOKENS  # the most by which one who asks, but for little, may be behind
ACTIVE_S = 10.0  # after its last request a caller still counts as one who asks
LEDGER_S = 0.1  # how often the ledger is read for a caller


class Ledger(Protocol):
    """What callers have had of all who serve them side by side, in tokens as they count, before any weight."""

    def note(self, caller: str, tokens: float) -> None:
        """It was served so much more here."""
        ...

    def elsewhere(self, caller: str) -> float:
        """What the others have served it; it falls when one of them begins anew."""
        ...


class LeastFirst:
    """The member with the smallest key among many, where keys only rise: O(log n), amortised over the rises.

    A heap holds one entry for each member. The key of an entry may be out of date: it is then too small, so the entry
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
        """The member with the smallest key, `without` excepted; None where there is no other."""
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


class Shares:
    """Virtual token counters of the callers of one gateway. Times are seconds of any one clock.

    weights: may change; a caller's is read at each of its requests.
    With a `ledger` a caller is charged for what others have served it, too, from its first request here.
    No method costs more than O(log n) in the number of callers, amortised.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, ledger: Ledger | None = None) -> None:
        self._weights = weights or {}
        self._callers: dict[str, _Caller] = {}
        self._ledger = ledger
        self._now = float("-inf")
        self._least = LeastFirst(self._charged)

    def came(self, caller: str, now: float) -> None:
        """One more job of the caller."""
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
        one.last_s = now

    def lift(self, caller: str, other: str, credit: float = 0.0) -> None:
        """A caller that begins again is behind `other` by at most `credit`."""
        one = self._callers[caller]
        one.tokens = max(one.tokens, self._callers[other].tokens - credit)

    def tokens(self, caller: str) -> float:
        """Its counter."""
        return self._callers[caller].tokens

    def over(self, caller: str, now: float) -> bool:
        """Whether it has had more than another active caller, by more than a few requests."""
        if len(self._callers) < 2:
            return False
        self._now = now
        other = self._least.first(self._active, without=caller)
        return other is not None and self._charged(caller) > self._callers[other].tokens + SLACK_TOKENS

    def _charged(self, caller: str) -> float:
        """Its counter, after what others served it meanwhile is charged; the ledger is read every `LEDGER_S`."""
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


class FairLine(Generic[Item]):
    """Items that wait, each of a caller: the next is the oldest of the caller with the fewest tokens.

    `shares` knows each caller. The head stays the head until it is taken or leaves. Items are told apart by identity.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._waiting: dict[str, dict[int, Item]] = {}  # by caller, then by the item's id, in order of arrival
        self._callers = LeastFirst(shares.tokens)
        self._head: tuple[str, Item] | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, item: Item, caller: str) -> None:
        """Add one."""
        if caller not in self._waiting:
            least = self._callers.first(self._waiting.__contains__)
            if least is not None:
                self._shares.lift(caller, least)
            self._waiting[caller] = {}
            self._callers.add(caller)
        self._waiting[caller][id(item)] = item
        self._count += 1

    def head(self) -> Item | None:
        """Whose turn it is, until it is removed; None when the line is empty."""
        if self._head is None:
            caller = self._callers.first(self._waiting.__contains__)
            if caller is not None:
                self._head = caller, next(iter(self._waiting[caller].values()))
        return self._head[1] if self._head is not None else None

    def remove(self, item: Item, caller: str) -> bool:
        """Take one out, the head or another; False when it is not here."""
        waiting = self._waiting.get(caller)
        if waiting is None or waiting.pop(id(item), None) is None:
            return False
        self._count -= 1
        if not waiting:
            del self._waiting[caller]
        if self._head is not None and self._head[1] is item:
            self._head = None
        return True
