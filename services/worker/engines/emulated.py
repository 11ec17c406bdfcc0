"""An engine without a model: real time, taken from the cost model, and deterministic tokens.

With it the whole stack, every service real, runs as a mixed cluster on a laptop. KV is metadata only: a transfer takes
no time. What it answers is no language, and every place that shows an instance says "emulated".
"""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from services.worker.engines.base import EngineInfo, EngineOutput, EngineRequest, EngineStats, Sink
from services.worker.settings import WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.cost.models import bundled_geometry, geometry_from_file
from shared.cost.step import Batch, StepModel
from shared.domain.instance import Compatibility, KvGeometry
from shared.runtime.logs import get_log
from shared.wire.messages import WIRE_VERSION

log = get_log(__name__)

_TOKENS = 997  # a prime, so that the tokens of two positions rarely agree
_FIRST = 300  # below it tokenizers keep their special tokens and single bytes


@dataclass(slots=True)
class _Request:
    request: EngineRequest
    sink: Sink
    blocks: int
    computed: int = 0  # prompt tokens in the KV cache
    generated: int = 0

    @property
    def prompt(self) -> int:
        return len(self.request.prompt_token_ids)


class EmulatedEngine:
    """Continuous batching with chunked prefill over an imaginary accelerator."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._waiting: list[_Request] = []
        self._running: dict[str, _Request] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        """Size the KV cache for the accelerator and begin to step."""
        s = self._settings
        name = s.emulated_model
        geometry = geometry_from_file(Path(name)) if Path(name).exists() else bundled_geometry(name)
        self._model = StepModel(Catalogue.built_in().get(s.accelerator), geometry, s.tensor_parallel, dtype=s.dtype)
        self._total = max(1, int(s.kv_cache_bytes // (geometry.kv_bytes_per_token(2.0) * s.block_size)))
        self._free = self._total
        self._task = asyncio.get_running_loop().create_task(self._steps(), name="emulated-engine")
        self._task.add_done_callback(_stop_with_engine)
        kv = KvGeometry(geometry.layers, geometry.kv_heads, geometry.head_dim)
        compatibility = Compatibility(f"emulated:{geometry.name}", "emulated", "1", WIRE_VERSION, kv)
        return EngineInfo(compatibility, self._total, s.max_model_len, s.block_size)

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue it; it starts when its prompt fits."""
        blocks = -(-(len(request.prompt_token_ids) + request.max_tokens) // self._settings.block_size)
        self._waiting.append(_Request(request, sink, min(blocks, self._total)))
        self._work.set()

    def abort(self, request_id: str) -> None:
        """Forget it."""
        if entry := self._running.pop(request_id, None):
            self._free += entry.blocks
        self._waiting = [entry for entry in self._waiting if entry.request.request_id != request_id]

    def stats(self) -> EngineStats:
        """Now."""
        return EngineStats(len(self._running), len(self._waiting), self._free, self._total)

    async def close(self) -> None:
        """Stop stepping."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._admit()
            if not self._running:
                self._work.clear()
                await self._work.wait()
                continue
            chunks, decodes = self._batch()
            due = loop.time() + self._duration(chunks, decodes)
            await asyncio.sleep(due - loop.time())
            self._finish_step(chunks, decodes)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._settings.max_seqs:
            entry = self._waiting[0]
            if entry.blocks > self._free:
                return
            del self._waiting[0]
            self._free -= entry.blocks
            if entry.request.import_from is not None:
                entry.computed = min(entry.request.import_from.tokens, entry.prompt - 1)
            self._running[entry.request.request_id] = entry

    def _batch(self) -> tuple[list[tuple[_Request, int]], list[_Request]]:
        decodes = [entry for entry in self._running.values() if entry.computed >= entry.prompt]
        budget = self._settings.chunk_size - len(decodes)
        chunks = []
        for entry in self._running.values():
            tokens = min(entry.prompt - entry.computed, budget)
            if tokens > 0:
                chunks.append((entry, tokens))
                budget -= tokens
        return chunks, decodes

    def _duration(self, chunks: list[tuple[_Request, int]], decodes: list[_Request]) -> float:
        s = self._settings
        if s.emulated_step_s is not None:
            per_token = s.emulated_prefill_s_per_token or 0.0
            return s.emulated_step_s + per_token * sum(tokens for _, tokens in chunks)
        contexts = sum(entry.prompt + entry.generated for entry in decodes)
        prefill = tuple((tokens, entry.computed) for entry, tokens in chunks)
        return self._model.step_time_s(Batch(prefill, len(decodes), contexts))

    def _finish_step(self, chunks: list[tuple[_Request, int]], decodes: list[_Request]) -> None:
        for entry, tokens in chunks:
            entry.computed += tokens
        for entry in [*decodes, *(entry for entry, _ in chunks if entry.computed >= entry.prompt)]:
            if self._running.get(entry.request.request_id) is not entry:
                continue  # aborted during the step
            token = _token(entry.prompt + entry.generated)
            entry.generated += 1
            ended = entry.generated >= entry.request.max_tokens
            if ended:
                del self._running[entry.request.request_id]
                self._free += entry.blocks
            entry.sink(EngineOutput([token], "length" if ended else ""))


def _token(position: int) -> int:
    """The token at a position of the sequence: the same on every instance, so that a hand-over shows no seam."""
    return _FIRST + position * 7919 % _TOKENS


def _stop_with_engine(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the emulated engine died; stopping the process", exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)
