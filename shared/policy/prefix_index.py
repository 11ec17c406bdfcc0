"""Which instance holds which beginnings of prompts, as far as they have told: what a placement can save.

Pure; whoever hears of the instances feeds it. It may know less than there is, never more than was told.
"""

from collections.abc import Collection, Sequence

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.domain.prompt import BLOCK_TOKENS, PrefixDelta

MAX_BLOCKS = 1_000_000  # over all instances: some 130 MB
_FEW = 8  # so many holders of a block are kept in a tuple, which takes a quarter of a dict's memory
_GIVE_UP = 64  # one in so many blocks of the instance with the most is forgotten at a time: to find it takes a while


class _Held:
    """What one instance holds; `blocks` in the order in which it told of them."""

    __slots__ = ("blocks", "generation", "instance_id", "sequence")

    def __init__(self, instance_id: str, generation: int) -> None:
        self.instance_id = instance_id
        self.generation = generation
        self.sequence = -1
        self.blocks: dict[int, None] = {}


_Holders = _Held | tuple[_Held, ...] | dict[_Held, None]  # most blocks have one holder, or two: prefill and decode


class PrefixIndex:
    """Blocks by instance and instances by block.

    `apply` wants the deltas of each account in order. An instance tells of a block only while it holds all before it,
    so a run's end is found by halves. Beyond `max_blocks` the instance with the most forgets what it told last: the
    beginnings, which most prompts share, were told first. `block_tokens`: size of the blocks.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_tokens = block_tokens
        self._most = max_blocks
        self._count = 0
        self._instances: dict[str, _Held] = {}
        self._holders: dict[int, _Holders] = {}

    def __len__(self) -> int:
        """Blocks known, each counted once for each instance that holds it."""
        return self._count

    @property
    def known(self) -> frozenset[str]:
        """Instances of which an account has begun."""
        return frozenset(self._instances)

    def apply(self, instance_id: str, delta: PrefixDelta) -> bool:
        """Take the next delta of an instance's account.

        False when it does not follow the last one: something was lost, and nothing is known of that instance until an
        account starts anew.
        """
        held = self._instances.get(instance_id)
        if delta.starts:
            self.forget(instance_id)
            held = self._instances[instance_id] = _Held(instance_id, delta.generation)
        if held is None or (held.generation, held.sequence + 1) != (delta.generation, delta.sequence):
            self.forget(instance_id)
            return False
        held.sequence = delta.sequence
        for block in delta.removed:
            self._remove(held, block)
        for block in delta.added:
            if block not in held.blocks and not self._add(held, block):
                break
        return True

    def replace(self, instance_id: str, generation: int, blocks: Sequence[int]) -> None:
        """An account that is whole."""
        self.apply(instance_id, PrefixDelta(generation, 0, added=list(blocks), starts=True))

    def forget(self, instance_id: str) -> None:
        """Know nothing of that instance."""
        held = self._instances.pop(instance_id, None)
        if held is not None:
            for block in held.blocks:
                self._unlink(held, block)
            self._count -= len(held.blocks)

    def held_tokens(self, instance_id: str, prefix: Sequence[int]) -> int:
        """Tokens of the longest run of blocks from the start of `prefix` that the instance holds."""
        held = self._instances.get(instance_id)
        if held is None or not prefix or prefix[0] not in held.blocks:
            return 0
        blocks, low, high = held.blocks, 1, len(prefix)
        while low < high:
            middle = (low + high + 1) // 2
            if prefix[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low * self.block_tokens

    def holders(self, prefix: Sequence[int], limit: int) -> list[tuple[str, int]]:
        """Instances that hold some of `prefix`, with the tokens of their runs: the longest first, `limit` at most."""
        found: dict[_Held, int] = {}
        end = self._run(prefix, len(prefix), 1)
        while end and len(found) < limit:
            for held in _each(self._holders.get(prefix[end - 1])):
                if len(found) == limit:
                    break
                found.setdefault(held, end * self.block_tokens)
            # What one holds of the rest, all of these hold: look on where there are more of them.
            end = self._run(prefix, end - 1, len(found) + 1)
        return [(held.instance_id, tokens) for held, tokens in found.items()]

    def _run(self, prefix: Sequence[int], high: int, holders: int) -> int:
        """How many blocks from the start, `high` at most, have so many holders each."""
        low, known = 0, self._holders
        while low < high:
            middle = (low + high + 1) // 2
            found = known.get(prefix[middle - 1])
            if found is not None and (1 if isinstance(found, _Held) else len(found)) >= holders:
                low = middle
            else:
                high = middle - 1
        return low

    def _add(self, held: _Held, block: int) -> bool:
        if self._count >= self._most and not self._make_room(held):
            return False
        held.blocks[block] = None
        self._count += 1
        others = self._holders.get(block)
        if others is None:
            self._holders[block] = held
        elif isinstance(others, dict):
            others[held] = None
        elif isinstance(others, _Held):
            self._holders[block] = (others, held)
        elif len(others) < _FEW:
            self._holders[block] = (*others, held)
        else:
            self._holders[block] = dict.fromkeys((*others, held))
        return True

    def _remove(self, held: _Held, block: int) -> None:
        if block in held.blocks:
            del held.blocks[block]
            self._count -= 1
            self._unlink(held, block)

    def _unlink(self, held: _Held, block: int) -> None:
        others = self._holders[block]
        if isinstance(others, _Held):
            del self._holders[block]
            return
        if isinstance(others, dict):
            del others[held]
            if len(others) > _FEW:
                return
        left = tuple(one for one in others if one is not held)
        self._holders[block] = left if len(left) > 1 else left[0]

    def _make_room(self, wanting: _Held) -> bool:
        """Have the one with the most forget some; False when that is the one who wants more."""
        largest = max(self._instances.values(), key=lambda held: len(held.blocks), default=wanting)
        if len(largest.blocks) <= len(wanting.blocks):
            return False
        for _ in range(max(1, len(largest.blocks) // _GIVE_UP)):
            block, _nothing = largest.blocks.popitem()
            self._count -= 1
            self._unlink(largest, block)
        return True


def saved_tokens(prefixes: PrefixIndex, view: InstanceView, job: JobView, computed_tokens: int | None = None) -> int:
    """Prompt tokens that an instance has not to compute, or to pull, of the first `computed_tokens` (default: all)."""
    tokens = job.prompt_tokens if computed_tokens is None else computed_tokens
    return saved_of(prefixes.held_tokens(view.info.instance_id, job.prefix), view, tokens)


def saved_of(held_tokens: int, view: InstanceView, tokens: int) -> int:
    """What of the first `tokens` a run of `held_tokens` saves an instance.

    Engines find whole blocks of their own size, and always compute the last token.
    """
    if not held_tokens:
        return 0
    held = min(held_tokens, tokens - 1)
    return max(0, held - held % max(1, view.info.block_size))


def wants_prefixes(policy: object) -> bool:
    """Whether a policy looks at prefixes: it says so by a class variable `uses_prefixes`."""
    return bool(getattr(policy, "uses_prefixes", False))


def _each(holders: _Holders | None) -> dict[_Held, None] | tuple[_Held, ...]:
    if holders is None:
        return ()
    return (holders,) if isinstance(holders, _Held) else holders


# MERGED prefix_blocks.py
# The blocks of one prefix cache as others may know them: each only while all that it follows are held, too.


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
