"""The vLLM engine: vLLM's engine core in this process, stepped by a thread of its own, and the conversion of requests,
tokens and log probabilities between Polyphase's messages and vLLM's.

Tokens in, tokens out: tokeniser, detokeniser and stop strings are the gateway's. One process for an instance takes a
third of the memory of vLLM's three (seen: 0.55 against 1.5 GB on a CPU).
"""

import asyncio
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder

from services.worker.engines.base import (
    CacheExport,
    CacheSink,
    CurrentRates,
    EngineInfo,
    EnginePolicies,
    EngineRequest,
    EngineStats,
    HostTierStats,
    KnownTokens,
    Left,
    Sink,
    StepLog,
    deliver,
)
from services.worker.engines.vllm_exports import CacheExports
from services.worker.engines.vllm_observers import CacheWatch, StepObserver
from services.worker.engines.vllm_patches import (
    FORCED,
    RESUMED,
    add_resumed,
    force_beside_drafts,
    make_stage_buffers,
    observe_steps,
    resume_requests,
    resumes_exactly,
    zero_imported_blocks,
)
from services.worker.engines.vllm_ranks import CoupledRanks
from services.worker.engines.vllm_scheduler import SchedulerPolicies, blocks_of
from services.worker.engines.vllm_sessions import KeptSessions
from services.worker.engines.vllm_start import (
    engine_config,
    engine_info,
    kept_kv,
    lora_requests,
    media_of,
    ranks_port,
    start_host_tier,
)
from services.worker.kv import lossy_salt
from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.settings import WorkerSettings
from shared.domain.adapters import digest_of_key
from shared.domain.job import Generation, LengthPrediction
from shared.errors import EngineFailed, InvalidRequest
from shared.runtime.logs import get_log
from shared.runtime.signals import ending_at_sigterm
from shared.wire.messages import LogprobRows, Reused, TokenStep, encode_rows

log = get_log(__name__)
# vLLM copies what it decodes: that the bytes of a message cannot be written to does not matter.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
_IDLE_S = 0.5
_WAITING_S, _RANKS_WAITING_S = 0.001, 0.004  # a turn of ranks in other processes costs each a millisecond
_END_S, _STUCK_S = 10.0, 1.0  # for the engine's thread to end, and where it waits for a rank that has died
_LOSS_S = 1.0  # for the loss of a rank to be noticed, of which a pass has failed
_KILL_S = 20.0  # beyond the drain: for the process of a rank to end when another has died
Command = Callable[[], None]
Result = TypeVar("Result")


