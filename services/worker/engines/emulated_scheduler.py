"""What an emulated engine's next step computes: continuous batching with chunked prefill, paged KV and preemption.

The order of work is vLLM's with our seam: decodes first, then streams that are computed again or wait at the door, then
prompts under way, then prompts that may enter; in each, heavier SLO classes go before lighter ones. When blocks run out
the youngest prompt of the lightest class gives its blocks up, or the youngest stream where the class has no prompt, and
is computed again. The simulator's scheduler does the same in virtual time.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from services.worker.engines.admission_queue import Entrance
from services.worker.engines.base import (
    BlocksRemoved,
    BlocksStored,
    CacheSink,
    CurrentRates,
    EnginePolicies,
    EngineRequest,
    Sink,
)
from services.worker.settings import WorkerSettings
from shared.domain.job import LengthPrediction
from shared.domain.kv import KvHandle
from shared.domain.prompt import block_hashes, next_hash, packed, root_hash
from shared.policy.admission_gate import Blocks, Decoding
from shared.policy.preemption import Rank, heaviest_first, victim
from shared.policy.step_budget import StepLoad, gap_target_s, joining_gap_s, prefill_tokens
from shared.wire.messages import Reused

# MERGED emulated_cache.py
# The prefix cache of an emulated engine: as vLLM's, without KV.


_MOST = 1 << 30


class EmulatedCache:
    """Whole blocks of computed tokens. Those that no request uses live in the free ones, and go as these are taken:
    the least recently used first, of one request the last first.

    Blocks that requests share are counted once for each of them, so memory is a little tighter than in vLLM.
    """

    def __init__(self, block_size: int, sink: CacheSink) -> None:
        self.block_size = block_size
        self._sink = sink
        self._users: dict[int, int] = {}  # of each block that is held
        self._unused: OrderedDict[int, None] = OrderedDict()  # the first goes first

    def __contains__(self, name: int) -> bool:
        """Whether a block is held."""
        return name in self._users

    def use(self, names: Sequence[int]) -> None:
        """A request uses these, which are held."""
        for name in names:
            self._users[name] += 1
            self._unused.pop(name, None)

    def store(self, name: int, parent: int | None, token_ids: Sequence[int], salt: str) -> None:
        """A request has computed a block, or the last token of it."""
        if name not in self._users:
            self._users[name] = 0
            self._sink([BlocksStored([name], parent, token_ids, salt)])

    def leave(self, names: Sequence[int]) -> None:
        """A request uses these no more."""
        for name in reversed(names):
            self._users[name] -= 1
            if not self._users[name]:
                self._unused[name] = None

    def shrink(self, free_blocks: int) -> None:
        """So many blocks are free."""
        gone = []
        while len(self._unused) > free_blocks:
            name, _ = self._unused.popitem(last=False)
            del self._users[name]
            gone.append(name)
        if gone:
            self._sink([BlocksRemoved(gone)])


class CacheUse:
    """One request's part in the cache. `token_at` gives what follows the prompt, by position."""

    def __init__(self, cache: EmulatedCache, prompt: Sequence[int], salt: str, token_at: Callable[[int], int]) -> None:
        self._cache = cache
        self._prompt = prompt
        self._salt = salt
        self._token_at = token_at
        self._used: list[int] = []

    def begin(self) -> int:
        """Use what is held of the prompt; how many tokens that is. The last one is always computed."""
        size = self._cache.block_size
        for name in block_hashes(self._prompt[:-1], self._salt, block_tokens=size, most=_MOST):
            if name not in self._cache:
                break
            self._used.append(name)
        self._cache.use(self._used)
        return len(self._used) * size

    def computed(self, tokens: int) -> None:
        """So many tokens from the start have their KV: whole blocks of them can be hit from now on."""
        size = self._cache.block_size
        while (len(self._used) + 1) * size <= tokens:
            at = len(self._used)
            block = self._tokens(at * size, (at + 1) * size)
            name = next_hash(self._used[-1] if at else root_hash(self._salt), packed(block))
            self._cache.store(name, self._used[-1] if at else None, block, self._salt)
            self._cache.use([name])
            self._used.append(name)

    def end(self) -> None:
        """The request is over."""
        self._cache.leave(self._used)
        self._used = []

    def _tokens(self, start: int, stop: int) -> list[int]:
        prompt = self._prompt
        return [*prompt[start:stop], *(self._token_at(at) for at in range(max(start, len(prompt)), stop))]


