"""An engine without a model: real time, taken from the cost model, and deterministic tokens.

With it the whole stack, every service real, runs as a mixed cluster on a laptop. KV is metadata only: a transfer takes
the time that `EmulatedLink` computes. What it answers is no language, and every place that shows an instance says
"emulated".
"""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from services.worker.engines.base import EngineInfo, EngineRequest, EngineStats, Sink, deliver
from services.worker.engines.cache_events import CacheSink
from services.worker.engines.emulated_cache import CacheUse, EmulatedCache
from services.worker.engines.step_log import StepLog
from services.worker.kv.emulated import EmulatedLink
from services.worker.settings import WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.cost.linear import rates_of
from shared.cost.models import bundled_geometry, geometry_from_file
from shared.cost.step import Batch, StepModel
from shared.domain.instance import Compatibility, KvGeometry
from shared.domain.rates import ChunkedCost, HuaweiCost, PartialPrefillCost, Rates
from shared.runtime.logs import get_log
from shared.wire.messages import WIRE_VERSION, TokenStep

log = get_log(__name__)

_TOKENS = 997  # a prime, so that the tokens of two positions rarely agree
_FIRST = 300  # below it tokenizers keep their special tokens and single bytes
_LATE_S = 0.005  # a timer that fires late makes the next step so much shorter, at most: the mean keeps to the model


