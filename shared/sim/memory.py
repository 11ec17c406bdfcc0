"""Paged KV of one engine: who holds how many blocks, and which prefixes are still there."""

from shared.sim.entry import Entry
from shared.sim.group import DecodeGroup
from shared.sim.prefix import PrefixCache
from shared.sim.spec import EngineLimits


class KvMemory:
    """Blocks of one engine. An entry holds the blocks of its computed tokens, or of all when outputs are reserved.

    While an entry decodes, its growth is counted for the whole group (`grow`). `reserved`: blocks that the decodes of
    the coming step need.
    """

    def __init__(self, limits: EngineLimits, kv_tokens: int, prefix_block_tokens: int) -> None:
        self._block = limits.block_tokens
        self._reserves_output = limits.reserves_output
        self._id_tokens = prefix_block_tokens
        self._cache = PrefixCache(prefix_block_tokens // self._block) if limits.prefix_cache else None
        self.total = kv_tokens // self._block
        self.free = self.total
        self.reserved = 0

    def could_start(self, entry: Entry, budget: int) -> bool:
        """Whether `entry`, which waits, has room now."""
        return -(-self._first(entry, 0 if entry.remote else min(entry.missing, budget)) // self._block) <= self.free

    def start(self, entry: Entry, tokens: int) -> bool:
        """Blocks for what an entry has and its first chunk of `tokens` tokens, or for all that it will ever need.

        False when there are too few.
        """
        return self.hold(entry, self._first(entry, tokens))

    def _first(self, entry: Entry, tokens: int) -> int:
        return entry.tokens + entry.left if self._reserves_output else entry.computed + tokens

    def hold(self, entry: Entry, tokens: int) -> bool:
        """Blocks for `tokens` tokens in all; False, and nothing changes, when there are too few."""
        more = -(-tokens // self._block) - entry.blocks
        if more > 0:
            if more > self.free - self.reserved:
                return False
            self.free -= more
            entry.blocks += more
        return True

    def grow(self, group: DecodeGroup, steps: int) -> None:
        """The decodes take what their next `steps` steps need."""
        self.free -= self.growth(group, steps)

    def growth(self, group: DecodeGroup, steps: int) -> int:
        """Blocks that the next `steps` steps of the decodes take."""
        return 0 if self._reserves_output else group.blocks_for(steps)

    def release(self, entry: Entry) -> None:
        """Everything that it holds is free."""
        self.free += max(entry.blocks, -(-entry.computed // self._block)) if entry.blocks else 0
        entry.blocks = 0

    def take_cached(self, entry: Entry) -> int:
        """Count the prefix that is still here as computed; how many tokens that is."""
        if self._cache is None or entry.computed or not entry.prefix:
            return 0
        tokens = self._cache.matched(entry.prefix, self.free) * self._id_tokens
        entry.computed = min(tokens, entry.tokens - 1)
        return entry.computed

    def keep_prefix(self, entry: Entry) -> None:
        """Its prompt is computed: others may use it."""
        if self._cache is not None and entry.prefix:
            self._cache.keep(entry.prefix, self.free)
