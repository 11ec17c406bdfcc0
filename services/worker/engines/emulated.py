"""An emulated instance: an engine without a model and its KV side without bytes.

With it the whole stack, every service real, runs as a mixed cluster on a laptop. Steps take the real time that the
cost model predicts and produce deterministic tokens. KV is metadata only: a transfer takes the time that
`EmulatedLink` computes. The answers are no language, and every place that shows an instance says "emulated".
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from services.worker.engines.base import (
    CacheSink,
    CurrentRates,
    EngineInfo,
    EnginePolicies,
    EngineRequest,
    EngineStats,
    Sink,
    StepLog,
    deliver,
)
from services.worker.engines.emulated_scheduler import Chunk, EmulatedRequest, EmulatedScheduler, RequestState
from services.worker.engines.emulated_tokens import EmulatedCache, output_token, refusal
from services.worker.kv.port import ExpectedImport, KvPort
from services.worker.settings import WorkerSettings
from services.worker.step_costs import kind_of
from shared.cost.catalogue import bytes_of
from shared.cost.geometry import ModelGeometry
from shared.cost.kinds import EngineKind, EngineModels
from shared.cost.library import Library, bundled_geometry, geometry_from_file
from shared.cost.network import Link, rate_of, wire_bytes
from shared.cost.step import Batch, ScaledSteps
from shared.domain.instance import Compatibility
from shared.domain.job import LengthPrediction
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.domain.rates import Rates, StepForm, StepRates
from shared.runtime.logs import get_log
from shared.runtime.wire_version import OURS
from shared.wire.messages import TokenStep

log = get_log(__name__)
_LATE_S = 0.005  # a timer that fires late shortens the next step by at most this: the mean keeps to the model


class EmulatedEngine:
    """Continuous batching with chunked prefill over an imaginary accelerator; `on_cache` receives the events of its
    prefix cache.
    """

    def __init__(
        self, settings: WorkerSettings, rates: CurrentRates = lambda: None, on_cache: CacheSink = lambda _: None
    ) -> None:
        self._settings = settings
        self._rates = rates
        caches = settings.emulated_prefix_cache and settings.pipeline_parallel == 1
        self._cache = EmulatedCache(settings.block_size, on_cache) if caches else None
        self.policies = EnginePolicies()
        self._lanes: tuple[EmulatedLane, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self.steps = StepLog()

    @property
    def step_s(self) -> float:
        """0: it steps on the event loop, so that a step that does not end is found by the process that does not
        answer.
        """
        return 0.0

    async def start(self) -> EngineInfo:
        """Size the KV cache for the accelerator and begin to step."""
        s, lanes = self._settings, self._settings.pipeline_parallel
        name = s.emulated_model
        geometry = geometry_from_file(Path(name)) if Path(name).exists() else bundled_geometry(name)
        models = EngineModels(Library.built_in(), geometry)
        kind = kind_of(s, models)
        self._times = ScaledSteps(models.times(kind), s.emulated_slowdown)
        paths = {peer: entry.link for peer, entry in s.emulated_links.items()}
        self.link = EmulatedLink(geometry, s.emulated_link_gbps, s.dtype, paths, s.emulated_slowdown)
        copies = float(s.tensor_parallel) if geometry.latent else max(1.0, s.tensor_parallel / geometry.kv_heads)
        total = max(1, int(s.kv_cache_bytes // (geometry.kv_bytes_per_token(2.0) * copies * s.block_size)))
        each = max(1, total // lanes)
        self._lanes = tuple(self._lane(each) for _ in range(lanes))
        for lane in self._lanes:
            self._tasks.append(asyncio.get_running_loop().create_task(lane.run(), name="emulated-engine"))
            self._tasks[-1].add_done_callback(_stop_with_engine)
        named = f"emulated:{geometry.name}"
        compatibility = Compatibility(named, "emulated", "1", OURS.version, geometry.kv_geometry(), OURS.minimum)
        longest = min(s.max_model_len, each * s.block_size) if lanes > 1 else s.max_model_len
        return EngineInfo(compatibility, each * lanes, longest, s.block_size, _rates(s, models, kind))

    def _lane(self, blocks: int) -> "EmulatedLane":
        scheduler = EmulatedScheduler(self._settings, blocks, self.policies, self._rates, self.link.pull, self._cache)
        return EmulatedLane(scheduler, self._duration, self.steps)

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue it in the lane with the fewest requests; it starts when it is its turn and its prompt fits.

        The sink of a request that it cannot compute is called before this returns.
        """
        if why := refusal(request):
            sink(TokenStep([], finish_reason="refused", stop_reason=why))
            return
        lane = min(self._lanes, key=lambda one: len(one.scheduler.requests))
        now = time.monotonic()
        lane.scheduler.add(request, sink, now)
        lane.scheduler.begin_imports(now)
        lane.wake()

    def abort(self, request_id: str) -> None:
        for lane in self._lanes:
            lane.scheduler.remove(request_id)
            lane.wake()

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        for lane in self._lanes:
            lane.scheduler.predicted(request_id, prediction)
            lane.wake()

    def wake(self) -> None:
        for lane in self._lanes:
            lane.wake()

    def set_policies(self, policies: EnginePolicies) -> None:
        self.policies = policies
        for lane in self._lanes:
            lane.scheduler.set_policies(policies)
            lane.wake()

    def set_chunk_size(self, tokens: int) -> None:
        for lane in self._lanes:
            lane.scheduler.chunk_size = min(tokens, self._settings.step_tokens)

    def stats(self) -> EngineStats:
        each = [lane.scheduler for lane in self._lanes]
        return EngineStats(
            sum(len(s.running) for s in each),
            sum(len(s.waiting) + len(s.importing) for s in each),
            sum(s.waiting.decode_tokens for s in each),
            sum(s.free_blocks for s in each),
            sum(s.total_blocks for s in each),
            sum(s.prompt_tokens for s in each),
            sum(s.hit_tokens for s in each),
            sum(s.preemptions for s in each),
        )

    async def close(self) -> None:
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


