"""Which blocks of KV lie in which slots of a store of fixed size, and which block leaves a full one.

A store keeps the block whose loss costs the most time to recompute it: GreedyDual (Young, 1994) with that time as a
block's value. All blocks of an engine have equally many bytes, so the time per byte orders them as the time does.

A block is found only behind all blocks before it in its prompt. Its loss therefore costs those that follow it too, and
only a block that no other block of the store follows is a candidate. Among the candidates the lowest value leaves, of
equal values the least recently used. A value counts from the last loss on, so that a prompt that nobody sends again
leaves in the end, however long it is.
"""

import heapq
from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    slot: int
    parent: bytes | None
    depth_tokens: int
    value: float
    used: int  # the number of its last use
    pins: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """A block's new slot, and the block that left it."""

    slot: int
    dropped: bytes | None = None


class SlotIndex:
    """Blocks by their keys. A key says all tokens up to the end of its block."""

    def __init__(self, slots: int, double_tokens: int) -> None:
        """double_tokens: so deep in a prompt, a token takes twice the time of the first one."""
        self.slots = slots
        self._double_tokens = double_tokens
        self._held: dict[bytes, _Held] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._followers: Counter[bytes] = Counter()  # by block, held or not: the held blocks that follow it
        self._candidates: list[tuple[float, int, bytes]] = []  # a heap; an entry is void after a later use
        self._floor = 0.0  # the value of the last block that left
        self._uses = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def slot(self, key: bytes) -> int | None:
        held = self._held.get(key)
        return held.slot if held is not None else None

    def put(self, key: bytes, parent: bytes | None, depth_tokens: int) -> Put | None:
        """Give a block that is not held a slot. None: every block is pinned, or followed by one that is.

        parent: the block without which this one is not found. depth_tokens: before the block, in its prompt.
        """
        dropped = None
        if not self._free:
            dropped = self._lowest()
            if dropped is None:
                return None
            self.drop(dropped)
        slot = self._free.pop()
        self._held[key] = _Held(slot, parent, depth_tokens, 0.0, 0)
        if parent is not None:
            self._followers[parent] += 1
        self.use(key)
        return Put(slot, dropped)

    def use(self, key: bytes) -> None:
        """A held block was stored again, or loaded."""
        held = self._held[key]
        self._uses += 1
        held.used, held.value = self._uses, self._floor + 1.0 + held.depth_tokens / self._double_tokens
        self._offer(key, held)

    def pin(self, key: bytes) -> int:
        """Keep a held block until as many calls of `unpin`. Returns its slot."""
        held = self._held[key]
        held.pins += 1
        return held.slot

    def unpin(self, key: bytes) -> None:
        held = self._held.get(key)
        if held is not None and held.pins:  # none after `clear`
            held.pins -= 1
            self._offer(key, held)

    def drop(self, key: bytes) -> None:
        held = self._held.pop(key)
        self._free.append(held.slot)
        parent = held.parent
        if parent is None:
            return
        self._followers[parent] -= 1
        if not self._followers[parent]:
            del self._followers[parent]
            if (before := self._held.get(parent)) is not None:
                self._offer(parent, before)

    def clear(self) -> None:
        self._held.clear()
        self._followers.clear()
        self._candidates.clear()
        self._free = list(range(self.slots - 1, -1, -1))

    def _offer(self, key: bytes, held: _Held) -> None:
        """Make a block a candidate, if it is one."""
        if held.pins or self._followers.get(key):
            return
        heapq.heappush(self._candidates, (held.value, held.used, key))
        if len(self._candidates) > 2 * len(self._held) + 64:
            alive = {entry for entry in self._candidates if self._is_candidate(entry)}
            self._candidates = list(alive)
            heapq.heapify(self._candidates)

    def _lowest(self) -> bytes | None:
        """The candidate that leaves."""
        while self._candidates:
            entry = heapq.heappop(self._candidates)
            if self._is_candidate(entry):
                self._floor = entry[0]
                return entry[2]
        return None

    def _is_candidate(self, entry: tuple[float, int, bytes]) -> bool:
        _, used, key = entry
        held = self._held.get(key)
        return held is not None and held.used == used and not held.pins and not self._followers.get(key)
