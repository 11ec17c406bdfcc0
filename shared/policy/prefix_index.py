"""Prefix caches of the instances: which instance holds which beginnings of prompts, by the instances' own reports.

A prompt's prefix is the sequence of hashes of its blocks. The file has two sides:

- `PrefixIndex` receives the reports of all instances and answers lookups; `saved_tokens` converts an answer to tokens.
- `ReachableBlocks` decides what one instance reports of its cache. The workers and the simulated engines use it.

The run invariant connects the two sides: an instance reports a block only while it holds all blocks before the block in
its prompt, so the blocks that it holds of any prefix are a run from the start. Of the prefix (a, b, c) it holds
nothing, a, a and b, or all. The end of a run can therefore be found by bisection (`run_length`). `PrefixIndex` may know
less than an instance holds, and more only until the report of a removal arrives.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.domain.prompt import BLOCK_TOKENS, PrefixDelta

MAX_BLOCKS = 1_000_000  # over all instances: about 130 MB
_EVICTED_PART = 64  # when the index is full, one block in so many of the largest instance is forgotten at a time
_MAX_TUPLE = 8  # holders of a block that are kept in a tuple, which takes a quarter of a dict's memory


def run_length(prefix: Sequence[int], is_outside: Callable[[int], bool], start: int, end: int) -> int:
    """The number of blocks in the run at the start of `prefix[:end]`, of which the first `start` are known to be in it.

    `is_outside` says whether a block is outside the run. By the run invariant it is false for all blocks of the run and
    true for all blocks after it, so its values are sorted (False < True), and the run ends before the first True.
    Example: an instance holds a and b of the prefix (a, b, c). The values are (False, False, True), and the length of
    the run is 2.
    """
    return bisect_left(prefix, True, start, end, key=is_outside)


class _Instance:
    """The blocks of one instance, and the report that must come next."""

    __slots__ = ("alone", "blocks", "generation", "instance_id", "next_sequence")

    def __init__(self, instance_id: str, generation: int) -> None:
        self.instance_id = instance_id
        self.generation = generation
        self.next_sequence = 0
        self.blocks: dict[int, None] = {}  # in the order of the reports
        self.alone = (self,)  # the holders of each block that only this instance holds


class _HolderTable:
    """Instances by block, and blocks by instance (`_Instance.blocks`); each method that changes one changes both.

    The holders of a block are in the order in which they were added. Most blocks have one or two, a prefill and a
    decode instance; a common beginning of prompts may have all. The size of the collection decides its type:

    - no holder: the block has no entry;
    - 1: the instance's tuple `alone`, since a tuple for each such block would take 48 bytes;
    - 2 to `_MAX_TUPLE`: a tuple;
    - more: a dict whose keys are the holders, since each change of a tuple copies the tuple.
    """

    __slots__ = ("_by_block", "count")

    def __init__(self) -> None:
        self.count = 0  # blocks, each counted once for each of its holders
        self._by_block: dict[int, tuple[_Instance, ...] | dict[_Instance, None]] = {}

    def __len__(self) -> int:
        """Blocks that have holders."""
        return len(self._by_block)

    def holders(self, block: int) -> Collection[_Instance]:
        return self._by_block.get(block, ())

    def add(self, instance: _Instance, block: int) -> None:
        """Add a block that the instance does not hold yet."""
        instance.blocks[block] = None
        self.count += 1
        holders = self._by_block.get(block)
        if holders is None:
            self._by_block[block] = instance.alone
        elif isinstance(holders, dict):
            holders[instance] = None
        elif len(holders) < _MAX_TUPLE:
            self._by_block[block] = (*holders, instance)
        else:
            self._by_block[block] = dict.fromkeys((*holders, instance))

    def remove(self, instance: _Instance, blocks: Iterable[int]) -> None:
        """Remove blocks of the instance; blocks that it does not hold are ignored."""
        held = instance.blocks
        for block in blocks:
            if block in held:
                del held[block]
                self.count -= 1
                self._remove_holder(instance, block)

    def remove_all(self, instance: _Instance) -> None:
        """Remove all blocks of the instance."""
        for block in instance.blocks:
            self._remove_holder(instance, block)
        self.count -= len(instance.blocks)
        instance.blocks.clear()

    def _remove_holder(self, instance: _Instance, block: int) -> None:
        holders = self._by_block[block]
        if holders is instance.alone:
            del self._by_block[block]
        elif isinstance(holders, dict):
            del holders[instance]
            if len(holders) == _MAX_TUPLE:
                self._by_block[block] = tuple(holders)
        else:
            at = holders.index(instance)
            left = holders[:at] + holders[at + 1 :]
            if len(left) == 1:
                left = left[0].alone
            self._by_block[block] = left


class PrefixIndex:
    """Looks up which instances hold the blocks of a prefix.

    `apply` expects the deltas of each instance in order. Beyond `max_blocks`, the instance with the most blocks loses
    the blocks that it reported last: the beginnings, which most prompts share, were reported first. `block_tokens`:
    size of the blocks.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._instances: dict[str, _Instance] = {}
        self._table = _HolderTable()

    def __len__(self) -> int:
        """Known blocks, each counted once for each instance that holds it."""
        return self._table.count

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self._instances)

    def apply(self, instance_id: str, delta: PrefixDelta) -> bool:
        """Apply the next delta of an instance.

        Returns False when the delta does not follow the last one: a delta was lost, and the instance is unknown until
        it starts again.
        """
        if delta.starts:
            self.forget(instance_id)
            self._instances[instance_id] = _Instance(instance_id, delta.generation)
        instance = self._instances.get(instance_id)
        if instance is None:
            return False
        if delta.generation != instance.generation or delta.sequence != instance.next_sequence:
            self.forget(instance_id)
            return False
        instance.next_sequence += 1
        table, blocks = self._table, instance.blocks
        table.remove(instance, delta.removed)
        for block in delta.added:
            if block in blocks:
                continue
            if table.count >= self._max_blocks and not self._make_room(instance):
                break
            table.add(instance, block)
        return True

    def replace(self, instance_id: str, generation: int, blocks: Sequence[int]) -> None:
        """Replace all blocks of an instance."""
        self.apply(instance_id, PrefixDelta(generation, 0, added=list(blocks), starts=True))

    def forget(self, instance_id: str) -> None:
        instance = self._instances.pop(instance_id, None)
        if instance is not None:
            self._table.remove_all(instance)

    def held_tokens(self, instance_id: str, prefix: Sequence[int]) -> int:
        """Tokens of the longest run of blocks from the start of `prefix` that the instance holds."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return 0
        blocks = instance.blocks
        if not prefix or prefix[0] not in blocks:  # the most frequent case, so it is tested first
            return 0
        return run_length(prefix, lambda block: block not in blocks, 1, len(prefix)) * self.block_tokens

    def holders(self, prefix: Sequence[int], limit: int) -> list[tuple[str, int]]:
        """The instances with the longest runs of `prefix`, at most `limit`, longest first, with the tokens that they
        hold.

        By the run invariant, the holders of a block also hold all blocks before it, so the number of holders does not
        increase along the prefix. Example: of the prefix (a, b, c), x holds all blocks, y holds a and b, and z holds a.
        The last block with a holder is c, which gives x; the last block with two holders is b, which adds y; the last
        block with three is a, which adds z. No block between two of these can add an instance.
        """
        found: dict[_Instance, int] = {}
        end = self._blocks_with(1, prefix, len(prefix))
        while end and len(found) < limit:
            for instance in self._table.holders(prefix[end - 1]):
                if len(found) == limit:
                    break
                found.setdefault(instance, end * self.block_tokens)
            end = self._blocks_with(len(found) + 1, prefix, end - 1)
        return [(instance.instance_id, tokens) for instance, tokens in found.items()]

    def _blocks_with(self, min_holders: int, prefix: Sequence[int], end: int) -> int:
        """The number of blocks at the start of `prefix[:end]` that have at least `min_holders` holders each."""
        holders = self._table.holders
        return run_length(prefix, lambda block: len(holders(block)) < min_holders, 0, end)

    def _make_room(self, wanting: _Instance) -> bool:
        """Forget some blocks of the instance with the most; False when no instance has more than `wanting`."""
        largest = max(self._instances.values(), key=lambda instance: len(instance.blocks))
        if len(largest.blocks) <= len(wanting.blocks):
            return False
        count = max(1, len(largest.blocks) // _EVICTED_PART)  # several, since the search for the largest takes a while
        self._table.remove(largest, list(islice(reversed(largest.blocks), count)))
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
    def changed(self) -> bool:
        """Whether `take_changes` has anything to report."""
        return bool(self._added or self._removed)

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
