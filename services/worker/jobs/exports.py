"""KV that moves apart from a prefill's hand-over: exports of what this instance holds, and pulls into its prefix cache
ahead of a job.
"""

import asyncio
from collections.abc import Callable

import msgspec

from services.worker.engines.base import Engine, EngineRequest, failure
from services.worker.jobs.decode import DecodeService
from services.worker.jobs.roles import RoleState
from services.worker.kv import import_salt
from services.worker.kv.port import ExpectedImport, KvPort
from shared.domain.instance import InstanceInfo
from shared.domain.job import JobView
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.domain.prompt import length, unpacked
from shared.errors import InvalidRequest, WrongRole
from shared.policy.leaving import PULLS_AT_ONCE
from shared.wire.messages import ExportReply, ExportRequest, PullReply, PullRequest, TokenStep
from shared.wire.rpc_server import ServerCall


class ExportService:
    """Serves `export` and `pull`, in either role. on_transfer: receives a report of each pull."""

    def __init__(
        self,
        engine: Engine,
        kv: KvPort,
        roles: RoleState,
        decodes: DecodeService,
        on_transfer: Callable[[KvHandle, TransferReport], None],
        info: InstanceInfo,
        cached_tokens: int,
    ) -> None:
        """cached_tokens: of a block of its prefix cache; 0: it has none."""
        self._engine = engine
        self._kv = kv
        self._roles = roles
        self._decodes = decodes
        self._on_transfer = on_transfer
        self._info = info
        self._cached_tokens = cached_tokens
        self._sequence = 0
        self._pulling = asyncio.Semaphore(PULLS_AT_ONCE)

    async def export(self, request: ExportRequest, call: ServerCall) -> ExportReply:
        """Stage KV that this instance holds. Raises NotFound for a job that does not decode here."""
        export = self._kv.cache_export(request.transfer_id, request.start, call.peer)
        if request.job_id:
            running = self._decodes.find(request.job_id)
            tokens = await self._engine.export_running(running.request_id, export)
            handle = running.handle(self._kv, request.transfer_id, request.start, tokens)
        else:
            if request.generation is None:
                raise InvalidRequest("generation: required where no job_id is named")
            tokens = await self._engine.export_cached(_cached_request(request), export)
            handle = self._kv.handle(request.transfer_id, tokens, Codec.RAW, request.generation.adapter)
            handle = msgspec.structs.replace(handle, start=request.start)
        return ExportReply(handle if tokens > request.start else None)

    async def pull(self, request: PullRequest, call: ServerCall) -> PullReply:
        """Pull KV into the prefix cache. The reply says whether it is there: KV that fails to arrive is not computed.

        Raises NoRoom if the request allows that; WrongRole while the instance drains.
        """
        if request.prompt_tokens <= request.handle.tokens:
            raise InvalidRequest(
                f"prompt: its {request.prompt_tokens} tokens must be more than the handle's {request.handle.tokens}"
            )
        expected = self._kv.expect(request.handle)  # its lease is renewed while it waits
        try:
            async with self._pulling:
                return await self._pull(request, expected)
        finally:
            self._kv.end(expected)

    async def _pull(self, request: PullRequest, expected: ExpectedImport) -> PullReply:
        handle, generation = request.handle, request.generation
        if self._roles.draining:
            raise WrongRole("this instance is draining")
        self._decodes.check_room(request)
        salt = import_salt(handle, self._info.precision, generation.cache_salt)
        self._sequence += 1
        request_id = f"{request.job.job_id}#i{self._sequence}"
        ended: asyncio.Future[TokenStep] = asyncio.get_running_loop().create_future()

        def step(output: TokenStep) -> None:
            if output.finish_reason and not ended.done():
                ended.set_result(output)

        try:
            self._engine.submit(
                EngineRequest(
                    request_id=request_id,
                    job=request.job,
                    prompt_token_ids=unpacked(request.prompt),
                    generation=msgspec.structs.replace(generation, cache_salt=salt),
                    max_tokens=1,
                    first_token_only=True,
                    wants_token=False,
                    import_from=handle,
                ),
                step,
            )
            arrived = asyncio.ensure_future(expected.complete.wait())
            try:
                await asyncio.wait((ended, arrived), return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrived.cancel()
            report = self._kv.known_report(expected)
            if report is None or report.outcome is not TransferOutcome.RECOMPUTED:
                last = await ended
                if (error := failure(request.job.job_id, last)) is not None:
                    raise error
                report = await self._kv.import_report(expected)
            self._on_transfer(handle, report)
            if report.outcome is TransferOutcome.RECOMPUTED or not self._cached_tokens:
                return PullReply(report)
            return PullReply(report, handle.tokens - handle.tokens % self._cached_tokens)
        finally:
            self._engine.abort(request_id)


def _cached_request(request: ExportRequest) -> EngineRequest:
    """The request whose prefix is looked up."""
    assert request.generation is not None
    view = JobView(request.transfer_id, length(request.prompt), 1)
    return EngineRequest(
        request_id=request.transfer_id,
        job=view,
        prompt_token_ids=unpacked(request.prompt),
        generation=request.generation,
        max_tokens=1,
        first_token_only=True,
        wants_token=False,
    )
