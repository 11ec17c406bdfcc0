"""The decode side of an instance: from KV, pulled or computed here, to tokens."""

import asyncio
import time

import msgspec

from services.worker.engines.base import Engine, EngineRequest
from services.worker.jobs.roles import RoleState
from services.worker.kv import lossy_salt
from services.worker.kv.port import KvPort
from shared.domain.instance import Role
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.errors import EngineFailed
from shared.policy.lengths import is_heavy
from shared.wire.messages import DecodeReply, DecodeRequest, PrefetchRequest, TokenStep
from shared.wire.rpc_server import ServerCall


class DecodeService:
    """Serves `decode` and `prefetch`."""

    def __init__(self, engine: Engine, kv: KvPort, roles: RoleState) -> None:
        self._engine = engine
        self._kv = kv
        self._roles = roles
        self._active: dict[str, DecodeRequest] = {}
        self._uncomputed: dict[str, int] = {}  # prompt tokens to prefill here, of requests without a token yet
        self._sequence = 0

    @property
    def active(self) -> list[DecodeRequest]:
        """Jobs being decoded."""
        return list(self._active.values())

    @property
    def heavy(self) -> int:
        """How many of them are predicted long."""
        return sum(is_heavy(request.job) for request in self._active.values())

    @property
    def context_tokens(self) -> int:
        """Prompt tokens of all of them; what they generated is not counted."""
        return sum(len(request.prompt_token_ids) for request in self._active.values())

    @property
    def queued(self) -> int:
        """Jobs whose prompt, or part of it, is to be prefilled here and is not yet."""
        return len(self._uncomputed)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of those."""
        return sum(self._uncomputed.values())

    async def prefetch(self, request: PrefetchRequest, call: ServerCall) -> None:
        """Start pulling before the decode arrives. Cancelling drops what came."""
        transfer_id = request.handle.transfer_id
        try:
            await self._kv.prefetch(request.handle, call.timeout_s)
        except asyncio.CancelledError:
            await asyncio.shield(self._kv.drop(transfer_id))
            raise

    async def decode(self, request: DecodeRequest, call: ServerCall) -> DecodeReply:
        """Stream tokens as items, then say how it ended. Raises WrongRole, EngineFailed."""
        with self._roles.job(Role.DECODE):
            self._sequence += 1
            request_id = f"{request.job.job_id}#d{self._sequence}"
            self._active[request_id] = request
            if (tokens := _to_prefill(request)) > 0:
                self._uncomputed[request_id] = tokens
            try:
                return await self._run(request_id, request, call)
            finally:
                del self._active[request_id]
                self._uncomputed.pop(request_id, None)
                self._engine.abort(request_id)
                if request.handle is not None:
                    self._kv.forget(request.handle.transfer_id)

    async def _run(self, request_id: str, request: DecodeRequest, call: ServerCall) -> DecodeReply:
        ended: asyncio.Future[TokenStep] = asyncio.get_running_loop().create_future()
        queued_s = time.time()
        started_s = 0.0

        def step(output: TokenStep) -> None:
            nonlocal started_s
            started_s = started_s or time.time()
            self._uncomputed.pop(request_id, None)
            if output.finish_reason != "error":
                call.send(output)
            if output.finish_reason and not ended.done():
                ended.set_result(output)

        self._engine.submit(_engine_request(request_id, request), step)
        last = await ended
        ended_s = time.time()
        if last.finish_reason == "error":
            raise EngineFailed(f"{request.job.job_id}: {last.stop_reason or 'the engine gave up'}")
        return DecodeReply(await self._transfer(request.handle), queued_s, started_s, ended_s)

    async def _transfer(self, handle: KvHandle | None) -> TransferReport:
        if handle is None:
            return TransferReport(TransferOutcome.LOCAL)
        return await self._kv.import_report(handle.transfer_id)


def _to_prefill(request: DecodeRequest) -> int:
    """Prompt tokens without KV, but for the last one: its step is the first decode."""
    imported = request.handle.tokens if request.handle is not None else 0
    return max(0, len(request.prompt_token_ids) - 1 - imported)


def _engine_request(request_id: str, request: DecodeRequest) -> EngineRequest:
    handle, generation = request.handle, request.generation
    if handle is not None and handle.codec.lossy:
        # Blocks that hold approximate KV must never be found by a request that wants exact ones.
        generation = msgspec.structs.replace(generation, cache_salt=lossy_salt(handle.transfer_id))
    return EngineRequest(
        request_id=request_id, prompt_token_ids=request.prompt_token_ids, generation=generation,
        max_tokens=request.job.max_tokens, import_from=handle,
    )  # fmt: skip
