"""The interface of an engine to the worker.

It has requests and their results, statistics, the policies that order the engine's work, its step log and the events
of its prefix cache. This module imports no engine.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from shared.domain.instance import Compatibility
from shared.domain.job import Generation, JobView, LengthPrediction
from shared.domain.kv import Codec, KvHandle
from shared.domain.policies import ENGINE, PolicySet
from shared.domain.rates import Rates, StepRates
from shared.errors import EngineFailed, InvalidRequest, PolyphaseError
from shared.policy import registry
from shared.policy.decode_admission import DecodeAdmission, Greedy
from shared.policy.prefill_order import Fcfs, PrefillOrder, PrefillShare, PromptTime, WaitingJob
from shared.runtime.logs import get_log
from shared.wire.messages import StepPage, StepRecord, TokenStep, decode_rows, encode_rows

log = get_log(__name__)
KEPT_STEPS = 8192  # over a minute of a fast engine's, some 2 MB
FAILED = ("abort", "error", "refused")  # finish reasons of requests that did not end well
BlockName = bytes | int
Chunks = tuple[tuple[int, int], ...]
CurrentRates = Callable[[], StepRates | None]  # the step costs that are known by now; any thread may call it
Sink = Callable[[TokenStep], None]
_Entry = tuple[int, float, float, float, Chunks, int, int]


@dataclass(frozen=True, slots=True)
class EnginePolicies:
    """The policies by which an engine orders its work; they may change between two steps. step_budget: prefill
    gives way to the TPOT targets of the requests that decode.
    """

    order: PrefillOrder = field(default_factory=Fcfs)
    admission: DecodeAdmission = field(default_factory=Greedy)
    step_budget: bool = False

    @classmethod
    def of(cls, policies: PolicySet) -> "EnginePolicies":
        """The policies of a set that concern an engine. Raises InvalidRequest that names the choices."""
        order, admission, budget = (registry.make(kind, policies.spec(kind)) for kind in ENGINE)
        return cls(order, admission, budget.limits)

    def names(self) -> dict[str, str | bool]:
        """By kind, for descriptions."""
        return {
            "prefill_order": self.order.name,
            "decode_admission": self.admission.name,
            "step_budget": self.step_budget,
        }


class StepLog:
    """A ring of the newest steps, for calibration and learning. One thread writes, others may read at any time;
    neither waits.
    """

    def __init__(self, kept: int = KEPT_STEPS) -> None:
        self._ring: list[_Entry | None] = [None] * kept
        self._count = 0
        self._share = PrefillShare()
        self._prompts = PromptTime()
        self.decodes = 0  # of all steps since the start; a step counts each of its decodes
        self.drafts = self.drafted_tokens = self.accepted_tokens = 0  # of speculative decoding, since the start

    @property
    def prefill_share(self) -> float:
        """The share of the last steps with decodes that computed prompts too."""
        return self._share.after()

    @property
    def busy_share(self) -> float:
        """Of the last seconds, the share in which steps computed prompts."""
        return self._prompts.at(time.monotonic())

    def add(self, seconds: float, cpu_s: float, prefill: Chunks, decode_count: int, decode_context_tokens: int) -> None:
        """Record a step that ends now; see StepRecord."""
        number = self._count
        self._ring[number % len(self._ring)] = (
            number,
            time.time(),
            seconds,
            cpu_s,
            prefill,
            decode_count,
            decode_context_tokens,
        )
        self._count = number + 1
        if prefill:
            self._prompts.add(seconds, time.monotonic())
        if decode_count:
            self.decodes += decode_count
            if prefill:
                self._share.mixed()
            else:
                self._share.plain()

    def drafted(self, drafts: int, tokens: int, accepted: int) -> None:
        """Count drafts of a step: their tokens, and those that the model accepted, each of which a decode gained beside
        the step's own token.
        """
        self.drafts += drafts
        self.drafted_tokens += tokens
        self.accepted_tokens += accepted

    def recent_token_s(self, count: int = 32) -> float:
        """Mean seconds of the newest steps with decodes, of at most so many steps; 0 where there are none."""
        seconds = [
            entry[2]
            for number in range(max(0, self._count - count), self._count)
            if (entry := self._ring[number % len(self._ring)]) is not None and entry[5]
        ]
        return sum(seconds) / len(seconds) if seconds else 0.0

    def page(self, instance_id: str, generation: int, since: int, limit: int) -> StepPage:
        """Up to `limit` steps from number `since` on; with a negative `since`, the newest ones."""
        count = self._count
        first = max(0, count - limit) if since < 0 else min(since, count)
        start = max(first, count - len(self._ring))
        stop = min(count, start + limit)
        kept = []
        for number in range(start, stop):
            entry = self._ring[number % len(self._ring)]
            if entry is not None and entry[0] == number:  # otherwise the writer has overwritten it meanwhile
                kept.append(StepRecord(*entry))
        return StepPage(instance_id, generation, tuple(kept), stop, stop - first - len(kept))


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


class EngineRequest(msgspec.Struct, frozen=True):
    """A request to an engine, in tokens. `job` is what the engine's policies know of it.

    With `export_to` set, KV of the prompt is staged under that transfer id while it is computed; where
    `export_codec` is lossy and a device has the KV, it is coded there. With `import_from` set, KV of the first
    `import_from.tokens` prompt tokens is pulled instead of computed. `first_token_only` ends the request after one
    token, whatever the sampling parameters say: it does not decode here. Without `wants_token` that token is
    dropped, and no grammar is compiled for it. The output begins with `forced_tokens`, whatever the engine would
    have chosen, and goes on as if it had chosen them. Where it `resumes`, only later tokens are given out, and `state`
    is that of the sampler after the known ones: their KV is imported or computed like that of a prompt. An engine that
    cannot go on exactly in that state generates them again instead. `max_tokens` counts them in both cases.

    The engine calls on its own thread: `has_room` when the request is next, whether it may start now, which from
    then on it may; `entered` whenever it stops waiting; `preempted` whenever its blocks are taken back and it waits
    again.
    """

    request_id: str
    job: JobView
    prompt_token_ids: list[int]
    generation: Generation
    max_tokens: int
    first_token_only: bool = False
    wants_token: bool = True
    export_to: str = ""
    export_codec: Codec = Codec.RAW
    import_from: KvHandle | None = None
    forced_tokens: list[int] = []
    resumes: bool = False
    state: bytes = b""
    has_room: Callable[[], bool] = _always
    entered: Callable[[], None] = _nothing
    preempted: Callable[[], None] = _nothing

    def expecting(self, prediction: LengthPrediction) -> "EngineRequest":
        """A copy with this prediction of its answer's length."""
        return msgspec.structs.replace(self, job=msgspec.structs.replace(self.job, prediction=prediction))

    @property
    def decodes(self) -> bool:
        """Whether it goes on here after its first token."""
        return not self.first_token_only

    def as_waiting(self) -> WaitingJob:
        """As the prefill order sees it. The last token is always computed here."""
        prompt = len(self.prompt_token_ids) + (len(self.forced_tokens) if self.resumes else 0)
        before = min(self.import_from.tokens, prompt - 1) if self.import_from is not None else 0
        return WaitingJob(self.job, prompt - before, self.job.started)


