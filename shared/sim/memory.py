"""KV memory of one engine: how many blocks each request holds, and which prefixes are cached, also in host memory."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from shared.policy.host_index import Put, SlotIndex
from shared.policy.reachable_blocks import TieredBlocks
from shared.sim.request import Leg, ScheduledRequest
from shared.sim.spec import EngineLimits, HostTier


class CacheListener(Protocol):
    """Receives what becomes of ids that a cache has held; `TieredBlocks` is one. Computed ids are those that
    `KvMemory.keep_blocks` returns.
    """

    def loaded(self, block: int, parent: int | None) -> None:
        """The cache holds an id again, which came from host memory."""
        ...

    def dropped(self, block: int) -> None:
        """The cache does not hold an id any more."""
        ...

    def kept(self, block: int) -> None:
        """Host memory holds an id of the cache, too; the cache is about to drop it."""
        ...

    def lost(self, block: int) -> None:
        """Host memory does not hold an id any more."""
        ...


class KvMemory:
    """Blocks of one engine. A request holds the blocks of its computed tokens and of the chunk that is planned for it,
    or of its whole output where outputs are reserved.

    The invariant of the block accounting: `total` = `free` + the blocks that requests hold, where a block that several
    requests share counts once. Cached blocks that no request uses are free. `start` and `allocate` take blocks for one
    request, `take_for_decodes` takes those that all decodes gain in a step, and `release` frees those of one request
    that no other request shares. Of the free blocks, `reserved` are kept for the coming steps of the decodes; `start`
    and `allocate` take from the rest, which is `available`.

    With a host tier, ids that the cache drops stay in host memory, and are loaded where a prompt's cached beginning
    goes on there.

    prefix_block_tokens: tokens that one id of `ScheduledRequest.prefix` stands for.
    """

    def __init__(
        self, limits: EngineLimits, kv_tokens: int, prefix_block_tokens: int = 0, listener: CacheListener | None = None
    ) -> None:
        self._block_tokens = limits.block_tokens
        self._reserves_output = limits.reserves_output
        self._keeps_prefixes = limits.prefix_cache
        self._id_tokens = max(1, prefix_block_tokens)
        self._listener = listener
        self._watched: TieredBlocks | None = None
        self._cache = PrefixCache(
            max(1, prefix_block_tokens // self._block_tokens), self._dropped, lambda: self.sessions.give_back()
        )
        self.host: HostCache | None = None
        if limits.host is not None and limits.prefix_cache:
            self.host = HostCache(limits.host, self._id_tokens, self._cache)
        self.total = kv_tokens // self._block_tokens
        budget = int(limits.session_share * self.total * self._block_tokens) // self._id_tokens
        self.sessions = KeptSessions(self._cache, budget if limits.prefix_cache else 0, limits.session_keep_s)
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
        if self.host is None:
            self._cache.use(cached)
        else:
            for at, parent in self.host.load(cached):
                if self._listener is not None:
                    self._listener.loaded(at, parent)
        return True

    def check_import(self, request: ScheduledRequest) -> None:
        """Give up the import of a waiting request where the tokens before the first imported one are not cached."""
        if not request.import_tokens or not request.import_start:
            return
        self.trim_cache()
        if len(self._cached(request)) * self._id_tokens < request.import_start:
            request.computed_tokens = request.import_tokens = 0

    def cached(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids from the first one on that the prefix cache holds, or host memory."""
        return self._cache.matched(ids) if self.host is None else self.host.matched(ids)

    def take_copied_s(self) -> float:
        """Seconds that the copies between the cache and host memory since the last call take."""
        return self.host.take_copied_s() if self.host is not None else 0.0

    def export_s(self, ids: tuple[int, ...], start: int, end: int) -> float:
        """Seconds to load, for an export of these tokens of the ids, what lies in host memory."""
        if self.host is None:
            return 0.0
        device = len(self._cache.matched(ids)) * self._id_tokens
        return self.host.token_s * max(0, end - max(start, device))

    @property
    def has_copied(self) -> bool:
        return self.host is not None and self.host.copied_tokens > 0

    def keep_session(self, request: ScheduledRequest, answer: tuple[int, ...], now: float) -> None:
        """A request of a session is complete: keep its ids for the next one. answer: see `keep_answer`."""
        if self.sessions.budget:
            ids = (
                (*request.prefix[: request.job.prompt_tokens // self._id_tokens], *answer) if answer else request.prefix
            )
            self.sessions.keep(request.job.session, self._cache.matched(ids), now)

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
        return len(self.cached(prefix)) * self._id_tokens if self._keeps_prefixes else 0

    def cached_part(self, request: ScheduledRequest) -> int:
        """Tokens of a started request that were in the prefix cache here."""
        return min(len(request.shared_ids) * self._id_tokens, request.tokens - 1)

    def keep_blocks(
        self, request: ScheduledRequest, ids: tuple[int, ...], before: int | None = None
    ) -> tuple[int, ...]:
        """Keep computed blocks of a request, which follow the block `before`. Returns those that were not held yet."""
        fresh = self._cache.keep(ids)
        request.shared_ids += fresh
        self._kept(ids, before)
        return fresh

    def remember(self, ids: tuple[int, ...], before: int | None = None) -> None:
        """Hold blocks of a request that ended before the run, which follow the block `before`, as used last of all."""
        fresh = set(self._cache.keep(ids))
        self._cache.use(tuple(at for at in ids if at not in fresh))
        self._cache.leave(ids)
        self._kept(ids, before)
        self.take_copied_s()

    def _kept(self, ids: tuple[int, ...], before: int | None) -> None:
        """The cache keeps these blocks now, which follow the block `before`."""
        if self.host is not None:
            self.host.place(ids, before)
        if self._watched is not None:
            for at in ids:
                self._watched.loaded(at, before)
                before = at
        self.trim_cache()

    def trim_cache(self) -> None:
        """Drop cached blocks whose memory was taken."""
        self._cache.trim(self.available)

    def watch_cache(self) -> TieredBlocks | None:
        """Ids that can be hit, kept up to date from now on; None without a cache."""
        if self._keeps_prefixes:
            self._watched = self._listener = TieredBlocks(tiered=self.host is not None)
        return self._watched

    def _dropped(self, at: int) -> None:
        """The cache drops an id: host memory may keep it, and lose another one for it."""
        saved = self.host.save(at) if self.host is not None else None
        if self._listener is None:
            return
        if saved is not None:
            self._listener.kept(at)
            if saved.dropped is not None:
                self._listener.lost(saved.dropped.key)
        self._listener.dropped(at)

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
        return self.cached(self._ids(request)) if request.prefix else ()

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
    recently used first, of one request the last first, as in vLLM. Pinned ones are dropped when no others are left and
    `give_back` has unpinned some.

    Blocks that several requests use are held once. Requests that compute the same prefix at the same time hold it once
    each, as in vLLM. The room for unused blocks changes with the load and is an argument, `room_blocks`.
    """

    def __init__(self, blocks_of_id: int, dropped: Callable[[int], None], give_back: Callable[[], None]) -> None:
        self._blocks_of_id = blocks_of_id
        self._dropped = dropped
        self._give_back = give_back
        self._users: dict[int, int] = {}  # of each id that is held
        self._unused: OrderedDict[int, None] = OrderedDict()  # those without users; the first is dropped first
        self._resting: dict[int, None] = {}  # those without users that are pinned
        self.pins: Counter[int] = Counter()

    def __contains__(self, at: int) -> bool:
        return at in self._users

    def matched(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        """The ids from the start of `prefix` that are held."""
        return tuple(takewhile(self._users.__contains__, prefix))

    def shared_blocks(self, ids: tuple[int, ...]) -> int:
        """Blocks of these ids that requests use."""
        return self._blocks_of_id * sum(self._users.get(at, 0) > 0 for at in ids)

    def use(self, ids: tuple[int, ...]) -> None:
        """One more request uses these ids, which are held."""
        for at in ids:
            self._users[at] += 1
            self._unused.pop(at, None)
            self._resting.pop(at, None)

    def leave(self, ids: tuple[int, ...]) -> int:
        """A request does not use these ids any more. Returns how many of their blocks other requests use."""
        still_used = 0
        for at in reversed(ids):
            self._users[at] -= 1
            if self._users[at]:
                still_used += 1
            elif at in self.pins:
                self._resting[at] = None
            else:
                self._unused[at] = None
        return self._blocks_of_id * still_used

    def keep(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Hold these ids from now on. Returns those that were not held before, which their request uses."""
        fresh = dict.fromkeys((at for at in ids if at not in self._users), 1)
        self._users.update(fresh)
        return tuple(fresh)

    def pin(self, ids: tuple[int, ...]) -> None:
        """These ids, which are held, are not dropped before others, until as many calls of `unpin`."""
        self.pins.update(ids)
        for at in ids:
            if at in self._unused:
                del self._unused[at]
                self._resting[at] = None

    def unpin(self, ids: tuple[int, ...]) -> None:
        for at in reversed(ids):
            self.pins[at] -= 1
            if not self.pins[at]:
                del self.pins[at]
                if at in self._resting:
                    del self._resting[at]
                    self._unused[at] = None

    def trim(self, room_blocks: int) -> None:
        """Drop unused ids that have no room any more."""
        while len(self._unused) + len(self._resting) > room_blocks // self._blocks_of_id:
            if not self._unused:
                self._give_back()
                continue
            at, _ = self._unused.popitem(last=False)
            del self._users[at]
            self._dropped(at)


class HostCache:
    """Ids in host memory, each with its copy in a slot; `cache` is the one from which they come.

    An id that the cache is about to drop is copied there. What is loaded stays there, too.
    """

    def __init__(self, host: HostTier, id_tokens: int, cache: PrefixCache) -> None:
        self.token_s = host.token_s
        self.copied_tokens = 0  # whose time no step has taken yet
        self.stored = self.loaded = self.evicted = 0  # ids, since the start
        self.index: SlotIndex[int] = SlotIndex(host.tokens // id_tokens, host.double_tokens)
        self._cache = cache
        self._id_tokens = id_tokens
        self._origins: dict[int, tuple[int | None, int]] = {}  # of ids in the cache: the one before, and their depth

    def take_copied_s(self) -> float:
        tokens, self.copied_tokens = self.copied_tokens, 0
        return tokens * self.token_s

    def matched(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids from the start that the cache or host memory holds."""
        return tuple(takewhile(lambda at: at in self._cache or at in self.index, ids))

    def place(self, ids: Iterable[int], before: int | None) -> None:
        """These ids of the cache follow each other, and `before`."""
        depth = self._origins[before][1] + self._id_tokens if before in self._origins else 0
        for at in ids:
            self._origins.setdefault(at, (before, depth))
            before, depth = at, depth + self._id_tokens

    def load(self, ids: tuple[int, ...]) -> list[tuple[int, int | None]]:
        """A request uses these ids, which are matched. Returns those that the cache holds from now on, and the ones
        before them.
        """
        device, loaded = len(self._cache.matched(ids)), []
        self._cache.use(ids[:device])
        for at in ids[device:]:
            if at in self._cache:  # it is copied nevertheless: what is loaded has to be without gaps
                self._cache.use((at,))
                continue
            held = self.index.get(at)
            assert held is not None, "the ids are matched"
            self._cache.keep((at,))
            self._origins[at] = held.parent, held.depth_tokens
            loaded.append((at, held.parent))
        for at, _ in reversed(loaded):  # the last ones leave first
            self.index.use(at)
        self.loaded += len(ids) - device
        self.copied_tokens += (len(ids) - device) * self._id_tokens
        return loaded

    def save(self, at: int) -> Put[int] | None:
        """The cache drops an id. None: host memory has it already, or has no room."""
        parent, depth = self._origins.pop(at)
        if at in self.index:
            self.index.use(at)
            return None
        put = self.index.put(at, parent, depth)
        if put is None:
            return None
        self.copied_tokens += self._id_tokens
        self.stored += 1
        self.evicted += put.dropped is not None
        return put


@dataclass(slots=True)
class _Kept:
    ids: tuple[int, ...]
    until_s: float


class KeptSessions:
    """Ids that a cache keeps over the pause between two requests of a session: for `keep_s`, at most `budget` of them.
    The oldest sessions leave first, and when requests need the memory. Live, the vLLM engine does this with blocks.
    """

    def __init__(self, cache: PrefixCache, budget: int, keep_s: float) -> None:
        self.budget = budget if keep_s > 0 else 0
        self.yielded = 0  # sessions whose ids were given back for requests
        self._cache = cache
        self._keep_s = keep_s
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by session, the oldest first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def pinned(self) -> int:
        """Ids that are kept."""
        return len(self._cache.pins)

    def keep(self, session: str, ids: tuple[int, ...], now: float) -> None:
        """The ids of the session's last request replace those that were kept of the session."""
        ids, former = ids[: self.budget], self._kept.pop(session, None)
        self._cache.pin(ids)  # before the former ones are released: they are mostly the same
        if ids:
            self._kept[session] = _Kept(ids, now + self._keep_s)
        if former is not None:
            self._cache.unpin(former.ids)
        while self.pinned > self.budget:
            self._drop_oldest()

    def expire(self, now: float) -> None:
        """Give back what was kept long enough."""
        while self._kept and next(iter(self._kept.values())).until_s <= now:
            self._drop_oldest()

    def give_back(self) -> None:
        """Requests need the memory of the oldest session, which is kept."""
        self._drop_oldest()
        self.yielded += 1

    def _drop_oldest(self) -> None:
        _, kept = self._kept.popitem(last=False)
        self._cache.unpin(kept.ids)
