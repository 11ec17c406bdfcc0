"""The decode side of an instance: from KV, pulled or computed here, to tokens."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.worker.engines.base import FAILED, Engine, EngineRequest, KnownTokens, failure
from services.worker.jobs.roles import RoleState
from services.worker.kv import holds_exact_kv, import_salt
from services.worker.kv.port import ExpectedImport, KvPort
from shared.domain.instance import InstanceInfo, Promised, Role
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.domain.prompt import length, unpacked
from shared.errors import Conflict, EngineFailed, NoRoom, NotFound
from shared.policy.decode_admission import (
    Ahead,
    ahead_of,
    fits_after,
    is_heavy,
    own_part,
    remaining_tokens,
    shared_each,
    with_job,
)
from shared.policy.leaving import DRAIN_NEWS_S, Stayer, leaves_for_memory, leaves_for_speed, leaves_kept
from shared.policy.overload import PAUSE_NEWS_S, Beside, pause_s
from shared.wire.messages import (
    DecodeReply,
    DecodeRequest,
    ExpectRequest,
    Handover,
    Leave,
    LeaveCause,
    LeaveRequest,
    Pause,
    Predicted,
    PrefetchRequest,
    PullRequest,
    Reused,
    TokenStep,
)
from shared.wire.rpc_server import ServerCall

BESIDE_S = 0.1  # how long a summary of all jobs is used


@dataclass(slots=True, eq=False)
class _Decode:
    """One job. `uncomputed`: tokens to prefill here when it came, 0 from its first one on."""

    request: DecodeRequest
    call: ServerCall
    context_tokens: int
    uncomputed: int
    imported: ExpectedImport | None
    started: bool = False
    reported: bool = False  # whether the end of its import was reported
    has_blocks: bool = False
    pause: int = 0  # numbered over all jobs: the last paused job is the next to get blocks. 0: none
    repeat: asyncio.TimerHandle | None = None  # of the notice of its pause
    salt: str = ""  # of its blocks, where these hold KV that is not what the engine computes itself
    ended: "asyncio.Future[TokenStep | Handover] | None" = None  # while the engine has it
    asked_mono: float = float("-inf")  # when its gateway was last asked to have it migrate

    @property
    def ahead(self) -> tuple[int, int]:
        """The tokens that it holds, and those that its answer is expected to add."""
        view, held = self.request.job, self.context_tokens
        given = held - self.request.prompt_tokens
        return held, remaining_tokens(given, view.answer_tokens or view.max_tokens, view.max_tokens)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A decode that is on its way to this instance. peer: the gateway that announced it."""

    promised: Promised
    peer: bytes
    until_mono: float