class VllmEngine:
    """Owns the engine core and its thread. `kv_config` goes to Polyphase's KV connector in every rank. `rates` is
    called for every step with a budget, and for every request that waits. `on_cache` receives the events of the
    prefix cache, on the event loop.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        kv_config: dict[str, Any],
        rates: CurrentRates = lambda: None,
        on_cache: CacheSink | None = None,
    ) -> None:
        self._settings = settings
        self._kv_config = kv_config
        self._rates = rates
        self._cache = CacheWatch(on_cache)
        self.policies = EnginePolicies()
        self._sinks: dict[str, Sink] = {}
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._stats = EngineStats()
        self._thread: threading.Thread | None = None
        self._step_began_mono = 0.0  # monotonic; 0: no step is under way
        self._with_adapter: dict[str, str] = {}  # requests in the engine, by their adapter's key
        self._repeating: dict[str, KnownTokens] = {}  # requests that resume and generate the known tokens again
        self._leaving: dict[str, LoRARequest] = {}  # removed adapters that requests still have
        self._ranks: CoupledRanks | None = None  # where this engine computes together with others
        self._dead = False
        self.steps = StepLog()

    @property
    def step_s(self) -> float:
        """How long the engine's thread has been at its present step, with its commands; 0 while it waits."""
        began_mono = self._step_began_mono
        return time.monotonic() - began_mono if began_mono else 0.0

    async def start(self) -> EngineInfo:
        """Load the model. Raises EngineFailed."""
        self._loop = asyncio.get_running_loop()
        self._met: asyncio.Future[None] = self._loop.create_future()
        self._started: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        if self._settings.data_parallel > 1:
            with ending_at_sigterm():  # other ranks may take minutes to come
                await self._met
        return await self._started

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        self._sinks[request.request_id] = sink
        self._post(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        if self._sinks.pop(request_id, None) is not None:
            self._post(lambda: self._abort(request_id))

    async def export_cached(self, request: EngineRequest, export: CacheExport) -> int:
        def found() -> Request:
            return Request.from_engine_core_request(self._requests.make(request), self._hasher)

        wanted = await self._result_of(found)
        tokens: int | None = None
        try:
            while tokens is None:
                tokens = await self._result_of(lambda: self._exports.export_cached(wanted, export))
                if tokens is None:  # a disk reads for it
                    await asyncio.sleep(_WAITING_S)
        except asyncio.CancelledError:
            self._post(lambda: self._exports.give_up(export.transfer_id))
            raise
        return tokens

    async def export_running(self, request_id: str, export: CacheExport) -> int:
        return await self._result_of(lambda: self._exports.export_running(request_id, export))

    async def leave(self, request_id: str, export: CacheExport) -> Left | None:
        ended: asyncio.Future[Left | None] = self._loop.create_future()

        def left(result: Left | None) -> None:
            if result is not None:
                self._kept.forget(request_id)
                self._abort(request_id)
            self._loop.call_soon_threadsafe(self._set_left, request_id, ended, result)

        self._post(lambda: self._exports.leave(request_id, export, left))
        return await asyncio.shield(ended)

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        self._post(lambda: self._scheduling.predicted(request_id, prediction))

    def wake(self) -> None:
        self._post(lambda: None)

    def set_policies(self, policies: EnginePolicies) -> None:
        if policies.step_budget and not self._settings.engine_args.get("enable_chunked_prefill", True):
            raise InvalidRequest("step_budget needs chunked prefill, which `engine_args` turn off")
        self._post(lambda: self._follow(policies))

    def set_chunk_size(self, tokens: int) -> None:
        """Between this step and the next."""
        self._post(lambda: self._scheduling.set_chunk_size(tokens))

    async def add_adapter(self, key: str, folder: str) -> None:
        try:
            await self._result_of(lambda: self._add_adapter(key, folder))
        except Exception as error:  # whatever vLLM raises for a folder
            raise EngineFailed(str(error) or type(error).__name__) from error

    async def remove_adapter(self, key: str) -> None:
        await self._result_of(lambda: self._remove_adapter(key))

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def rank(self) -> KvEndpoint | None:
        """The KV endpoint of the only rank, when it runs in this process."""
        if self._settings.ranks > 1 or not has_kv_transfer_group():
            return None
        endpoint: KvEndpoint | None = get_kv_transfer_group().worker.endpoint
        return endpoint

    async def close(self) -> None:
        """Stop the thread and release the executor's processes. Of coupled ranks, each goes on with the passes of those
        that still compute.
        """
        self._stopping = True
        with self._wake:
            self._wake.notify()
        if self._thread is not None:
            within_s = _STUCK_S if self._dead else self._leave_s + _END_S
            await asyncio.to_thread(self._thread.join, within_s)

    @property
    def _leave_s(self) -> float:
        """How long the other ranks may go on after this one: they were told to end at the same time."""
        return self._settings.drain_s + _END_S if self._ranks is not None else 0.0

    def _post(self, command: Command) -> None:
        self._commands.append(command)
        with self._wake:
            self._wake.notify()

    async def _result_of(self, command: Callable[[], Result]) -> Result:
        """Run a command between two steps and wait for its end. Raises what it raises."""
        ended: asyncio.Future[Result] = self._loop.create_future()

        def end(result: Result | None, error: Exception | None) -> None:
            if ended.done():
                return  # the caller is gone
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(cast(Result, result))

        def run() -> None:
            result, failure = None, None
            try:
                result = command()
            except Exception as error:  # for the caller
                failure = error
            self._loop.call_soon_threadsafe(end, result, failure)

        self._post(run)
        return await ended

    # Everything below runs on the engine thread.

    def _run(self) -> None:
        try:
            info = self._load()
        except BaseException as error:
            failure = EngineFailed(f"vLLM did not start: {type(error).__name__}: {error}")
            failure.__cause__ = error
            if self._ranks is not None:
                self._ranks.close()
            self._loop.call_soon_threadsafe(self._start_failed, failure)
            return
        self._loop.call_soon_threadsafe(self._has_started, info)
        try:
            self._steps()
        except BaseException as error:
            log.critical("the engine thread died", exc_info=error)
            lost = self._ranks.loss(_LOSS_S) if self._ranks is not None else ""
            self._loop.call_soon_threadsafe(self._died, lost or f"{type(error).__name__}: {error}")
        finally:
            if self._ranks is not None:
                self._ranks.close()
            self._core.shutdown()

    def _load(self) -> EngineInfo:
        s = self._settings
        config = engine_config(s, self._kv_config, self._cache.config)
        self._ranks = self._meet(config)
        speculates = config.speculative_config is not None
        self._core = InprocClient(config, Executor.get_class(config), log_stats=speculates)  # they count drafts
        make_stage_buffers(self._core.engine_core)
        force_beside_drafts(self._core.engine_core)
        resume_requests(self._core.engine_core)
        self._scheduler = self._core.engine_core.scheduler
        zero_imported_blocks(self._scheduler)
        if self._ranks is not None:
            observe_steps(self._scheduler, self._pass_scheduled, lambda _: None)
        self._kept = KeptSessions(self._scheduler, s.session_keep_s, s.session_share)
        self._scheduling = SchedulerPolicies(self._scheduler, self.policies, self._rates, lambda: self._kept.unused)
        # A step of coupled ranks lasts as long as that of the slowest one.
        own_cpu = s.computes_here and self._ranks is None
        self._observer = StepObserver(self._scheduler, self.steps, own_cpu=own_cpu, stages=s.pipeline_parallel)
        adapters: dict[str, str] = self._kv_config.get("adapters", {})
        media = MediaFeatures.of_engine(config, self._scheduler)
        self._requests = CoreRequests(config, lora_requests(s.lora), adapters, media)
        self._adapters_loaded = len(adapters)  # since the start: adapters are numbered by it
        for each in self._requests.adapters.values():  # one that cannot be loaded ends the start, not a later step
            self._core.engine_core.add_lora(each)
        self._cache.attach(self._scheduler, self._loop)
        core = self._core.engine_core
        self._hasher = core.request_block_hasher
        self._exports = CacheExports(core)
        self._host = None
        if s.host_kv_bytes:
            folder = Path(s.disk_kv_folder, s.instance_id) if s.disk_kv_folder else None
            self._host = self._exports.tier = start_host_tier(core, s.host_kv_bytes, s.disk_kv_bytes, folder)
        self._snapshot()
        kept = self._core.engine_core.model_executor.collective_rpc(kept_kv)[0]
        return engine_info(s, config, blocks_of(self._scheduler), kept, adapters)

    def _meet(self, config: VllmConfig) -> CoupledRanks | None:
        """Wait for the other ranks of the instance where this one cannot compute without them."""
        parallel, ranks = config.parallel_config, None
        if parallel.data_parallel_size > 1:
            rank, size, port = parallel.data_parallel_rank, parallel.data_parallel_size, ranks_port(self._settings)
            ranks = CoupledRanks(rank, size, port, on_news=self.wake, on_lost=self._lost)
            ranks.meet()
        self._loop.call_soon_threadsafe(self._met.set_result, None)
        return ranks

    def _pass_scheduled(self, plan: Any) -> None:
        if plan.total_num_scheduled_tokens:
            assert self._ranks is not None
            self._ranks.begin_pass()

    def _steps(self) -> None:
        ranks = self._ranks
        while not self._stopping:
            self._step_began_mono = time.monotonic()
            self._observer.began()
            self._follow_commands()
            self._exports.advance()
            self._kept.advance()
            busy, begun = self._busy, ranks.passes.begun if ranks is not None else 0
            if busy:
                self._turn()
            if ranks is not None and ranks.passes.behind and ranks.passes.begun == begun:
                self._join_pass(ranks)
            elif not busy:
                self._snapshot()
                self._step_began_mono = 0.0
                self._pause(_IDLE_S)
            elif self._observer.idle:
                # The engine would turn as fast as it can while it waits for KV or a grammar. More room wakes it.
                waiting_s = _WAITING_S if self._settings.ranks == 1 else _RANKS_WAITING_S
                self._pause(_IDLE_S if self._scheduling.blocked else waiting_s)
        self._exports.close()
        if ranks is not None:
            self._leave(ranks)

    def _turn(self) -> None:
        self._scheduling.before_step()
        outputs = self._core.get_output()
        self._snapshot()
        if outputs.scheduler_stats is not None and (drafts := outputs.scheduler_stats.spec_decoding_stats):
            self.steps.drafted(drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens)
        if outputs.outputs:
            self._cache.count(outputs.outputs)
            batch = self._new_steps(outputs.outputs)
            for request_id, output in batch:
                if output.finish_reason:
                    self._forget(request_id)
            self._loop.call_soon_threadsafe(self._deliver, batch)
        self._observer.ended()

    def _new_steps(self, outputs: Sequence[Any]) -> list[tuple[str, TokenStep]]:
        """The requests that have new tokens or have ended, with these."""
        steps = [(output.request_id, token_step(output)) for output in outputs]
        if not self._repeating:
            return steps
        new = [(request_id, self._new_part(request_id, step)) for request_id, step in steps]
        return [(request_id, step) for request_id, step in new if step.tokens or step.finish_reason]

    def _new_part(self, request_id: str, step: TokenStep) -> TokenStep:
        known = self._repeating.get(request_id)
        if known is None:
            return step
        try:
            return known.without(step)
        except EngineFailed as error:
            if not step.finish_reason:
                self._core.abort_requests([request_id])
            return TokenStep([], finish_reason="error", stop_reason=str(error))

    def _join_pass(self, ranks: CoupledRanks) -> None:
        """Another rank computes, and this one has nothing to compute with it."""
        ranks.begin_pass()
        self._core.engine_core.execute_dummy_batch()

    def _leave(self, ranks: CoupledRanks) -> None:
        """Execute the passes of the other ranks until these end, too; not for longer than they have to end."""
        until_mono = time.monotonic() + self._leave_s
        ranks.leave()
        while not ranks.may_end and (left_s := until_mono - time.monotonic()) > 0:
            self._step_began_mono = time.monotonic()
            self._follow_commands()
            if ranks.passes.behind:
                self._join_pass(ranks)
            else:
                self._step_began_mono = 0.0
                self._pause(min(left_s, _IDLE_S), stopping=True)
        if ranks.may_end:
            ranks.done()
        while not ranks.all_done and (left_s := until_mono - time.monotonic()) > 0:
            self._follow_commands()
            self._pause(min(left_s, _IDLE_S), stopping=True)
        if not ranks.all_done:
            log.warning("this data-parallel rank ends while others still compute, which end with it")

    def _follow_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    @property
    def _busy(self) -> bool:
        """Whether a turn would do anything; pipeline stages may hold batches of requests that are gone."""
        return bool(self._scheduler.has_requests() or self._core.engine_core.batch_queue)

    def _pause(self, seconds: float, *, stopping: bool = False) -> None:
        with self._wake:
            if not self._commands and self._stopping is stopping:
                self._wake.wait(seconds)

    def _add(self, request: EngineRequest) -> None:
        if request.request_id not in self._sinks:
            return  # aborted before the engine saw it
        try:
            if request.resumes and not self._requests.resumes(request):
                self._repeating[request.request_id] = KnownTokens(request.forced_tokens)
                request = msgspec.structs.replace(request, resumes=False)
            core_request = self._requests.make(request)
            self._scheduling.add(request)
            if request.resumes:
                add_resumed(self._core.engine_core, core_request)
            else:
                self._core.add_request(core_request)
            if not request.generation.cache_salt.startswith(lossy_salt("")):  # its next turn would not find it
                self._kept.watch(request.request_id, request.job.session)
            if adapter := request.generation.adapter:
                self._with_adapter[request.request_id] = adapter
        except Exception as error:  # whatever vLLM raises: one request must not fail the others
            self._forget(request.request_id)
            refused = isinstance(error, (ValueError, TypeError, VLLMValidationError, msgspec.MsgspecError))
            cause = str(error) if refused else f"{type(error).__name__}: {error}"
            log.warning("engine refused a request", request_id=request.request_id, error=cause)
            output = TokenStep([], finish_reason="refused" if refused else "error", stop_reason=cause)
            self._loop.call_soon_threadsafe(self._deliver, [(request.request_id, output)])

    def _follow(self, policies: EnginePolicies) -> None:
        self._scheduling.set_policies(policies)
        self.policies = policies

    def _abort(self, request_id: str) -> None:
        self._core.abort_requests([request_id])
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """The request has left the engine."""
        self._scheduling.forget(request_id)
        self._repeating.pop(request_id, None)
        adapter = self._with_adapter.pop(request_id, None)
        if adapter is not None and adapter in self._leaving and adapter not in self._with_adapter.values():
            self._drop_adapter(self._leaving.pop(adapter))

    def _add_adapter(self, key: str, folder: str) -> None:
        if (leaving := self._leaving.pop(key, None)) is not None:  # of the same weights, by its key
            self._requests.adapters[key] = leaving
            return
        held = len(self._requests.adapters) + len(self._leaving)
        if held >= self._settings.lora.room:  # vLLM would forget the adapter that was used least recently
            raise RuntimeError(
                f"there is no room: {held} adapters are loaded, {len(self._leaving)} of them former ones"
            )
        self._adapters_loaded += 1
        added = LoRARequest(key, self._adapters_loaded, folder)
        try:
            self._core.engine_core.add_lora(added)
        except Exception:
            self._drop_adapter(added)  # one of several ranks may have it
            raise
        self._requests.adapters[key] = added

    def _remove_adapter(self, key: str) -> None:
        removed = self._requests.adapters.pop(key, None)
        if removed is None:
            return
        if key in self._with_adapter.values():
            self._leaving[key] = removed
        else:
            self._drop_adapter(removed)

    def _drop_adapter(self, adapter: LoRARequest) -> None:
        try:
            self._core.engine_core.remove_lora(adapter.lora_int_id)
        except Exception as error:  # whatever vLLM raises: the engine goes on, with the adapter in its memory
            log.error("vLLM could not remove an adapter", adapter=adapter.lora_name, exc_info=error)

    def _snapshot(self) -> None:
        scheduler = self._scheduler
        blocks = blocks_of(scheduler, self._kept.unused)
        self._stats = EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.kv_holding_waiting),
            waiting_tokens=self._scheduling.waiting_tokens,
            free_blocks=blocks.free,
            total_blocks=blocks.total,
            partly={
                request.request_id: request.num_computed_tokens
                for request in scheduler.running
                if 0 < request.num_computed_tokens < request.num_prompt_tokens
            },
            prompt_tokens=self._cache.prompt_tokens,
            hit_tokens=self._cache.hit_tokens,
            preemptions=self._scheduling.preemptions,
            sessions=len(self._kept),
            session_blocks=self._kept.pinned,
            sessions_yielded=self._kept.yielded,
            host=self._host.stats() if self._host is not None else HostTierStats(),
        )

    # Back on the event loop.

    def _set_left(self, request_id: str, ended: "asyncio.Future[Left | None]", result: Left | None) -> None:
        """Called after the request's last tokens were delivered."""
        if result is not None:
            self._sinks.pop(request_id, None)
        if not ended.done():
            ended.set_result(result)

    def _deliver(self, batch: list[tuple[str, TokenStep]]) -> None:
        for request_id, output in batch:
            sink = self._sinks.get(request_id)
            if sink is None:
                continue
            if output.finish_reason:
                del self._sinks[request_id]
            deliver(sink, output)

    def _has_started(self, info: EngineInfo) -> None:
        if not self._started.done():
            self._started.set_result(info)

    def _start_failed(self, failure: EngineFailed) -> None:
        if not self._met.done():
            self._met.set_result(None)
        if not self._started.done():
            self._started.set_exception(failure)

    def _lost(self, cause: str) -> None:
        """Called on the thread that listens to the other ranks. The engine's thread may wait for the lost rank for
        ever, within a library that cannot be interrupted.
        """
        log.critical(cause)
        self._loop.call_soon_threadsafe(self._rank_lost, cause)
        killer = threading.Timer(self._settings.drain_s + _KILL_S, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()

    def _rank_lost(self, cause: str) -> None:
        if self._started.done():
            self._died(cause)
        else:
            self._dead = True
            self._start_failed(EngineFailed(cause))

    def _died(self, cause: str) -> None:
        if self._dead:
            return
        self._dead = True
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(TokenStep([], finish_reason="error", stop_reason=f"engine died: {cause}"))
        os.kill(os.getpid(), signal.SIGTERM)  # an instance is of no use without its engine


class MediaFeatures:
    """Decodes media items for an engine, which computes items of these modalities with at most so many tokens each."""

    def __init__(self, modalities: Sequence[str] = (), max_item_tokens: int = 0) -> None:
        self._modalities = modalities
        self._max_item_tokens = max_item_tokens
        self._decoder = MsgpackDecoder(list[MultiModalFeatureSpec])

    @classmethod
    def of_engine(cls, config: Any, scheduler: Any) -> "MediaFeatures":
        """By the engine's VllmConfig and its scheduler."""
        most = min(scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager.cache_size)
        return cls(media_of(config), most)

    def features(self, generation: Generation, prompt_tokens: int) -> list[MultiModalFeatureSpec] | None:
        """Of a prompt, or of its beginning, which a prefill instance gets; None where the prompt is text.

        Raises ValueError for an item that the engine cannot compute: its scheduler would wait for room for ever.
        """
        if not generation.items:
            return None
        features = []
        for each in self._decoder.decode(generation.media):
            place = each.mm_position
            if each.modality not in self._modalities:
                raise ValueError(f"this instance processes no {each.modality} items")
            if place.get_num_embeds() > self._max_item_tokens:
                raise ValueError(
                    f"an item ({each.modality}) has {place.get_num_embeds()} tokens, this instance computes at most "
                    f"{self._max_item_tokens}: `mm_processor_kwargs` of the gateway and of `engine_args` must be equal"
                )
            if place.offset < prompt_tokens:
                if place.offset + place.length > prompt_tokens:
                    raise ValueError(f"the prompt's {prompt_tokens} tokens end within an item ({each.modality})")
                features.append(each)
        return features or None


class CoreRequests:
    """Converts requests for one engine, by its VllmConfig. adapters: that it has loaded, by key, which the engine
    changes; digests: of the cluster file's.
    """

    def __init__(
        self,
        config: Any,
        adapters: dict[str, LoRARequest],
        digests: Mapping[str, str],
        media: "MediaFeatures | None" = None,
    ) -> None:
        self.adapters = adapters
        self._digests = digests
        self._media = media or MediaFeatures()
        self._config, self._model, self._speculative = config, config.model_config, config.speculative_config
        self._parses_reasoning = bool(config.structured_outputs_config.reasoning_parser)
        self._limits_reasoning = config.reasoning_config is not None and config.reasoning_config.enabled
        self._sampling = msgspec.msgpack.Decoder(SamplingParams)
        self._sent = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])

    def resumes(self, request: EngineRequest) -> bool:
        """Whether the engine goes on exactly after the request's known tokens, without generating them again. Raises
        MsgspecError for what cannot be decoded.
        """
        known = len(request.forced_tokens)
        if not 0 < known < request.max_tokens:
            return False
        if len(request.prompt_token_ids) + known >= self._model.max_model_len:
            return False
        return resumes_exactly(self._config, self._sampling.decode(request.generation.sampling), request.state)

    def make(self, request: EngineRequest) -> EngineCoreRequest:
        """Raises ValueError, TypeError, VLLMValidationError or MsgspecError for what no engine can compute."""
        params = self._sampling.decode(request.generation.sampling)
        if unknown := self._sent.decode(request.generation.sampling).keys() - SamplingParams.__struct_fields__:
            # The gateway's vLLM is of another release; msgspec ignores what a struct does not have.
            raise ValueError(f"the vLLM of this instance has no {', '.join(sorted(unknown))}")
        self._check(request, params)
        adapter = request.generation.adapter
        params.max_tokens = 1 if request.first_token_only else request.max_tokens
        if request.first_token_only:
            params.min_tokens = 0
        if not request.wants_token:
            params.structured_outputs = None
        extra = dict(params.extra_args or {})
        for name in ("kv_transfer_params", FORCED, RESUMED):  # a client may not set them
            extra.pop(name, None)
        if request.resumes:
            extra[RESUMED] = {"tokens": request.forced_tokens, "state": request.state}
            if params.prompt_logprobs is not None:  # the client has them; vLLM reads no prefix cache for their sake
                params.prompt_logprobs, params.skip_reading_prefix_cache = None, False
        elif request.forced_tokens:
            extra[FORCED] = request.forced_tokens
        transfers: dict[str, Any] = {}
        if request.export_to:
            transfers["export"] = {
                "transfer_id": request.export_to,
                "codec": request.export_codec.value,
                "adapter": digest_of_key(adapter, self._digests),
            }
        if request.import_from is not None:
            transfers["import"] = msgspec.to_builtins(request.import_from)
        if transfers:
            extra["kv_transfer_params"] = transfers
        params.extra_args = extra or None
        return EngineCoreRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=self._media.features(request.generation, len(request.prompt_token_ids)),
            sampling_params=params,
            pooling_params=None,
            arrival_time=request.generation.arrived_s or time.time(),
            lora_request=self.adapters[adapter] if adapter else None,
            cache_salt=request.generation.cache_salt or None,
            data_parallel_rank=None,
            reasoning_ended=request.generation.reasoning_ended,
            reasoning_parser_kwargs=_reasoning_arguments(request),
        )

    def _check(self, request: EngineRequest, params: SamplingParams) -> None:
        """Check what vLLM's front end checks and its engine relies on: a request that fails there would end the
        step, and with it the engine. Grammars are left to the engine, which compiles them beside its steps.
        """
        prompt, model, adapter = request.prompt_token_ids, self._model, request.generation.adapter
        if adapter and adapter not in self.adapters:
            raise ValueError(f"this instance does not serve the adapter {adapter!r}")
        if not 0 < len(prompt) < model.max_model_len:
            raise ValueError(f"the prompt must have 1 to {model.max_model_len - 1} tokens, got {len(prompt)}")
        if not 0 <= min(prompt) <= max(prompt) < model.get_vocab_size():
            raise ValueError(f"token ids must be 0 to {model.get_vocab_size() - 1}")
        forced = request.forced_tokens
        if forced and not 0 <= min(forced) <= max(forced) < model.get_vocab_size():
            raise ValueError(f"forced token ids must be 0 to {model.get_vocab_size() - 1}")
        params.verify(model, self._speculative, None, None)
        generation = request.generation
        if generation.reasoning and generation.reasoning_ended is not True and not self._parses_reasoning:
            raise ValueError(
                "structured output after reasoning: this instance has no reasoning parser and would begin the output "
                "at once: set engine_args: {reasoning_parser: ...} to the gateway's"
            )
        if params.thinking_token_budget is not None and not self._limits_reasoning:
            raise ValueError(
                f"thinking_token_budget {params.thinking_token_budget}: this instance has no reasoning parser: set "
                "engine_args: {reasoning_parser: ...}, or leave the budget out"
            )


