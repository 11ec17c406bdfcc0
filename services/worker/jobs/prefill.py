"""The prefill side of an instance: queue, compute, stage, and choose where the job decodes."""

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from services.worker.engines.base import Engine, EngineRequest, failure
from services.worker.jobs.dispatcher import Dispatcher
from services.worker.jobs.lengths import Asked, LengthClient
from services.worker.jobs.prefill_queue import PrefillQueue
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from shared.domain.instance import Role
from shared.domain.job import LengthPrediction
from shared.domain.kv import KvHandle
from shared.domain.route import InstanceRef, Reason
from shared.errors import Unavailable
from shared.wire.messages import PrefillReply, PrefillRequest, PrefillStarted, TokenStep
from shared.wire.rpc_server import ServerCall


@dataclass(slots=True)
class _Prefill:
    """One job here: what was asked, and what is known so far."""

    request_id: str
    request: PrefillRequest
    call: ServerCall
    asked: Asked
    decode: InstanceRef | None = None
    reasons: tuple[Reason, ...] = ()
    prediction: LengthPrediction | None = None
    queued_s: float = 0.0
    started_s: float = 0.0
    tokens: list[int] = field(default_factory=list)


class PrefillService:
    """Serves `prefill`."""

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
        kv.when_room(queue.admit)

    async def prefill(self, request: PrefillRequest, call: ServerCall) -> PrefillReply:
        """Compute the prompt's KV and stage it; the first token is in the reply if it was wanted.

        The job waits until its KV has room in the staging pool. When the prompt takes several chunks, an item names
        the decode instance as soon as the first is staged. That there is none is no error: the reply says so.
        Raises WrongRole, EngineFailed, InvalidRequest.
        """
        with self._roles.job(Role.PREFILL):
            self._sequence += 1
            request_id = f"{request.job.job_id}#p{self._sequence}"
            asked = self._lengths.ask(request.prompt_token_ids, request.job.max_tokens)
            job = _Prefill(request_id, request, call, asked, decode=request.decode, queued_s=time.time())
            kept = False
            try:
                reply = await self._run(job)
                kept = reply.handle is not None
                return reply
            finally:
                asked.cancel()
                self._engine.abort(request_id)
                self._kv.forget(request.transfer_id)
                if request.export and not kept:
                    await asyncio.shield(self._kv.release([request.transfer_id]))

    async def _run(self, job: _Prefill) -> PrefillReply:
        request = job.request
        view = msgspec.structs.replace(request.job, job_id=job.request_id)  # one job may be here twice for a moment
        async with self._queue.turn(view, lambda: self._has_room(job)):
            job.started_s = time.time()
            last = await self._compute(job)
        handle = None
        if request.export and not _is_over(last, request):
            self._choose(job)
            handle = self._handle(request)
        return PrefillReply(
            tokens=job.tokens if request.want_token else [],
            decode=job.decode,
            handle=handle,
            finish_reason="stop" if last.finish_reason == "stop" and request.want_token else "",
            stop_reason=last.stop_reason,
            logprobs=last.logprobs,
            queued_s=job.queued_s,
            started_s=job.started_s,
            ended_s=time.time(),
            reasons=job.reasons,
            prediction=job.prediction,
        )

    def _has_room(self, job: _Prefill) -> bool:
        request = job.request
        return not request.export or self._kv.reserve(request.transfer_id, len(request.prompt_token_ids), job.call.peer)

    async def _compute(self, job: _Prefill) -> TokenStep:
        request = job.request
        ended: asyncio.Future[TokenStep] = asyncio.get_running_loop().create_future()

        def step(output: TokenStep) -> None:
            job.tokens.extend(output.tokens)
            if output.finish_reason and not ended.done():
                ended.set_result(output)

        def first_chunk() -> None:
            # The transfer of a long prompt overlaps with the rest of its prefill.
            if not ended.done():
                self._choose(job)
                if job.decode is not None:
                    job.call.send(PrefillStarted(job.decode, self._handle(request), job.reasons))

        if request.export and len(request.prompt_token_ids) > self._chunk_size:
            self._kv.when_staged(request.transfer_id, first_chunk)
        self._engine.submit(_engine_request(job.request_id, request), step)
        last = await ended
        if (error := failure(request.job.job_id, last)) is not None:
            raise error
        return last

    def _choose(self, job: _Prefill) -> None:
        """Find a decode instance, unless there is one; without any, `reasons` say why."""
        job.prediction = job.prediction or job.asked.prediction
        if job.decode is not None:
            return
        view = job.request.job
        if job.prediction is not None:
            view = msgspec.structs.replace(view, prediction=job.prediction)
        try:
            job.decode, job.reasons = self._dispatcher.choose(view, job.request.dispatch, exclude=job.request.exclude)
        except Unavailable as error:
            job.reasons = (Reason(error.message, {"code": error.code}),)

    def _handle(self, request: PrefillRequest) -> KvHandle:
        return self._kv.handle(request.transfer_id, len(request.prompt_token_ids), request.codec)


def _is_over(last: TokenStep, request: PrefillRequest) -> bool:
    """Whether the first token already ended the answer."""
    return request.want_token and (last.finish_reason == "stop" or request.job.max_tokens <= 1)


def _engine_request(request_id: str, request: PrefillRequest) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=request.prompt_token_ids,
        generation=request.generation,
        max_tokens=1,
        first_token_only=True,
        export_to=request.transfer_id if request.export else "",
        codec=request.codec,
    )