class EmulatedLane:
    """A batch in flight, its scheduler, and its steps in real time; `duration` gives the time of a batch.

    An engine has one lane for each pipeline stage, each with its share of the memory. A step of a lane takes as long as
    the pipeline needs from a batch of it to the next, as in the simulator.
    """

    def __init__(self, scheduler: EmulatedScheduler, duration: Callable[[Batch], float], steps: StepLog) -> None:
        self.scheduler = scheduler
        self._duration = duration
        self._steps = steps
        self._work = asyncio.Event()

    def wake(self) -> None:
        self._work.set()

    async def run(self) -> None:
        due = 0.0
        while True:
            began = time.monotonic()  # the loop's own clock may tick in milliseconds
            chunks, decodes = self.scheduler.plan(began)
            if not chunks and not decodes:
                await self._wait(began)
                due = time.monotonic()
                continue
            batch = _batch_of(chunks, decodes)
            due = max(due, began - _LATE_S) + self._duration(batch)
            await asyncio.sleep(due - began)
            self._finish_step(chunks, decodes)
            seconds = time.monotonic() - began
            self._steps.add(seconds, 0.0, batch.prefill, batch.decode_count, batch.decode_context_tokens)

    async def _wait(self, now: float) -> None:
        """Until there is new work or the next import is complete."""
        self._work.clear()
        ready_s = min(self.scheduler.importing.values(), default=None)
        try:
            async with asyncio.timeout(None if ready_s is None else ready_s - now):
                await self._work.wait()
        except TimeoutError:
            pass

    def _finish_step(self, chunks: list[Chunk], decodes: list[EmulatedRequest]) -> None:
        for entry, tokens in (*((entry, 1) for entry in decodes), *chunks):
            if entry.state is not RequestState.RUNNING:
                continue  # aborted during the step
            entry.computed_tokens += tokens
            if entry.cached is not None:
                entry.cached.computed(entry.computed_tokens)
            if entry.uncomputed_tokens:
                continue  # not done with its prompt
            token = output_token(entry.request, entry.tokens)
            entry.tokens += 1
            entry.remaining_output_tokens -= 1
            if not entry.remaining_output_tokens:
                self.scheduler.remove(entry.request.request_id)
            reused, entry.reused = entry.reused, None
            deliver(
                entry.sink,
                TokenStep([token], "" if entry.remaining_output_tokens else entry.finish_reason, reused=reused),
            )


