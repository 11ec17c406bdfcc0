"""An engine without a model: real time, taken from the cost model, and deterministic tokens.

With it the whole stack, every service real, runs as a mixed cluster on a laptop. KV is metadata only: a transfer takes
the time that `EmulatedLink` computes. What it answers is no language, and every place that shows an instance says
"emulated".
"""

import asyncio
import os
import signal
import time
from pathlib import Path

from services.worker.engines.base import EngineInfo, EngineRequest, EngineStats, Sink, deliver
from services.worker.engines.cache_events import CacheSink
from services.worker.engines.emulated_cache import EmulatedCache
from services.worker.engines.emulated_scheduler import EmulatedScheduler, Entry, token_at
from services.worker.engines.policies import CurrentRates, EnginePolicies
from services.worker.engines.step_log import StepLog
from services.worker.kv.emulated import EmulatedLink
from services.worker.settings import WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.cost.linear import rates_of
from shared.cost.models import bundled_geometry, geometry_from_file
from shared.cost.rates_file import ScaledSteps, scaled_rates
from shared.cost.step import Batch, StepModel
from shared.domain.instance import Compatibility, KvGeometry
from shared.domain.job import LengthPrediction
from shared.domain.rates import ChunkedCost, HuaweiCost, PartialPrefillCost, Rates, StepForm, StepRates
from shared.runtime.logs import get_log
from shared.wire.messages import WIRE_VERSION, TokenStep

log = get_log(__name__)

_LATE_S = 0.005  # a timer that fires late makes the next step so much shorter, at most: the mean keeps to the model


class EmulatedEngine:
    """Continuous batching with chunked prefill over an imaginary accelerator; `on_cache` hears of its prefix cache."""

    def __init__(
        self, settings: WorkerSettings, rates: CurrentRates = lambda: None, on_cache: CacheSink = lambda _: None
    ) -> None:
        self._settings = settings
        self._rates = rates
        self._cache = EmulatedCache(settings.block_size, on_cache) if settings.emulated_prefix_cache else None
        self.policies = EnginePolicies()
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
        model = StepModel(Catalogue.built_in().get(s.accelerator), geometry, s.tensor_parallel, dtype=s.dtype)
        self._times = ScaledSteps(model, s.emulated_slowdown)
        self.link = EmulatedLink(geometry, s.emulated_link_gbps / s.emulated_slowdown, s.dtype)
        total = max(1, int(s.kv_cache_bytes // (geometry.kv_bytes_per_token(2.0) * s.block_size)))
        self._scheduler = EmulatedScheduler(s, total, self.policies, self._rates, self.link.pull, self._cache)
        self._task = asyncio.get_running_loop().create_task(self._steps(), name="emulated-engine")
        self._task.add_done_callback(_stop_with_engine)
        kv = KvGeometry(geometry.layers, geometry.kv_heads, geometry.head_dim)
        compatibility = Compatibility(f"emulated:{geometry.name}", "emulated", "1", WIRE_VERSION, kv)
        return EngineInfo(compatibility, total, s.max_model_len, s.block_size, _rates(s, model))

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue it; it starts when it is its turn and its prompt fits."""
        self._scheduler.add(request, sink)
        self._work.set()

    def abort(self, request_id: str) -> None:
        """Forget it."""
        self._scheduler.remove(request_id)
        self._work.set()

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        """At once."""
        self._scheduler.predicted(request_id, prediction)
        self._work.set()

    def wake(self) -> None:
        """Look again who may enter."""
        self._work.set()

    def set_policies(self, policies: EnginePolicies) -> None:
        """Between this step and the next."""
        self.policies = policies
        self._scheduler.follow(policies)
        self._work.set()

    def set_chunk_size(self, tokens: int) -> None:
        """Between this step and the next."""
        self._scheduler.chunk_size = min(tokens, self._settings.step_tokens)

    def stats(self) -> EngineStats:
        """Now."""
        s = self._scheduler
        waiting = len(s.waiting) + len(s.coming), s.waiting.decode_tokens
        return EngineStats(len(s.running), *waiting, s.free, s.total, s.prompt_tokens, s.hit_tokens, s.preemptions)

    async def close(self) -> None:
        """Stop stepping."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _steps(self) -> None:
        due = 0.0
        while True:
            began = time.monotonic()  # the loop's own clock may tick in milliseconds
            chunks, decodes = self._scheduler.plan(began)
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
        ready_s = min((entry.ready_s for entry in self._scheduler.coming), default=None)
        try:
            async with asyncio.timeout(None if ready_s is None else ready_s - now):
                await self._work.wait()
        except TimeoutError:
            pass

    def _duration(self, batch: Batch) -> float:
        s = self._settings
        if s.emulated_step_s is not None:
            per_token = s.emulated_prefill_s_per_token or 0.0
            step_s = s.emulated_step_s + per_token * (batch.tokens - batch.decode_count)
            return s.emulated_slowdown * step_s
        return self._times.step_time_s(batch)

    def _finish_step(self, chunks: list[tuple[Entry, int]], decodes: list[Entry]) -> None:
        for entry, tokens in (*((entry, 1) for entry in decodes), *chunks):
            if entry not in self._scheduler.running:
                continue  # aborted during the step
            entry.computed += tokens
            if entry.use is not None:
                entry.use.computed(entry.computed)
            if entry.missing:
                continue  # not done with its prompt
            token = token_at(entry.tokens)
            entry.tokens += 1
            entry.left -= 1
            if not entry.left:
                self._scheduler.remove(entry.request.request_id)
            deliver(entry.sink, TokenStep([token], "" if entry.left else "length"))


def _batch_of(chunks: list[tuple[Entry, int]], decodes: list[Entry]) -> Batch:
    prefill = tuple((tokens, entry.computed) for entry, tokens in chunks)
    return Batch(prefill, len(decodes), sum(entry.computed for entry in decodes))


def _rates(settings: WorkerSettings, model: StepModel) -> Rates:
    """What an instance that runs at these times would have been measured at."""
    step_s = settings.emulated_step_s
    if step_s is None:
        rates = rates_of(model, settings.step_tokens, model.accelerator.price_usd_hour * settings.tensor_parallel)
    else:
        rates = fixed_step_rates(step_s, settings.emulated_prefill_s_per_token or 0.0, settings.step_tokens)
    return scaled_rates(rates, settings.emulated_slowdown)


def fixed_step_rates(step_s: float, s_per_token: float, chunk_size: int) -> Rates:
    """What an instance would have been measured at whose steps take `step_s`, and as much again for a prompt token."""
    return Rates(
        PartialPrefillCost(s_per_token + step_s / chunk_size, step_s / 2.0),  # the last step is half full
        ChunkedCost(0.0, 0.0, step_s + s_per_token * chunk_size),
        HuaweiCost(s_per_token, 0.0, 0.0, step_s, 0.0, 0.0, 0.0, step_s),
        StepRates(StepForm(step_s, s_per_token), StepForm(step_s), StepForm(step_s, s_per_token)),
    )


def _stop_with_engine(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the emulated engine died; stopping the process", exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)
