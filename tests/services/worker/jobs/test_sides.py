"""The prefill and decode sides over an engine that does what the test says."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from services.worker.engines.base import EngineInfo, EngineRequest, EngineStats, Sink, deliver
from services.worker.jobs.decode import DecodeService
from services.worker.jobs.dispatcher import Dispatcher
from services.worker.jobs.lengths import LengthClient
from services.worker.jobs.prefill import PrefillService
from services.worker.jobs.prefill_queue import PrefillQueue
from services.worker.jobs.roles import RoleState
from shared.domain.instance import Role
from shared.domain.job import Generation, JobView
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.domain.route import InstanceRef, PolicySpec
from shared.errors import Busy, EngineFailed, InvalidRequest, PolyphaseError, Unavailable, WrongRole
from shared.policy import registry
from shared.runtime.tasks import Background
from shared.wire.messages import (
    DecodeRequest,
    PrefetchRequest,
    PrefillReply,
    PrefillRequest,
    PrefillStarted,
    TokenStep,
)
from shared.wire.rpc_server import ServerCall

TARGET = InstanceRef("d0", 1, "tcp://127.0.0.1:1")


class ScriptedEngine:
    """Keeps what it is given; the test steps it."""

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.arrived = asyncio.Event()

    async def start(self) -> EngineInfo:
        raise NotImplementedError

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        self.requests.append(request)
        self.sinks[request.request_id] = sink
        self.arrived.set()

    def abort(self, request_id: str) -> None:
        if self.sinks.pop(request_id, None):
            self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        """Nothing to stop."""

    def step(self, output: TokenStep) -> None:
        request_id, sink = next(iter(self.sinks.items()))
        if output.finish_reason:
            del self.sinks[request_id]
        sink(output)


class ScriptedPort:
    """The KV side, as a list of what was asked."""

    staged_bytes = 0

    def __init__(self) -> None:
        self.released: list[str] = []
        self.dropped: list[str] = []
        self.reserved: dict[str, bytes] = {}
        self.prefetched: dict[str, float] = {}
        self.full = False
        self.callbacks: dict[str, Callable[[], None]] = {}

    def start(self, tasks: Background) -> None:
        """Nothing runs."""

    def handle(self, transfer_id: str, tokens: int, codec: Codec) -> KvHandle:
        return KvHandle(transfer_id, "p0", 1, "f", (), tokens, "bfloat16", codec)

    def when_staged(self, transfer_id: str, callback: Callable[[], None]) -> None:
        self.callbacks[transfer_id] = callback

    def forget(self, transfer_id: str) -> None:
        self.callbacks.pop(transfer_id, None)

    async def import_report(self, transfer_id: str) -> TransferReport:
        return TransferReport(TransferOutcome.PULLED, tokens=3)

    async def release(self, transfer_ids: list[str]) -> None:
        self.released += transfer_ids

    def reserve(self, transfer_id: str, tokens: int, owner: bytes) -> bool:
        if self.full:
            return False
        self.reserved[transfer_id] = owner
        return True

    def when_room(self, callback: Callable[[], None]) -> None:
        self.room = callback

    async def release_of(self, owner: bytes) -> None:
        await self.release([each for each, known in self.reserved.items() if known == owner])

    async def prefetch(self, handle: KvHandle, keep_s: float) -> None:
        self.prefetched[handle.transfer_id] = keep_s

    async def drop(self, transfer_id: str) -> None:
        self.dropped.append(transfer_id)


class Call:
    """The caller's end."""

    timeout_s = 5.0

    def __init__(self, peer: bytes = b"gateway") -> None:
        self.peer = peer
        self.items: list[Any] = []

    def send(self, item: object) -> None:
        self.items.append(item)


class FixedDispatcher:
    """Always the same instance, or none."""

    def __init__(self) -> None:
        self.asked = 0
        self.refusal: PolyphaseError | None = None

    def choose(
        self, job: JobView, policy: PolicySpec | None, exclude: tuple[str, ...] = ()
    ) -> tuple[InstanceRef, tuple[()]]:
        self.asked += 1
        if self.refusal is not None:
            raise self.refusal
        return TARGET, ()


