"""Which blocks of KV lie in which slots of a store of fixed size, and which block leaves a full one.

A store keeps the block whose loss costs the most time to recompute it: GreedyDual (Young, 1994) with that time as a
block's value. All blocks of an engine have equally many bytes, so the time per byte orders them as the time does.

A block is found only behind all blocks before it in its prompt. Its loss therefore costs those that follow it too, and
only a block that no other block of the store follows is a candidate. Among the candidates the lowest value leaves, of
equal values the least recently used. A value counts from the last loss on, so that a prompt that is not sent again
leaves in the end, however long it is.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic

from typing_extensions import TypeVar

Key = TypeVar("Key", bound=Hashable, default=bytes)  # of a block


@dataclass(slots=True)
class Held(Generic[Key]):
    """A block of the store. Others read it alone."""

    key: Key
    slot: int
    parent: Key | None
    depth_tokens: int
    value: float = 0.0
    used: int = 0  # the number of its last use
    pins: int = 0
    cleared: bool = False  # nothing finds it any more


@dataclass(frozen=True, slots=True)
class Put(Generic[Key]):
    """A block's new slot, and the block that left it."""

    slot: int
    dropped: Held[Key] | None = None


class SlotIndex(Generic[Key]):
    """Blocks by their keys. A key says all tokens up to the end of its block."""

    def __init__(self, slots: int, double_tokens: int) -> None:
        """double_tokens: so deep in a prompt, a token takes twice the time of the first one."""
        self.slots = slots
        self._double_tokens = double_tokens
        self._held: dict[Key, Held[Key]] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._followers: Counter[Key] = Counter()  # by block, held or not: the held blocks that follow it
        self._candidates: list[tuple[float, int, Key]] = []  # a heap; an entry is void after a later use
        self._floor = 0.0  # the value of the last block that left
        self._uses = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Key]:
        return iter(self._held)

    def get(self, key: Key) -> Held[Key] | None:
        return self._held.get(key)

    def put(self, key: Key, parent: Key | None, depth_tokens: int) -> Put[Key] | None:
        """Give a block that is not held a slot. None: every block is pinned, or followed by one that is.

        parent: the block without which this one is not found. depth_tokens: before the block, in its prompt.
        """
        dropped = None
        if not self._free:
            lowest = self._lowest()
            if lowest is None:
                return None
            dropped = self.drop(lowest)
        slot = self._free.pop()
        self._held[key] = Held(key, slot, parent, depth_tokens)
        if parent is not None:
            self._followers[parent] += 1
        self.use(key)
        return Put(slot, dropped)

    def use(self, key: Key) -> None:
        """A held block was stored again, or loaded."""
        held = self._held[key]
        self._uses += 1
        held.used, held.value = self._uses, self._floor + 1.0 + held.depth_tokens / self._double_tokens
        self._offer(held)

    def pin(self, key: Key) -> Held[Key]:
        """Keep a held block, and its slot, until as many calls of `unpin`."""
        held = self._held[key]
        held.pins += 1
        return held

    def unpin(self, held: Held[Key]) -> None:
        held.pins -= 1
        if held.cleared and not held.pins:
            self._free.append(held.slot)
        elif not held.cleared:
            self._offer(held)

    def drop(self, key: Key) -> Held[Key]:
        """Forget a held block. The slot of a pinned one is not given to others until it is unpinned."""
        held = self._held.pop(key)
        held.cleared = True
        if not held.pins:
            self._free.append(held.slot)
        if (parent := held.parent) is not None:
            self._followers[parent] -= 1
            if not self._followers[parent]:
                del self._followers[parent]
                if (before := self._held.get(parent)) is not None:
                    self._offer(before)
        return held

    def clear(self) -> None:
        """Forget all blocks. Slots of pinned ones are not given to others until they are unpinned."""
        for held in self._held.values():
            held.cleared = True
            if not held.pins:
                self._free.append(held.slot)
        self._held.clear()
        self._followers.clear()
        self._candidates.clear()

    def _offer(self, held: Held[Key]) -> None:
        """Make a block a candidate, if it is one."""
        if held.pins or self._followers.get(held.key):
            return
        heapq.heappush(self._candidates, (held.value, held.used, held.key))
        if len(self._candidates) > 2 * len(self._held) + 64:
            self._candidates = list({entry for entry in self._candidates if self._is_candidate(entry)})
            heapq.heapify(self._candidates)

    def _lowest(self) -> Key | None:
        """The candidate that leaves."""
        while self._candidates:
            entry = heapq.heappop(self._candidates)
            if self._is_candidate(entry):
                self._floor = entry[0]
                return entry[2]
        return None

    def _is_candidate(self, entry: tuple[float, int, Key]) -> bool:
        _, used, key = entry
        held = self._held.get(key)
        return held is not None and held.used == used and not held.pins and not self._followers.get(key)