_TOKENS = 997  # a prime, so that the tokens of two positions rarely agree
_FIRST = 300  # below it tokenizers keep their special tokens and single bytes


def token_at(position: int) -> int:
    """The token at a position of the sequence: the same on every instance, so that a hand-over shows no seam."""
    return _FIRST + position * 7919 % _TOKENS


class _Sampling(msgspec.Struct):
    """The sampling parameters that matter here, by vLLM's names: when an answer ends, beside max_tokens, and which
    wishes an engine without a model cannot fulfil.
    """

    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None


_SAMPLING = msgspec.msgpack.Decoder(_Sampling)
_WISHES = ("logprobs", "prompt_logprobs", "logprob_token_ids")


def refusal(request: EngineRequest) -> str:
    """Why an emulated engine cannot compute this request; empty where it can."""
    sampling = _sampling(request)
    wishes = [f"{name} {wish}" for name in _WISHES if (wish := getattr(sampling, name)) is not None]
    if not wishes:
        return ""
    return f"{', '.join(wishes)}: an emulated engine has no model and no log probabilities: leave them out"


def answer_tokens(request: EngineRequest) -> tuple[int, str]:
    """How many tokens are to come, and why it ends then: our tokens are known by position, so this is known before.

    A stop token ends an answer, as with a real engine, so that clients can ask for more than they get.
    """
    first, most, stops = len(request.prompt_token_ids), request.max_tokens, _stops(request)
    for at in range(len(request.forced_tokens), most if stops else 0):
        if token_at(first + at) in stops:
            return at + 1, "stop"
    return most, "length"


def _stops(request: EngineRequest) -> frozenset[int]:
    return frozenset(_sampling(request).stop_token_ids)


def _sampling(request: EngineRequest) -> _Sampling:
    """The defaults where the request holds no sampling parameters."""
    try:
        return _SAMPLING.decode(request.generation.sampling)
    except msgspec.MsgspecError:
        return _Sampling()