class Side:
    """Both sides of an instance, wired as the app does."""

    def __init__(self, role: Role, chunk_size: int = 4) -> None:
        self.engine, self.port, self.call = ScriptedEngine(), ScriptedPort(), Call()
        self.roles = RoleState(role)
        self.dispatcher = FixedDispatcher()
        queue = PrefillQueue(registry.prefill_order("fcfs"), 4)
        lengths = LengthClient("", 0.1)
        dispatcher = cast(Dispatcher, self.dispatcher)
        self._prefill = PrefillService(self.engine, self.port, self.roles, queue, dispatcher, lengths, chunk_size)
        self._decode = DecodeService(self.engine, self.port, self.roles)

    async def prefill(self, request: PrefillRequest) -> "asyncio.Task[PrefillReply]":
        task = asyncio.create_task(self._prefill.prefill(request, cast(ServerCall, self.call)))
        await asyncio.wait_for(self.engine.arrived.wait(), 5)
        return task

    async def decode(self, request: DecodeRequest) -> "asyncio.Task[Any]":
        task = asyncio.create_task(self._decode.decode(request, cast(ServerCall, self.call)))
        await asyncio.wait_for(self.engine.arrived.wait(), 5)
        return task


def prefill_request(tokens: int = 3, **changes: Any) -> PrefillRequest:
    view = JobView("job", tokens, changes.pop("max_tokens", 8))
    return PrefillRequest(view, "t1", list(range(tokens)), Generation(b"", 1.0), **changes)


def decode_request(handle: KvHandle | None = None) -> DecodeRequest:
    return DecodeRequest(JobView("job", 3, 8), [1, 2, 3], Generation(b"", 1.0), handle)


async def test_a_prefill_answers_with_its_token_the_instance_and_the_handle() -> None:
    side = Side(Role.PREFILL)
    task = await side.prefill(prefill_request())
    side.engine.step(TokenStep([42], "length"))
    reply = await task
    assert reply.tokens == [42]
    assert reply.decode == TARGET
    assert reply.handle is not None
    assert reply.handle.tokens == 3
    assert reply.finish_reason == ""
    assert side.engine.requests[0].export_to == "t1"
    assert side.roles.inflight == 0


async def test_a_first_token_that_ends_the_answer_needs_no_dispatch() -> None:
    side = Side(Role.PREFILL)
    task = await side.prefill(prefill_request())
    side.engine.step(TokenStep([2], "stop"))
    reply = await task
    assert reply.finish_reason == "stop"
    assert side.dispatcher.asked == 0
    assert reply.decode is None


async def test_a_long_prompt_names_its_decode_instance_after_the_first_chunk() -> None:
    side = Side(Role.PREFILL, chunk_size=4)
    task = await side.prefill(prefill_request(10))
    side.port.callbacks["t1"]()
    assert isinstance(side.call.items[0], PrefillStarted)
    assert side.call.items[0].handle.tokens == 10
    side.engine.step(TokenStep([42], "length"))
    assert (await task).decode == TARGET
    assert side.dispatcher.asked == 1


@pytest.mark.parametrize("refusal", [Unavailable("no decode instance is ready"), Busy("all are full")])
async def test_a_prefill_without_a_decode_instance_ends_well_and_says_why(refusal: PolyphaseError) -> None:
    side = Side(Role.PREFILL, chunk_size=4)
    side.dispatcher.refusal = refusal
    task = await side.prefill(prefill_request(10))
    side.port.callbacks["t1"]()  # nothing to announce, and no error
    assert side.call.items == []
    side.engine.step(TokenStep([42], "length"))
    reply = await task
    assert reply.decode is None
    assert reply.handle is not None
    assert reply.tokens == [42]
    assert [reason.what for reason in reply.reasons] == [refusal.message]
    assert side.port.released == []  # it waits for whoever finds a decode instance, or for its lease


