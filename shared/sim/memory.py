"""KV memory of one engine: how many blocks each request holds, and which prefixes are cached."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile

from shared.policy.reachable_blocks import ReachableBlocks
from shared.sim.request import Leg, ScheduledRequest
from shared.sim.spec import EngineLimits


class KvMemory:
    """Blocks of one engine. A request holds the blocks of its computed tokens and of the chunk that is planned for it,
    or of its whole output where outputs are reserved.

    The invariant of the block accounting: `total` = `free` + the blocks that requests hold, where a block that several
    requests share counts once. Cached blocks that no request uses are free. `start` and `allocate` take blocks for one
    request, `take_for_decodes` takes those that all decodes gain in a step, and `release` frees those of one request
    that no other request shares. Of the free blocks, `reserved` are kept for the coming steps of the decodes; `start`
    and `allocate` take from the rest, which is `available`.

    prefix_block_tokens: tokens that one id of `ScheduledRequest.prefix` stands for. dropped: called with each id
    that the prefix cache does not hold any more.
    """

    def __init__(
        self,
        limits: EngineLimits,
        kv_tokens: int,
        prefix_block_tokens: int = 0,
        dropped: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._block_tokens = limits.block_tokens
        self._reserves_output = limits.reserves_output
        self._keeps_prefixes = limits.prefix_cache
        self._id_tokens = max(1, prefix_block_tokens)
        self._cache = PrefixCache(max(1, prefix_block_tokens // self._block_tokens), dropped)
        self._reachable: ReachableBlocks | None = None
        self.total = kv_tokens // self._block_tokens
        self._free = self.total
        self._reserved = 0  # of the free ones

    @property
    def free(self) -> int:
        """Blocks that no request holds."""
        return self._free

    @property
    def reserved(self) -> int:
        """Free blocks that are kept for the decodes (`reserve_for_decodes`)."""
        return self._reserved

    @property
    def available(self) -> int:
        """Free blocks that requests may take beside the decodes."""
        return self._free - self._reserved

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens of one request fill; the last one perhaps in part."""
        return (tokens + self._block_tokens - 1) // self._block_tokens

    def could_start(self, request: ScheduledRequest) -> bool:
        """Whether there is room for all that a waiting request has to compute now, beside the decodes as they are.

        vLLM requires this, too (`scheduler_reserve_full_isl`): a request that starts with less is soon preempted again.
        """
        return self._fits(request, self._cached(request), self._free)

    def start(self, request: ScheduledRequest, budget: int) -> bool:
        """Take blocks for what a waiting request has after this, and for its first chunk of at most `budget` tokens, or
        for its whole output as well. False when there are too few for all that it has to compute now.

        It has what is cached and what it imports, but its last token is always computed here.
        """
        self.trim_cache()
        cached = self._cached(request)
        request.cached_tokens = len(cached) * self._id_tokens
        brought = max(request.import_tokens, request.pulled_tokens)
        computed = min(max(brought, request.cached_tokens), request.tokens - 1)
        cached = cached[: computed // self._id_tokens]
        if not self._fits(request, cached, self.available):
            return False
        request.blocks = self._cache.shared_blocks(cached)
        if self._reserves_output:
            needed = request.tokens + request.output_left
        elif request.imports:
            needed = computed
        else:
            needed = min(request.tokens, computed + budget)
        if not self.allocate(request, needed):
            request.blocks = 0
            return False
        request.computed_tokens = computed
        request.shared_ids = cached
        self._cache.use(cached)
        return True

    def check_import(self, request: ScheduledRequest) -> None:
        """Give up the import of a waiting request where the tokens before the first imported one are not cached."""
        if not request.import_tokens or not request.import_start:
            return
        self.trim_cache()
        if len(self._cached(request)) * self._id_tokens < request.import_start:
            request.computed_tokens = request.import_tokens = 0

    def cached(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids from the first one on that the prefix cache holds."""
        return self._cache.matched(ids)

    def allocate(self, request: ScheduledRequest, tokens: int) -> bool:
        """Take blocks until the request holds `tokens` tokens; False, and nothing changes, when there are too few."""
        more = self.blocks_for(tokens) - request.blocks
        if more <= 0:
            return True
        if more > self._free - self._reserved:
            return False
        self._free -= more
        request.blocks += more
        return True

    def reserve_for_decodes(self, blocks: int) -> None:
        """Keep so many free blocks for what the decodes gain in their coming steps, instead of those kept before."""
        self._reserved = blocks

    def take_for_decodes(self, blocks: int) -> None:
        """Take the blocks that the decodes have gained in the steps that end now; none are reserved any more.

        They are taken for all decodes together: `ScheduledRequest.blocks` of each stays as it was when it joined.
        """
        self._free -= blocks
        self._reserved = 0

    def release(self, request: ScheduledRequest) -> None:
        """Free the blocks of the request that no other request uses."""
        if not request.blocks:
            return
        still_used = self._cache.leave(request.shared_ids)
        self._free += self._held(request) - still_used
        request.blocks, request.shared_ids = 0, ()

    def keep_prefix(self, request: ScheduledRequest) -> None:
        """The request's prompt, or its part of the prompt, is here: others may use it."""
        if ids := self._ids(request):
            self.keep_blocks(request, ids)

    def keep_answer(self, request: ScheduledRequest, prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
        """The request is complete: others may use the blocks that its answer has filled, too, after those of the prompt
        that are whole.
        """
        if self._keeps_prefixes and answer:
            whole = prompt[: request.job.prompt_tokens // self._id_tokens]
            self.keep_blocks(request, answer, whole[-1] if whole else None)

    def matched_tokens(self, prefix: tuple[int, ...]) -> int:
        """Tokens from the start of a prompt that the prefix cache holds."""
        return len(self._cache.matched(prefix)) * self._id_tokens if self._keeps_prefixes else 0

    def cached_part(self, request: ScheduledRequest) -> int:
        """Tokens of a started request that were in the prefix cache here."""
        return min(len(request.shared_ids) * self._id_tokens, request.tokens - 1)

    def keep_blocks(
        self, request: ScheduledRequest, ids: tuple[int, ...], before: int | None = None
    ) -> tuple[int, ...]:
        """Keep computed blocks of a request, which follow the block `before`. Returns those that were not held yet."""
        fresh = self._cache.keep(ids)
        request.shared_ids += fresh
        if self._reachable is not None:
            for at in ids:
                self._reachable.hold(at, before)
                before = at
        self.trim_cache()
        return fresh

    def trim_cache(self) -> None:
        """Drop cached blocks whose memory was taken."""
        self._cache.trim(self.available)

    def watch_cache(self) -> ReachableBlocks | None:
        """Ids that can be hit, kept up to date by the cache from now on; None without a cache."""
        if self._keeps_prefixes:
            self._reachable = ReachableBlocks()
            self._cache.dropped = self._reachable.drop
        return self._reachable

    def _held(self, request: ScheduledRequest) -> int:
        """Blocks that a request holds, shared ones included; it is not in the decode group. The larger of two counts:

        `request.blocks` is what `start` and `allocate` took. It is larger while a planned chunk is not computed yet,
        and where the whole output is reserved. The blocks of its computed tokens are more after it has decoded: what
        it gained then (`take_for_decodes`) was not added to `request.blocks`.
        """
        return max(request.blocks, self.blocks_for(request.computed_tokens))

    def _fits(self, request: ScheduledRequest, cached: tuple[int, ...], free: int) -> bool:
        whole = min(self.blocks_for(request.tokens), self.total)
        return whole - self._cache.shared_blocks(cached) <= free

    def _cached(self, request: ScheduledRequest) -> tuple[int, ...]:
        return self._cache.matched(self._ids(request)) if request.prefix else ()

    def _ids(self, request: ScheduledRequest) -> tuple[int, ...]:
        """Ids of the request's prompt; where only a part of it is computed here, of the whole blocks in that part."""
        if not self._keeps_prefixes:
            return ()
        part = request.tokens < request.job.prompt_tokens
        return request.prefix[: request.tokens // self._id_tokens] if part else request.prefix


class ExportRoom:
    """Room for the KV that an engine computes for other instances, in tokens: a request holds it from its start until
    its KV is sent. A prompt that is longer than all of the room holds none. Live, a worker's `ExportLedger` does this.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = self._free = tokens
        self._held: dict[Leg, int] = {}

    def reserve(self, leg: Leg) -> bool:
        if leg not in self._held:
            tokens = leg.tokens if leg.tokens <= self._tokens else 0
            if tokens > self._free:
                return False
            self._free -= tokens
            self._held[leg] = tokens
        return True

    def free(self, leg: Leg) -> bool:
        """No KV of the leg is here any more. False where it held no room."""
        if leg not in self._held:
            return False
        self._free += self._held.pop(leg)
        return True


class PrefixCache:
    """Ids of prompt blocks. Ids that no request uses lie in free memory and are dropped as it is taken: the least
    recently used first, of one request the last first, as in vLLM.

    Blocks that several requests use are held once. Requests that compute the same prefix at the same time hold it once
    each, as in vLLM. The room for unused blocks changes with the load and is an argument, `room_blocks`.
    """

    def __init__(self, blocks_of_id: int, dropped: Callable[[int], None]) -> None:
        self._blocks_of_id = blocks_of_id
        self.dropped = dropped
        self._users: dict[int, int] = {}  # of each id that is held
        self._unused: OrderedDict[int, None] = OrderedDict()  # those without users; the first is dropped first

    def matched(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        """The ids from the start of `prefix` that are held."""
        return tuple(takewhile(self._users.__contains__, prefix))

    def shared_blocks(self, ids: tuple[int, ...]) -> int:
        """Blocks of these ids that requests use."""
        return self._blocks_of_id * sum(self._users[at] > 0 for at in ids)

    def use(self, ids: tuple[int, ...]) -> None:
        """One more request uses these ids, which are held."""
        for at in ids:
            self._users[at] += 1
            self._unused.pop(at, None)

    def leave(self, ids: tuple[int, ...]) -> int:
        """A request does not use these ids any more. Returns how many of their blocks other requests use."""
        still_used = 0
        for at in reversed(ids):
            self._users[at] -= 1
            if self._users[at]:
                still_used += 1
            else:
                self._unused[at] = None
        return self._blocks_of_id * still_used

    def keep(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Hold these ids from now on. Returns those that were not held before, which their request uses."""
        fresh = dict.fromkeys((at for at in ids if at not in self._users), 1)
        self._users.update(fresh)
        return tuple(fresh)

    def trim(self, room_blocks: int) -> None:
        """Drop unused ids that have no room any more."""
        while len(self._unused) > room_blocks // self._blocks_of_id:
            at, _ = self._unused.popitem(last=False)
            del self._users[at]
            self.dropped(at)
