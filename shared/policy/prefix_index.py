"""Prefix caches of the instances: which instance holds which beginnings of prompts, by the instances' own reports.

A prompt's prefix is the sequence of hashes of its blocks. An instance reports a block only while it holds all blocks
before it in its prompt (`ReachableBlocks`), so the blocks that it holds of any prefix are a run from the start: of the
prefix (a, b, c) it holds nothing, a, a and b, or all. `PrefixIndex` may know less than an instance holds, and more only
until the report of a removal arrives.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.domain.prompt import BLOCK_TOKENS, PrefixDelta

MAX_BLOCKS = 1_000_000  # over all instances: about 130 MB
_FEW = 8  # so many holders of a block are kept in a tuple, which takes a quarter of a dict's memory
_EVICTED_PART = 64  # when the index is full, one block in so many of the largest instance is forgotten at a time


class _Instance:
    """The blocks of one instance, in the order of its reports."""

    __slots__ = ("blocks", "generation", "instance_id", "sequence")

    def __init__(self, instance_id: str, generation: int) -> None:
        self.instance_id = instance_id
        self.generation = generation
        self.sequence = -1
        self.blocks: dict[int, None] = {}


_Holders = tuple[_Instance, ...] | dict[_Instance, None]  # most blocks have one or two: prefill and decode


class PrefixIndex:
    """Blocks by instance and instances by block.

    `apply` wants the deltas of each instance in order. Beyond `max_blocks`, the instance with the most blocks loses
    those that it reported last: the beginnings, which most prompts share, were reported first. `block_tokens`: size of
    the blocks.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._count = 0
        self._instances: dict[str, _Instance] = {}
        self._holders: dict[int, _Instance | _Holders] = {}  # a single holder without a tuple, to save memory

    def __len__(self) -> int:
        """Known blocks, each counted once for each instance that holds it."""
        return self._count

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self._instances)

    def apply(self, instance_id: str, delta: PrefixDelta) -> bool:
        """Apply the next delta of an instance.

        Returns False when it does not follow the last one: a delta was lost, and the instance is unknown until it
        starts again.
        """
        held = self._instances.get(instance_id)
        if delta.starts:
            self.forget(instance_id)
            held = self._instances[instance_id] = _Instance(instance_id, delta.generation)
        if held is None or (held.generation, held.sequence + 1) != (delta.generation, delta.sequence):
            self.forget(instance_id)
            return False
        held.sequence = delta.sequence
        for block in delta.removed:
            if block in held.blocks:
                del held.blocks[block]
                self._count -= 1
                self._remove_holder(held, block)
        for block in delta.added:
            if block not in held.blocks and not self._add(held, block):
                break
        return True

    def replace(self, instance_id: str, generation: int, blocks: Sequence[int]) -> None:
        """Replace all blocks of an instance."""
        self.apply(instance_id, PrefixDelta(generation, 0, added=list(blocks), starts=True))

    def forget(self, instance_id: str) -> None:
        held = self._instances.pop(instance_id, None)
        if held is not None:
            for block in held.blocks:
                self._remove_holder(held, block)
            self._count -= len(held.blocks)

    def held_tokens(self, instance_id: str, prefix: Sequence[int]) -> int:
        """Tokens of the longest run of blocks from the start of `prefix` that the instance holds."""
        held = self._instances.get(instance_id)
        if held is None or not prefix or prefix[0] not in held.blocks:
            return 0
        return bisect_left(prefix, True, 1, key=lambda block: block not in held.blocks) * self.block_tokens

    def holders(self, prefix: Sequence[int], limit: int) -> list[tuple[str, int]]:
        """The instances with the longest runs of `prefix`, at most `limit`, longest first, with the tokens that they
        hold.

        The holders of a block also hold all blocks before it, so the number of holders does not increase along the
        prefix. The loop starts at the last block that has a holder and goes back to the last block with more holders
        than were found so far; no block between the two can add one.
        """
        found: dict[_Instance, int] = {}
        end = self._last_with(prefix, len(prefix), 1)
        while end and len(found) < limit:
            for held in self._holders_of(prefix[end - 1]):
                if len(found) == limit:
                    break
                found.setdefault(held, end * self.block_tokens)
            end = self._last_with(prefix, end - 1, len(found) + 1)
        return [(held.instance_id, tokens) for held, tokens in found.items()]

    def _last_with(self, prefix: Sequence[int], high: int, holders: int) -> int:
        """The number of blocks from the start, at most `high`, that have at least so many holders each."""
        return bisect_left(prefix, True, 0, high, key=lambda block: len(self._holders_of(block)) < holders)

    def _holders_of(self, block: int) -> _Holders:
        holders = self._holders.get(block, ())
        return (holders,) if isinstance(holders, _Instance) else holders

    def _add(self, held: _Instance, block: int) -> bool:
        if self._count >= self._max_blocks and not self._make_room(held):
            return False
        held.blocks[block] = None
        self._count += 1
        others = self._holders.get(block)
        if others is None:
            self._holders[block] = held
        elif isinstance(others, dict):
            others[held] = None
        elif isinstance(others, _Instance):
            self._holders[block] = (others, held)
        elif len(others) < _FEW:
            self._holders[block] = (*others, held)
        else:
            self._holders[block] = dict.fromkeys((*others, held))
        return True

    def _remove_holder(self, held: _Instance, block: int) -> None:
        others = self._holders[block]
        if isinstance(others, _Instance):
            del self._holders[block]
            return
        if isinstance(others, dict):
            del others[held]
            if len(others) > _FEW:
                return
        left = tuple(one for one in others if one is not held)
        self._holders[block] = left if len(left) > 1 else left[0]

    def _make_room(self, wanting: _Instance) -> bool:
        """Forget some blocks of the instance with the most; False when that is `wanting` itself."""
        largest = max(self._instances.values(), key=lambda held: len(held.blocks), default=wanting)
        if len(largest.blocks) <= len(wanting.blocks):
            return False
        for _ in range(max(1, len(largest.blocks) // _EVICTED_PART)):  # the search for the largest takes a while
            block, _nothing = largest.blocks.popitem()
            self._count -= 1
            self._remove_holder(largest, block)
        return True


def saved_tokens(prefixes: PrefixIndex, view: InstanceView, job: JobView, computed_tokens: int | None = None) -> int:
    """Of the first `computed_tokens` (default: all) prompt tokens, those that an instance need not compute or pull."""
    tokens = job.prompt_tokens if computed_tokens is None else computed_tokens
    return saved_of(prefixes.held_tokens(view.info.instance_id, job.prefix), view, tokens)


def saved_of(held_tokens: int, view: InstanceView, tokens: int) -> int:
    """Of the first `tokens`, those that a run of `held_tokens` saves an instance.

    Engines find whole blocks of their own size, and compute the last token in any case.
    """
    if not held_tokens:
        return 0
    held = min(held_tokens, tokens - 1)
    return max(0, held - held % max(1, view.info.block_size))


def wants_prefixes(policy: object) -> bool:
    """Whether a policy looks at prefixes: it declares that by a class variable `uses_prefixes`."""
    return bool(getattr(policy, "uses_prefixes", False))


class ReachableBlocks:
    """The blocks of one prefix cache that a prompt can hit, and the changes since they were last reported.

    A block that is held but follows a block that is not held cannot be hit, so it does not count. The receiver of the
    reports may therefore find the end of a run by bisection.
    """

    __slots__ = ("_changes", "_children", "_parents", "_reached")

    def __init__(self) -> None:
        self._parents: dict[int, int | None] = {}  # of all held blocks
        self._children: dict[int, dict[int, None]] = {}  # of all held blocks, by the block that they follow
        self._reached: dict[int, None] = {}
        self._changes: dict[int, bool] = {}  # whether the block was added; in order

    @property
    def blocks(self) -> Collection[int]:
        """All blocks that can be hit, each after the one that it follows."""
        return self._reached.keys()

    @property
    def changed(self) -> bool:
        """Whether `take_changes` has anything to report."""
        return bool(self._changes)

    def hold(self, block: int, parent: int | None) -> None:
        """Add a block; `parent` is the one before it in its prompt, if any."""
        if block in self._parents:
            return
        self._parents[block] = parent
        if parent is not None:
            self._children.setdefault(parent, {})[block] = None
        if parent is None or parent in self._reached:
            for reached in self._descendants(block):
                self._reached[reached] = None
                self._note(reached, added=True)

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
                del self._reached[lost]
                self._note(lost, added=False)

    def clear(self) -> None:
        for block in tuple(self._reached):
            self._note(block, added=False)
        self._parents.clear()
        self._children.clear()
        self._reached.clear()

    def take_changes(self) -> tuple[list[int], list[int]]:
        """The blocks that were added, each after the one that it follows, and removed since the last call."""
        changes, self._changes = self._changes, {}
        added = [block for block, was_added in changes.items() if was_added]
        removed = [block for block, was_added in changes.items() if not was_added]
        return added, removed

    def _descendants(self, block: int) -> Iterable[int]:
        """The block and all held blocks that follow it, parents first."""
        left = [block]
        while left:
            block = left.pop()
            yield block
            left += self._children.get(block, ())

    def _note(self, block: int, *, added: bool) -> None:
        if self._changes.pop(block, added) is added:
            self._changes[block] = added