async def test_a_decode_instance_that_comes_while_the_prompt_is_computed_is_taken() -> None:
    side = Side(Role.PREFILL, chunk_size=4)
    side.dispatcher.refusal = Unavailable("no decode instance is ready")
    task = await side.prefill(prefill_request(10))
    side.port.callbacks["t1"]()
    side.dispatcher.refusal = None
    side.engine.step(TokenStep([42], "length"))
    reply = await task
    assert (reply.decode, reply.reasons) == (TARGET, ())


async def test_an_answer_that_is_over_leaves_nothing_staged() -> None:
    side = Side(Role.PREFILL)
    task = await side.prefill(prefill_request(decode=TARGET))
    side.engine.step(TokenStep([2], "stop"))
    assert (await task).handle is None
    assert side.port.released == ["t1"]


async def test_a_cancelled_prefill_leaves_nothing_behind() -> None:
    side = Side(Role.PREFILL)
    task = await side.prefill(prefill_request())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert side.engine.aborted == ["job#p1"]
    assert side.port.released == ["t1"]
    assert side.roles.inflight == 0


async def test_an_engine_error_is_an_error_and_frees_the_staging() -> None:
    side = Side(Role.PREFILL)
    task = await side.prefill(prefill_request())
    side.engine.step(TokenStep([], "error", "no room"))
    with pytest.raises(EngineFailed, match="no room"):
        await task
    assert side.port.released == ["t1"]


async def test_a_decode_streams_steps_and_reports_the_transfer() -> None:
    side = Side(Role.DECODE)
    task = await side.decode(decode_request(side.port.handle("t1", 3, Codec.RAW)))
    side.engine.step(TokenStep([1]))
    side.engine.step(TokenStep([2], "stop", 7))
    reply = await task
    assert side.call.items == [TokenStep([1]), TokenStep([2], "stop", 7)]
    assert reply.transfer.outcome is TransferOutcome.PULLED


async def test_prompts_that_a_decode_instance_has_to_compute_count_as_queued_until_their_first_token() -> None:
    side = Side(Role.DECODE)
    handle = KvHandle("t1", "p0", 1, "fp", (), 2, "bfloat16")
    for given, queued, tokens in ((None, 1, 2), (handle, 0, 0)):  # the last token is the first decode's
        task = await side.decode(decode_request(given))
        assert (side._decode.queued, side._decode.queued_tokens) == (queued, tokens)
        side.engine.step(TokenStep([5], ""))
        assert (side._decode.queued, side._decode.queued_tokens) == (0, 0)
        side.engine.step(TokenStep([6], "stop"))
        await task
        side.engine.arrived.clear()


async def test_a_local_decode_says_so() -> None:
    side = Side(Role.DECODE)
    task = await side.decode(decode_request())
    side.engine.step(TokenStep([1], "length"))
    assert (await task).transfer.outcome is TransferOutcome.LOCAL


async def test_a_cancelled_decode_aborts_the_engine() -> None:
    side = Side(Role.DECODE)
    task = await side.decode(decode_request())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert side.engine.aborted == ["job#d1"]
    assert side.roles.inflight == 0


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4, Codec.FP8])
async def test_approximate_kv_gets_a_salt_that_exact_requests_never_have(codec: Codec) -> None:
    side = Side(Role.DECODE)
    task = await side.decode(decode_request(side.port.handle("t1", 3, codec)))
    assert "t1" in side.engine.requests[0].generation.cache_salt
    side.engine.step(TokenStep([1], "length"))
    await task


async def test_generated_tokens_count_as_context() -> None:
    side = Side(Role.DECODE)
    task = await side.decode(decode_request())
    for given, context in (([5], 4), ([6, 7], 6)):
        side.engine.step(TokenStep(given))
        assert side._decode.context_tokens == context
    side.engine.step(TokenStep([8], "stop"))
    await task
    assert side._decode.context_tokens == 0


