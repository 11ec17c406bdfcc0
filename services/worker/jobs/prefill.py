"""The prefill side of an instance: queue, compute, stage, and choose where the job decodes."""

import asyncio
import time
from dataclasses import dataclass, field

from services.worker.engines.base import Engine, EngineRequest
from services.worker.jobs.dispatcher import Dispatcher
from services.worker.jobs.lengths import LengthClient
from services.worker.jobs.prefill_queue import PrefillQueue
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from shared.domain.instance import Role
from shared.domain.job import JobView, LengthPrediction
from shared.domain.kv import KvHandle
from shared.domain.route import InstanceRef, Reason
from shared.errors import EngineFailed
from shared.wire.messages import PrefillReply, PrefillRequest, PrefillStarted, ReleaseRequest, TokenStep
from shared.wire.rpc_server import ServerCall


@dataclass(slots=True)
class _Dispatch:
    """Where the job will decode, once that is known."""

    decode: InstanceRef | None = None
    reasons: tuple[Reason, ...] = ()
    prediction: LengthPrediction | None = None
    queued_s: float = 0.0
    started_s: float = 0.0
    tokens: list[int] = field(default_factory=list)


class PrefillService:
    """Serves `prefill` and `release`."""

    def __init__(
        self,
        engine: Engine,
        kv: KvPort,
        roles: RoleState,
        queue: PrefillQueue,
        dispatcher: Dispatcher,
        lengths: LengthClient,
        chunk_size: int,
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._roles = roles
        self._queue = queue
        self._dispatcher = dispatcher
        self._lengths = lengths
        self._chunk_size = chunk_size
        self._sequence = 0

    async def prefill(self, request: PrefillRequest, call: ServerCall) -> PrefillReply:
        """Compute the prompt's KV and stage it; the first token is in the reply if it was wanted.

        When the prompt takes several chunks, an item names the decode instance as soon as the first is staged.
        Raises WrongRole, EngineFailed, Unavailable (nowhere to decode).
        """
        with self._roles.job(Role.PREFILL):
            self._sequence += 1
            request_id = f"{request.job.job_id}#p{self._sequence}"
            finished = False
            try:
                reply = await self._run(request_id, request, call)
                finished = True
                return reply
            finally:
                self._engine.abort(request_id)
                self._kv.forget(request.transfer_id)
                if request.export and not finished:
                    await asyncio.shield(self._kv.release([request.transfer_id]))

    async def release(self, request: ReleaseRequest, _: ServerCall) -> None:
        """Free what these transfers hold here, staged or prefetched."""
        await self._kv.release(request.transfer_ids)

    async def _run(self, request_id: str, request: PrefillRequest, call: ServerCall) -> PrefillReply:
        state = _Dispatch(decode=request.decode, queued_s=time.time())
        lengths = self._lengths.predict(request.prompt_token_ids, request.job.max_tokens)
        predicted = asyncio.get_running_loop().create_task(lengths)
        try:
            async with self._queue.turn(request.job):
                state.started_s = time.time()
                last = await self._compute(request_id, request, call, state, predicted)
            if request.export and not _is_over(last, request):
                self._choose(request, state, predicted)
        finally:
            predicted.cancel()  # an answer that comes later is of no use
        handle = self._handle(request) if state.decode is not None else None
        return PrefillReply(
            tokens=state.tokens if request.want_token else [], decode=state.decode, handle=handle,
            finish_reason="stop" if last.finish_reason == "stop" and request.want_token else "",
            stop_reason=last.stop_reason, logprobs=last.logprobs, queued_s=state.queued_s,
            started_s=state.started_s, ended_s=time.time(), reasons=state.reasons, prediction=state.prediction,
        )  # fmt: skip

    async def _compute(
        self,
        request_id: str,
        request: PrefillRequest,
        call: ServerCall,
        state: _Dispatch,
        predicted: "asyncio.Task[LengthPrediction | None]",
    ) -> TokenStep:
        ended: asyncio.Future[TokenStep] = asyncio.get_running_loop().create_future()

        def step(output: TokenStep) -> None:
            state.tokens.extend(output.tokens)
            if output.finish_reason and not ended.done():
                ended.set_result(output)

        def first_chunk() -> None:
            # The transfer of a long prompt overlaps with the rest of its prefill.
            if not ended.done():
                self._choose(request, state, predicted)
                if state.decode is not None:
                    call.send(PrefillStarted(state.decode, self._handle(request), state.reasons))

        if request.export and len(request.prompt_token_ids) > self._chunk_size:
            self._kv.when_staged(request.transfer_id, first_chunk)
        self._engine.submit(_engine_request(request_id, request), step)
        last = await ended
        if last.finish_reason in ("error", "abort"):
            raise EngineFailed(f"{request.job.job_id}: {last.stop_reason or 'the engine gave up'}")
        return last

    def _choose(
        self, request: PrefillRequest, state: _Dispatch, predicted: "asyncio.Task[LengthPrediction | None]"
    ) -> None:
        if predicted.done() and not predicted.cancelled() and state.prediction is None:
            state.prediction = predicted.result()
        if state.decode is None:
            state.decode, state.reasons = self._dispatcher.choose(
                _with_prediction(request.job, state.prediction), exclude=request.exclude
            )

    def _handle(self, request: PrefillRequest) -> KvHandle:
        return self._kv.handle(request.transfer_id, len(request.prompt_token_ids), request.codec)


def _is_over(last: TokenStep, request: PrefillRequest) -> bool:
    """Whether the first token already ended the answer."""
    return request.want_token and (last.finish_reason == "stop" or request.job.max_tokens <= 1)


def _with_prediction(job: JobView, prediction: LengthPrediction | None) -> JobView:
    if prediction is None:
        return job
    return JobView(job.job_id, job.prompt_tokens, job.max_tokens, job.slo, prediction, job.local_only)


def _engine_request(request_id: str, request: PrefillRequest) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_token_ids=request.prompt_token_ids, generation=request.generation, max_tokens=1,
        first_token_only=True, export_to=request.transfer_id if request.export else "", codec=request.codec,
    )  # fmt: skip