@dataclass(slots=True)
class _Request:
    request: EngineRequest
    sink: Sink
    blocks: int
    tokens: int  # prompt, and what was generated
    computed: int = 0  # of those, what is in the KV cache
    left: int = 0  # tokens to generate
    ready_s: float = 0.0  # monotonic time at which its imported KV is there
    use: CacheUse | None = None

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one is out."""
        return self.tokens - self.computed

    @property
    def decodes(self) -> bool:
        """One token after some context; the last one of a prompt whose KV was imported costs the same."""
        return self.missing == 1 and self.computed > 0


class EmulatedEngine:
    """Continuous batching with chunked prefill over an imaginary accelerator; `on_cache` hears of its prefix cache."""

    def __init__(self, settings: WorkerSettings, on_cache: CacheSink = lambda _: None) -> None:
        self._settings = settings
        self._cache = EmulatedCache(settings.block_size, on_cache) if settings.emulated_prefix_cache else None
        self._prompt_tokens = self._hit_tokens = 0
        self._waiting: list[_Request] = []
        self._running: dict[str, _Request] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.steps = StepLog()

    @property
    def step_s(self) -> float:
        """It steps on the event loop: one that does not end is one where the process does not answer either."""
        return 0.0

    async def start(self) -> EngineInfo:
        """Size the KV cache for the accelerator and begin to step."""
        s = self._settings
        name = s.emulated_model
        geometry = geometry_from_file(Path(name)) if Path(name).exists() else bundled_geometry(name)
        self._model = StepModel(Catalogue.built_in().get(s.accelerator), geometry, s.tensor_parallel, dtype=s.dtype)
        self.link = EmulatedLink(geometry, s.emulated_link_gbps, s.dtype)
        self._total = max(1, int(s.kv_cache_bytes // (geometry.kv_bytes_per_token(2.0) * s.block_size)))
        self._free = self._total
        self._task = asyncio.get_running_loop().create_task(self._steps(), name="emulated-engine")
        self._task.add_done_callback(_stop_with_engine)
        kv = KvGeometry(geometry.layers, geometry.kv_heads, geometry.head_dim)
        compatibility = Compatibility(f"emulated:{geometry.name}", "emulated", "1", WIRE_VERSION, kv)
        return EngineInfo(compatibility, self._total, s.max_model_len, s.block_size, _rates(s, self._model))

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue it; it starts when its prompt fits."""
        prompt = len(request.prompt_token_ids)
        blocks = -(-(prompt + request.max_tokens) // self._settings.block_size)
        self._waiting.append(_Request(request, sink, min(blocks, self._total), prompt, left=request.max_tokens))
        self._work.set()

    def abort(self, request_id: str) -> None:
        """Forget it."""
        if entry := self._running.pop(request_id, None):
            self._free_blocks_of(entry)
        self._waiting = [entry for entry in self._waiting if entry.request.request_id != request_id]

    def stats(self) -> EngineStats:
        """Now."""
        counts = self._prompt_tokens, self._hit_tokens
        return EngineStats(len(self._running), len(self._waiting), self._free, self._total, *counts)

    async def close(self) -> None:
        """Stop stepping."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _steps(self) -> None:
        due = 0.0
        while True:
            began = time.monotonic()  # the loop's own clock may tick in milliseconds
            self._admit(began)
            chunks, decodes = self._batch(began)
            if not chunks and not decodes:
                await self._wait(began)
                due = time.monotonic()
                continue
            batch = _batch_of(chunks, decodes)
            due = max(due, began - _LATE_S) + self._duration(batch)
            await asyncio.sleep(due - began)
            self._finish_step(chunks, decodes)
            seconds = time.monotonic() - began
            self.steps.add(seconds, 0.0, batch.prefill, batch.decode_count, batch.decode_context_tokens)

    async def _wait(self, now: float) -> None:
        """Until there is new work or the next import is complete."""
        self._work.clear()
        ready_s = min((entry.ready_s for entry in self._running.values()), default=None)
        try:
            async with asyncio.timeout(None if ready_s is None else ready_s - now):
                await self._work.wait()
        except TimeoutError:
            pass

    def _admit(self, now: float) -> None:
        while self._waiting and len(self._running) < self._settings.max_seqs:
            entry = self._waiting[0]
            if entry.blocks > self._free:
                return
            del self._waiting[0]
            self._free -= entry.blocks
            entry.computed = held = self._take_cached(entry)
            if (handle := entry.request.import_from) is not None:
                entry.computed = max(held, min(handle.tokens, entry.tokens - 1))
                entry.ready_s = now + self.link.pull(handle, held)
            self._running[entry.request.request_id] = entry

    def _take_cached(self, entry: _Request) -> int:
        """Tokens of its prompt that are in the prefix cache, from now on in use."""
        if self._cache is None:
            return 0
        prompt, salt = entry.request.prompt_token_ids, entry.request.generation.cache_salt
        entry.use = CacheUse(self._cache, prompt, salt, _token)
        held = entry.use.begin()
        self._cache.shrink(self._free)
        self._prompt_tokens += len(prompt)
        self._hit_tokens += held
        return held

    def _free_blocks_of(self, entry: _Request) -> None:
        self._free += entry.blocks
        if entry.use is not None:
            entry.use.end()

    def _batch(self, now: float) -> tuple[list[tuple[_Request, int]], list[_Request]]:
        """Every decode, and chunks up to the step's token budget."""
        here = [entry for entry in self._running.values() if entry.ready_s <= now]
        decodes = [entry for entry in here if entry.decodes]
        budget = self._settings.chunk_size - len(decodes)
        chunks = []
        for entry in here:
            tokens = 0 if entry.decodes else min(entry.missing, budget)
            if tokens > 0:
                chunks.append((entry, tokens))
                budget -= tokens
        return chunks, decodes

    def _duration(self, batch: Batch) -> float:
        s = self._settings
        if s.emulated_step_s is not None:
            per_token = s.emulated_prefill_s_per_token or 0.0
            return s.emulated_step_s + per_token * (batch.tokens - batch.decode_count)
        return self._model.step_time_s(batch)

    def _finish_step(self, chunks: list[tuple[_Request, int]], decodes: list[_Request]) -> None:
        for entry, tokens in (*((entry, 1) for entry in decodes), *chunks):
            entry.computed += tokens
            if entry.use is not None:
                entry.use.computed(entry.computed)
            if entry.missing or self._running.get(entry.request.request_id) is not entry:
                continue  # not done with its prompt, or aborted during the step
            token = _token(entry.tokens)
            entry.tokens += 1
            entry.left -= 1
            if not entry.left:
                del self._running[entry.request.request_id]
                self._free_blocks_of(entry)
            deliver(entry.sink, TokenStep([token], "" if entry.left else "length"))


def _batch_of(chunks: list[tuple[_Request, int]], decodes: list[_Request]) -> Batch:
    prefill = tuple((tokens, entry.computed) for entry, tokens in chunks)
    return Batch(prefill, len(decodes), sum(entry.computed for entry in decodes))


def _rates(settings: WorkerSettings, model: StepModel) -> Rates:
    """What an instance that runs at these times would have been measured at."""
    step_s = settings.emulated_step_s
    if step_s is None:
        return rates_of(model, settings.chunk_size, model.accelerator.price_usd_hour * settings.tensor_parallel)
    return fixed_step_rates(step_s, settings.emulated_prefill_s_per_token or 0.0, settings.chunk_size)


def fixed_step_rates(step_s: float, s_per_token: float, chunk_size: int) -> Rates:
    """What an instance would have been measured at whose steps take `step_s`, and as much again for a prompt token."""
    return Rates(
        PartialPrefillCost(s_per_token + step_s / chunk_size, step_s / 2.0),  # the last step is half full
        ChunkedCost(0.0, 0.0, step_s + s_per_token * chunk_size),
        HuaweiCost(s_per_token, 0.0, 0.0, step_s, 0.0, 0.0, 0.0, step_s),
    )


def _token(position: int) -> int:
    """The token at a position of the sequence: the same on every instance, so that a hand-over shows no seam."""
    return _FIRST + position * 7919 % _TOKENS


def _stop_with_engine(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the emulated engine died; stopping the process", exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)
