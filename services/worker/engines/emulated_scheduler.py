"""The scheduler of an emulated engine: continuous batching with chunked prefill, priorities, paged KV and preemption.

Its prefix cache is like vLLM's, but holds block names and no KV.

The order of work is vLLM's with Polyphase's policies: decodes first, then streams (requests whose clients have tokens)
that are computed again or wait, then prompts under way, then prompts that may start; within each, heavier SLO classes
go before lighter ones. When blocks run out, the youngest prompt of the lightest class is preempted and computed again,
or the youngest stream where that class has no prompt. The simulator's scheduler does the same in virtual time.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from services.worker.engines.admission_queue import AdmissionQueue
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
from shared.policy.decode_admission import Blocks, Decoding
from shared.policy.prefill_order import Rank, heaviest_first, victim
from shared.policy.step_budget import StepLoad, gap_target_s, joining_gap_s, prefill_tokens
from shared.wire.messages import Reused

_MAX_BLOCKS = 1 << 30  # of a prompt: no bound
_TOKENS = 997  # a prime, so that the tokens of two positions rarely agree
_FIRST = 300  # below it tokenizers keep their special tokens and single bytes


@dataclass(slots=True, eq=False)
class EmulatedRequest:
    """A request in exactly one place: it waits, imports its KV, or runs."""

    request: EngineRequest
    sink: Sink
    tokens: int  # prompt and output
    remaining_output_tokens: int
    finish_reason: str = "length"  # why it ends then
    computed: int = 0  # of `tokens`, those whose KV is in the cache
    blocks: int = 0
    imports: bool = False  # it imports its KV when it starts, which it has not; it does so once
    imported_mono: float = 0.0  # when its import is complete; 0 for a request that computes its KV here
    arrived_mono: float = 0.0
    cached: "CachedPrefix | None" = None  # its part in the prefix cache, while it holds blocks
    started_before: bool = False
    reused: Reused | None = None  # until its first token is out

    def token_at(self, position: int) -> int:
        at, forced = position - len(self.request.prompt_token_ids), self.request.forced_tokens
        return forced[at] if at < len(forced) else token_at(position)

    @property
    def started(self) -> bool:
        """Whether it is a stream: its client has a token, from this instance or another."""
        return self.request.job.started or self.tokens > len(self.request.prompt_token_ids)

    def waited_s(self, now: float) -> float:
        """Since it was handed over; 0 for a request that was preempted here."""
        return now - self.arrived_mono if self.imports or self.imported_mono > 0.0 else 0.0

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one is generated."""
        return self.tokens - self.computed

    @property
    def decodes(self) -> bool:
        """Whether its step computes one token after some context; the last token of an imported prompt counts too."""
        return self.missing == 1 and self.computed > 0