@dataclass(frozen=True, slots=True)
class CacheExport:
    """KV that is to be staged for a transfer from blocks that hold it already, from token `start` on.

    The engine calls on its own thread: `announce` once it knows how many tokens that are; `has_room`, until it is true,
    whether they may be staged now.
    """

    transfer_id: str
    start: int
    announce: Callable[[int], None]
    has_room: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Left:
    """A request that has left the engine to go on in another one. tokens: up to which its KV is staged; 0: none.
    state: see `EngineRequest.state`.
    """

    tokens: int
    state: bytes


class DiskTierStats(msgspec.Struct, frozen=True):
    """KV on the disk, of all ranks. Blocks count since the start."""

    held_bytes: int = 0
    limit_bytes: int = 0  # 0: the engine has no disk tier
    written_blocks: int = 0
    read_blocks: int = 0
    evicted_blocks: int = 0
    dropped_blocks: int = 0  # not written: too many were to be written at once
    lost_blocks: int = 0  # damaged, short, or not readable: nothing was served from them
    fault: str = ""  # why the tier was switched off


class HostTierStats(msgspec.Struct, frozen=True):
    """KV in host memory, of all ranks. Blocks and tokens count since the start."""

    held_bytes: int = 0
    limit_bytes: int = 0  # 0: the engine has no host tier
    stored_blocks: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0  # to the disk, where there is one
    served_tokens: int = 0  # of prompts, loaded in place of being computed
    block_tokens: float = 0.0  # tokens of a prompt for each block, of whatever group of layers
    disk: DiskTierStats = DiskTierStats()


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot. `waiting` includes requests that wait for KV. `waiting_tokens`: of requests without blocks that
    are to decode here. `free_blocks` includes those that are kept for sessions and that no request uses.
    `partly`: of running requests whose prompts are partly computed, by id, the tokens that are, or are in steps under
    way. `prompt_tokens`, `hit_tokens`, `preemptions` and `sessions_yielded` count since the start.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    partly: Mapping[str, int] = {}
    prompt_tokens: int = 0  # of all requests that have started
    hit_tokens: int = 0  # of these, found in the engine's own prefix cache or in its host memory
    preemptions: int = 0  # how often a request lost its blocks
    sessions: int = 0  # whose KV is kept until their next turn
    session_blocks: int = 0  # that are kept for them
    sessions_yielded: int = 0  # whose blocks requests needed
    host: HostTierStats = HostTierStats()