class DecodeService:
    """Serves `decode`, `prefetch` and `expect`. `on_transfer` receives a report of each KV import; `info`:
    this instance with its present rates.
    """

    def __init__(
        self,
        engine: Engine,
        kv: KvPort,
        roles: RoleState,
        on_transfer: Callable[[KvHandle, TransferReport], None],
        info: Callable[[], InstanceInfo],
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._roles = roles
        self._on_transfer = on_transfer
        self._info = info
        self._pauses = 0
        self._beside: tuple[float, Beside] | None = None  # when (monotonic), and the jobs with blocks
        self._active: dict[str, _Decode] = {}
        self._prefetches: dict[
            str, bytes
        ] = {}  # transfers whose job has not arrived yet, by the peer that requested them
        self._sequence = 0
        self._ahead: Ahead = ()  # as of the last heartbeat, with the jobs that arrived since
        self._shared_each = 0.0  # tokens of each job in blocks that it shares, as of then
        self._expected: dict[str, _Expected] = {}  # by transfer
        self._drain_news: asyncio.TimerHandle | None = None
        roles.on_drain = self._let_all_leave

    @property
    def active(self) -> int:
        """Jobs accepted and not finished."""
        return len(self._active)

    @property
    def heavy(self) -> int:
        """Jobs that are predicted long."""
        return sum(is_heavy(job.request.job) for job in self._active.values())

    @property
    def context_tokens(self) -> int:
        """Tokens of all jobs: prompts, and what was generated here."""
        return sum(job.context_tokens for job in self._active.values())

    @property
    def promised(self) -> tuple[Promised, ...]:
        """See `InstanceLoad.promised`."""
        now_mono = time.monotonic()
        for transfer_id in [name for name, one in self._expected.items() if one.until_mono < now_mono]:
            del self._expected[transfer_id]
        return tuple(one.promised for one in self._expected.values())

    def kv_ahead(self, used_tokens: int, waiting_tokens: int) -> Ahead:
        """See `InstanceLoad.kv_ahead`. used_tokens: of all blocks that are in use. waiting_tokens: of jobs that hold no
        blocks yet.
        """
        if not self._active:
            self._ahead, self._shared_each = (), 0.0
            return ()
        held = self.context_tokens - self.queued_tokens - waiting_tokens
        self._shared_each = shared_each(used_tokens, held, len(self._active)) if used_tokens > 0 else 0.0
        jobs = (job.ahead for job in self._active.values())
        self._ahead = ahead_of(jobs, self._info().block_size, own_part(used_tokens, held))
        return self._ahead

    @property
    def inbound_tokens(self) -> int:
        """Tokens whose import is not known to be complete: no step has computed on them."""
        handles = (job.request.handle for job in self._active.values() if not job.started)
        return sum(handle.tokens for handle in handles if handle is not None)

    @property
    def queued(self) -> int:
        """Jobs whose prompt, or part of it, is to be prefilled here and is not yet."""
        return sum(job.uncomputed > 0 for job in self._active.values())

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the queued jobs that are not computed, without the last one of each."""
        if not self.queued:
            return 0
        computed = self._engine.stats().partly
        return sum(
            max(0, min(job.uncomputed, _known_tokens(job.request) - 1 - computed.get(request_id, 0)))
            for request_id, job in self._active.items()
            if job.uncomputed
        )

    def expect(self, request: ExpectRequest, call: ServerCall) -> None:
        """Announce a decode: the load includes it until it arrives or is released, or its gateway is gone."""
        until_mono = time.monotonic() + request.keep_s
        self._expected[request.transfer_id] = _Expected(request.promised, call.peer, until_mono)

    async def prefetch(self, request: PrefetchRequest, call: ServerCall) -> None:
        """Start pulling before the decode arrives. `release` drops it, as does the loss of the caller."""
        transfer_id = request.handle.transfer_id
        self._prefetches[transfer_id] = call.peer
        try:
            await self._kv.prefetch(request.handle, request.keep_s)
        except BaseException:
            self._prefetches.pop(transfer_id, None)
            await asyncio.shield(self._kv.drop(transfer_id))
            raise

    def forget(self, transfer_ids: list[str]) -> None:
        for transfer_id in transfer_ids:
            self._prefetches.pop(transfer_id, None)
            self._expected.pop(transfer_id, None)

    async def drop_of(self, peer: bytes) -> None:
        """Free what was prefetched for a peer that is gone, and expect none of its decodes."""
        self._expected = {name: one for name, one in self._expected.items() if one.peer != peer}
        held = [transfer_id for transfer_id, owner in self._prefetches.items() if owner == peer]
        self.forget(held)
        await self._kv.release(held)

    def predicted(self, prediction: Predicted) -> None:
        """The predicted length of an answer, for its admission and that of others beside it."""
        for request_id, job in self._active.items():
            if job.request.job.job_id == prediction.job_id:
                view = msgspec.structs.replace(job.request.job, prediction=prediction.prediction)
                job.request = msgspec.structs.replace(job.request, job=view)
                self._engine.predicted(request_id, prediction.prediction)

    async def decode(self, request: DecodeRequest, call: ServerCall) -> DecodeReply:
        """Stream tokens as items, and reply how it ended.

        Raises WrongRole, EngineFailed, InvalidRequest; NoRoom if the request allows that.
        """
        if request.handle is not None:
            self._expected.pop(request.handle.transfer_id, None)
        # A prefetch outlives NoRoom: the job returns if no other instance has room, and otherwise the gateway releases
        # the prefetch.
        self.check_room(request)
        ended = False
        try:
            role = self._roles.role if request.keep_tokens else Role.DECODE
            with self._roles.job(role, request.job.job_id):
                reply = await self._admitted(request, call)
            ended = True
            return reply
        finally:
            if request.handle is not None and not ended:
                # Refused, failed or cancelled: the prefetch is not needed here.
                self.forget([request.handle.transfer_id])
                await asyncio.shield(self._kv.drop(request.handle.transfer_id))

    def check_room(self, request: "DecodeRequest | PullRequest") -> None:
        """Raises NoRoom where the job may be refused for that: its KV does not fit beside the jobs that decode here
        until the end of its answer, or all seats are taken. The figures are those that schedulers decide on, and
        newer.
        """
        if not request.if_room or not self._active:
            return
        info, (held, left) = self._info(), self._room_of(request)
        if info.max_seqs and len(self._active) >= info.max_seqs:
            raise NoRoom(f"{info.instance_id}: all {info.max_seqs} seats are taken")
        room = info.total_blocks * info.block_size
        if fits_after(self._ahead, room, held, min(left, max(1, room - held)), info.block_size) > 0.0:
            most = max(self._ahead)
            raise NoRoom(
                f"{info.instance_id}: the answers that decode there come to {most} tokens of KV, and the job to "
                f"{held + left}; there is room for {room}"
            )

    def _room_of(self, request: "DecodeRequest | PullRequest") -> tuple[int, int]:
        """Tokens of KV that a job takes when it starts, and those of its answer, for which room is kept."""
        saved = request.saved if isinstance(request, DecodeRequest) else 0
        view, shared = request.job, min(saved, int(self._shared_each))
        held = _known_tokens(request) if isinstance(request, DecodeRequest) else request.prompt_tokens
        left = (view.answer_tokens or view.max_tokens) - (held - request.prompt_tokens)
        return max(1, held - shared), max(1, left)

    async def _admitted(self, request: DecodeRequest, call: ServerCall) -> DecodeReply:
        self._sequence += 1
        request_id = f"{request.job.job_id}#d{self._sequence}"
        imported = self._kv.expect(request.handle) if request.handle is not None else None
        job = self._active[request_id] = _Decode(request, call, _known_tokens(request), _to_prefill(request), imported)
        self._ahead = with_job(self._ahead, *self._room_of(request), self._info().block_size)
        try:
            # Only now, when the job counts: no other job may pass the check of the room meanwhile.
            if request.handle is not None and request.handle.transfer_id in self._prefetches:
                await self._kv.accepted(request.handle.transfer_id)
            return await self._run(request_id, job)
        finally:
            del self._active[request_id]
            self._end_notices(job)
            self._engine.abort(request_id)
            if imported is not None:
                if job.started and not job.reported and (report := self._kv.known_report(imported)):
                    self._on_transfer(imported.handle, report)  # its client stopped reading or is gone
                self._kv.end(imported)

    async def _run(self, request_id: str, job: _Decode) -> DecodeReply:
        request, call, loop = job.request, job.call, asyncio.get_running_loop()
        known = KnownTokens([] if request.resumes else unpacked(request.known))
        ended: asyncio.Future[TokenStep | Handover] = loop.create_future()
        job.ended = ended
        queued_s = time.time()
        started_s = 0.0

        def step(output: TokenStep) -> None:
            nonlocal started_s
            started_s = started_s or time.time()
            job.uncomputed = 0
            job.started = True
            job.context_tokens += len(output.tokens)
            if ended.done():
                return
            if output.finish_reason not in FAILED:
                try:
                    new = known.without(output)
                except EngineFailed as error:
                    ended.set_exception(error)
                    return
                if new is output or new.tokens or new.finish_reason:
                    call.send(self._as_reused(job, new))
            if output.finish_reason:
                ended.set_result(output)

        def entered() -> None:
            loop.call_soon_threadsafe(self._entered, request_id)

        def preempted() -> None:
            loop.call_soon_threadsafe(self._preempted, request_id)

        precision = self._info().precision
        engine_request = _engine_request(request_id, request, precision, entered, preempted)
        salt = engine_request.generation.cache_salt
        job.salt = "" if holds_exact_kv(salt) else salt
        self._engine.submit(engine_request, step)
        if request.handle is not None:
            self._prefetches.pop(request.handle.transfer_id, None)  # from here on the engine imports or drops it
        last = await ended
        ended_s = time.time()
        handover = last if isinstance(last, Handover) else None
        if isinstance(last, TokenStep) and (error := failure(request.job.job_id, last)) is not None:
            raise error
        return DecodeReply(await self._transfer(job), queued_s, started_s, ended_s, handover)

    async def leave(self, request: LeaveRequest, call: ServerCall) -> None:
        """End a decode that goes on elsewhere; the reply of its call has the handover. Raises NotFound."""
        running = self.find(request.job_id)
        export = self._kv.cache_export(request.transfer_id, request.start, call.peer)
        left = await self._engine.leave(running.request_id, export)
        ended = running.job.ended
        if left is None or ended is None or ended.done():
            raise NotFound(f"{request.job_id}: its decode has ended, or has not begun")
        handle = None
        if left.tokens > request.start:
            handle = running.handle(self._kv, request.transfer_id, request.start, left.tokens)
        ended.set_result(Handover(handle, left.state))

    def look(self) -> None:
        """Ask gateways to have jobs migrate where the KV memory or the speed of this instance does not suffice for all
        that decode here; to be called a few times per second.
        """
        stayers = [
            Stayer(name, *job.ahead, job.request.job.slo.weight, job.request.job.slo.tpot_s, job.asked_mono)
            for name, job in self._active.items()
            if job.started and job.has_blocks and job.request.tell_leaves
        ]
        if not stayers:
            return
        if self._roles.role is Role.PREFILL:
            self._let_kept_leave()
        info, stats, now_mono = self._info(), self._engine.stats(), time.monotonic()
        token_s, size = self._engine.steps.recent_token_s(), info.block_size
        leavers = leaves_for_memory(
            stayers, stats.total_blocks * size, stats.free_blocks * size, token_s, size, now_mono
        )
        for name in leavers:
            self._ask_to_leave(self._active[name], Leave(LeaveCause.MEMORY))
        gain = info.rates.step.gain if info.rates.step is not None else 1.0
        slow = leaves_for_speed(stayers, token_s / gain, now_mono) if not leavers else None
        if slow is not None:
            self._ask_to_leave(self._active[slow], Leave(LeaveCause.TPOT, tpot_s=token_s / gain))

    def _let_kept_leave(self) -> None:
        """Ask gateways to have those jobs migrate that a prefill instance is not to decode to their ends."""
        busy_share, now_mono = self._engine.steps.busy_share, time.monotonic()
        for job in self._active.values():
            given = job.context_tokens - job.request.prompt_tokens
            keep_tokens, tells = job.request.keep_tokens, job.started and job.request.tell_leaves
            if tells and leaves_kept(given, keep_tokens, busy_share, job.asked_mono, now_mono):
                self._ask_to_leave(job, Leave(LeaveCause.KEPT))

    def move(self, job_id: str, to: str = "") -> None:
        """Ask the gateway of a job to have it migrate to `to`, or to any instance.

        Raises NotFound for a job that does not decode here, Conflict for one that cannot migrate.
        """
        job, here = self.find(job_id).job, self._info().instance_id
        if to == here:
            raise Conflict(f"{job_id} decodes on {to} already")
        if not job.request.tell_leaves:
            raise Conflict(f"{job_id} stays on {here}: its gateway does not migrate it")
        self._ask_to_leave(job, Leave(LeaveCause.OPERATOR, to))

    def _let_all_leave(self) -> None:
        """A drain has begun, or goes on: ask gateways to have their jobs migrate."""
        if self._drain_news is not None:
            self._drain_news.cancel()
            self._drain_news = None
        if not self._roles.draining or not self._active:
            return
        for job in self._active.values():
            if job.request.tell_leaves:
                self._ask_to_leave(job, Leave(LeaveCause.DRAIN))
        self._drain_news = asyncio.get_running_loop().call_later(DRAIN_NEWS_S, self._let_all_leave)

    def _ask_to_leave(self, job: _Decode, leave: Leave) -> None:
        job.asked_mono = time.monotonic()
        job.call.send(TokenStep([], leave=leave))

    def find(self, job_id: str) -> "RunningDecode":
        """A job that decodes here. Raises NotFound."""
        for request_id, job in self._active.items():
            if job.request.job.job_id == job_id:
                return RunningDecode(request_id, job)
        raise NotFound(f"{job_id}: no such job decodes at {self._info().instance_id}")

    def _as_reused(self, job: _Decode, step: TokenStep) -> TokenStep:
        """Correct the step where the import failed on which its count of reused tokens relies."""
        if step.reused is None or job.imported is None:
            return step
        report = self._kv.known_report(job.imported)
        return msgspec.structs.replace(step, reused=as_reported(step.reused, report))

    def _entered(self, request_id: str) -> None:
        if (job := self._active.get(request_id)) is None:
            return
        if job.repeat is not None:
            self._end_notices(job)
            job.call.send(TokenStep([], pause=Pause(self._pause_s(job), computing=True)))
        job.has_blocks, job.pause, self._beside = True, 0, None

    def _preempted(self, request_id: str) -> None:
        if (job := self._active.get(request_id)) is None:
            return
        self._pauses += 1
        job.has_blocks, job.pause, self._beside = False, self._pauses, None
        if job.request.tell_pauses and (job.started or job.request.job.started):
            self._notify_pause(job)

    def _notify_pause(self, job: _Decode) -> None:
        """Notify the client now, and again while the pause lasts."""
        self._end_notices(job)
        job.call.send(TokenStep([], pause=Pause(self._pause_s(job))))
        job.repeat = asyncio.get_running_loop().call_later(PAUSE_NEWS_S, self._notify_pause, job)

    def _end_notices(self, job: _Decode) -> None:
        if job.repeat is not None:
            job.repeat.cancel()
            job.repeat = None

    def _pause_s(self, job: _Decode) -> float:
        """Seconds until the next token of a paused job is expected."""
        info, now_mono = self._info(), time.monotonic()
        if self._beside is None or now_mono - self._beside[0] > BESIDE_S:
            self._beside = now_mono, self._have_blocks(info.block_size)
        first = sum(one.context_tokens for one in self._active.values() if one.pause > job.pause)
        room = self._engine.stats().total_blocks * info.block_size - first
        return pause_s(self._beside[1], room, *job.ahead, info.block_size, info.rates.step, info.chunk_size)

    def _have_blocks(self, block_size: int) -> Beside:
        stats, inside = self._engine.stats(), [one for one in self._active.values() if one.has_blocks]
        held, used = sum(one.context_tokens for one in inside), (stats.total_blocks - stats.free_blocks) * block_size
        return Beside.from_jobs([one.ahead for one in inside], block_size, own_part(used, held))

    async def _transfer(self, job: _Decode) -> TransferReport:
        if job.imported is None:
            return TransferReport(TransferOutcome.LOCAL)
        report = await self._kv.import_report(job.imported)
        job.reported = True
        self._on_transfer(job.imported.handle, report)
        return report


def as_reported(reused: Reused, report: TransferReport | None) -> Reused:
    """Without the tokens that were computed here because their import failed."""
    if report is None or report.outcome is not TransferOutcome.RECOMPUTED:
        return reused
    return msgspec.structs.replace(reused, tokens=reused.tokens - reused.imported, imported=0)


@dataclass(frozen=True, slots=True)
class RunningDecode:
    """A job that decodes here, and the engine's name for it."""

    request_id: str
    job: _Decode

    def handle(self, kv: KvPort, transfer_id: str, start: int, tokens: int) -> KvHandle:
        """Of its KV."""
        handle = kv.handle(transfer_id, tokens, Codec.RAW, self.job.request.generation.adapter)
        return msgspec.structs.replace(handle, start=start, salt=self.job.salt)


def _known_tokens(request: DecodeRequest) -> int:
    """Tokens after which the engine goes on: of the prompt, and of an answer that has begun in another engine."""
    return request.prompt_tokens + (length(request.known) if request.resumes else 0)


def _to_prefill(request: DecodeRequest) -> int:
    """Of these, tokens without KV, except for the last one: its step is the first decode."""
    imported = request.handle.tokens if request.handle is not None else 0
    return max(0, _known_tokens(request) - 1 - max(imported, request.saved))


def _engine_request(
    request_id: str, request: DecodeRequest, precision: str, entered: Callable[[], None], preempted: Callable[[], None]
) -> EngineRequest:
    """precision: of the engine."""
    handle, generation = request.handle, request.generation
    if handle is not None and (salt := import_salt(handle, precision, generation.cache_salt)) != generation.cache_salt:
        generation = msgspec.structs.replace(generation, cache_salt=salt)
    return EngineRequest(
        request_id=request_id,
        job=request.job,
        prompt_token_ids=unpacked(request.prompt),
        generation=generation,
        max_tokens=request.job.max_tokens,
        import_from=handle,
        forced_tokens=unpacked(request.known),
        resumes=request.resumes,
        state=request.state,
        entered=entered,
        preempted=preempted,
    )
