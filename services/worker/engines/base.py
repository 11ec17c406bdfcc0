"""What a worker asks of an engine."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from services.worker.engines.policies import EnginePolicies
from services.worker.engines.step_log import StepLog
from shared.domain.instance import Compatibility
from shared.domain.job import Generation, JobView, LengthPrediction
from shared.domain.kv import Codec, KvHandle
from shared.domain.rates import Rates
from shared.errors import EngineFailed, InvalidRequest, PolyphaseError
from shared.policy.prefill_order import WaitingJob
from shared.runtime.logs import get_log
from shared.wire.messages import TokenStep

log = get_log(__name__)


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


class EngineRequest(msgspec.Struct, frozen=True):
    """Tokens in.

    `job` is what the engine's policies know of it. With `export_to` set, KV of the prompt is staged under that transfer
    id while it is computed, coded by `export_codec` already where that is lossy and a device has the KV; with
    `import_from` set, KV of the first `import_from.tokens` prompt tokens is pulled instead of computed.
    `first_token_only` makes the engine stop after one token, whatever the sampling parameters say: it does not decode
    here. Without `wants_token` that token is dropped, and no grammar is compiled to choose it. The output begins with
    `forced_tokens`, whatever the engine would have chosen, and goes on as if it had chosen them. The engine calls on
    its own thread: `has_room` when it is the next, whether it may enter now, which from then on it may; `entered`
    whenever it leaves the line of those that wait; `preempted` whenever its blocks are taken back and it waits again.
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
    has_room: Callable[[], bool] = _always
    entered: Callable[[], None] = _nothing
    preempted: Callable[[], None] = _nothing

    def expecting(self, prediction: LengthPrediction) -> "EngineRequest":
        """The same with this prediction of its answer's length."""
        return msgspec.structs.replace(self, job=msgspec.structs.replace(self.job, prediction=prediction))

    @property
    def decodes(self) -> bool:
        """Whether it goes on here after its first token."""
        return not self.first_token_only

    def as_waiting(self) -> WaitingJob:
        """What the order of prompts goes by. The last token is always computed here."""
        prompt = len(self.prompt_token_ids)
        before = min(self.import_from.tokens, prompt - 1) if self.import_from is not None else 0
        return WaitingJob(self.job, prompt - before, before, self.generation.arrived_s, self.job.started)


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot. `waiting` includes requests that wait for KV. `waiting_tokens`: of those without blocks that are to
    decode here. `prompt_tokens`, `hit_tokens` and `preemptions` are counted since the start.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    prompt_tokens: int = 0  # of all requests that began
    hit_tokens: int = 0  # of those, found in the engine's own prefix cache
    preemptions: int = 0  # how often a request lost its blocks


class EngineInfo(msgspec.Struct, frozen=True):
    """What the engine turned out to be, once started. Empty rates: nobody measured it.

    stages: layers of each pipeline stage, as in KvHandle; empty where there is one.
    """

    compatibility: Compatibility
    total_blocks: int
    max_model_len: int
    block_size: int
    rates: Rates = Rates()
    stages: tuple[int, ...] = ()


Sink = Callable[[TokenStep], None]
FAILED = ("abort", "error", "refused")  # finish reasons of what did not end well


def failure(job_id: str, last: TokenStep) -> PolyphaseError | None:
    """What the last step of a job means for its caller, if it did not end well."""
    if last.finish_reason == "refused":
        return InvalidRequest(f"{job_id}: {last.stop_reason}")
    if last.finish_reason in FAILED:
        return EngineFailed(f"{job_id}: {last.stop_reason or 'the engine gave up'}")
    return None


def deliver(sink: Sink, step: TokenStep) -> None:
    """Hand a job its step. A bug in how it takes it is that job's alone: the others get theirs."""
    try:
        sink(step)
    except Exception as error:
        log.error("a job could not take its step", exc_info=error)


class Engine(Protocol):
    """Continuous batching behind a few calls. All are made, and all sinks are called, on the event loop."""

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
        """Take a request; its outputs go to `sink`, the last one with a finish reason."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request and free its blocks; its sink is not called again. Unknown ids are ignored."""
        ...

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        """How long the answer of a request will be, for admission from the next step on. Unknown ids are ignored."""
        ...

    def wake(self) -> None:
        """What `has_room` said may have changed."""
        ...

    @property
    def policies(self) -> EnginePolicies:
        """What it goes by at this step."""
        ...

    def set_policies(self, policies: EnginePolicies) -> None:
        """Go by others from the next step on, for those that wait, too. Raises InvalidRequest for those it cannot."""
        ...

    def set_chunk_size(self, tokens: int) -> None:
        """A step holds at most so many tokens from the next one on, and never more than it was started for."""
        ...

    def stats(self) -> EngineStats:
        """The newest snapshot; costs nothing."""
        ...

    async def close(self) -> None:
        """Stop everything."""
        ...