class EngineInfo(msgspec.Struct, frozen=True):
    """The properties of an engine that has started. Empty rates: not measured.

    stages: layers of each pipeline stage, as in KvHandle; empty where there is one. adapters, media, precision: as in
    InstanceInfo. cached_tokens: of a block of its prefix cache; 0: it has no cache that can hold a request's KV.
    """

    compatibility: Compatibility
    total_blocks: int
    max_model_len: int
    block_size: int
    rates: Rates = Rates()
    stages: tuple[int, ...] = ()
    kv_dtype: str = ""  # in which KV is stored; empty: that of the settings
    adapters: dict[str, str] = {}
    precision: str = ""
    media: tuple[str, ...] = ()
    cached_tokens: int = 0


class Engine(Protocol):
    """Continuous batching behind a few calls. The event loop makes all calls and runs all sinks."""

    @property
    def steps(self) -> StepLog:
        """The newest steps."""
        ...

    @property
    def step_s(self) -> float:
        """Seconds that the present step has lasted; 0 between steps, and without work."""
        ...

    async def start(self) -> EngineInfo:
        """Load and warm up. Raises EngineFailed with the cause."""
        ...

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue a request; its outputs go to `sink`, the last one with a finish reason."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request and free its blocks; its sink is not called again. Unknown ids are ignored."""
        ...

    async def export_cached(self, request: EngineRequest, export: CacheExport) -> int:
        """Begin to stage KV of the request's prompt, as far as the prefix cache has it. Returns up to which token; 0:
        nothing is staged. The KV may be pulled while it is being staged.
        """
        ...

    async def export_running(self, request_id: str, export: CacheExport) -> int:
        """The same of a request that runs here, and goes on, as far as it is computed; 0 also where it does not run."""
        ...

    async def leave(self, request_id: str, export: CacheExport) -> Left | None:
        """Stop a request between two steps and stage its KV. Its sink has all its tokens, and is not called again. None
        where it has ended.
        """
        ...

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        """The predicted length of a request's answer, for admission from the next step on. Unknown ids are ignored."""
        ...

    def wake(self) -> None:
        """The result of `has_room` may have changed."""
        ...

    @property
    def policies(self) -> EnginePolicies:
        """The policies of the present step."""
        ...

    def set_policies(self, policies: EnginePolicies) -> None:
        """Use other policies from the next step on, also for waiting requests. Raises InvalidRequest for policies
        that the engine cannot follow.
        """
        ...

    def set_chunk_size(self, tokens: int) -> None:
        """A step holds at most that many tokens from the next one on, and at most what the engine was started for."""
        ...

    async def add_adapter(self, key: str, folder: str) -> None:
        """Load a LoRA adapter between two steps; requests may have it from then on. Raises EngineFailed with the cause,
        and has no such adapter then.
        """
        ...

    async def remove_adapter(self, key: str) -> None:
        """Accept no more requests for an adapter, and forget it once none has it. Unknown keys are ignored."""
        ...

    def stats(self) -> EngineStats:
        """The newest snapshot; costs nothing."""
        ...

    async def close(self) -> None:
        """Stop everything."""
        ...


