"""The methods of an instance's RPC and the spans around them: which service handles each method, and the trace that is
exported when a call has ended.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from services.worker.jobs.adapters import Adapters
from services.worker.jobs.decode import DecodeService
from services.worker.jobs.exports import ExportService
from services.worker.jobs.prefill import PrefillService
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.errors import PolyphaseError
from shared.runtime.logs import in_logs
from shared.wire.messages import (
    DECODE,
    DRAIN,
    EXPECT,
    EXPORT,
    FLIP,
    LEAVE,
    LOAD_ADAPTER,
    MOVE,
    PREDICTED,
    PREFETCH,
    PREFILL,
    PULL,
    RELEASE,
    RESUME,
    UNLOAD_ADAPTER,
    DecodeReply,
    DecodeRequest,
    DrainReply,
    DrainRequest,
    FlipReply,
    FlipRequest,
    LoadAdapterReply,
    LoadAdapterRequest,
    MoveRequest,
    Predicted,
    PrefillReply,
    PrefillRequest,
    PrefillStarted,
    ReleaseRequest,
    ResumeRequest,
    TokenStep,
    UnloadAdapterRequest,
)

if TYPE_CHECKING:
    from shared.runtime.otlp import Trace, Tracer  # OpenTelemetry is heavy, and loaded only where tracing is on
from shared.wire.rpc_server import Handlers, ServerCall

Figures = dict[str, str | int | float | bool | list[str]]


def handlers(
    prefill: PrefillService,
    decode: DecodeService,
    exports: ExportService,
    roles: RoleState,
    kv: KvPort,
    adapters: Adapters,
) -> Handlers:
    async def drain(request: DrainRequest, _: ServerCall) -> DrainReply:
        roles.obey(request.epoch)
        return await roles.drain(request.timeout_s)

    async def flip(request: FlipRequest, _: ServerCall) -> FlipReply:
        roles.obey(request.epoch)
        return roles.flip(request.role)

    async def predicted(prediction: Predicted, _: ServerCall) -> None:
        prefill.predicted(prediction)
        decode.predicted(prediction)

    async def release(request: ReleaseRequest, _: ServerCall) -> None:
        decode.forget(request.transfer_ids)
        await kv.release(request.transfer_ids)

    async def resume(request: ResumeRequest, _: ServerCall) -> None:
        roles.obey(request.epoch)
        roles.resume()

    async def move(request: MoveRequest, _: ServerCall) -> None:
        roles.obey(request.epoch)
        decode.move(request.job_id, request.to)

    async def load_adapter(request: LoadAdapterRequest, _: ServerCall) -> LoadAdapterReply:
        roles.obey(request.epoch)
        return await adapters.load(request)

    async def unload_adapter(request: UnloadAdapterRequest, _: ServerCall) -> None:
        roles.obey(request.epoch)
        await adapters.unload(request)

    return {
        PREFILL: prefill.prefill,
        PREDICTED: predicted,
        RELEASE: release,
        EXPECT: decode.expect,
        PREFETCH: decode.prefetch,
        DECODE: decode.decode,
        LEAVE: decode.leave,
        EXPORT: exports.export,
        PULL: exports.pull,
        DRAIN: drain,
        FLIP: flip,
        RESUME: resume,
        MOVE: move,
        LOAD_ADAPTER: load_adapter,
        UNLOAD_ADAPTER: unload_adapter,
    }


def traced(handlers: Handlers, tracer: "Tracer", instance_id: str, chunk_tokens: Callable[[], int]) -> Handlers:
    """`handlers`, with spans around prefill and decode, below the span of the attempt that the call is for.
    chunk_tokens: of the engine's steps at the moment.
    """
    do_prefill: Callable[[PrefillRequest, ServerCall], Awaitable[PrefillReply]] = handlers[PREFILL]
    do_decode: Callable[[DecodeRequest, ServerCall], Awaitable[DecodeReply]] = handlers[DECODE]
    who: Figures = {"polyphase.instance.id": instance_id}

    async def prefill(request: PrefillRequest, call: ServerCall) -> PrefillReply:
        trace = _trace(tracer, request.trace)
        if trace is None:
            return await do_prefill(request, call)
        began_s, watched, chunk = time.time(), _WatchedCall(call), chunk_tokens()
        try:
            reply = await do_prefill(request, watched)
        except BaseException as error:
            _add_unfinished(trace, "prefill", began_s, who, error)
            raise
        _add_prefill(trace, request, reply, watched, who, chunk)
        return reply

    async def decode(request: DecodeRequest, call: ServerCall) -> DecodeReply:
        trace = _trace(tracer, request.trace)
        if trace is None:
            return await do_decode(request, call)
        began_s, watched = time.time(), _WatchedCall(call)
        try:
            reply = await do_decode(request, watched)
        except BaseException as error:
            if watched.first_s:
                trace.add("decode_queue", began_s, watched.first_s, who)
                _add_unfinished(trace, "decode", watched.first_s, who, error)
            else:
                _add_unfinished(trace, "decode_queue", began_s, who, error)
            raise
        if request.handle is not None and reply.transfer.started_s:
            _add_transfer(trace, request.handle, reply.transfer, who)
        trace.add("decode_queue", reply.queued_s, reply.started_s or reply.ended_s, who)
        trace.add("decode", reply.started_s or reply.ended_s, reply.ended_s, who)
        return reply

    return {**handlers, PREFILL: prefill, DECODE: decode}


class _WatchedCall(ServerCall):
    """A call that notes when its first item left."""

    def __init__(self, call: ServerCall) -> None:
        self._call = call
        self.timeout_s = call.timeout_s
        self.peer = call.peer
        self.first_s = 0.0
        self.first: Any = None

    def send(self, item: object) -> None:
        notice = isinstance(item, TokenStep) and (item.pause is not None or item.leave is not None)
        if not self.first_s and not notice:
            self.first_s, self.first = time.time(), item
        self._call.send(item)


def _trace(tracer: "Tracer", wire: str) -> "Trace | None":
    trace = tracer.remote(wire) if wire else None
    if trace is not None:
        in_logs(trace.trace_id)
    return trace


def _add_unfinished(trace: "Trace", name: str, began_s: float, who: Figures, error: BaseException) -> None:
    """A cancelled call is no failure: its client may have all it wanted."""
    code = error.code if isinstance(error, PolyphaseError) else type(error).__name__
    if isinstance(error, asyncio.CancelledError):
        trace.add(name, began_s, time.time(), {**who, "polyphase.cancelled": True})
    else:
        trace.add(name, began_s, time.time(), who, error=code)


def _add_prefill(
    trace: "Trace", request: PrefillRequest, reply: PrefillReply, watched: _WatchedCall, who: Figures, chunk: int
) -> None:
    computed = max(1, request.prompt_tokens - request.saved)
    trace.add("queue", reply.queued_s, reply.started_s, who)
    figures: Figures = {
        "polyphase.prompt_tokens": request.prompt_tokens,
        "polyphase.known_cached_tokens": request.saved,
        "polyphase.chunk_tokens": chunk,
        "polyphase.chunks": -(-computed // chunk),
    }
    if reply.decode is not None:
        figures["polyphase.decode.instance.id"] = reply.decode.instance_id
    if reply.reasons:
        figures["polyphase.reasons"] = [reason.line for reason in reply.reasons]
    span = trace.child("prefill", reply.started_s, who)
    if isinstance(watched.first, PrefillStarted):
        span.event("first_chunk_staged", watched.first_s)
    span.end(max(reply.started_s, reply.ended_s), figures)


def _add_transfer(trace: "Trace", handle: KvHandle, report: TransferReport, who: Figures) -> None:
    figures: Figures = {
        **who,
        "polyphase.transfer.from": handle.instance_id,
        "polyphase.transfer.outcome": report.outcome.value,
        "polyphase.transfer.tokens": report.tokens,
        "polyphase.transfer.bytes": report.wire_bytes,
        "polyphase.transfer.codec": handle.codec.value,
    }
    if report.transport:
        figures["polyphase.transfer.transport"] = report.transport
    failed = report.outcome is TransferOutcome.RECOMPUTED
    trace.add("transfer", report.started_s, report.ended_s, figures, error=report.outcome.value if failed else "")
