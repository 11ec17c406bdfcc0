"""The real engine: vLLM's engine core in this process, stepped by a thread of its own.

Tokens in, tokens out: the front end (tokeniser, detokeniser, stop strings) is the gateway's. One process an
instance takes a third of the memory of vLLM's three (seen: 0.55 against 1.5 GB on a CPU).
"""

import asyncio
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor

from services.worker.engines.base import EngineInfo, EngineRequest, EngineStats, Sink, deliver
from services.worker.engines.cache_events import CacheSink
from services.worker.engines.policies import CurrentRates, EnginePolicies
from services.worker.engines.step_log import StepLog
from services.worker.engines.step_observer import StepObserver
from services.worker.engines.vllm_requests import CoreRequests, token_step
from services.worker.engines.vllm_seam import SchedulerSeam
from services.worker.engines.vllm_start import engine_config, engine_info, make_stage_buffers
from services.worker.kv.vllm.cache_watch import CacheWatch
from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.settings import WorkerSettings
from shared.domain.job import LengthPrediction
from shared.errors import EngineFailed, InvalidRequest
from shared.runtime.logs import get_log
from shared.wire.messages import TokenStep

log = get_log(__name__)
_IDLE_S = 0.5
_WAITING_S, _RANKS_WAITING_S = 0.001, 0.004  # a turn of ranks in other processes costs them all a millisecond
Command = Callable[[], None]


