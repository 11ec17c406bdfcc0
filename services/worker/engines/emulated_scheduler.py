"""The scheduler of an emulated engine: continuous batching with chunked prefill, priorities, paged KV and preemption.

The order of work is vLLM's with Polyphase's policies: decodes first, then streams (requests whose clients have tokens)
that are computed again or wait, then prompts under way, then prompts that may start; within each, heavier SLO classes
go before lighter ones. When blocks run out, the youngest prompt of the lightest class is preempted and computed again,
or the youngest stream where that class has no prompt. The simulator's scheduler does the same in virtual time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from math import inf

from services.worker.engines.admission_queue import AdmissionQueue
from services.worker.engines.base import CurrentRates, EnginePolicies, EngineRequest, Sink
from services.worker.engines.emulated_tokens import CachedPrefix, EmulatedCache, answer_tokens, output_token
from services.worker.settings import WorkerSettings
from shared.domain.job import LengthPrediction
from shared.domain.kv import KvHandle
from shared.policy.decode_admission import Blocks, Decoding
from shared.policy.prefill_order import Rank, heaviest_first, victim
from shared.policy.step_budget import StepLoad, gap_target_s, joining_gap_s, prefill_tokens
from shared.wire.messages import Reused


class RequestState(Enum):
    """WAITING leads to RUNNING, by way of IMPORTING where the request comes with KV. A running request may be PREEMPTED
    and run again, any number of times. Every other state may become FINISHED.
    """

    WAITING = auto()  # in the queue; it has not started yet
    IMPORTING = auto()  # it has blocks, and its KV is under way
    RUNNING = auto()  # in the batch
    PREEMPTED = auto()  # in the queue again, without blocks; all of its tokens are computed here
    FINISHED = auto()  # complete or aborted


@dataclass(slots=True, eq=False)
class EmulatedRequest:
    """A request and its progress."""

    request: EngineRequest
    sink: Sink
    arrived_mono: float
    tokens: int  # of the prompt and of the output so far
    remaining_output_tokens: int
    finish_reason: str  # reported with the last output token
    state: RequestState = RequestState.WAITING
    computed_tokens: int = 0  # of `tokens`, those whose KV is in the cache
    blocks: int = 0  # that it holds
    cached: CachedPrefix | None = None  # its part in the prefix cache, while it holds blocks
    reused: Reused | None = None  # from its first start until its first token is out

    @property
    def is_stream(self) -> bool:
        """Whether its client has a token, from this instance or another."""
        return self.request.job.started or self.tokens > len(self.request.prompt_token_ids)

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens to compute before the next token is generated."""
        return self.tokens - self.computed_tokens

    @property
    def is_decode(self) -> bool:
        """Whether its next step computes one token after some context; the last token of an imported prompt counts
        too.
        """
        return self.uncomputed_tokens == 1 and self.computed_tokens > 0

    @property
    def kv_to_import(self) -> KvHandle | None:
        """The KV with which it starts; None where it computes its tokens here."""
        if self.state is RequestState.WAITING:
            return self.request.import_from
        return None

    def handed_over_s(self, now: float) -> float:
        """How long ago a stream that has yet to join the batch was handed over with its KV; 0 without KV, and after a
        preemption here.
        """
        if self.request.import_from is None or self.state is RequestState.PREEMPTED:
            return 0.0
        return now - self.arrived_mono


Chunk = tuple[EmulatedRequest, int]  # prompt tokens of a request that a step computes


