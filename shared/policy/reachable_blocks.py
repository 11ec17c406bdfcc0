"""What one instance reports of its prefix cache, to `PrefixIndex`. The workers and the simulated engines use it."""

from collections.abc import Collection, Iterable
from typing import NamedTuple


class ReachableBlocks:
    """The blocks of one prefix cache that a prompt can hit, and the changes since they were last reported.

    This class keeps the run invariant: a block that is held but follows a block that is not held cannot be hit, so it
    is not reached and not reported.
    """

    __slots__ = ("_added", "_children", "_parents", "_reached", "_removed")

    def __init__(self) -> None:
        self._parents: dict[int, int | None] = {}  # of all held blocks
        self._children: dict[int, dict[int, None]] = {}  # of all held blocks, by the block that they follow
        self._reached: dict[int, None] = {}  # held blocks whose parents are all held; parents first
        self._added: dict[int, None] = {}  # reached now, but not at the last report; parents first
        self._removed: dict[int, None] = {}  # reached at the last report, but not now

    @property
    def blocks(self) -> Collection[int]:
        """All blocks that can be hit, each after the one that it follows."""
        return self._reached.keys()

    @property
    def changed(self) -> int:
        """The number of blocks that `take_changes` has to report."""
        return len(self._added) + len(self._removed)

    def holds(self, block: int) -> bool:
        """Whether it was added, even if it cannot be hit."""
        return block in self._parents

    def hold(self, block: int, parent: int | None) -> None:
        """Add a block; `parent` is the one before it in its prompt, if any."""
        if block in self._parents:
            return
        self._parents[block] = parent
        if parent is not None:
            self._children.setdefault(parent, {})[block] = None
        if parent is None or parent in self._reached:
            for reached in self._descendants(block):
                self._reach(reached)

    def drop(self, block: int) -> None:
        """Remove a block; unknown ones are ignored."""
        if block not in self._parents:
            return
        parent = self._parents.pop(block)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[block]
            if not siblings:
                del self._children[parent]
        if block in self._reached:
            for lost in self._descendants(block):
                self._lose(lost)

    def clear(self) -> None:
        for block in tuple(self._reached):
            self._lose(block)
        self._parents.clear()
        self._children.clear()

    def take_changes(self) -> tuple[list[int], list[int]]:
        """The blocks that were added, each after the one that it follows, and removed since the last call."""
        added, removed = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed

    def _descendants(self, block: int) -> Iterable[int]:
        """The block and all held blocks that follow it, parents first."""
        left = [block]
        while left:
            block = left.pop()
            yield block
            left += self._children.get(block, ())

    def _reach(self, block: int) -> None:
        self._reached[block] = None
        if block in self._removed:
            del self._removed[block]  # the last report still holds
        else:
            self._added[block] = None

    def _lose(self, block: int) -> None:
        del self._reached[block]
        if block in self._added:
            del self._added[block]  # never reported
        else:
            self._removed[block] = None


class CacheChanges(NamedTuple):
    """Changes of what can be hit, as `PrefixDelta` reports them."""

    added: list[int]
    removed: list[int]
    hosted: list[int]


class TieredBlocks:
    """The blocks of one instance on its accelerator and in its host tier.

    `every` has the blocks that either of the two holds. `device` has those of the accelerator: a block that is held
    there, but follows one in host memory, is not reached in it. Without a tier they are the same.
    """

    __slots__ = ("_hosted", "device", "every")

    def __init__(self, *, tiered: bool) -> None:
        self.every = ReachableBlocks()
        self.device = ReachableBlocks() if tiered else self.every
        self._hosted: set[int] = set()  # in host memory, whether or not they are on the accelerator

    @property
    def tiered(self) -> bool:
        return self.device is not self.every

    @property
    def blocks(self) -> Collection[int]:
        """All blocks that can be hit, each after the one that it follows."""
        return self.every.blocks

    @property
    def changed(self) -> int:
        """The number of changes that `take_changes` has to report; of either tier, where there are two."""
        return self.every.changed + self.device.changed if self.tiered else self.every.changed

    def loaded(self, block: int, parent: int | None) -> None:
        """The accelerator holds the block: it was computed, or comes from host memory."""
        self.every.hold(block, parent)
        if self.tiered:
            self.device.hold(block, parent)

    def dropped(self, block: int) -> None:
        """The accelerator does not hold the block any more."""
        if self.tiered:
            self.device.drop(block)
        if block not in self._hosted:
            self.every.drop(block)

    def kept(self, block: int) -> None:
        """Host memory has a block of the accelerator, too."""
        self._hosted.add(block)

    def lost(self, block: int) -> None:
        """Host memory does not hold the block any more."""
        self._hosted.discard(block)
        if not self.device.holds(block):
            self.every.drop(block)

    def clear(self) -> None:
        self.every.clear()
        self._hosted.clear()
        if self.tiered:
            self.device.clear()

    def snapshot(self) -> CacheChanges:
        """All blocks that can be hit, as if they were added now."""
        return CacheChanges(list(self.every.blocks), [], self._beyond_device(self.every.blocks))

    def take_changes(self) -> CacheChanges:
        """The changes since the last call."""
        added, removed = self.every.take_changes()
        if not self.tiered:
            return CacheChanges(added, removed, [])
        back, left = self.device.take_changes()
        hosted = [*self._beyond_device(added), *(block for block in left if block in self.every.blocks)]
        known = set(added)
        return CacheChanges([*added, *(block for block in back if block not in known)], removed, hosted)

    def _beyond_device(self, blocks: Iterable[int]) -> list[int]:
        on_device = self.device.blocks
        return [block for block in blocks if block not in on_device] if self.tiered else []