class VllmEngine:
    """Owns the engine core and its thread. `kv_config` goes to our KV connector in every rank; `rates` is asked
    for every step with a budget, and for every request that waits; `on_cache` hears, on the event loop, what the prefix
    cache tells.
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
        self._step_began_s = 0.0  # monotonic; 0: no step is under way
        self.steps = StepLog()

    @property
    def step_s(self) -> float:
        """How long the engine's thread has been at its present step, its commands included; 0 while it waits."""
        began_s = self._step_began_s
        return time.monotonic() - began_s if began_s else 0.0

    async def start(self) -> EngineInfo:
        """Load the model. Raises EngineFailed."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="engine", daemon=True)
        self._thread.start()
        return await started

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue the request for the next step."""
        self._sinks[request.request_id] = sink
        self._post(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """Abort before the next step."""
        if self._sinks.pop(request_id, None) is not None:
            self._post(lambda: self._abort(request_id))

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        """Between this step and the next."""
        self._post(lambda: self._seam.predicted(request_id, prediction))

    def wake(self) -> None:
        """An engine that waits looks again."""
        self._post(lambda: None)

    def set_policies(self, policies: EnginePolicies) -> None:
        """Between this step and the next. Raises InvalidRequest for a step budget where prompts cannot be cut."""
        if policies.step_budget and not self._settings.engine_args.get("enable_chunked_prefill", True):
            raise InvalidRequest("step_budget: `engine_args` turn chunked prefill off, so no prompt can give way")
        self._post(lambda: self._follow(policies))

    def set_chunk_size(self, tokens: int) -> None:
        """Between this step and the next."""
        self._post(lambda: self._seam.hold_at_most(tokens))

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    @property
    def rank(self) -> KvEndpoint | None:
        """The KV endpoint of the only rank, when it runs in this process."""
        if self._settings.ranks > 1 or not has_kv_transfer_group():
            return None
        endpoint: KvEndpoint | None = get_kv_transfer_group().worker.endpoint
        return endpoint

    async def close(self) -> None:
        """Stop the thread and release the executor's processes."""
        self._stopping = True
        with self._wake:
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10.0)

    def _post(self, command: Command) -> None:
        self._commands.append(command)
        with self._wake:
            self._wake.notify()

    # Everything below runs on the engine thread.

    def _run(self, started: asyncio.Future[EngineInfo]) -> None:
        try:
            info = self._load()
        except BaseException as error:
            failure = EngineFailed(f"vLLM did not start: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._loop.call_soon_threadsafe(started.set_exception, failure)
            return
        self._loop.call_soon_threadsafe(started.set_result, info)
        try:
            self._steps()
        except BaseException as error:
            log.critical("engine thread died", exc_info=error)
            self._loop.call_soon_threadsafe(self._died, f"{type(error).__name__}: {error}")
        finally:
            self._core.shutdown()

    def _load(self) -> EngineInfo:
        s = self._settings
        config = engine_config(s, self._kv_config, self._cache.config)
        self._core = InprocClient(config, Executor.get_class(config), log_stats=False)
        make_stage_buffers(self._core.engine_core)
        self._scheduler = self._core.engine_core.scheduler
        self._seam = SchedulerSeam(self._scheduler, self.policies, self._rates)
        self._observer = StepObserver(self._scheduler, self.steps, own_cpu=s.computes_here, stages=s.pipeline_parallel)
        self._requests = CoreRequests(config)
        self._cache.attach(self._scheduler, self._loop)
        self._snapshot()
        return engine_info(s, config, self._stats.total_blocks)

    def _steps(self) -> None:
        while not self._stopping:
            self._step_began_s = time.monotonic()
            self._observer.began()
            while self._commands:
                self._commands.popleft()()
            if self._busy:
                self._seam.before_step()
                outputs = self._core.get_output()
                self._snapshot()
                if outputs.outputs:
                    self._cache.count(outputs.outputs)
                    batch = [(output.request_id, token_step(output)) for output in outputs.outputs]
                    for request_id, output in batch:
                        if output.finish_reason:
                            self._seam.forget(request_id)
                    self._loop.call_soon_threadsafe(self._deliver, batch)
                self._observer.ended()
                if self._observer.idle:
                    # For KV or a grammar the engine would turn as fast as it can; who waits for room is woken.
                    waiting_s = _WAITING_S if self._settings.ranks == 1 else _RANKS_WAITING_S
                    self._pause(_IDLE_S if self._seam.shut else waiting_s)
                continue
            self._snapshot()
            self._step_began_s = 0.0
            self._pause(_IDLE_S)

    @property
    def _busy(self) -> bool:
        """Whether a turn would do anything; pipeline stages may hold batches of requests that are gone."""
        return bool(self._scheduler.has_requests() or self._core.engine_core.batch_queue)

    def _pause(self, seconds: float) -> None:
        with self._wake:
            if not self._commands and not self._stopping:
                self._wake.wait(seconds)

    def _add(self, request: EngineRequest) -> None:
        if request.request_id not in self._sinks:
            return  # aborted before the engine saw it
        try:
            core_request = self._requests.make(request)
            self._seam.expect(request)
            self._core.add_request(core_request)
        except Exception as error:  # whatever vLLM makes of it: one request is no reason to fail the others
            self._seam.forget(request.request_id)
            refused = isinstance(error, (ValueError, TypeError, VLLMValidationError, msgspec.MsgspecError))
            cause = str(error) if refused else f"{type(error).__name__}: {error}"
            log.warning("engine refused a request", request_id=request.request_id, error=cause)
            output = TokenStep([], finish_reason="refused" if refused else "error", stop_reason=cause)
            self._loop.call_soon_threadsafe(self._deliver, [(request.request_id, output)])

    def _follow(self, policies: EnginePolicies) -> None:
        self._seam.follow(policies)
        self.policies = policies

    def _abort(self, request_id: str) -> None:
        self._core.abort_requests([request_id])
        self._seam.forget(request_id)

    def _snapshot(self) -> None:
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        # Block 0 is vLLM's null block: it is never free and never used.
        self._stats = EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.kv_holding_waiting),
            waiting_tokens=self._seam.waiting_tokens,
            free_blocks=pool.get_num_free_blocks(),
            total_blocks=pool.num_gpu_blocks - 1,
            prompt_tokens=self._cache.prompt_tokens,
            hit_tokens=self._cache.hit_tokens,
            preemptions=self._seam.preemptions,
        )

    # Back on the event loop.

    def _deliver(self, batch: list[tuple[str, TokenStep]]) -> None:
        for request_id, output in batch:
            sink = self._sinks.get(request_id)
            if sink is None:
                continue
            if output.finish_reason:
                del self._sinks[request_id]
            deliver(sink, output)

    def _died(self, cause: str) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(TokenStep([], finish_reason="error", stop_reason=f"engine died: {cause}"))
        os.kill(os.getpid(), signal.SIGTERM)  # without its engine an instance is of no use
