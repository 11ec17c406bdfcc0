"""A worker's two sides over an engine and a KV port that do what a test tells them."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from services.worker.engines.base import EngineInfo, EnginePolicies, EngineRequest, EngineStats, Sink
from services.worker.jobs.adapters import Adapters
from services.worker.jobs.decode import DecodeService
from services.worker.jobs.exports import ExportService
from services.worker.jobs.prefill import Codecs, Dispatcher, PrefillService
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import ExpectedImport, KvPort
from services.worker.rpc import handlers
from shared.domain.instance import InstanceView, Role
from shared.domain.job import Generation, JobView, LengthPrediction
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.domain.prompt import packed
from shared.domain.route import InstanceRef, PolicySpec
from shared.errors import PolyphaseError
from shared.model.adapters import LoraSection
from shared.wire.messages import (
    PREDICTED,
    DecodeReply,
    DecodeRequest,
    Predicted,
    PrefillReply,
    PrefillRequest,
    TokenStep,
)
from shared.wire.rpc_server import Handlers, ServerCall
from tests.services.fake_worker import make_info

TARGET = InstanceRef("d0", 1, "tcp://127.0.0.1:1")
FIRST_TOKEN = TokenStep([42], "length")  # of a prefill: the engine ends there


class ScriptedEngine:
    """Keeps what it is given; the test lets it in and steps it."""

    policies = EnginePolicies()

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.arrived = asyncio.Event()
        self.predictions: dict[str, LengthPrediction] = {}
        self.woken = 0
        self.partly: dict[str, int] = {}

    async def start(self) -> EngineInfo:
        raise NotImplementedError

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        self.requests.append(request)
        self.sinks[request.request_id] = sink
        self.arrived.set()

    def abort(self, request_id: str) -> None:
        if self.sinks.pop(request_id, None):
            self.aborted.append(request_id)

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        self.predictions[request_id] = prediction

    def wake(self) -> None:
        self.woken += 1

    def set_policies(self, policies: EnginePolicies) -> None:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        return EngineStats(partly=self.partly)

    async def close(self) -> None:
        """Nothing to stop."""

    def enter(self, at: int = -1) -> bool:
        """One of the requests is the next; whether it has room."""
        if not self.requests[at].has_room():
            return False
        self.requests[at].entered()
        return True

    def step(self, output: TokenStep) -> None:
        request_id, sink = next(iter(self.sinks.items()))
        if output.finish_reason:
            del self.sinks[request_id]
        sink(output)


class ScriptedPort(KvPort):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(KvHandle("", "p0", 1, "f", (), 0, "bfloat16"))
        self.released: list[str] = []
        self.dropped: list[str] = []
        self.accepted_ids: list[str] = []
        self.reserved: dict[str, bytes] = {}
        self.prefetched: dict[str, float] = {}
        self.announced: dict[str, bytes] = {}
        self.expected: list[ExpectedImport] = []
        self.full = False
        self.callbacks: dict[str, Callable[[], None]] = {}

    def when_staged(self, transfer_id: str, callback: Callable[[], None]) -> None:
        self.callbacks[transfer_id] = callback

    def forget(self, transfer_id: str) -> None:
        self.callbacks.pop(transfer_id, None)

    def expect(self, handle: KvHandle) -> ExpectedImport:
        expected = ExpectedImport(handle)
        self.expected.append(expected)
        return expected

    def end(self, expected: ExpectedImport) -> None:
        self.expected.remove(expected)

    def known_report(self, expected: ExpectedImport) -> TransferReport | None:
        assert expected in self.expected
        return TransferReport(TransferOutcome.PULLED, tokens=3)

    async def release(self, transfer_ids: list[str]) -> None:
        self.released += transfer_ids

    def announce(self, transfer_id: str, tokens: int, owner: bytes) -> None:
        self.announced[transfer_id] = owner

    def reserve(self, transfer_id: str) -> bool:
        if self.full:
            return False
        self.reserved[transfer_id] = self.announced[transfer_id]
        return True

    def when_room(self, callback: Callable[[], None]) -> None:
        self.room = callback

    async def release_of(self, owner: bytes) -> None:
        await self.release([each for each, known in self.announced.items() if known == owner])

    async def accepted(self, transfer_id: str) -> None:
        self.accepted_ids.append(transfer_id)

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
        self.jobs: list[JobView] = []
        self.refusal: PolyphaseError | None = None
        self.views: dict[str, InstanceView] = {}
        self.expected = 0

    def expect(self) -> None:
        self.expected += 1

    async def wait_for_cluster(self) -> None:
        assert self.expected

    def known(self, instance_id: str) -> InstanceView | None:
        return self.views.get(instance_id)

    def choose(
        self, job: JobView, policy: PolicySpec | None, exclude: tuple[str, ...] = ()
    ) -> tuple[InstanceRef, tuple[()]]:
        self.asked += 1
        self.jobs.append(job)
        if self.refusal is not None:
            raise self.refusal
        return TARGET, ()


class Side:
    """Both sides of an instance, wired as the app does."""

    def __init__(self, role: Role, chunk_size: int = 4, *, lossy: bool = True) -> None:
        self.engine, self.port, self.call = ScriptedEngine(), ScriptedPort(), Call()
        self.roles = RoleState(role)
        self.dispatcher = FixedDispatcher()
        dispatcher = cast(Dispatcher, self.dispatcher)
        codecs = Codecs(lambda: make_info("p0", "tcp://a:1"), dispatcher, lossy)
        self.transfers: list[TransferReport] = []
        told = self.transfers.append
        self.prefills = PrefillService(
            self.engine, self.port, self.roles, dispatcher, codecs, lambda: chunk_size, lambda _, report: told(report)
        )
        self.info = make_info("d0", "tcp://a:1", block_size=1, total_blocks=64)
        self.decodes = DecodeService(
            self.engine, self.port, self.roles, lambda _, report: told(report), lambda: self.info
        )
        self.exports = ExportService(
            self.engine, self.port, self.roles, self.decodes, lambda _, report: told(report), self.info, 1
        )

    async def prefill(self, request: PrefillRequest) -> "asyncio.Task[PrefillReply]":
        self.engine.arrived.clear()
        task = asyncio.create_task(self.prefills.prefill(request, cast(ServerCall, self.call)))
        await asyncio.wait_for(self.engine.arrived.wait(), 5)
        return task

    async def prefilled(self, request: PrefillRequest, last: TokenStep = FIRST_TOKEN) -> PrefillReply:
        """The reply to a request whose prompt the engine computes in one step, which ends like this."""
        task = await self.prefill(request)
        self.engine.step(last)
        return await task

    async def decoded(self, request: DecodeRequest, *steps: TokenStep) -> DecodeReply:
        """The reply to a request for which the engine does these steps."""
        task = await self.decode(request)
        for step in steps:
            self.engine.step(step)
        reply: DecodeReply = await task
        return reply

    @property
    def handlers(self) -> Handlers:
        """Those of the RPC."""
        adapters = Adapters(LoraSection(), cast(Any, self.engine), {})
        return handlers(self.prefills, self.decodes, self.exports, self.roles, self.port, adapters)

    async def predicted(self, said: Predicted) -> None:
        await self.handlers[PREDICTED](said, cast(ServerCall, self.call))

    async def decode(self, request: DecodeRequest) -> "asyncio.Task[Any]":
        self.engine.arrived.clear()
        task = asyncio.create_task(self.decodes.decode(request, cast(ServerCall, self.call)))
        await asyncio.wait_for(self.engine.arrived.wait(), 5)
        return task


def prefill_request(tokens: int = 3, **changes: Any) -> PrefillRequest:
    view = JobView("job", tokens, changes.pop("max_tokens", 8))
    return PrefillRequest(view, "t1", packed(range(tokens)), Generation(b"", 1.0), **changes)


def decode_request(handle: KvHandle | None = None) -> DecodeRequest:
    return DecodeRequest(JobView("job", 3, 8), packed([1, 2, 3]), Generation(b"", 1.0), handle)
