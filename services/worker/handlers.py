"""The methods of an instance's RPC, and who answers each."""

from services.worker.jobs.decode import DecodeService
from services.worker.jobs.prefill import PrefillService
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from shared.wire.messages import (
    DECODE,
    DRAIN,
    EXPECT,
    FLIP,
    PREDICTED,
    PREFETCH,
    PREFILL,
    RELEASE,
    RESUME,
    DrainReply,
    DrainRequest,
    FlipReply,
    FlipRequest,
    Predicted,
    ReleaseRequest,
    ResumeRequest,
)
from shared.wire.rpc_server import Handlers, ServerCall


def handlers(prefill: PrefillService, decode: DecodeService, roles: RoleState, kv: KvPort) -> Handlers:
    """Those of jobs and of operations."""

    async def drain(request: DrainRequest, _: ServerCall) -> DrainReply:
        roles.obey(request.epoch)
        return await roles.drain(request.timeout_s)

    async def flip(request: FlipRequest, _: ServerCall) -> FlipReply:
        roles.obey(request.epoch)
        return roles.flip(request.role)

    async def predicted(said: Predicted, _: ServerCall) -> None:
        prefill.predicted(said)
        decode.predicted(said)

    async def release(request: ReleaseRequest, _: ServerCall) -> None:
        decode.forget(request.transfer_ids)
        await kv.release(request.transfer_ids)

    async def resume(request: ResumeRequest, _: ServerCall) -> None:
        roles.obey(request.epoch)
        roles.resume()

    return {
        PREFILL: prefill.prefill,
        PREDICTED: predicted,
        RELEASE: release,
        EXPECT: decode.expect,
        PREFETCH: decode.prefetch,
        DECODE: decode.decode,
        DRAIN: drain,
        FLIP: flip,
        RESUME: resume,
    }