def _reasoning_arguments(request: EngineRequest) -> dict[str, Any] | None:
    packed = request.generation.reasoning
    return msgspec.msgpack.decode(packed, type=dict[str, Any]) if packed else None


def token_step(output: Any) -> TokenStep:
    return TokenStep(
        tokens=list(output.new_token_ids),
        finish_reason="" if output.finish_reason is None else str(output.finish_reason),
        stop_reason=output.stop_reason,
        logprobs=encode_logprobs(output.new_logprobs),
        prompt_logprobs=encode_prompt_logprobs(output.new_prompt_logprobs_tensors),
        reused=_reused(output.prefill_stats),
    )


def _reused(stats: Any) -> Reused | None:
    """From PrefillStats, which vLLM gives with a request's first output."""
    if stats is None:
        return None
    return Reused(stats.num_cached_tokens, stats.num_cache_creation_tokens, stats.num_external_cached_tokens)


def encode_logprobs(logprobs: Any) -> bytes:
    """The wire's rows of the sampled tokens' log probabilities (vLLM's LogprobsLists); empty for none."""
    if logprobs is None:
        return b""
    return _encode(logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks)


def encode_prompt_logprobs(tensors: Any) -> bytes:
    """The same of the prompt's log probabilities (vLLM's LogprobsTensors)."""
    if tensors is None:
        return b""
    return _encode(tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks)


def _encode(ids: Any, values: Any, ranks: Any) -> bytes:
    packed_ids = np.asarray(ids).astype("<i4")
    packed_values, packed_ranks = np.asarray(values).astype("<f4"), np.asarray(ranks).astype("<i4")
    return encode_rows(
        LogprobRows(packed_ids.shape[1], packed_ids.tobytes(), packed_values.tobytes(), packed_ranks.tobytes())
    )
