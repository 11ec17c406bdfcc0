"""What a worker asks of an engine."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from services.worker.engines.step_log import StepLog
from shared.domain.instance import Compatibility
from shared.domain.job import Generation
from shared.domain.kv import Codec, KvHandle
from shared.domain.rates import Rates
from shared.errors import EngineFailed, InvalidRequest, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.messages import TokenStep

log = get_log(__name__)


class EngineRequest(msgspec.Struct, frozen=True):
    """Tokens in.

    With `export_to` set, KV of the prompt is staged under that transfer id while it is computed; with `import_from`
    set, KV of the first `import_from.tokens` prompt tokens is pulled instead of computed. `first_token_only` makes
    the engine stop after one token, whatever the sampling parameters say.
    """

    request_id: str
    prompt_token_ids: list[int]
    generation: Generation
    max_tokens: int
    first_token_only: bool = False
    export_to: str = ""
    codec: Codec = Codec.RAW
    import_from: KvHandle | None = None


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot. `waiting` includes requests that wait for KV. Tokens are counted since the start."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    prompt_tokens: int = 0  # of all requests that began
    hit_tokens: int = 0  # of those, found in the engine's own prefix cache


class EngineInfo(msgspec.Struct, frozen=True):
    """What the engine turned out to be, once started. Empty rates: nobody measured it."""

    compatibility: Compatibility
    total_blocks: int
    max_model_len: int
    block_size: int
    rates: Rates = Rates()


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
    """Continuous batching behind five calls. All are made, and all sinks are called, on the event loop."""

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

    def stats(self) -> EngineStats:
        """The newest snapshot; costs nothing."""
        ...

    async def close(self) -> None:
        """Stop everything."""
        ...
