"""KV memory of one engine: how many blocks each leg holds, which may start to decode, which prefixes are cached."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice, takewhile

import msgspec

from shared.policy.decode_admission import Blocks, DecodeAdmission, Decoding, may_decode
from shared.policy.prefix_index import ReachableBlocks
from shared.sim.group import DecodeGroup
from shared.sim.request import Leg
from shared.sim.spec import EngineLimits


class KvMemory:
    """Blocks of one engine. A leg holds the blocks of its computed tokens, or of all when outputs are reserved.

    While a leg decodes, its growth is counted for the whole group (`grow`). `reserved`: blocks that the decodes of
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

    def could_start(self, leg: Leg) -> bool:
        """Whether there is room for all that a waiting leg has to compute now, beside the decodes as they are.

        vLLM requires this, too (`scheduler_reserve_full_isl`): a leg that starts with less is soon preempted again.
        """
        shared = self._cache.shared(self._cache.known(self._ids(leg))) if self._cache is not None and leg.prefix else 0
        return self._whole(leg) - shared <= self.free

    def _whole(self, leg: Leg) -> int:
        return min(-(-leg.tokens // self._block), self.total)

    def start(self, leg: Leg, tokens: int) -> bool:
        """Take blocks for what a leg has and its first chunk of `tokens` tokens, or for its whole output as well.

        False when there are too few for all that it has to compute now. For a leg whose KV is to come, sets `saved`,
        the tokens that are cached here, and `computed`, the tokens that it will have once its KV is here.
        """
        if leg.remote:
            leg.saved = self._cached(leg)
            leg.computed = min(max(leg.request.split, leg.saved), leg.tokens - 1)
        used: tuple[int, ...] = ()
        if self._cache is not None and leg.prefix:
            held = leg.saved if leg.remote else leg.computed
            used = self._cache.known(self._ids(leg)[: held // self._id_tokens])
        shared = self._cache.shared(used) if self._cache is not None else 0
        if self._whole(leg) - shared > self.free - self.reserved:
            return False
        leg.blocks = shared
        if not self.hold(leg, leg.tokens + leg.left if self._reserves_output else leg.computed + tokens):
            leg.blocks = 0
            return False
        if self._cache is not None:
            self._cache.use(used)
            leg.used = used
        return True

    def hold(self, leg: Leg, tokens: int) -> bool:
        """Take blocks until the leg holds `tokens` tokens; False, and nothing changes, when there are too few."""
        more = -(-tokens // self._block) - leg.blocks
        if more > 0:
            if more > self.free - self.reserved:
                return False
            self.free -= more
            leg.blocks += more
        return True

    def grow(self, group: DecodeGroup, steps: int) -> None:
        self.free -= self.growth(group, steps)

    def growth(self, group: DecodeGroup, steps: int) -> int:
        return 0 if self._reserves_output else group.blocks_for(steps)

    def release(self, leg: Leg) -> None:
        """Free the blocks of the leg that no other leg uses."""
        if not leg.blocks:
            return
        self.free += max(leg.blocks, -(-leg.computed // self._block))
        leg.blocks = 0
        if self._cache is not None:
            self.free -= self._cache.leave(leg.used)
            leg.used = ()

    def take_cached(self, leg: Leg) -> int:
        """Count the prefix that is still cached as computed. Returns its tokens."""
        if leg.computed:
            return 0
        leg.computed = min(self._cached(leg), leg.tokens - 1)
        return leg.computed

    def _cached(self, leg: Leg) -> int:
        if self._cache is None or not leg.prefix:
            return 0
        return self._cache.matched(self._ids(leg), self.free) * self._id_tokens

    def keep_prefix(self, leg: Leg) -> None:
        """The leg's prompt, or its part of the prompt, is here: others may use it."""
        if self._cache is not None and leg.prefix:
            leg.used += self._cache.keep(self._ids(leg), self.free)

    def _ids(self, leg: Leg) -> tuple[int, ...]:
        """Ids of the leg's prompt; where only a part of it is computed here, of the whole blocks in that part."""
        part = leg.tokens < leg.request.job.prompt_tokens
        return leg.prefix[: leg.tokens // self._id_tokens] if part else leg.prefix

    def watch_cache(self) -> ReachableBlocks | None:
        """Ids that can be hit, kept up to date by the cache from now on; None without a cache."""
        return self._cache.watch() if self._cache is not None else None


class AdmissionGate:
    """Lets legs that are to decode here start when the policy admits them; prompts that are only computed here pass."""

    def __init__(self, policy: DecodeAdmission, memory: KvMemory, group: DecodeGroup, block_tokens: int) -> None:
        self._policy = policy
        self.needs_running = policy.needs_running  # whether decodes that go on may be enough to let another leg in
        self._memory = memory
        self._group = group
        self._block = block_tokens

    def opens(self, leg: Leg, now: float, inside: Iterable[Leg]) -> bool:
        """Whether `leg` may start beside those `inside`, which run or whose KV is under way."""
        if not leg.decodes:
            return True
        job = leg.request.job
        if leg.given:  # preempted: what it has given is prompt now
            job = msgspec.structs.replace(job, prompt_tokens=leg.tokens, max_tokens=leg.left)
        decoding = [
            Decoding(other.request.job, other.request.job.prompt_tokens, self._context(other))
            for other in inside
            if other.decodes
        ]
        free = self._memory.free - self._memory.reserved
        return may_decode(self._policy, job, decoding, Blocks(free, self._memory.total, self._block), now)

    def _context(self, leg: Leg) -> int:
        """Prompt and output of a leg, the newest token included."""
        if leg.finish_step > self._group.steps:
            return leg.base + self._group.steps + 1
        return leg.tokens


class PrefixCache:
    """Ids of prompt blocks, the least recently used forgotten first.

    Blocks that several requests use are held once. Unused blocks live in free memory, so the room for them changes with
    the load and is an argument, `room_blocks`. Requests that compute the same prefix at the same time hold it once
    each, as in vLLM.
    """

    def __init__(self, blocks_of_id: int) -> None:
        self._blocks_of_id = max(1, blocks_of_id)
        self._ids: OrderedDict[int, None] = OrderedDict()
        self._users: dict[int, int] = {}  # how many requests use an id; without unused ids
        self._watched: ReachableBlocks | None = None

    def watch(self) -> ReachableBlocks:
        """The ids that can be hit: an id as long as all ids before it in its prompt are held, too."""
        assert not self._ids, "a cache can be watched only while it is empty"
        self._watched = ReachableBlocks()
        return self._watched

    def matched(self, prefix: tuple[int, ...], room_blocks: int) -> int:
        """How many ids from the start of `prefix` are held."""
        self._trim(room_blocks)
        count = 0
        for at in prefix:
            if at not in self._ids:
                break
            self._ids.move_to_end(at)
            count += 1
        return count

    def known(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(takewhile(self._ids.__contains__, prefix))

    def shared(self, ids: tuple[int, ...]) -> int:
        return self._blocks_of_id * sum(at in self._users for at in ids)

    def use(self, ids: tuple[int, ...]) -> None:
        """One more request uses these ids, which are held."""
        for at in ids:
            self._users[at] = self._users.get(at, 0) + 1

    def leave(self, ids: tuple[int, ...]) -> int:
        """A request does not use these ids any more. Returns how many of their blocks other requests use."""
        left = 0
        for at in ids:
            if self._users[at] > 1:
                self._users[at] -= 1
                left += 1
            else:
                del self._users[at]
        return self._blocks_of_id * left

    def keep(self, prefix: tuple[int, ...], room_blocks: int) -> tuple[int, ...]:
        """Hold these ids from now on. Returns those that were not held before, which their request uses."""
        before, fresh = None, tuple(at for at in prefix if at not in self._ids)
        self.use(fresh)
        for at in prefix:
            self._ids[at] = None
            self._ids.move_to_end(at)
            if self._watched is not None:
                self._watched.hold(at, before)
                before = at
        self._trim(room_blocks)
        return fresh

    def _trim(self, room_blocks: int) -> None:
        """Forget the oldest unused ids that have no room any more."""
        over = len(self._ids) - len(self._users) - room_blocks // self._blocks_of_id
        if over <= 0:
            return
        for gone in list(islice((at for at in self._ids if at not in self._users), over)):
            del self._ids[gone]
            if self._watched is not None:
                self._watched.drop(gone)
