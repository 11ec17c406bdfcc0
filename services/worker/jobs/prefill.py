"""The prefill side of an instance: compute the prompt, stage its KV, and dispatch the request to a decode instance.

The dispatcher chooses the decode instance from the loads that the monitor publishes; the codec of the KV is chosen
once that instance is known.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from services.worker.engines.base import Engine, EngineRequest, failure
from services.worker.jobs.decode import as_reported
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceInfo, InstanceView, Role
from shared.domain.job import JobView
from shared.domain.kv import Codec, KvHandle, TransferReport
from shared.domain.prompt import unpacked
from shared.domain.route import InstanceRef, PolicySpec, Reason
from shared.errors import InvalidRequest, Unavailable
from shared.policy import registry
from shared.policy.codec import CodecChoice, choose_codec
from shared.policy.decode_admission import is_heavy
from shared.policy.dispatch import DispatchPolicy, choose_decode
from shared.policy.index import LoadTracker
from shared.policy.ledger import Assignment
from shared.wire.messages import Predicted, PrefillReply, PrefillRequest, PrefillStarted, Reused, TokenStep
from shared.wire.rpc_server import ServerCall

_KEPT_POLICIES = 16  # schedulers name one at a time
PATIENCE_S = 1.0  # for the first cluster state
REST_S = 30.0  # the cluster is no longer followed when no job was dispatched for so long


@dataclass(slots=True)
class _Prefill:
    """One job and what is known of it so far."""

    request_id: str
    request: PrefillRequest
    call: ServerCall
    view: JobView
    decode: InstanceRef | None = None
    reasons: tuple[Reason, ...] = ()
    codec: CodecChoice | None = None
    queued_s: float = 0.0
    started_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    reused: Reused | None = None

    def entered(self) -> None:
        """Called again after a preemption."""
        self.started_s = self.started_s or time.time()


class PrefillService:
    def __init__(
        self,
        engine: Engine,
        kv: KvPort,
        roles: RoleState,
        dispatcher: "Dispatcher",
        codecs: "Codecs",
        chunk_size: Callable[[], int],
        on_transfer: Callable[[KvHandle, TransferReport], None],
    ) -> None:
        """on_transfer: receives a report of each import of a prompt's beginning."""
        self._engine = engine
        self._kv = kv
        self._roles = roles
        self._dispatcher = dispatcher
        self._codecs = codecs
        self._chunk_size = chunk_size
        self._on_transfer = on_transfer
        self._active: dict[str, _Prefill] = {}  # jobs whose prompts are not computed
        self._sequence = 0
        kv.when_room(engine.wake)

    @property
    def queued(self) -> int:
        return len(self._active)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the queued jobs that are neither computed nor known to be in its prefix cache."""
        if not self._active:
            return 0
        computed = self._engine.stats().partly
        return sum(
            max(0, job.request.prompt_tokens - max(job.request.known, computed.get(request_id, 0)))
            for request_id, job in self._active.items()
        )

    async def prefill(self, request: PrefillRequest, call: ServerCall) -> PrefillReply:
        """Compute the prompt's KV and stage it; the first token is in the reply if it was wanted.

        The engine starts the job when it is its turn and its KV has room in the staging pool. When the prompt takes
        several chunks, an item names the decode instance as soon as the first is staged. It is no error if there is
        none: the reply says why. Raises WrongRole, EngineFailed, InvalidRequest.
        """
        with self._roles.job(Role.PREFILL, request.job.job_id):
            self._sequence += 1
            request_id = f"{request.job.job_id}#p{self._sequence}"
            job = _Prefill(request_id, request, call, request.job, decode=request.decode, queued_s=time.time())
            kept = False
            try:
                reply = await self._run(job)
                kept = reply.handle is not None
                return reply
            finally:
                self._engine.abort(request_id)
                self._kv.forget(request.transfer_id)
                if request.export and not kept:
                    await asyncio.shield(self._kv.release([request.transfer_id]))

    def predicted(self, prediction: Predicted) -> None:
        """The predicted length of the answer, for its dispatch; ignored once the prompt is computed."""
        for job in self._active.values():
            if job.request.transfer_id == prediction.transfer_id:
                job.view = msgspec.structs.replace(job.view, prediction=prediction.prediction)

    async def _run(self, job: _Prefill) -> PrefillReply:
        request = job.request
        self._active[job.request_id] = job
        if request.export and (request.decode is None or request.job.slo.lossy_kv.lossy):
            self._dispatcher.expect()
        imported = self._kv.expect(request.handle) if request.handle is not None else None
        transfer = None
        try:
            last = await self._compute(job)
            if imported is not None:
                transfer = await self._kv.import_report(imported)
                self._on_transfer(imported.handle, transfer)
                job.reused = as_reported(job.reused, transfer) if job.reused is not None else None
        finally:
            del self._active[job.request_id]
            if imported is not None:
                self._kv.end(imported)
        handle = None
        if request.export and not _ends_answer(last, request):
            if job.decode is None:
                await self._dispatcher.wait_for_cluster()
            self._choose(job)
            handle = self._handle(job, 0)
        return PrefillReply(
            tokens=job.tokens if request.want_token else [],
            decode=job.decode,
            handle=handle,
            finish_reason="stop" if last.finish_reason == "stop" and request.want_token else "",
            stop_reason=last.stop_reason,
            logprobs=last.logprobs,
            queued_s=job.queued_s,
            started_s=job.started_s or job.queued_s,
            ended_s=time.time(),
            reasons=job.reasons,
            codec=job.codec.reason if job.codec is not None else None,
            reused=job.reused,
            transfer=transfer,
        )

    async def _compute(self, job: _Prefill) -> TokenStep:
        request = job.request
        ended: asyncio.Future[TokenStep] = asyncio.get_running_loop().create_future()

        prompt, chunk = request.prompt_tokens, self._chunk_size()

        def step(output: TokenStep) -> None:
            job.tokens.extend(output.tokens)
            job.reused = job.reused or output.reused
            if output.finish_reason and not ended.done():
                ended.set_result(output)

        def first_chunk() -> None:
            # The transfer of a long prompt overlaps with the rest of its prefill.
            if not ended.done():
                self._choose(job)
                if job.decode is not None:
                    handle = self._handle(job, prompt - chunk)
                    job.call.send(PrefillStarted(job.decode, handle, job.reasons))

        if request.export:
            self._kv.announce(request.transfer_id, prompt, job.call.peer)
            if prompt > chunk:
                self._kv.when_staged(request.transfer_id, first_chunk)
        self._engine.submit(self._engine_request(job), step)
        last = await ended
        if (error := failure(request.job.job_id, last)) is not None:
            raise error
        return last

    def _engine_request(self, job: _Prefill) -> EngineRequest:
        request = job.request
        if request.export and (job.decode is not None or request.codec.lossy):  # the device can code it then
            self._choose_codec(job, max(0, request.prompt_tokens - self._chunk_size()))
        return EngineRequest(
            request_id=job.request_id,
            job=request.job,
            prompt_token_ids=unpacked(request.prompt),
            generation=request.generation,
            max_tokens=1,
            first_token_only=True,
            wants_token=request.want_token,
            export_to=request.transfer_id if request.export else "",
            export_codec=job.codec.codec if job.codec is not None else Codec.RAW,
            import_from=request.handle,
            has_room=lambda: self._kv.reserve(request.transfer_id),
            entered=job.entered,
        )

    def _choose(self, job: _Prefill) -> None:
        """Choose a decode instance, unless there is one; without any, `reasons` say why."""
        if job.decode is not None:
            return
        try:
            job.decode, job.reasons = self._dispatcher.choose(
                job.view, job.request.dispatch, exclude=job.request.exclude
            )
        except Unavailable as error:
            job.reasons = (Reason(error.message, {"code": error.code}),)

    def _handle(self, job: _Prefill, left_tokens: int) -> KvHandle:
        request, chosen = job.request, self._choose_codec(job, left_tokens)
        adapter = request.generation.adapter
        return self._kv.handle(request.transfer_id, request.prompt_tokens, chosen.codec, adapter)

    def _choose_codec(self, job: _Prefill, left_tokens: int) -> CodecChoice:
        """The first choice stays: a pull may have begun, and what is staged is coded."""
        if job.codec is None:
            decode = job.decode.instance_id if job.decode is not None else ""
            job.codec = self._codecs.choose(job.request, decode, left_tokens)
        return job.codec


def _ends_answer(last: TokenStep, request: PrefillRequest) -> bool:
    """Whether the first token ends the answer."""
    return request.want_token and (last.finish_reason == "stop" or request.job.max_tokens <= 1)


class Dispatcher:
    """Chooses decode instances by dispatch policies, from the newest loads and what it has assigned since.

    It chooses where a route names none: the placement policy is not `adaptive` and the prefill instance computes the
    whole prompt, as with TetriInfer's `least_load`, `full` and `power_of_two` (docs/deciding.md). It also knows the
    decode instance whose codecs decide on lossy KV, with any policy.

    The policy comes with each job: its scheduler owns the choice. A policy that was built is kept, with its state.
    The cluster is followed only while jobs need it: with the default policies routes name the decode instance, and the
    state of a thousand instances, sent to a thousand instances, is a million messages.
    """

    def __init__(self, seed: int | str) -> None:
        self._rng = random.Random(seed)
        self._index = LoadTracker()
        self._first = asyncio.Event()
        self._wanted_mono: float | None = None  # when a job last needed the cluster state
        self.on_follow: Callable[[bool], None] = lambda _: None  # starts or stops the broadcast of the cluster state
        self._policies: dict[bytes, DispatchPolicy] = {}
        self.dispatched = 0  # since the start

    def hear(self, delta: ClusterDelta) -> bool:
        """Apply a broadcast; False where one before it is missing."""
        applied = self._index.apply(delta, time.time(), self._rng)
        if applied:
            self._first.set()
        return applied

    def expect(self) -> None:
        """A job will need the cluster state soon."""
        if self._wanted_mono is None:
            self.on_follow(True)
        self._wanted_mono = time.monotonic()

    async def wait_for_cluster(self) -> None:
        """Wait for the first cluster state, for at most PATIENCE_S."""
        if not self._first.is_set():
            self.expect()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._first.wait()
            except TimeoutError:
                return  # `choose` then finds no instance

    def rest(self) -> None:
        """Stop following the cluster where no job has needed it for a while."""
        if self._wanted_mono is not None and time.monotonic() - self._wanted_mono > REST_S:
            self._wanted_mono = None
            self.on_follow(False)
            self._index = LoadTracker()
            self._first.clear()

    def known(self, instance_id: str) -> InstanceView | None:
        """A decode instance, as of the last broadcast."""
        return self._index.current.decode.get(instance_id) if self._index.known else None

    def choose(
        self, job: JobView, policy: PolicySpec | None, exclude: tuple[str, ...] = ()
    ) -> tuple[InstanceRef, tuple[Reason, ...]]:
        """A decode instance and why.

        Raises Unavailable when there is none, InvalidRequest when the policy is missing or unknown.
        """
        if policy is None:
            raise InvalidRequest(f"{job.job_id}: neither a decode instance nor a dispatch policy was named")
        now, index = time.time(), self._index.current
        if unable := index.unable(job):
            exclude = (*exclude, *unable)
        choice = choose_decode(self._policy(policy), job, index, exclude, now, self._rng)
        instance_id = choice.instance.instance_id
        answer = job.answer_tokens or job.max_tokens
        self._index.book(
            Assignment(
                instance_id,
                now,
                decode_tokens=job.prompt_tokens,
                heavy=is_heavy(job),
                job_id=job.job_id,
                answer_tokens=answer,
            )
        )
        self.dispatched += 1
        return choice.ref, choice.reasons

    def _policy(self, spec: PolicySpec) -> DispatchPolicy:
        key = msgspec.json.encode(spec, order="deterministic")
        known = self._policies.get(key)
        if known is None:
            known = self._policies[key] = registry.dispatch(spec.name, spec.parameters)
            if len(self._policies) > _KEPT_POLICIES:
                del self._policies[next(iter(self._policies))]
        return known


class Codecs:
    """Chooses the codec in which the KV of a job leaves this instance. `own`: this instance with its present rates.
    `loaded`: whether its lossy codecs are; the first use of a codec that is not loaded would hold up the transfer
    threads for longer than peers wait.
    """

    def __init__(self, own: Callable[[], InstanceInfo], dispatcher: Dispatcher, loaded: bool) -> None:
        self._own = own
        self._dispatcher = dispatcher
        self._loaded = loaded

    def choose(self, request: PrefillRequest, decode_id: str, left_tokens: int) -> CodecChoice:
        """The codec of the request's KV for that instance; `left_tokens` of its prompt are still to be computed.

        It is the codec that the gateway's setting fixes, if it fixes one; raw where the decode instance is not
        known here, and where this instance has no codecs loaded.
        """
        if not self._loaded:
            return CodecChoice(Codec.RAW, 0.0)
        if request.codec.lossy or not request.job.slo.lossy_kv.lossy:
            return CodecChoice(request.codec, 0.0)
        receiver = self._dispatcher.known(decode_id)
        if receiver is None:
            return CodecChoice(Codec.RAW, 0.0)
        return choose_codec(request.job, request.prompt_tokens, left_tokens, self._own(), receiver)