async def test_a_prompt_whose_kv_has_no_room_waits_outside_of_the_engine() -> None:
    side = Side(Role.PREFILL)
    side.port.full = True
    task = asyncio.create_task(side._prefill.prefill(prefill_request(), cast(ServerCall, side.call)))
    local = asyncio.create_task(  # nothing of it is staged, but it does not overtake either
        side._prefill.prefill(prefill_request(export=False), cast(ServerCall, side.call))
    )
    for _ in range(5):
        await asyncio.sleep(0)
    assert side.engine.requests == []
    side.port.full = False
    side.port.room()
    await asyncio.wait_for(side.engine.arrived.wait(), 5)
    for _ in range(2):
        side.engine.step(TokenStep([42], "length"))
    assert (await task).handle is not None
    assert (await local).handle is None
    assert side.port.reserved == {"t1": b"gateway"}


async def test_what_a_gone_gateway_had_staged_is_released() -> None:
    side = Side(Role.PREFILL)
    task = await side.prefill(prefill_request())
    side.engine.step(TokenStep([42], "length"))
    await task
    await side.port.release_of(b"another")
    assert side.port.released == []
    await side.port.release_of(b"gateway")
    assert side.port.released == ["t1"]


async def test_staged_kv_survives_a_flip() -> None:
    side = Side(Role.PREFILL)
    task = await side.prefill(prefill_request())
    side.engine.step(TokenStep([42], "length"))
    await task
    assert (await side.roles.drain(1)).drained
    side.roles.flip(Role.DECODE)
    side.roles.resume()
    assert side.port.released == []
    assert side.port.reserved == {"t1": b"gateway"}


def prefetch_request(side: Side, name: str = "t1") -> PrefetchRequest:
    return PrefetchRequest(side.port.handle(name, 3, Codec.RAW), keep_s=77.0)


async def test_a_prefetch_is_kept_as_long_as_the_job_may_want_it_not_as_long_as_its_call() -> None:
    side = Side(Role.DECODE)
    await side._decode.prefetch(prefetch_request(side), cast(ServerCall, side.call))
    assert side.port.prefetched == {"t1": 77.0}


async def test_prefetches_of_a_gone_gateway_are_dropped_unless_a_job_has_come_for_them() -> None:
    side = Side(Role.DECODE)
    for name, peer in (("t1", b"a"), ("t2", b"a"), ("t3", b"a"), ("t4", b"b")):
        await side._decode.prefetch(prefetch_request(side, name), cast(ServerCall, Call(peer)))
    task = await side.decode(decode_request(side.port.handle("t1", 3, Codec.RAW)))
    side._decode.forget(["t2"])  # released meanwhile
    await side._decode.drop_of(b"a")
    assert side.port.released == ["t3"]
    side.engine.step(TokenStep([1], "length"))
    await task
    assert side.port.dropped == []


async def test_a_decode_that_is_refused_or_fails_leaves_no_prefetch() -> None:
    side = Side(Role.DECODE)
    handle = side.port.handle("t1", 3, Codec.RAW)
    await side._decode.prefetch(prefetch_request(side), cast(ServerCall, side.call))
    task = await side.decode(decode_request(handle))
    side.engine.step(TokenStep([], "error", "refused"))
    with pytest.raises(EngineFailed):
        await task
    side.roles.draining = True
    with pytest.raises(WrongRole):
        await side._decode.decode(decode_request(handle), cast(ServerCall, side.call))
    assert side.port.dropped == ["t1", "t1"]


async def test_a_job_that_cannot_take_its_step_does_not_cost_the_others_theirs() -> None:
    taken: list[TokenStep] = []
    deliver(lambda _: {}["a bug"], TokenStep([1]))
    deliver(taken.append, TokenStep([2]))
    assert taken == [TokenStep([2])]


@pytest.mark.parametrize(
    ("reason", "error"), [("refused", InvalidRequest), ("error", EngineFailed), ("abort", EngineFailed)]
)
async def test_what_the_engine_refuses_is_the_requests_fault_and_what_fails_is_not(
    reason: str, error: type[PolyphaseError]
) -> None:
    for role in Role:
        side = Side(role)
        request = prefill_request() if role is Role.PREFILL else decode_request()
        task = await (side.prefill(request) if isinstance(request, PrefillRequest) else side.decode(request))
        side.engine.step(TokenStep([], reason, "a prompt of 5 tokens"))
        with pytest.raises(error, match="a prompt of 5 tokens"):
            await task
        assert side.call.items == []
