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
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import msgspec

from services.worker.engines.base import (
    BlocksKept,
    BlocksRemoved,
    BlocksStored,
    CacheExport,
    CacheSink,
    CurrentRates,
    EngineInfo,
    EnginePolicies,
    EngineRequest,
    EngineStats,
    HostTierStats,
    Left,
    Sink,
    StepLog,
    deliver,
)
from services.worker.engines.emulated_tokens import answer_tokens, given_tokens, output_token, refusal
from services.worker.kv.port import ExpectedImport, KvPort
from services.worker.settings import WorkerSettings
from services.worker.step_costs import kind_of
from shared.cost.catalogue import bytes_of
from shared.cost.geometry import ModelGeometry
from shared.cost.kinds import EngineKind, EngineModels
from shared.cost.library import Library, bundled_geometry, geometry_from_file
from shared.cost.network import Link, rate_of, wire_bytes
from shared.cost.step import Batch
from shared.cost.step_variants import ScaledSteps
from shared.domain.instance import Compatibility
from shared.domain.job import JobView, LengthPrediction
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.domain.prompt import MODALITIES, begun_in, block_hashes, next_hash, packed, root_hash
from shared.domain.rates import Rates, StepForm, StepRates
from shared.errors import EngineFailed, InvalidRequest
from shared.runtime.logs import get_log
from shared.runtime.wire_version import OURS
from shared.sim.group import DecodeGroup
from shared.sim.memory import KvMemory
from shared.sim.request import ScheduledRequest, State
from shared.sim.scheduler import Backlog, Scheduler, Step
from shared.sim.spec import EngineLimits, HostTier
from shared.wire.messages import Reused, TokenStep

log = get_log(__name__)
_LATE_S = 0.005  # a timer that fires late shortens the next step by at most this: the mean keeps to the model


@dataclass(slots=True, eq=False)
class EmulatedRequest(ScheduledRequest):
    """A request and where its tokens go."""

    request: EngineRequest
    sink: Sink
    finish_reason: str  # reported with the last output token
    cached_blocks: int = 0  # whole blocks of it that the prefix cache has, while it holds blocks
    has_started: bool = False
    reused: Reused | None = None  # from its first start until its first token is out

    @property
    def job(self) -> JobView:
        return self.request.job

    @property
    def remaining_job(self) -> JobView:
        left = self.request.max_tokens - (self.tokens - len(self.request.prompt_token_ids))
        return msgspec.structs.replace(self.request.job, prompt_tokens=self.tokens, max_tokens=left)

    @property
    def is_stream(self) -> bool:
        return self.request.job.started or self.tokens > len(self.request.prompt_token_ids)

    def block(self, number: int, size: int) -> list[int]:
        """The tokens of its block of that number, of the prompt or of the output."""
        prompt, start, stop = self.request.prompt_token_ids, number * size, (number + 1) * size
        output = (output_token(self.request, at) for at in range(max(start, len(prompt)), stop))
        return [*prompt[start:stop], *output]


