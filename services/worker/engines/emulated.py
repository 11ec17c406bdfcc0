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

from services.worker.engine_kind import kind_of
from services.worker.engines.base import EngineInfo, EngineRequest, EngineStats, Sink
from services.worker.engines.cache_events import CacheSink
from services.worker.engines.emulated_cache import EmulatedCache
from services.worker.engines.emulated_lane import EmulatedLane
from services.worker.engines.emulated_scheduler import EmulatedScheduler, refusal
from services.worker.engines.policies import CurrentRates, EnginePolicies
from services.worker.engines.step_log import StepLog
from services.worker.kv.emulated import EmulatedLink
from services.worker.settings import WorkerSettings
from shared.cost.kinds import EngineKind, Workshop
from shared.cost.library import Library, bundled_geometry, geometry_from_file
from shared.cost.rates_file import ScaledSteps, scaled_rates
from shared.cost.step import Batch
from shared.domain.instance import Compatibility
from shared.domain.job import LengthPrediction
from shared.domain.rates import ChunkedCost, HuaweiCost, PartialPrefillCost, Rates, StepForm, StepRates
from shared.runtime.logs import get_log
from shared.runtime.wire_version import OURS
from shared.wire.messages import TokenStep

log = get_log(__name__)


class EmulatedEngine:
    """Continuous batching with chunked prefill over an imaginary accelerator; `on_cache` hears of its prefix cache."""

    def __init__(
        self, settings: WorkerSettings, rates: CurrentRates = lambda: None, on_cache: CacheSink = lambda _: None
    ) -> None:
        self._settings = settings
        self._rates = rates
        caches = settings.emulated_prefix_cache and settings.pipeline_parallel == 1  # lanes would tell of each other's
        self._cache = EmulatedCache(settings.block_size, on_cache) if caches else None
        self.policies = EnginePolicies()
        self._lanes: tuple[EmulatedLane, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self.steps = StepLog()

    @property
    def step_s(self) -> float:
        """It steps on the event loop: one that does not end is one where the process does not answer either."""
        return 0.0

    async def start(self) -> EngineInfo:
        """Size the KV cache for the accelerator and begin to step."""
        s, lanes = self._settings, self._settings.pipeline_parallel
        name = s.emulated_model
        geometry = geometry_from_file(Path(name)) if Path(name).exists() else bundled_geometry(name)
        shop = Workshop(Library.built_in(), geometry)
        kind = kind_of(s, shop)
        self._times = ScaledSteps(shop.times(kind), s.emulated_slowdown)
        paths = {peer: entry.link for peer, entry in s.emulated_links.items()}
        self.link = EmulatedLink(geometry, s.emulated_link_gbps, s.dtype, paths, s.emulated_slowdown)
        copies = float(s.tensor_parallel) if geometry.latent else max(1.0, s.tensor_parallel / geometry.kv_heads)
        total = max(1, int(s.kv_cache_bytes // (geometry.kv_bytes_per_token(2.0) * copies * s.block_size)))
        each = max(1, total // lanes)  # what is left over is of no use to any
        self._lanes = tuple(self._lane(each) for _ in range(lanes))
        for lane in self._lanes:
            self._tasks.append(asyncio.get_running_loop().create_task(lane.run(), name="emulated-engine"))
            self._tasks[-1].add_done_callback(_stop_with_engine)
        named = f"emulated:{geometry.name}"
        compatibility = Compatibility(named, "emulated", "1", OURS.version, geometry.kv_geometry(), OURS.minimum)
        longest = min(s.max_model_len, each * s.block_size) if lanes > 1 else s.max_model_len
        return EngineInfo(compatibility, each * lanes, longest, s.block_size, _rates(s, shop, kind))

    def _lane(self, blocks: int) -> EmulatedLane:
        scheduler = EmulatedScheduler(self._settings, blocks, self.policies, self._rates, self.link.pull, self._cache)
        return EmulatedLane(scheduler, self._duration, self.steps)

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue it in the lane with the fewest; it starts when it is its turn and its prompt fits.

        The sink of a request that it cannot compute is called before this returns.
        """
        if why := refusal(request):
            sink(TokenStep([], finish_reason="refused", stop_reason=why))
            return
        lane = min(self._lanes, key=lambda one: len(one.scheduler.known))
        now = time.monotonic()
        lane.scheduler.add(request, sink, now)
        lane.scheduler.begin_imports(now)
        lane.wake()

    def abort(self, request_id: str) -> None:
        """Forget it."""
        for lane in self._lanes:
            lane.scheduler.remove(request_id)
            lane.wake()

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        """At once."""
        for lane in self._lanes:
            lane.scheduler.predicted(request_id, prediction)
            lane.wake()

    def wake(self) -> None:
        """Look again who may enter."""
        for lane in self._lanes:
            lane.wake()

    def set_policies(self, policies: EnginePolicies) -> None:
        """Between this step and the next."""
        self.policies = policies
        for lane in self._lanes:
            lane.scheduler.follow(policies)
            lane.wake()

    def set_chunk_size(self, tokens: int) -> None:
        """Between this step and the next."""
        for lane in self._lanes:
            lane.scheduler.chunk_size = min(tokens, self._settings.step_tokens)

    def stats(self) -> EngineStats:
        """Now, over all lanes."""
        each = [lane.scheduler for lane in self._lanes]
        return EngineStats(
            sum(len(s.running) for s in each),
            sum(len(s.waiting) + len(s.coming) for s in each),
            sum(s.waiting.decode_tokens for s in each),
            sum(s.free for s in each),
            sum(s.total for s in each),
            sum(s.prompt_tokens for s in each),
            sum(s.hit_tokens for s in each),
            sum(s.preemptions for s in each),
        )

    async def close(self) -> None:
        """Stop stepping."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _duration(self, batch: Batch) -> float:
        s = self._settings
        if s.emulated_step_s is not None:
            per_token = s.emulated_prefill_s_per_token or 0.0
            step_s = s.emulated_step_s + per_token * (batch.tokens - batch.decode_count)
            return s.emulated_slowdown * step_s
        return self._times.step_time_s(batch)


def _rates(settings: WorkerSettings, shop: Workshop, kind: EngineKind) -> Rates:
    """What an instance that runs at these times would have been measured at."""
    step_s = settings.emulated_step_s
    if step_s is None:
        rates = shop.rates(kind, settings.step_tokens, shop.price_usd_hour(kind))
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
