"""Fairness between callers: who has had how much, and whose turn it is.

Source: virtual token counters, Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: a
prompt token counts 1, an output token 2, over the caller's weight; who was idle gains no credit.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")
PROMPT_COST, OUTPUT_COST = 1.0, 2.0
SLACK_TOKENS = 4096.0  # by which a caller may be ahead: a few requests
CREDIT_TOKENS = 4.0 * SLACK_TOKENS  # the most by which one who asks, but for little, may be behind
ACTIVE_S = 10.0  # after its last request a caller still counts as one who asks
HEARD_S = 0.1  # so often it is looked at what callers have had elsewhere


class Ledger(Protocol):
    """What callers have had of all who serve them side by side, in tokens as they count, before any weight."""

    def note(self, caller: str, tokens: float) -> None:
        """It was served so much more here."""
        ...

    def elsewhere(self, caller: str) -> float:
        """What the others have served it; it falls when one of them begins anew."""
        ...


@dataclass(slots=True)
class _Caller:
    weight: float
    tokens: float = 0.0  # the virtual counter
    open: int = 0
    asked_s: float = float("-inf")
    elsewhere: float = 0.0  # of the ledger, as far as it is in the counter


class Shares:
    """Virtual token counters of those who ask at one gateway. Times are seconds of any one clock.

    With a `ledger` a caller is charged for what others have served it, too, from its first request here.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, ledger: Ledger | None = None) -> None:
        self._weights = dict(weights or {})
        self._callers: dict[str, _Caller] = {}
        self._ledger = ledger
        self._heard_s = float("-inf")

    def came(self, caller: str, now: float) -> None:
        """One more job of the caller."""
        one = self._callers.get(caller)
        if one is None:
            one = self._callers[caller] = _Caller(self._weights.get(caller, 1.0))
            one.elsewhere = self._ledger.elsewhere(caller) if self._ledger is not None else 0.0
        self._hear(now)
        if not one.open:
            idle = now - one.asked_s > ACTIVE_S
            others = (name for name in self._active(now) if name != caller)
            self.lift(caller, others, 0.0 if idle else CREDIT_TOKENS)
        one.open += 1
        one.asked_s = now

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

    def lift(self, caller: str, others: Iterable[str], credit: float = 0.0) -> None:
        """Who begins to ask again is behind the others by `credit` at most, for the time that it did not."""
        least = min((self._callers[name].tokens for name in others), default=0.0)
        one = self._callers[caller]
        one.tokens = max(one.tokens, least - credit)

    def tokens(self, caller: str) -> float:
        """Its counter."""
        return self._callers[caller].tokens

    def over(self, caller: str, now: float) -> bool:
        """Whether it has had more than another one who asks, by more than a few requests."""
        if len(self._callers) < 2:
            return False
        self._hear(now)
        others = (self._callers[name].tokens for name in self._active(now) if name != caller)
        return self._callers[caller].tokens > min(others, default=float("inf")) + SLACK_TOKENS

    def _hear(self, now: float) -> None:
        """Charge those known here for what they were served elsewhere meanwhile."""
        if self._ledger is None or now - self._heard_s < HEARD_S:
            return
        self._heard_s = now
        for name, one in self._callers.items():
            elsewhere = self._ledger.elsewhere(name)
            one.tokens += max(0.0, elsewhere - one.elsewhere) / one.weight
            one.elsewhere = elsewhere

    def _active(self, now: float) -> list[str]:
        return [name for name, one in self._callers.items() if one.open or now - one.asked_s <= ACTIVE_S]


class FairLine(Generic[Item]):
    """Items that wait, each of a caller: the next is the oldest of the caller with the least tokens.

    `shares` knows each caller. The head stays the head until it is taken or leaves.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._waiting: dict[str, deque[Item]] = {}
        self._head: tuple[str, Item] | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, item: Item, caller: str) -> None:
        """Add one."""
        if caller not in self._waiting:
            self._shares.lift(caller, self._waiting)
            self._waiting[caller] = deque()
        self._waiting[caller].append(item)
        self._count += 1

    def head(self) -> Item | None:
        """Whose turn it is, until it is removed; None when nobody waits."""
        if self._head is None and self._waiting:
            caller = min(self._waiting, key=self._shares.tokens)
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
        if self._head is not None and self._head[1] is item:
            self._head = None
        return True