def _batch_of(chunks: list[Chunk], decodes: list[EmulatedRequest]) -> Batch:
    prefill = tuple((tokens, entry.computed_tokens) for entry, tokens in chunks)
    return Batch(prefill, len(decodes), sum(entry.computed_tokens for entry in decodes))


class EmulatedLink:
    """How long this instance's imports take: in turn through its port of `gbps` Gb/s; 0 takes no time.

    paths: by exporter, where both have a node; imports by one path take turns there. Counted as the simulator does
    (`shared.sim.wires`), without what the exporters' ports would add. Everything takes `slowdown` times as long.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        gbps: float,
        dtype: str,
        paths: Mapping[str, Link] = MappingProxyType({}),
        slowdown: float = 1.0,
    ) -> None:
        self._geometry = geometry
        self._link = Link(gbps * 1e9 / 8.0) if gbps > 0 else None
        self._paths = paths
        self._slowdown = slowdown
        self._width = bytes_of(dtype)
        self._free_s: dict[Link, float] = {}  # monotonic time from which a path, or the port, is idle
        self._reports: dict[str, TransferReport | None] = {}  # of expected imports; None: it has not begun

    def pull(self, handle: KvHandle, held_tokens: int = 0) -> float:
        """Begin an import of the tokens that are not held here; seconds until it is complete."""
        tokens = max(0, handle.tokens - held_tokens)
        moved = wire_bytes(self._geometry, tokens, handle.codec, self._width)
        now, waits_s = time.monotonic(), 0.0
        link = self._paths.get(handle.instance_id, self._link)
        if link is not None:
            takes_s = self._slowdown * moved / rate_of(link)
            self._free_s[link] = max(self._free_s.get(link, 0.0), now) + takes_s
            waits_s = self._free_s[link] - now + link.latency_s
        started_s = time.time()
        if handle.transfer_id in self._reports:
            self._reports[handle.transfer_id] = TransferReport(
                TransferOutcome.PULLED, tokens, int(moved), started_s, started_s + waits_s, transport="emulated"
            )
        return waits_s

    def expect(self, transfer_id: str) -> None:
        """Keep the report of that import until it is forgotten."""
        self._reports[transfer_id] = None

    def known(self, transfer_id: str) -> TransferReport | None:
        """The report of an expected import, if it has begun."""
        return self._reports.get(transfer_id)

    def forget(self, transfer_id: str) -> None:
        self._reports.pop(transfer_id, None)


class EmulatedPort(KvPort):
    """Exports are always ready; imports take their time in the engine. Nothing is moved."""

    def __init__(self, template: KvHandle, link: EmulatedLink) -> None:
        super().__init__(template)
        self._link = link

    def expect(self, handle: KvHandle) -> ExpectedImport:
        self._link.expect(handle.transfer_id)
        return ExpectedImport(handle)

    def end(self, expected: ExpectedImport) -> None:
        self._link.forget(expected.handle.transfer_id)

    def known_report(self, expected: ExpectedImport) -> TransferReport | None:
        return self._link.known(expected.handle.transfer_id)


def _rates(settings: WorkerSettings, models: EngineModels, kind: EngineKind) -> Rates:
    """The step cost and the price of this engine."""
    if settings.emulated_step_s is None:
        steps, price = models.step_rates(kind, settings.step_tokens), models.price_usd_hour(kind)
    else:
        steps, price = fixed_steps(settings.emulated_step_s, settings.emulated_prefill_s_per_token or 0.0), 0.0
    return Rates(steps.scaled(settings.emulated_slowdown), price_per_hour=price)


def fixed_steps(step_s: float, s_per_token: float) -> StepRates:
    """The step cost where each step takes `step_s`, and `s_per_token` more for a prompt token."""
    return StepRates(StepForm(step_s, s_per_token), StepForm(step_s), StepForm(step_s, s_per_token))


def _stop_with_engine(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the emulated engine died; stopping the process", exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)