class EmulatedEngine:
    """Continuous batching with chunked prefill over an imaginary accelerator; `on_cache` receives the events of its
    prefix cache.
    """

    def __init__(
        self, settings: WorkerSettings, rates: CurrentRates = lambda: None, on_cache: CacheSink = lambda _: None
    ) -> None:
        self._settings = settings
        self._rates = rates
        self._on_cache = on_cache
        self.policies = EnginePolicies()
        self._lanes: tuple[EmulatedLane, ...] = ()
        self._woken = asyncio.Event()  # the room for exports may have changed
        self._tasks: list[asyncio.Task[None]] = []
        self.steps = StepLog()
        self._host: HostTier | None = None

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
        self._block_bytes = geometry.kv_bytes_per_token(2.0) * copies * s.block_size
        total = max(1, int(s.kv_cache_bytes // self._block_bytes))
        if s.host_kv_bytes:
            tokens = int(s.host_kv_bytes // self._block_bytes) * s.block_size
            if not tokens:
                raise InvalidRequest(
                    f"host_kv_bytes: {s.host_kv_bytes} bytes do not hold a block of {s.block_size} tokens"
                )
            self._host = HostTier.of_kind(models, kind, tokens, s.emulated_slowdown)
        blocks = max(1, total // lanes)  # of each lane
        self._lanes = tuple(self._lane(blocks) for _ in range(lanes))
        for lane in self._lanes:
            self._tasks.append(asyncio.get_running_loop().create_task(lane.run(), name="emulated-engine"))
            self._tasks[-1].add_done_callback(_stop_with_engine)
        named = f"emulated:{geometry.name}"
        compatibility = Compatibility(named, "emulated", "1", OURS.version, geometry.kv_geometry(), OURS.minimum)
        longest = min(s.max_model_len, blocks * s.block_size)
        rates = _rates(s, models, kind)
        if self._host is not None:
            rates = msgspec.structs.replace(rates, host_token_s=self._host.token_s)
        caches = s.emulated_prefix_cache and lanes == 1
        return EngineInfo(
            compatibility,
            blocks * lanes,
            longest,
            s.block_size,
            rates,
            media=MODALITIES,
            cached_tokens=s.block_size if caches else 0,
        )

    def _lane(self, blocks: int) -> "EmulatedLane":
        s = self._settings
        limits = EngineLimits(
            batched_tokens=s.step_tokens,
            sequences=min(max(1, s.max_seqs // s.pipeline_parallel), s.step_tokens),
            block_tokens=s.block_size,
            prefix_cache=s.emulated_prefix_cache and s.pipeline_parallel == 1,
            host=self._host,
            session_keep_s=s.session_keep_s,
            session_share=s.session_share,
        )
        lane = EmulatedLane(limits, blocks, self.link, self._duration_s, self._rates, self.steps, self._on_cache)
        lane.set_policies(self.policies)
        return lane

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue it in the lane with the fewest requests; it starts when it is its turn and its prompt fits.

        The sink of a request that it cannot compute is called before this returns.
        """
        lane = min(self._lanes, key=lambda lane: len(lane.requests))
        if why := refusal(request, lane.capacity_tokens):
            sink(TokenStep([], finish_reason="refused", stop_reason=why))
        else:
            lane.submit(request, sink)

    def abort(self, request_id: str) -> None:
        for lane in self._lanes:
            lane.abort(request_id)
            lane.wake()

    async def export_cached(self, request: EngineRequest, export: CacheExport) -> int:
        return await self._stage(max(lane.cached_tokens(request) for lane in self._lanes), export)

    async def export_running(self, request_id: str, export: CacheExport) -> int:
        lane = self._lane_of(request_id)
        return await self._stage(lane.computed_tokens(request_id), export) if lane is not None else 0

    async def leave(self, request_id: str, export: CacheExport) -> Left | None:
        lane = self._lane_of(request_id)
        computed = await lane.leave(request_id) if lane is not None else None
        return Left(await self._stage(computed, export), b"") if computed is not None else None

    async def _stage(self, tokens: int, export: CacheExport) -> int:
        """Wait for the room of an export of KV up to that token. Returns up to which it is staged."""
        if tokens <= export.start:
            return 0
        export.announce(tokens - export.start)
        while not export.has_room():
            self._woken.clear()
            await self._woken.wait()
        return tokens

    def _lane_of(self, request_id: str) -> "EmulatedLane | None":
        return next((lane for lane in self._lanes if request_id in lane.requests), None)

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        for lane in self._lanes:
            if (request := lane.requests.get(request_id)) is not None:
                request.request = request.request.expecting(prediction)
                lane.wake()

    def wake(self) -> None:
        self._woken.set()
        for lane in self._lanes:
            lane.wake()

    def set_policies(self, policies: EnginePolicies) -> None:
        self.policies = policies
        for lane in self._lanes:
            lane.set_policies(policies)
            lane.wake()

    def set_chunk_size(self, tokens: int) -> None:
        for lane in self._lanes:
            lane.set_chunk_size(min(tokens, self._settings.step_tokens))

    async def add_adapter(self, key: str, folder: str) -> None:
        raise EngineFailed(f"an emulated engine has no adapters: {key} cannot be loaded")

    async def remove_adapter(self, key: str) -> None:
        """It has none."""

    def stats(self) -> EngineStats:
        backlog = Backlog()
        for lane in self._lanes:
            lane.scheduler.count_backlog(backlog)
        return EngineStats(
            running=sum(len(lane.scheduler.running) for lane in self._lanes),
            waiting=sum(lane.scheduler.blocked for lane in self._lanes),
            waiting_tokens=backlog.waiting_tokens,
            free_blocks=sum(lane.memory.available for lane in self._lanes),
            total_blocks=sum(lane.memory.total for lane in self._lanes),
            partly={
                request.request.request_id: request.computed_tokens
                for lane in self._lanes
                for request in lane.scheduler.prefilling
                if request.computed_tokens
            },
            prompt_tokens=sum(lane.prompt_tokens for lane in self._lanes),
            hit_tokens=sum(lane.hit_tokens for lane in self._lanes),
            preemptions=sum(lane.preemptions for lane in self._lanes),
            sessions=sum(len(lane.memory.sessions) for lane in self._lanes),
            session_blocks=sum(lane.memory.sessions.pinned for lane in self._lanes),
            sessions_yielded=sum(lane.memory.sessions.yielded for lane in self._lanes),
            host=self._host_stats(),
        )

    def _host_stats(self) -> HostTierStats:
        host = self._lanes[0].memory.host  # an engine with a host tier has one lane
        if host is None:
            return HostTierStats()
        return HostTierStats(
            held_bytes=int(len(host.index) * self._block_bytes),
            limit_bytes=int(host.index.slots * self._block_bytes),
            stored_blocks=host.stored,
            loaded_blocks=host.loaded,
            evicted_blocks=host.evicted,
            served_tokens=host.loaded * self._settings.block_size,
            block_tokens=float(self._settings.block_size),
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _duration_s(self, batch: Batch) -> float:
        s = self._settings
        if s.emulated_step_s is not None:
            per_token = s.emulated_prefill_s_per_token or 0.0
            step_s = s.emulated_step_s + per_token * (batch.tokens - batch.decode_count)
            return s.emulated_slowdown * step_s
        return self._times.step_time_s(batch)


class EmulatedLane:
    """A batch in flight, with its scheduler and its share of the memory, and its steps in real time.

    An engine has one lane for each pipeline stage. A step of a lane takes as long as the pipeline needs from a batch of
    the lane to the next, as in the simulator. duration_s: of the step of a batch.
    """

    def __init__(
        self,
        limits: EngineLimits,
        blocks: int,
        link: "EmulatedLink",
        duration_s: Callable[[Batch], float],
        rates: CurrentRates,
        steps: StepLog,
        on_cache: CacheSink,
    ) -> None:
        self._limits = limits  # those that it was started for
        self._policies = EnginePolicies()
        self._link = link
        self._duration_s = duration_s
        self._steps = steps
        self._on_cache = on_cache
        self._work = asyncio.Event()
        self.memory = KvMemory(limits, blocks * limits.block_tokens, limits.block_tokens, self)
        self.scheduler: Scheduler[EmulatedRequest] = Scheduler(
            limits,
            self.memory,
            DecodeGroup(limits.block_tokens),
            self,
            self._policies.order,
            self._policies.admission,
            rates=rates,
            reserve_export=lambda request: request.request.has_room(),
        )
        self.requests: dict[str, EmulatedRequest] = {}  # all that are not finished, by id
        self._importing: dict[EmulatedRequest, float] = {}  # when the import is complete, in monotonic seconds
        self._leaving: list[tuple[str, asyncio.Future[int | None]]] = []  # after the step under way
        self.preemptions = 0
        self.prompt_tokens = 0  # of all requests that started, where there is a prefix cache
        self.hit_tokens = 0  # of these, held by the prefix cache

    @property
    def capacity_tokens(self) -> int:
        return self.memory.total * self._limits.block_tokens

    def wake(self) -> None:
        self._work.set()

    def set_policies(self, policies: EnginePolicies) -> None:
        """From the next step on."""
        if policies.order != self._policies.order:
            self.scheduler.waiting.reorder(policies.order)
        self._policies = policies
        self.scheduler.admission = policies.admission
        self.scheduler.limits = replace(self.scheduler.limits, step_budget=policies.step_budget)

    def set_chunk_size(self, tokens: int) -> None:
        sequences = min(self._limits.sequences, tokens)
        self.scheduler.limits = replace(self.scheduler.limits, batched_tokens=tokens, sequences=sequences)

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        given, handle, now = len(given_tokens(request)), request.import_from, time.monotonic()
        output_tokens, finish_reason = answer_tokens(request)
        if output_tokens > (room := self.capacity_tokens - given):
            output_tokens, finish_reason = room, "length"
        imported = min(handle.tokens, given - 1) if handle is not None else 0
        added = self.requests[request.request_id] = EmulatedRequest(
            request,
            sink,
            finish_reason,
            tokens=given,
            output_left=output_tokens,
            decodes=request.decodes,
            exports=bool(request.export_to),
            computed_tokens=imported,
            import_tokens=imported,
            import_start=handle.start if handle is not None else 0,
            last_token_s=now,
            prefix=self._block_names(request, given_tokens(request)[:-1]),
        )
        self.scheduler.add(added)
        self.scheduler.admit_streams(now)
        self.wake()

    def abort(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._importing.pop(request, None)
            self.scheduler.cancel(request)

    # KV for other instances

    def cached_tokens(self, request: EngineRequest) -> int:
        """Tokens of the request's prompt that the prefix cache holds."""
        self.memory.trim_cache()
        names = self._block_names(request, request.prompt_token_ids)
        return len(self.memory.cached(names)) * self._limits.block_tokens

    def computed_tokens(self, request_id: str) -> int:
        """Tokens of a request whose KV is here; 0 where it has no blocks, or its import is under way."""
        request = self.requests.get(request_id)
        if request is None or request.state in (State.WAITING, State.RECEIVING):
            return 0
        if request.state is State.DECODING:
            return self.scheduler.group.tokens_of(request) - 1
        return request.computed_tokens

    async def leave(self, request_id: str) -> int | None:
        """Stop a request once the step under way has ended. Returns how many of its tokens were computed; None where it
        has ended by then.
        """
        stopped: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._leaving.append((request_id, stopped))
        self.wake()
        return await stopped

    def _stop_leaving(self) -> None:
        """Between two steps. A request stays where its caller does not wait for it any more."""
        leaving, self._leaving = self._leaving, []
        for request_id, stopped in leaving:
            if not stopped.done():
                stopped.set_result(self.computed_tokens(request_id) if request_id in self.requests else None)
                self.abort(request_id)

    # What the scheduler reports

    def admitted(self, request: EmulatedRequest, now: float) -> None:
        request.request.entered()
        request.cached_blocks = request.cached_tokens // self._limits.block_tokens
        if request.has_started:
            return
        request.has_started = True
        self._count_reuse(request)
        handle = request.request.import_from
        if handle is not None and request.cached_tokens < handle.start:
            self._link.recompute(handle)
        elif handle is not None:
            complete_mono = now + self._link.pull(handle, request.cached_tokens)
            if request.state is State.RECEIVING:
                self._importing[request] = complete_mono

    def preempted(self, request: EmulatedRequest, now: float) -> None:
        self.preemptions += 1
        request.request.preempted()

    # Steps

    async def run(self) -> None:
        due = 0.0
        while True:
            began = time.monotonic()  # the loop's own clock may tick in milliseconds
            for request in [request for request, ready in self._importing.items() if ready <= began]:
                del self._importing[request]
                self.scheduler.kv_arrived(request)
            self._stop_leaving()
            step = self.scheduler.plan(began)
            self.memory.trim_cache()
            if not step.chunks and not step.has_decodes:
                await self._wait(began)
                due = time.monotonic()
                continue
            batch = self._batch(step)
            due = max(due, began - _LATE_S) + self._duration_s(batch) + self.memory.take_copied_s()
            await asyncio.sleep(due - began)
            self._end_step(step)
            seconds = time.monotonic() - began
            self._steps.add(seconds, 0.0, batch.prefill, batch.decode_count, batch.decode_context_tokens)

    async def _wait(self, now: float) -> None:
        """Until there is new work or the next import is complete."""
        self._work.clear()
        ready_s = min(self._importing.values(), default=None)
        try:
            async with asyncio.timeout(None if ready_s is None else ready_s - now):
                await self._work.wait()
        except TimeoutError:
            pass

    def _batch(self, step: Step[EmulatedRequest]) -> Batch:
        """The batch as vLLM counts it: a prompt's last token after some context is a decode."""
        chunks = [(tokens, request.computed_tokens) for request, tokens in step.chunks]
        ends = [before for tokens, before in chunks if tokens == 1 and before]
        prefill = tuple((tokens, before) for tokens, before in chunks if tokens > 1 or not before)
        group = self.scheduler.group
        return Batch(prefill, group.count + len(ends), group.context_tokens + sum(ends))

    def _end_step(self, step: Step[EmulatedRequest]) -> None:
        scheduler = self.scheduler
        decodes = [request for request in scheduler.running if request.state is State.DECODING]
        complete = scheduler.end_decodes(1) if decodes else []
        for request in decodes:
            self._cache_blocks(request, scheduler.group.tokens_of(request) - 1)
        for request in complete:
            self._finish(request)
        for request in decodes:
            self._deliver(request)
        for request, tokens in step.chunks:
            request.computed_tokens += tokens
            self._cache_blocks(request, request.computed_tokens)
            if request.uncomputed_tokens or request.cancelled:
                continue
            request.tokens += 1
            request.output_left -= 1
            if request.output_left:
                scheduler.start_decoding(request)
            else:
                self._finish(request)
            self._deliver(request)

    def _finish(self, request: EmulatedRequest) -> None:
        if request.job.session:
            self.memory.keep_session(request, (), time.monotonic())
        self.scheduler.finish(request)

    def _deliver(self, request: EmulatedRequest) -> None:
        """Deliver the token that the step has given to a request, unless it was aborted during the step."""
        if request.cancelled:
            return
        position = self.scheduler.group.tokens_of(request) - 1
        is_last = request.state is State.FINISHED
        if is_last:
            self.requests.pop(request.request.request_id, None)
        reused, request.reused = request.reused, None
        token = output_token(request.request, position)
        deliver(request.sink, TokenStep([token], request.finish_reason if is_last else "", reused=reused))

    # The prefix cache

    def _count_reuse(self, request: EmulatedRequest) -> None:
        """At the first start: what is not computed here, and what of the prompt is new to the prefix cache."""
        computed, created = request.computed_tokens, 0
        if self._limits.prefix_cache:
            size = self._limits.block_tokens
            self.prompt_tokens += request.tokens
            self.hit_tokens += request.cached_tokens
            created = max(0, request.tokens // size * size - computed)
        request.reused = Reused(computed, created=created, imported=computed - request.cached_tokens)

    def _block_names(self, request: EngineRequest, tokens: list[int]) -> tuple[int, ...]:
        """Names of the whole blocks of these tokens, with which the request begins."""
        if not self._limits.prefix_cache:
            return ()
        salt, items = request.generation.cache_salt, request.generation.items
        return block_hashes(tokens, salt, items=items, block_tokens=self._limits.block_tokens, most=len(tokens))

    def _cache_blocks(self, request: EmulatedRequest, computed_tokens: int) -> None:
        """Whole blocks of computed tokens can be hit from now on."""
        size, generation = self._limits.block_tokens, request.request.generation
        while self._limits.prefix_cache and (request.cached_blocks + 1) * size <= computed_tokens:
            number = request.cached_blocks
            block, parent = request.block(number, size), request.prefix[number - 1] if number else None
            begun = begun_in(generation.items, number * size, size)
            if number == len(request.prefix):
                last = root_hash(generation.cache_salt) if parent is None else parent
                request.prefix += (next_hash(last, packed(block), begun),)
            name = request.prefix[number]
            if self.memory.keep_blocks(request, (name,), parent):
                self._on_cache([BlocksStored([name], parent, block, generation.cache_salt, begun=begun)])
            request.cached_blocks += 1

    def loaded(self, block: int, parent: int | None) -> None:
        self._on_cache([BlocksKept([block])])

    def dropped(self, block: int) -> None:
        self._on_cache([BlocksRemoved([block])])

    def kept(self, block: int) -> None:
        self._on_cache([BlocksKept([block], host=True)])

    def lost(self, block: int) -> None:
        self._on_cache([BlocksRemoved([block], host=True)])


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
        self._given_up: dict[str, asyncio.Event] = {}

    def pull(self, handle: KvHandle, held_tokens: int = 0) -> float:
        """Begin an import of the tokens that are not held here; seconds until it is complete."""
        tokens = max(0, handle.tokens - max(handle.start, held_tokens))
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

    def recompute(self, handle: KvHandle) -> None:
        """An import is given up, because the tokens before its first one are not held here."""
        if (given_up := self._given_up.pop(handle.transfer_id, None)) is not None:
            given_up.set()
        if handle.transfer_id in self._reports:
            now_s, missing = time.time(), f"the KV of the first {handle.start} tokens is not here"
            self._reports[handle.transfer_id] = TransferReport(
                TransferOutcome.RECOMPUTED, started_s=now_s, ended_s=now_s, error=missing, transport="emulated"
            )

    def expect(self, transfer_id: str, given_up: asyncio.Event | None = None) -> None:
        """Keep the report of that import until it is forgotten. given_up: is set if it is known to fail."""
        self._reports[transfer_id] = None
        if given_up is not None:
            self._given_up[transfer_id] = given_up

    def known(self, transfer_id: str) -> TransferReport | None:
        """The report of an expected import, if it has begun."""
        return self._reports.get(transfer_id)

    def forget(self, transfer_id: str) -> None:
        self._reports.pop(transfer_id, None)
        self._given_up.pop(transfer_id, None)


class EmulatedPort(KvPort):
    """Exports are always ready; imports take their time in the engine. Nothing is moved."""

    def __init__(self, template: KvHandle, link: EmulatedLink) -> None:
        super().__init__(template)
        self._link = link

    def expect(self, handle: KvHandle) -> ExpectedImport:
        expected = ExpectedImport(handle)
        self._link.expect(handle.transfer_id, expected.complete)
        return expected

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