class EmulatedScheduler:
    """Decides what each step computes, and which requests hold how many blocks. `pull` begins an import and returns
    its seconds. `now` is in monotonic seconds.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        total_blocks: int,
        policies: EnginePolicies,
        rates: CurrentRates,
        pull: Callable[[KvHandle, int], float],
        cache: EmulatedCache | None = None,
    ) -> None:
        self.policies = policies
        self.chunk_size = settings.step_tokens
        self._block_size = settings.block_size
        self._max_num_seqs = max(1, settings.max_seqs // settings.pipeline_parallel)  # each lane has its share
        self._rates = rates
        self._pull = pull
        self._cache = cache
        self.total_blocks = total_blocks
        self.free_blocks = total_blocks

        self.requests: dict[str, EmulatedRequest] = {}  # all that are not finished, by id
        self.waiting: AdmissionQueue[EmulatedRequest] = AdmissionQueue(  # also those that were preempted
            policies, lambda entry: entry.request, lambda entry: entry.tokens, self._decoding, self._memory
        )
        self.importing: dict[EmulatedRequest, float] = {}  # when the import is complete, in monotonic seconds
        self.running: dict[EmulatedRequest, None] = {}  # in order of admission

        # Of the step that is being planned:
        self._chunks: list[Chunk] = []
        self._has_preempted = False

        # Since the start:
        self.preemptions = 0
        self.prompt_tokens = 0  # of all requests that started
        self.hit_tokens = 0  # of these, held by the prefix cache

    def set_policies(self, policies: EnginePolicies) -> None:
        """From the next step on."""
        self.policies = policies
        self.waiting.set_policies(policies)

    def add(self, request: EngineRequest, sink: Sink, now: float) -> None:
        output_tokens, finish_reason = answer_tokens(request)
        entry = EmulatedRequest(
            request,
            sink,
            arrived_mono=now,
            tokens=len(request.prompt_token_ids),
            remaining_output_tokens=output_tokens,
            finish_reason=finish_reason,
        )
        self.requests[request.request_id] = entry
        self.waiting.add(entry)

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        entry = self.requests.get(request_id)
        if entry is not None:
            entry.request = entry.request.expecting(prediction)

    def remove(self, request_id: str) -> None:
        """The request is complete or aborted."""
        entry = self.requests.pop(request_id, None)
        if entry is None:
            return
        if entry.state is RequestState.RUNNING:
            del self.running[entry]
        elif entry.state is RequestState.IMPORTING:
            del self.importing[entry]
        else:
            self.waiting.remove(entry)
        entry.state = RequestState.FINISHED
        self._release(entry)

    def plan(self, now: float) -> tuple[list[Chunk], list[EmulatedRequest]]:
        """Prefill chunks and decodes of the coming step."""
        self._chunks = []
        self._has_preempted = False
        joined = self._run_imported(now)
        self._allocate_decodes()
        budget = self._prefill_budget(joined, now)
        for streams in (True, False):
            budget = self._continue_prefill(budget, streams=streams)
            if not self._has_preempted:
                budget = self._admit(budget, now, streams=streams)
        return self._chunks, [entry for entry in self.running if entry.is_decode]

    def begin_imports(self, now: float) -> None:
        """Between two steps: start the imports of streams, as far as there is room for them beside the step under
        way.
        """
        self._admit(0, now, streams=True)

    # Requests in the batch

    def _run_imported(self, now: float) -> list[EmulatedRequest]:
        """Run the requests whose import is complete, as many as the batch has places for: streams before prompts,
        heavier classes first. Returns these requests.
        """
        imported = [entry for entry, complete_mono in self.importing.items() if complete_mono <= now]
        imported.sort(key=lambda entry: (entry.is_stream, entry.request.job.slo.weight), reverse=True)
        joined = imported[: max(0, self._max_num_seqs - len(self.running))]
        for entry in joined:
            del self.importing[entry]
            self._run(entry)
        return joined

    def _run(self, entry: EmulatedRequest) -> None:
        entry.state = RequestState.RUNNING
        self.running[entry] = None

    def _allocate_decodes(self) -> None:
        """Allocate room for the next token of each decode."""
        decodes = [entry for entry in self.running if entry.is_decode]
        for entry in heaviest_first(decodes, _rank):
            if entry.state is not RequestState.PREEMPTED:
                self._allocate_or_preempt(entry, entry.tokens)

    def _continue_prefill(self, budget: int, *, streams: bool) -> int:
        """Plan chunks of the streams, or of the prompts without a token, that are being computed. Returns what is left
        of the budget.
        """
        prefills = [entry for entry in self.running if not entry.is_decode and entry.is_stream is streams]
        for entry in heaviest_first(prefills, _rank):
            if budget <= 0:
                break
            if entry.state is RequestState.PREEMPTED:
                continue  # for a request before it in this loop
            tokens = min(entry.uncomputed_tokens, budget)
            if self._allocate_or_preempt(entry, entry.computed_tokens + tokens):
                self._chunks.append((entry, tokens))
                budget -= tokens
        return budget

    def _allocate_or_preempt(self, entry: EmulatedRequest, tokens: int) -> bool:
        """Preempt requests until this one has blocks for `tokens` tokens in all; False when it is preempted itself."""
        while not self._allocate(entry, tokens):
            self._preempt()
            if entry.state is RequestState.PREEMPTED:
                return False
        return True

    def _preempt(self) -> None:
        """Preempt the `victim`: it waits before the others of its class, a stream before all prompts."""
        entry = victim(self.running, _rank)
        del self.running[entry]
        self._chunks = [chunk for chunk in self._chunks if chunk[0] is not entry]
        self._release(entry)
        entry.computed_tokens = 0
        entry.state = RequestState.PREEMPTED
        self.waiting.preempted(entry)
        self.preemptions += 1
        self._has_preempted = True

    # The prompt tokens of a step

    def _prefill_budget(self, joined: list[EmulatedRequest], now: float) -> int:
        """Prompt tokens of the coming step, which is the first one for the requests that `joined`."""
        max_tokens = max(0, self.chunk_size - sum(entry.is_decode for entry in self.running))
        if not self.policies.step_budget:
            return max_tokens
        return prefill_tokens(self._rates(), self._step_load(joined, now), max_tokens)

    def _step_load(self, joined: list[EmulatedRequest], now: float) -> StepLoad:
        """The decodes of the coming step with the streams that are about to join them, and the tightest gap target of
        all requests that generate more than one token here (`request.decodes`).
        """
        decodes = [entry for entry in self.running if entry.is_decode and entry.request.decodes]
        here = [entry for entry in joined if entry.is_stream and entry.state is RequestState.RUNNING]
        coming = [entry for entry in self.importing if entry.is_stream]
        if (next_stream := self.waiting.stream) is not None:
            coming.append(next_stream)

        gaps_s = [gap_target_s(entry.request.job.slo) for entry in (*decodes, *self._prompts())]
        for entry in here:
            gaps_s.append(joining_gap_s(entry.request.job.slo, entry.handed_over_s(now), here=True))
        for entry in coming:
            gaps_s.append(joining_gap_s(entry.request.job.slo, entry.handed_over_s(now), here=False))
        context_tokens = sum(entry.computed_tokens for entry in decodes) + sum(entry.tokens for entry in coming)
        return StepLoad(
            decodes=len(decodes) + len(coming),
            context_tokens=context_tokens,
            gap_s=min(gaps_s, default=inf),
            before_tokens=max((entry.computed_tokens for entry in self.running if not entry.is_decode), default=0),
        )

    def _prompts(self) -> list[EmulatedRequest]:
        """Prompts that are being computed, or else the next that waits, of requests that decode here."""
        prompts = [entry for entry in self.running if not entry.is_decode]
        if not prompts and len(self.waiting):
            prompts = [self.waiting.peek()]
        return [entry for entry in prompts if entry.request.decodes]

    # Admission

    def _admit(self, budget: int, now: float, *, streams: bool) -> int:
        """Start requests that wait, with `streams` only streams. Returns what is left of the budget."""
        while len(self.running) < self._max_num_seqs:
            entry = self._next_waiting(streams=streams)
            if entry is None:
                break
            if (handle := entry.kv_to_import) is not None:
                if not self._start_import(entry, handle, now):
                    break
            else:
                tokens = self._start_prefill(entry, budget)
                if not tokens:
                    break
                budget -= tokens
        return budget

    def _next_waiting(self, *, streams: bool) -> EmulatedRequest | None:
        """The request that may start now, with `streams` only a stream."""
        if streams and self.waiting.stream is None:
            return None
        entry = self.waiting.next()
        if entry is None or entry.is_stream:
            return entry
        if streams:
            return None  # a prompt whose room for an export is reserved goes before streams
        # A prompt leaves a place in the batch for each stream whose KV is under way.
        coming = sum(other.is_stream for other in self.importing)
        if len(self.running) + coming >= self._max_num_seqs:
            return None
        return entry

    def _start_import(self, entry: EmulatedRequest, handle: KvHandle, now: float) -> bool:
        """Import the KV of its prompt, beyond what the prefix cache holds. The last token is always computed here."""
        cached_tokens = self._use_cache(entry)
        computed_tokens = max(cached_tokens, min(handle.tokens, entry.tokens - 1))
        if not self._fits(entry) or not self._allocate(entry, computed_tokens):
            self._leave_cache(entry)
            return False
        entry.computed_tokens = computed_tokens
        complete_mono = now + self._pull(handle, cached_tokens)
        self._count_reuse(entry, cached_tokens)
        self.waiting.pop()
        entry.state = RequestState.IMPORTING
        self.importing[entry] = complete_mono
        return True

    def _start_prefill(self, entry: EmulatedRequest, budget: int) -> int:
        """Plan its first chunk, after what the prefix cache holds. Returns the tokens of the chunk; 0 when the request
        has to wait.
        """
        cached_tokens = self._use_cache(entry)
        tokens = min(entry.uncomputed_tokens - cached_tokens, budget)
        if tokens <= 0 or not self._fits(entry) or not self._allocate(entry, cached_tokens + tokens):
            self._leave_cache(entry)
            return 0
        entry.computed_tokens = cached_tokens
        if entry.state is RequestState.WAITING:
            self._count_reuse(entry, cached_tokens)
        self.waiting.pop()
        self._run(entry)
        self._chunks.append((entry, tokens))
        return tokens

    def _count_reuse(self, entry: EmulatedRequest, cached_tokens: int) -> None:
        """At its first start: what it does not have to compute, and what of its prompt is new to the prefix cache."""
        created_tokens = 0
        if self._cache is not None:
            prompt_tokens = len(entry.request.prompt_token_ids)
            self.prompt_tokens += prompt_tokens
            self.hit_tokens += cached_tokens
            whole_blocks = prompt_tokens // self._cache.block_size
            created_tokens = max(0, whole_blocks * self._cache.block_size - entry.computed_tokens)
        entry.reused = Reused(
            entry.computed_tokens, created=created_tokens, imported=entry.computed_tokens - cached_tokens
        )

    # KV blocks

    def _use_cache(self, entry: EmulatedRequest) -> int:
        """Use the blocks of its prompt that the prefix cache holds. Returns their tokens."""
        if self._cache is None:
            return 0
        self._cache.shrink(self.free_blocks)
        request = entry.request
        entry.cached = CachedPrefix(
            self._cache, request.prompt_token_ids, request.generation.cache_salt, partial(output_token, request)
        )
        return entry.cached.begin()

    def _leave_cache(self, entry: EmulatedRequest) -> None:
        if entry.cached is not None:
            entry.cached.end()
            entry.cached = None

    def _missing_blocks(self, entry: EmulatedRequest, tokens: int) -> int:
        """Blocks that it lacks for `tokens` tokens in all; a request needs at most every block."""
        needed = -(-tokens // self._block_size)
        return min(needed, self.total_blocks) - entry.blocks

    def _fits(self, entry: EmulatedRequest) -> bool:
        """Whether there is room for all that it has to compute now. vLLM requires that too
        (`scheduler_reserve_full_isl`): a request that starts with less would soon be preempted again.
        """
        return self._missing_blocks(entry, entry.tokens) <= self.free_blocks

    def _allocate(self, entry: EmulatedRequest, tokens: int) -> bool:
        """Allocate blocks for `tokens` tokens in all; False when too few are free."""
        missing = self._missing_blocks(entry, tokens)
        if missing > self.free_blocks:
            return False
        if missing > 0:
            self.free_blocks -= missing
            entry.blocks += missing
            if self._cache is not None:
                self._cache.shrink(self.free_blocks)
        return True

    def _release(self, entry: EmulatedRequest) -> None:
        self.free_blocks += entry.blocks
        entry.blocks = 0
        self._leave_cache(entry)

    # What admission policies see

    def _decoding(self) -> list[Decoding]:
        return [
            Decoding(entry.request.job, len(entry.request.prompt_token_ids), entry.tokens)
            for entry in (*self.running, *self.importing)
            if entry.request.decodes
        ]

    def _memory(self) -> Blocks:
        return Blocks(self.free_blocks, self.total_blocks, self._block_size)


def _rank(entry: EmulatedRequest) -> Rank:
    return entry.request.job.slo.weight, entry.is_stream
