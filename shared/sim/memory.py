"""KV memory of one engine: who holds how many blocks, who may start to decode, which prefixes are still there."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice, takewhile

import msgspec

from shared.policy.admission_gate import Blocks, Decoding, may_decode
from shared.policy.decode_admission import DecodeAdmission
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
        """Whether there is room for all that `leg`, which waits, has to compute now, the coming step of the decodes
        left out. vLLM asks for it, too (`scheduler_reserve_full_isl`): one that starts with less would soon be
        preempted again.
        """
        shared = self._cache.shared(self._cache.known(self._ids(leg))) if self._cache is not None and leg.prefix else 0
        return self._whole(leg) - shared <= self.free

    def _whole(self, leg: Leg) -> int:
        return min(-(-leg.tokens // self._block), self.total)

    def start(self, leg: Leg, tokens: int) -> bool:
        """Blocks for what a leg has and its first chunk of `tokens` tokens, or for all that it will ever need.

        False when there are too few for all that it has to compute now. Of a leg whose KV is to come `saved` tokens are
        here already, be they of the part that comes or of the rest.
        """
        if leg.remote:
            leg.saved = self._cached(leg)
            leg.computed = min(max(leg.request.split, leg.saved), leg.tokens - 1)
        used = self._used_prefix(leg)
        shared = self._cache.shared(used) if self._cache is not None else 0
        if self._whole(leg) - shared > self.free - self.reserved:
            return False
        leg.blocks = shared
        if not self.hold(leg, self._first(leg, tokens)):
            leg.blocks = 0
            return False
        if self._cache is not None:
            self._cache.use(used)
            leg.used = used
        return True

    def _used_prefix(self, leg: Leg) -> tuple[int, ...]:
        """Ids of the blocks of its prompt that are here already, of which it uses those that are here."""
        if self._cache is None or not leg.prefix:
            return ()
        held = leg.saved if leg.remote else leg.computed
        return self._cache.known(self._ids(leg)[: held // self._id_tokens])

    def _first(self, leg: Leg, tokens: int) -> int:
        return leg.tokens + leg.left if self._reserves_output else leg.computed + tokens

    def hold(self, leg: Leg, tokens: int) -> bool:
        """Blocks for `tokens` tokens in all; False, and nothing changes, when there are too few."""
        more = -(-tokens // self._block) - leg.blocks
        if more > 0:
            if more > self.free - self.reserved:
                return False
            self.free -= more
            leg.blocks += more
        return True

    def grow(self, group: DecodeGroup, steps: int) -> None:
        """The decodes take what their next `steps` steps need."""
        self.free -= self.growth(group, steps)

    def growth(self, group: DecodeGroup, steps: int) -> int:
        """Blocks that the next `steps` steps of the decodes take."""
        return 0 if self._reserves_output else group.blocks_for(steps)

    def release(self, leg: Leg) -> None:
        """Everything that it holds is free, but for what others use, too."""
        if not leg.blocks:
            return
        self.free += max(leg.blocks, -(-leg.computed // self._block))
        leg.blocks = 0
        if self._cache is not None:
            self.free -= self._cache.leave(leg.used)
            leg.used = ()

    def take_cached(self, leg: Leg) -> int:
        """Count the prefix that is still here as computed; how many tokens that is."""
        if leg.computed:
            return 0
        leg.computed = min(self._cached(leg), leg.tokens - 1)
        return leg.computed

    def _cached(self, leg: Leg) -> int:
        if self._cache is None or not leg.prefix:
            return 0
        return self._cache.matched(self._ids(leg), self.free) * self._id_tokens

    def keep_prefix(self, leg: Leg) -> None:
        """Its prompt, or its part of that, is computed or has come: others may use it."""
        if self._cache is not None and leg.prefix:
            leg.used += self._cache.keep(self._ids(leg), self.free)

    def _ids(self, leg: Leg) -> tuple[int, ...]:
        """Of its prompt; where a part of that is computed here, of the whole blocks in this part."""
        part = leg.tokens < leg.request.job.prompt_tokens
        return leg.prefix[: leg.tokens // self._id_tokens] if part else leg.prefix

    def watch_cache(self) -> ReachableBlocks | None:
        """Ids that can be hit, kept up to date from now on; None without a cache."""
        return self._cache.watch() if self._cache is not None else None


class AdmissionGate:
    """Asks the policy about legs that are to decode here; prompts that are only computed here pass."""

    def __init__(self, policy: DecodeAdmission, memory: KvMemory, group: DecodeGroup, block_tokens: int) -> None:
        self._policy = policy
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

    def may_open_by_itself(self) -> bool:
        """Whether decodes that go on may be enough to let another one in: its policy looks at how long they last."""
        return self._policy.needs_running

    def _context(self, leg: Leg) -> int:
        """Its prompt and its output, the newest token included."""
        if leg.finish_step > self._group.steps:
            return leg.base + self._group.steps + 1
        return leg.tokens


class PrefixCache:
    """Ids of prompt blocks, the least recently used forgotten first.

    Blocks that requests use, be they many, are held once. The others live in free memory, so the room for
    them changes with the load: `room_blocks` is handed in. Requests that compute the same beginning at the same time
    have it each for itself, as in vLLM.
    """

    def __init__(self, blocks_of_id: int) -> None:
        self._blocks_of_id = max(1, blocks_of_id)
        self._ids: OrderedDict[int, None] = OrderedDict()
        self._users: dict[int, int] = {}  # of those that are used
        self._watched: ReachableBlocks | None = None

    def watch(self) -> ReachableBlocks:
        """What is held, for whoever is to know: an id as long as all before it in its prompt are held, too."""
        assert not self._ids, "it is watched from its beginning, or not at all"
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
        """The beginning of `prefix` that is held."""
        return tuple(takewhile(self._ids.__contains__, prefix))

    def shared(self, ids: tuple[int, ...]) -> int:
        """Blocks of those among `ids` that somebody uses."""
        return self._blocks_of_id * sum(at in self._users for at in ids)

    def use(self, ids: tuple[int, ...]) -> None:
        """One more request uses these, which are held."""
        for at in ids:
            self._users[at] = self._users.get(at, 0) + 1

    def leave(self, ids: tuple[int, ...]) -> int:
        """A request uses these no more; how many of their blocks others do."""
        left = 0
        for at in ids:
            if self._users[at] > 1:
                self._users[at] -= 1
                left += 1
            else:
                del self._users[at]
        return self._blocks_of_id * left

    def keep(self, prefix: tuple[int, ...], room_blocks: int) -> tuple[int, ...]:
        """Hold these from now on. Those that were not held before, which the request that has computed them uses."""
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
        """Unused ones that have no room any more are forgotten, the oldest first."""
        over = len(self._ids) - len(self._users) - room_blocks // self._blocks_of_id
        if over <= 0:
            return
        for gone in list(islice((at for at in self._ids if at not in self._users), over)):
            del self._ids[gone]
            if self._watched is not None:
                self._watched.drop(gone)