class KnownTokens:
    """The beginning of an answer, which its client has: the engine generates it again, and it is not sent again."""

    def __init__(self, tokens: list[int]) -> None:
        self._left = tokens

    def without(self, step: TokenStep) -> TokenStep:
        """The new part of the step. Raises EngineFailed where the engine gave other tokens than the known ones."""
        if not self._left:
            return step
        count = min(len(self._left), len(step.tokens))
        if step.tokens[:count] != self._left[:count]:
            raise EngineFailed("the engine did not repeat the tokens that the client has; the answer cannot go on")
        self._left = self._left[count:]
        logprobs = step.logprobs and encode_rows(decode_rows(step.logprobs).after(count))
        return TokenStep(step.tokens[count:], step.finish_reason, step.stop_reason, logprobs)


def failure(job_id: str, last: TokenStep) -> PolyphaseError | None:
    """The error for a job's caller if its last step did not end it well."""
    if last.finish_reason == "refused":
        return InvalidRequest(f"{job_id}: {last.stop_reason}")
    if last.finish_reason in FAILED:
        return EngineFailed(f"{job_id}: {last.stop_reason or 'the engine gave up'}")
    return None


def deliver(sink: Sink, step: TokenStep) -> None:
    """Deliver a step to its job. A bug in the job's sink is logged and concerns no other job."""
    try:
        sink(step)
    except Exception as error:
        log.error("a job failed to handle its step", exc_info=error)


class BlocksStored(msgspec.Struct, frozen=True):
    """Blocks of one prompt, in order, can be found from now on; the first follows `parent`, or begins the prompt.
    An engine names each block after all tokens up to its end.

    `token_ids` are those of the blocks alone. `salt` comes with the first block of a prompt. `adapter`: the key of the
    LoRA adapter that computed them. `begun`: the media items that begin in the blocks, each by its position among
    `token_ids` and its digest.
    """

    blocks: Sequence[BlockName]
    parent: BlockName | None
    token_ids: Sequence[int]
    salt: str = ""
    adapter: str = ""
    begun: Sequence[tuple[int, str]] = ()


class BlocksRemoved(msgspec.Struct, frozen=True):
    """One copy of each block is gone: of the accelerator, or the one in host memory. A block that was stored twice is
    gone when it was removed twice.
    """

    blocks: Sequence[BlockName]
    host: bool = False


class BlocksKept(msgspec.Struct, frozen=True):
    """There is one more copy of each block that can be found already: on the accelerator, or in host memory, for which
    the disk counts, too.
    """

    blocks: Sequence[BlockName]
    host: bool = False


class BlocksCleared(msgspec.Struct, frozen=True):
    """All blocks are gone."""


CacheEvent = BlocksStored | BlocksRemoved | BlocksKept | BlocksCleared
CacheSink = Callable[[Sequence[CacheEvent]], None]