class EmulatedScheduler:
    """Who waits, imports and runs, and who holds how many blocks. `pull` begins an import and returns its seconds."""

    def __init__(
        self,
        settings: WorkerSettings,
        total_blocks: int,
        policies: EnginePolicies,
        rates: CurrentRates,
        pull: Callable[[KvHandle, int], float],
        cache: "EmulatedCache | None" = None,
    ) -> None:
        self._settings = settings
        self._rates = rates
        self._pull = pull
        self._cache = cache
        self.prompt_tokens = self.hit_tokens = 0  # of all that started, and of these, held by the prefix cache
        self.policies = policies
        self.chunk_size = settings.step_tokens
        self._max_num_seqs = max(1, settings.max_seqs // settings.pipeline_parallel)  # each lane has its share
        self.total = self.free = total_blocks
        self.preemptions = 0
        self.waiting: AdmissionQueue[EmulatedRequest] = AdmissionQueue(
            policies, lambda each: each.request, lambda each: each.tokens, self._decoding, self._blocks
        )
        self.importing: dict[EmulatedRequest, None] = {}  # blocks are allocated, KV is under way
        self.running: dict[EmulatedRequest, None] = {}  # in order of admission
        self.known: dict[str, EmulatedRequest] = {}  # all of them
        self._chunks: list[tuple[EmulatedRequest, int]] = []  # of the step that is being planned

    def set_policies(self, policies: EnginePolicies) -> None:
        """From the next step on."""
        self.policies = policies
        self.waiting.set_policies(policies)

    def add(self, request: EngineRequest, sink: Sink, now: float) -> None:
        """`now`: monotonic seconds."""
        tokens, imports = len(request.prompt_token_ids), request.import_from is not None
        entry = EmulatedRequest(request, sink, tokens, *answer_tokens(request), imports=imports, arrived_mono=now)
        self.known[request.request_id] = entry
        self.waiting.add(entry)

    def begin_imports(self, now: float) -> None:
        """Between two steps: start the imports of streams, as far as there is room for them beside the step under
        way.
        """
        self._admit(0, now, streams=True)

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        if (entry := self.known.get(request_id)) is not None:
            entry.request = entry.request.expecting(prediction)

    def remove(self, request_id: str) -> None:
        entry = self.known.pop(request_id, None)
        if entry is not None:
            self.waiting.remove(entry)
            self.importing.pop(entry, None)
            self.running.pop(entry, None)
            self._release(entry)

    def plan(self, now: float) -> tuple[list[tuple[EmulatedRequest, int]], list[EmulatedRequest]]:
        """Prefill chunks and decodes of the coming step."""
        self._chunks = []
        joined = self._start_imported(now)
        preempted = self._allocate_decodes()
        budget = self._budget(joined, now)
        for streams in (True, False):
            budget, more = self._continue_prefill(budget, streams=streams)
            preempted |= more
            if not preempted:
                budget = self._admit(budget, now, streams=streams)
        return self._chunks, [entry for entry in self.running if entry.decodes]

    def _start_imported(self, now: float) -> list[EmulatedRequest]:
        """Run requests whose import is complete, streams before prompts, heavier classes first; those that run now."""
        arrived, joined = [entry for entry in self.importing if entry.imported_mono <= now], []
        for entry in sorted(arrived, key=lambda one: (one.started, one.request.job.slo.weight), reverse=True):
            if len(self.running) < self._max_num_seqs:
                del self.importing[entry]
                self.running[entry] = None
                joined.append(entry)
        return joined

    def _continue_prefill(self, budget: int, *, streams: bool) -> tuple[int, bool]:
        """Plan chunks of the streams, or of the prompts without a token, that are being computed. Returns what is left
        of the budget, and whether any request had to be preempted.
        """
        preempted = False
        for entry in heaviest_first(self.running, _rank):
            tokens = 0 if entry.decodes or entry.started is not streams else min(entry.missing, budget)
            if entry not in self.running or tokens <= 0:
                continue
            while entry in self.running and not self._allocate(entry, entry.computed + tokens):
                self._preempt()
                preempted = True
            if entry in self.running:
                self._chunks.append((entry, tokens))
                budget -= tokens
        return budget, preempted

    def _allocate_decodes(self) -> bool:
        """Allocate room for the next token of each decode; whether any request had to be preempted."""
        preempted = False
        for entry in heaviest_first(self.running, _rank):
            while entry in self.running and entry.decodes and not self._allocate(entry, entry.tokens):
                self._preempt()
                preempted = True
        return preempted

    def _budget(self, joined: list[EmulatedRequest], now: float) -> int:
        """Prompt tokens of the coming step, which is the first one for the requests that `joined`."""
        most = max(0, self.chunk_size - sum(entry.decodes for entry in self.running))
        if not self.policies.step_budget:
            return most
        decodes = [entry for entry in self.running if entry.decodes and entry.request.decodes]
        joining = [entry for entry in self.importing if entry.started]
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

    def _prompts(self) -> list[EmulatedRequest]:
        """Prompts that are being computed, or else the next that waits, of requests that decode here."""
        prompts = [entry for entry in self.running if not entry.decodes]
        if not prompts and len(self.waiting):
            prompts = [self.waiting.peek()]
        return [entry for entry in prompts if entry.request.decodes]

    def _admit(self, budget: int, now: float, *, streams: bool) -> int:
        """Start requests that wait, with `streams` only streams. Returns what is left of the budget."""
        while len(self.running) < self._max_num_seqs:
            if streams and self.waiting.stream is None:
                return budget
            entry = self.waiting.next()
            if entry is None or (streams and not entry.started) or not self._may_run(entry):
                return budget
            handle, held = entry.request.import_from, self._find_cached(entry)
            if entry.imports and handle is not None:
                computed = max(held, min(handle.tokens, entry.tokens - 1))
                if not self._fits(entry) or not self._allocate(entry, computed):
                    self._leave_cache(entry)
                    return budget
                entry.computed, entry.imports = computed, False
                entry.imported_mono = now + self._pull(handle, held)
                self._count_start(entry, held, computed)
                self.importing[self.waiting.pop()] = None
                continue
            tokens = min(entry.missing - held, budget)
            if tokens <= 0 or not self._fits(entry) or not self._allocate(entry, held + tokens):
                self._leave_cache(entry)
                return budget
            entry.computed = held
            self._count_start(entry, held, held)
            self.running[self.waiting.pop()] = None
            self._chunks.append((entry, tokens))
            budget -= tokens
        return budget

    def _may_run(self, entry: EmulatedRequest) -> bool:
        """Whether the batch has a place for it; a prompt leaves one for each stream whose KV is under way."""
        return entry.started or len(self.running) + sum(one.started for one in self.importing) < self._max_num_seqs

    def _find_cached(self, entry: EmulatedRequest) -> int:
        """Use the blocks of its prompt that the prefix cache holds; their tokens."""
        if self._cache is None:
            return 0
        self._cache.shrink(self.free)
        request = entry.request
        entry.cached = CachedPrefix(
            self._cache, request.prompt_token_ids, request.generation.cache_salt, entry.token_at
        )
        return entry.cached.begin()

    def _leave_cache(self, entry: EmulatedRequest) -> None:
        if entry.cached is not None:
            entry.cached.end()
            entry.cached = None

    def _count_start(self, entry: EmulatedRequest, held: int, computed: int) -> None:
        """Count a first start, with `held` tokens in the prefix cache and `computed` with KV."""
        if entry.started_before:
            return
        entry.started_before, prompt = True, len(entry.request.prompt_token_ids)
        kept = 0
        if self._cache is not None:
            self.prompt_tokens += prompt
            self.hit_tokens += held
            kept = prompt // self._cache.block_size * self._cache.block_size
        entry.reused = Reused(computed, max(0, kept - computed), computed - held)

    def _fits(self, entry: EmulatedRequest) -> bool:
        """Whether there is room for all that it has to compute now. vLLM requires that too
        (`scheduler_reserve_full_isl`): a request that starts with less would soon be preempted again.
        """
        return min(-(-entry.tokens // self._settings.block_size), self.total) - entry.blocks <= self.free

    def _allocate(self, entry: EmulatedRequest, tokens: int) -> bool:
        """Allocate blocks for `tokens` tokens in all, at most every block; False when too few are free."""
        more = min(-(-tokens // self._settings.block_size), self.total) - entry.blocks
        if more > self.free:
            return False
        if more > 0:
            self.free -= more
            entry.blocks += more
            if self._cache is not None:
                self._cache.shrink(self.free)
        return True

    def _release(self, entry: EmulatedRequest) -> None:
        self.free += entry.blocks
        entry.blocks = 0
        self._leave_cache(entry)

    def _preempt(self) -> None:
        """Preempt the `victim`: it waits before the others of its class, a stream before all prompts."""
        entry = victim(self.running, _rank)
        del self.running[entry]
        self._chunks = [chunk for chunk in self._chunks if chunk[0] is not entry]
        self._release(entry)
        entry.computed, entry.imported_mono = 0, 0.0
        self.preemptions += 1
        self.waiting.preempted(entry)

    def _decoding(self) -> list[Decoding]:
        return [
            Decoding(entry.request.job, len(entry.request.prompt_token_ids), entry.tokens)
            for entry in (*self.running, *self.importing)
            if entry.request.decodes
        ]

    def _blocks(self) -> Blocks:
        return Blocks(self.free, self.total, self._settings.block_size)


def _rank(entry: EmulatedRequest) -> Rank:
    return entry.request.job.slo.weight, entry.started


def token_at(position: int) -> int:
    """The token at a position of the sequence: the same on every instance, so that an answer goes on alike after a
    hand-over.
    """
    return _FIRST + position * 7919 % _TOKENS


class _Sampling(msgspec.Struct):
    """The sampling parameters that matter here, by vLLM's names: when an answer ends, beside max_tokens, and log
    probabilities, which an engine without a model does not have.
    """

    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None


_SAMPLING = msgspec.msgpack.Decoder(_Sampling)
_LOGPROBS = ("logprobs", "prompt_logprobs", "logprob_token_ids")


def refusal(request: EngineRequest) -> str:
    """Why an emulated engine cannot compute this request; empty where it can."""
    sampling = _sampling(request)
    requested = [f"{name} {value}" for name in _LOGPROBS if (value := getattr(sampling, name)) is not None]
    if not requested:
        return ""
    return f"{', '.join(requested)}: an emulated engine has no model and no log probabilities: leave them out"


def answer_tokens(request: EngineRequest) -> tuple[int, str]:
    """How many tokens the answer has, and why it ends then. An emulated token follows from its position, so both are
    known before. A stop token ends an answer, as with a real engine, so that clients can allow more tokens than they
    get.
    """
    prompt, limit, stops = len(request.prompt_token_ids), request.max_tokens, set(_sampling(request).stop_token_ids)
    for at in range(len(request.forced_tokens), limit if stops else 0):
        if token_at(prompt + at) in stops:
            return at + 1, "stop"
    return limit, "length"


def _sampling(request: EngineRequest) -> _Sampling:
    """Undecodable sampling parameters count as the defaults."""
    try:
        return _SAMPLING.decode(request.generation.sampling)
    except msgspec.MsgspecError:
        return _Sampling()


class EmulatedCache:
    """Whole blocks of computed tokens. Blocks that no request uses lie in free memory and are dropped as it is taken:
    the least recently used first, of one request the last first.

    Blocks that requests share are counted once for each of them, so memory is a little tighter than in vLLM.
    """

    def __init__(self, block_size: int, sink: CacheSink) -> None:
        self.block_size = block_size
        self._sink = sink
        self._users: dict[int, int] = {}  # of each block that is held
        self._unused: OrderedDict[int, None] = OrderedDict()  # the first goes first

    def __contains__(self, name: int) -> bool:
        return name in self._users

    def use(self, names: Sequence[int]) -> None:
        for name in names:
            self._users[name] += 1
            self._unused.pop(name, None)

    def store(self, name: int, parent: int | None, token_ids: Sequence[int], salt: str) -> None:
        """A request has computed a block, or the last token of it."""
        if name not in self._users:
            self._users[name] = 0
            self._sink([BlocksStored([name], parent, token_ids, salt)])

    def leave(self, names: Sequence[int]) -> None:
        for name in reversed(names):
            self._users[name] -= 1
            if not self._users[name]:
                self._unused[name] = None

    def shrink(self, free_blocks: int) -> None:
        """Drop unused blocks beyond the free ones."""
        gone = []
        while len(self._unused) > free_blocks:
            name, _ = self._unused.popitem(last=False)
            del self._users[name]
            gone.append(name)
        if gone:
            self._sink([BlocksRemoved(gone)])


class CachedPrefix:
    """One request's part in the cache. `token_at` gives the tokens after the prompt, by position."""

    def __init__(self, cache: EmulatedCache, prompt: Sequence[int], salt: str, token_at: Callable[[int], int]) -> None:
        self._cache = cache
        self._prompt = prompt
        self._salt = salt
        self._token_at = token_at
        self._used: list[int] = []

    def begin(self) -> int:
        """Use the blocks that are held of the prompt; their tokens. The last token is not among them: it is
        computed.
        """
        size = self._cache.block_size
        for name in block_hashes(self._prompt[:-1], self._salt, block_tokens=size, most=_MAX_BLOCKS):
            if name not in self._cache:
                break
            self._used.append(name)
        self._cache.use(self._used)
        return len(self._used) * size

    def computed(self, tokens: int) -> None:
        """The first `tokens` tokens have their KV: their whole blocks can be hit from now on."""
        size = self._cache.block_size
        while (len(self._used) + 1) * size <= tokens:
            at = len(self._used)
            block = self._tokens(at * size, (at + 1) * size)
            name = next_hash(self._used[-1] if at else root_hash(self._salt), packed(block))
            self._cache.store(name, self._used[-1] if at else None, block, self._salt)
            self._cache.use([name])
            self._used.append(name)

    def end(self) -> None:
        self._cache.leave(self._used)
        self._used = []

    def _tokens(self, start: int, stop: int) -> list[int]:
        prompt = self._prompt
        return [*prompt[start:stop], *(self._token_at(at) for at in range(max(start, len(prompt)), stop))]
