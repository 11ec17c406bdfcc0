"""The blocks of one prefix cache as others may know them: each only while all that it follows are held, too."""

from collections.abc import Collection


class ReachableBlocks:
    """What of a cache can be hit, and what has changed in it since somebody last asked.

    A block that is held but follows one that is not can never be hit, so it does not count. Whoever is told only of
    blocks that count may look for the end of a run by halves.
    """

    __slots__ = ("_changes", "_children", "_parents", "_reached")

    def __init__(self) -> None:
        self._parents: dict[int, int | None] = {}  # of all that is held
        self._children: dict[int, dict[int, None]] = {}  # of them, by what they follow, held or not
        self._reached: dict[int, None] = {}
        self._changes: dict[int, bool] = {}  # whether it was added; in order

    @property
    def blocks(self) -> Collection[int]:
        """All that can be hit, each after the one that it follows."""
        return self._reached.keys()

    @property
    def changed(self) -> bool:
        """Whether `take_changes` has anything to tell."""
        return bool(self._changes)

    def hold(self, block: int, parent: int | None) -> None:
        """A block is held; `parent` is the one before it in its prompt, if any."""
        if block in self._parents:
            return
        self._parents[block] = parent
        if parent is not None:
            self._children.setdefault(parent, {})[block] = None
        if parent is None or parent in self._reached:
            self._reach(block)

    def drop(self, block: int) -> None:
        """A block is held no longer; unknown ones are ignored."""
        if block not in self._parents:
            return
        parent = self._parents.pop(block)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[block]
            if not siblings:
                del self._children[parent]
        if block in self._reached:
            self._lose(block)

    def clear(self) -> None:
        """Nothing is held."""
        for block in tuple(self._reached):
            self._note(block, added=False)
        self._parents.clear()
        self._children.clear()
        self._reached.clear()

    def take_changes(self) -> tuple[list[int], list[int]]:
        """What was added, each after the one that it follows, and what was removed since the last call."""
        changes, self._changes = self._changes, {}
        added = [block for block, was_added in changes.items() if was_added]
        removed = [block for block, was_added in changes.items() if not was_added]
        return added, removed

    def _reach(self, block: int) -> None:
        found = [block]
        while found:
            block = found.pop()
            self._reached[block] = None
            self._note(block, added=True)
            found += self._children.get(block, ())

    def _lose(self, block: int) -> None:
        found = [block]
        while found:
            block = found.pop()
            del self._reached[block]
            self._note(block, added=False)
            found += self._children.get(block, ())

    def _note(self, block: int, *, added: bool) -> None:
        if self._changes.pop(block, added) is added:
            self._changes[block] = added