@dataclass(slots=True, eq=False)
class Entry:
    """A request here."""

    request: EngineRequest
    sink: Sink
    tokens: int  # prompt, and what was generated
    left: int  # tokens to generate
    ends: str = "length"  # why it ends then
    computed: int = 0  # of `tokens`, what is in the KV cache
    blocks: int = 0
    imports: bool = False  # takes its KV from elsewhere, when it enters; once
    ready_s: float = 0.0  # monotonic time at which that is there; 0 for one that computes its KV here
    came_s: float = 0.0  # monotonic time at which it came
    use: CacheUse | None = None  # its part in the prefix cache, while it holds blocks
    counted: bool = False  # it has entered before
    reused: Reused | None = None  # until its first token is out

    def token_at(self, position: int) -> int:
        """A token of its sequence after the prompt."""
        at, forced = position - len(self.request.prompt_token_ids), self.request.forced_tokens
        return forced[at] if at < len(forced) else token_at(position)

    @property
    def started(self) -> bool:
        """Whether it is a stream: its client has a token, given here or elsewhere."""
        return self.request.job.started or self.tokens > len(self.request.prompt_token_ids)

    def waited_s(self, now: float) -> float:
        """Since it was handed over; of one that was preempted here nothing is counted."""
        return now - self.came_s if self.imports or self.ready_s > 0.0 else 0.0

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one is out."""
        return self.tokens - self.computed

    @property
    def decodes(self) -> bool:
        """One token after some context; the last one of a prompt whose KV was imported costs the same."""
        return self.missing == 1 and self.computed > 0


class EmulatedScheduler:
    """Who waits, who runs, who holds how many blocks. `pull` begins an import and says how long it takes."""

    def __init__(
        self,
        settings: WorkerSettings,
        total_blocks: int,
        policies: EnginePolicies,
        rates: CurrentRates,
        pull: Callable[[KvHandle, int], float],
        cache: EmulatedCache | None = None,
    ) -> None:
        self._settings = settings
        self._rates = rates
        self._pull = pull
        self._cache = cache
        self.prompt_tokens = self.hit_tokens = 0  # of all that entered, and of those what the prefix cache held
        self.policies = policies
        self.chunk_size = settings.step_tokens
        self._seats = max(1, settings.max_seqs // settings.pipeline_parallel)  # each lane has its share
        self.total = self.free = total_blocks
        self.preemptions = 0
        self.waiting: Entrance[Entry] = Entrance(
            policies, rates, lambda entry: entry.request, lambda entry: entry.tokens, self._inside, self._blocks
        )
        self.coming: dict[Entry, None] = {}  # blocks reserved, KV under way
        self.running: dict[Entry, None] = {}  # in order of admission
        self.known: dict[str, Entry] = {}  # all of them
        self._chunks: list[tuple[Entry, int]] = []

    def follow(self, policies: EnginePolicies) -> None:
        """Go by these from the next step on."""
        self.policies = policies
        self.waiting.follow(policies)

    def add(self, request: EngineRequest, sink: Sink, now: float) -> None:
        """One has come. `now`: monotonic seconds."""
        tokens, imports = len(request.prompt_token_ids), request.import_from is not None
        entry = Entry(request, sink, tokens, *answer_tokens(request), imports=imports, came_s=now)
        self.known[request.request_id] = entry
        self.waiting.add(entry)

    def begin_imports(self, now: float) -> None:
        """Between two steps: the KV of streams begins to come, as far as there is room for it beside the step under
        way.
        """
        self._admit(0, now, streams=True)

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        """How long the answer of a request will be."""
        if (entry := self.known.get(request_id)) is not None:
            entry.request = entry.request.expecting(prediction)

    def remove(self, request_id: str) -> None:
        """It is done, or given up."""
        entry = self.known.pop(request_id, None)
        if entry is not None:
            self.waiting.remove(entry)
            self.coming.pop(entry, None)
            self.running.pop(entry, None)
            self._release(entry)

    def plan(self, now: float) -> tuple[list[tuple[Entry, int]], list[Entry]]:
        """Prefill chunks and decodes of the coming step."""
        self._chunks = []
        joined = self._take_arrived(now)
        preempted = self._make_room()
        budget = self._budget(joined, now)
        for streams in (True, False):
            budget, more = self._go_on(budget, streams=streams)
            preempted |= more
            if not preempted:
                budget = self._admit(budget, now, streams=streams)
        return self._chunks, [entry for entry in self.running if entry.decodes]

    def _take_arrived(self, now: float) -> list[Entry]:
        """Streams take seats before prompts, heavier classes first. Those that have a seat now."""
        arrived, joined = [entry for entry in self.coming if entry.ready_s <= now], []
        for entry in sorted(arrived, key=lambda one: (one.started, one.request.job.slo.weight), reverse=True):
            if len(self.running) < self._seats:
                del self.coming[entry]
                self.running[entry] = None
                joined.append(entry)
        return joined

    def _go_on(self, budget: int, *, streams: bool) -> tuple[int, bool]:
        """Chunks of the streams, or of the prompts without a token, that are being computed. What is left of the
        budget, and whether any request had to be preempted.
        """
        preempted = False
        for entry in heaviest_first(self.running, _rank):
            tokens = 0 if entry.decodes or entry.started is not streams else min(entry.missing, budget)
            if entry not in self.running or tokens <= 0:
                continue
            while entry in self.running and not self._hold(entry, entry.computed + tokens):
                self._preempt()
                preempted = True
            if entry in self.running:
                self._chunks.append((entry, tokens))
                budget -= tokens
        return budget, preempted

    def _make_room(self) -> bool:
        """A token's room for each decode; whether anybody had to be preempted for it."""
        preempted = False
        for entry in heaviest_first(self.running, _rank):
            while entry in self.running and entry.decodes and not self._hold(entry, entry.tokens):
                self._preempt()
                preempted = True
        return preempted

    def _budget(self, joined: list[Entry], now: float) -> int:
        """Prompt tokens of the coming step, which is the first one here for those that `joined`."""
        most = max(0, self.chunk_size - sum(entry.decodes for entry in self.running))
        if not self.policies.step_budget:
            return most
        decodes = [entry for entry in self.running if entry.decodes and entry.request.decodes]
        joining = [entry for entry in self.coming if entry.started]
        joining += [entry] if (entry := self.waiting.stream) is not None else []
        gaps_s = [gap_target_s(entry.request.job.slo) for entry in (*decodes, *self._prompts())]
        gaps_s += [joining_gap_s(entry.request.job.slo, entry.waited_s(now), here=False) for entry in joining]
        here = [entry for entry in joined if entry.started and entry in self.running]
        gaps_s += [joining_gap_s(entry.request.job.slo, entry.waited_s(now), here=True) for entry in here]
        load = StepLoad(
            len(decodes) + len(joining),
            sum(entry.computed for entry in decodes) + sum(entry.tokens for entry in joining),
            min(gaps_s, default=inf),
            max((entry.computed for entry in self.running if not entry.decodes), default=0),
        )
        return prefill_tokens(self._rates(), load, most)

    def _prompts(self) -> list[Entry]:
        """Those that are computed here, or the next one, and are to decode here."""
        prompts = [entry for entry in self.running if not entry.decodes]
        if not prompts and len(self.waiting):
            prompts = [self.waiting.peek()]
        return [entry for entry in prompts if entry.request.decodes]

    def _admit(self, budget: int, now: float, *, streams: bool) -> int:
        """Take in what may enter, with `streams` nothing but streams. What is left of the budget."""
        while len(self.running) < self._seats:
            if streams and self.waiting.stream is None:
                return budget
            entry = self.waiting.next()
            if entry is None or (streams and not entry.started) or not self._has_seat(entry):
                return budget
            handle, held = entry.request.import_from, self._find_cached(entry)
            if entry.imports and handle is not None:
                computed = max(held, min(handle.tokens, entry.tokens - 1))
                if not self._fits(entry) or not self._hold(entry, computed):
                    self._leave_cache(entry)
                    return budget
                entry.computed, entry.imports = computed, False
                entry.ready_s = now + self._pull(handle, held)
                self._entered(entry, held, computed)
                self.coming[self.waiting.take()] = None
                continue
            tokens = min(entry.missing - held, budget)
            if tokens <= 0 or not self._fits(entry) or not self._hold(entry, held + tokens):
                self._leave_cache(entry)
                return budget
            entry.computed = held
            self._entered(entry, held, held)
            self.running[self.waiting.take()] = None
            self._chunks.append((entry, tokens))
            budget -= tokens
        return budget

    def _has_seat(self, entry: Entry) -> bool:
        """Whether one is left; a prompt leaves one for each stream whose KV is under way."""
        return entry.started or len(self.running) + sum(one.started for one in self.coming) < self._seats

    def _find_cached(self, entry: Entry) -> int:
        """Tokens of its prompt that are in the prefix cache, from now on in use."""
        if self._cache is None:
            return 0
        self._cache.shrink(self.free)
        request = entry.request
        entry.use = CacheUse(self._cache, request.prompt_token_ids, request.generation.cache_salt, entry.token_at)
        return entry.use.begin()

    def _leave_cache(self, entry: Entry) -> None:
        if entry.use is not None:
            entry.use.end()
            entry.use = None

    def _entered(self, entry: Entry, held: int, computed: int) -> None:
        """It begins, with `held` tokens in the prefix cache and `computed` with KV. A preempted one began before."""
        if entry.counted:
            return
        entry.counted, prompt = True, len(entry.request.prompt_token_ids)
        kept = 0
        if self._cache is not None:
            self.prompt_tokens += prompt
            self.hit_tokens += held
            kept = prompt // self._cache.block_size * self._cache.block_size
        entry.reused = Reused(computed, max(0, kept - computed), computed - held)

    def _fits(self, entry: Entry) -> bool:
        """Whether there is room for all that it has to compute now. vLLM asks for it, too
        (`scheduler_reserve_full_isl`): one that enters with less would soon be preempted again.
        """
        return min(-(-entry.tokens // self._settings.block_size), self.total) - entry.blocks <= self.free

    def _hold(self, entry: Entry, tokens: int) -> bool:
        """Blocks for `tokens` tokens in all; all that there are will do for one that is longer. False: too few."""
        more = min(-(-tokens // self._settings.block_size), self.total) - entry.blocks
        if more > self.free:
            return False
        if more > 0:
            self.free -= more
            entry.blocks += more
            if self._cache is not None:
                self._cache.shrink(self.free)
        return True

    def _release(self, entry: Entry) -> None:
        self.free += entry.blocks
        entry.blocks = 0
        self._leave_cache(entry)

    def _preempt(self) -> None:
        """See `victim`; it waits before the others of its class, a stream before all prompts."""
        entry = victim(self.running, _rank)
        del self.running[entry]
        self._chunks = [chunk for chunk in self._chunks if chunk[0] is not entry]
        self._release(entry)
        entry.computed, entry.ready_s = 0, 0.0
        self.preemptions += 1
        self.waiting.preempted(entry)

    def _inside(self) -> list[Decoding]:
        return [
            Decoding(entry.request.job, len(entry.request.prompt_token_ids), entry.tokens)
            for entry in (*self.running, *self.coming)
            if entry.request.decodes
        ]

    def _blocks(self) -> Blocks:
        return Blocks(self.free, self.total, self._settings.block_size)


def _rank(entry: Entry) -> Rank:
    return entry.request.job.slo.weight, entry.started
