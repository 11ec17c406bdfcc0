"""Prefix caches of the instances: which instance holds which beginnings of prompts, by the instances' own reports.

A prompt's prefix is the sequence of hashes of its blocks. `PrefixIndex` receives the reports of all instances and
answers lookups. What an instance reports is decided in `reachable_blocks.py`; how many prompt tokens a lookup's
result saves an engine is computed in `saved_tokens.py`.

The run invariant: a block's hash covers all tokens before the block, and an instance reports a block only while it
holds all blocks before it. The blocks that it is known to hold of any prefix are therefore a run from the start: of the
prefix (a, b, c) nothing, a, a and b, or all. The end of a run can be found by bisection (`run_length`). Where the index
is full it forgets blocks, the last of a run first. So it may know less than an instance holds; it knows more only until
the report of a removal arrives.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from shared.domain.prompt import BLOCK_TOKENS, PrefixDelta

MAX_BLOCKS = 1_000_000  # over all instances: about 130 MB
_EVICTED_PART = 64  # when the index is full, one block in so many of the largest instance is forgotten at a time


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

    __slots__ = ("blocks", "generation", "hosted", "instance_id", "next_sequence", "single")

    def __init__(self, instance_id: str, generation: int) -> None:
        self.instance_id = instance_id
        self.generation = generation
        self.next_sequence = 0
        self.blocks: dict[int, None] = {}  # in the order of the reports
        self.hosted: set[int] = set()  # of these, those in host memory, and those behind them in a prompt
        self.single = (instance_id,)  # the holders of all blocks that only this instance holds


class _HolderTable:
    """Instances by block, and blocks by instance (`_Instance.blocks`); each method that changes one changes both.

    The holders of a block are a tuple of instance ids, in the order in which they were added; a block without a holder
    has no entry. Most blocks have one holder or two, a prefill and a decode instance, and a tuple of two takes a
    quarter of a dict's memory. Blocks with the same single holder share its tuple `_Instance.single`, which saves 48
    bytes each. A common beginning of prompts may have all instances, and each change copies its tuple.
    """

    __slots__ = ("_by_block", "_instances", "count")

    def __init__(self, instances: Mapping[str, _Instance]) -> None:
        self._instances = instances  # by id; all that hold blocks
        self._by_block: dict[int, tuple[str, ...]] = {}
        self.count = 0  # blocks, each counted once for each of its holders

    def __len__(self) -> int:
        """Blocks that have holders."""
        return len(self._by_block)

    def holders(self, block: int) -> tuple[str, ...]:
        return self._by_block.get(block, ())

    def add(self, instance: _Instance, block: int) -> None:
        """Add a block that the instance does not hold yet."""
        instance.blocks[block] = None
        self.count += 1
        holders = self._by_block.get(block)
        if holders is None:
            self._by_block[block] = instance.single
        else:
            self._by_block[block] = (*holders, instance.instance_id)

    def remove(self, instance: _Instance, blocks: Iterable[int]) -> None:
        """Remove blocks of the instance; blocks that it does not hold are ignored."""
        held = instance.blocks
        for block in blocks:
            if block in held:
                del held[block]
                instance.hosted.discard(block)
                self.count -= 1
                self._remove_holder(block, instance.instance_id)

    def remove_all(self, instance: _Instance) -> None:
        """Remove all blocks of the instance."""
        for block in instance.blocks:
            self._remove_holder(block, instance.instance_id)
        self.count -= len(instance.blocks)
        instance.blocks.clear()
        instance.hosted.clear()

    def _remove_holder(self, block: int, instance_id: str) -> None:
        holders = self._by_block[block]
        if len(holders) == 1:
            del self._by_block[block]
            return
        at = holders.index(instance_id)
        left = holders[:at] + holders[at + 1 :]
        if len(left) == 1:
            left = self._instances[left[0]].single
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
        self._table = _HolderTable(self._instances)

    def __len__(self) -> int:
        """Known blocks, each counted once for each instance that holds it."""
        return self._table.count

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self._instances)

    def reports(self, instance_id: str) -> bool:
        """Whether it is known what the instance holds."""
        return instance_id in self._instances

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
        if instance.hosted:
            instance.hosted.difference_update(delta.added)
        for block in delta.added:
            if block in blocks:
                continue
            if table.count >= self._max_blocks and not self._make_room(instance):
                break
            table.add(instance, block)
        instance.hosted.update(block for block in delta.hosted if block in blocks)
        return True

    def replace(self, instance_id: str, generation: int, blocks: Sequence[int]) -> None:
        """Replace all blocks of an instance."""
        self.apply(instance_id, PrefixDelta(generation, 0, added=list(blocks), starts=True))

    def forget(self, instance_id: str) -> None:
        instance = self._instances.get(instance_id)
        if instance is not None:
            self._table.remove_all(instance)
            del self._instances[instance_id]

    def held_tokens(self, instance_id: str, prefix: Sequence[int]) -> int:
        """Tokens of the longest run of blocks from the start of `prefix` that the instance holds."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return 0
        blocks = instance.blocks
        if not prefix or prefix[0] not in blocks:  # the most frequent case, so it is tested first
            return 0
        return run_length(prefix, lambda block: block not in blocks, 1, len(prefix)) * self.block_tokens

    def hosted_tokens(self, instance_id: str, prefix: Sequence[int], held: int) -> int:
        """Of the first `held` tokens of `prefix`, which the instance holds, those that it loads from host memory.

        The run invariant holds for the blocks on the accelerator, too: one that follows a block in host memory counts
        as there.
        """
        instance = self._instances.get(instance_id)
        if instance is None or not instance.hosted:
            return 0
        hosted = instance.hosted
        end = held // self.block_tokens
        return (end - run_length(prefix, lambda block: block in hosted, 0, end)) * self.block_tokens

    def holders(self, prefix: Sequence[int], limit: int) -> list[tuple[str, int]]:
        """The instances with the longest runs of `prefix`, at most `limit`, longest first, with the tokens that they
        hold.

        By the run invariant, the holders of a block also hold all blocks before it, so the number of holders does not
        increase along the prefix. Example: of the prefix (a, b, c), x holds all blocks, y holds a and b, and z holds a.
        The last block with a holder is c, which gives x; the last block with two holders is b, which adds y; the last
        block with three is a, which adds z. No block between two of these can add an instance.
        """
        found: dict[str, int] = {}
        end = self._blocks_with(1, prefix, len(prefix))
        while end and len(found) < limit:
            for instance_id in self._table.holders(prefix[end - 1]):
                if len(found) == limit:
                    break
                found.setdefault(instance_id, end * self.block_tokens)
            end = self._blocks_with(len(found) + 1, prefix, end - 1)
        return list(found.items())

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
