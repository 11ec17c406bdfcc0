"""A cluster without engines: a scheduler, instances and predictors on real sockets that follow the protocol.

Their fields make them fail, refuse or wait. `running_cluster` starts one with a gateway's pipeline.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import zmq
from prometheus_client import CollectorRegistry

from gateway.job import Job, JobSpec
from gateway.lengths import LengthClient
from gateway.metrics import GatewayMetrics
from gateway.pipeline import Pipeline
from gateway.reports import Reporter
from gateway.settings import GatewaySettings
from services.launcher.ports import is_free
from shared.domain.job import Generation, LengthPrediction, Slo
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.domain.prompt import unpacked
from shared.domain.route import InstanceRef, PrefixPull, Route
from shared.errors import EngineFailed, NoRoom, PolyphaseError, Unavailable
from shared.wire import messages as wire
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.rpc_client import RpcClients
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets
from tests.ports import free_address

PROMPT = [5, 6, 7, 8, 9]
_job_numbers = itertools.count()


def next_token(tokens: list[int]) -> int:
    """The "model": each token depends on all tokens before it."""
    return (sum(tokens) * 31 + len(tokens) * 7) % 1000


def answer(prompt: list[int], count: int) -> list[int]:
    """The tokens that an undisturbed run gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def forever(_: object = None) -> None:
    await asyncio.Event().wait()


async def listen(server: RpcServer) -> RpcServer:
    """Start a server; libzmq frees the address of a closed socket a little later."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await server.__aenter__()
            except zmq.ZMQError:
                await asyncio.sleep(0.02)


def make_job(
    prompt: list[int],
    max_tokens: int = 8,
    *,
    carry: bool = True,
    local_only: bool = False,
    timeout_s: float = 600.0,
    job_id: str = "",
    salt: str = "",
    caller: str = "",
    age_s: float = 0.0,
    slo: Slo | None = None,
    session: str = "",
) -> tuple[Job, list[wire.TokenStep]]:
    """A job that arrived `age_s` ago, and the list in which its steps gather."""
    steps: list[wire.TokenStep] = []
    generation = Generation(b"", time.time() - age_s, salt)
    job_id = job_id or f"job-{next(_job_numbers)}"
    spec = JobSpec(job_id, prompt, generation, max_tokens, carry, local_only, slo or Slo(), caller, session=session)
    return Job(spec, steps.append, "gateway-0", time.monotonic() + timeout_s), steps


def tokens_of(steps: list[wire.TokenStep]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@dataclass
class Worker:
    """An instance. `before_token(n)` may raise or wait before the n-th token of each decode; 0 is also for prefills."""

    name: str
    sockets: Sockets
    address: str = field(default_factory=free_address)
    decode_at: "Worker | None" = None  # what the dispatcher of a prefill instance names
    refuse: Exception | None = None
    full: bool = False  # refuses decodes that request room
    chunked: bool = False  # announces the decode instance as the prefill begins
    dispatches: bool = True  # as a prefill instance
    stubborn: bool = False  # replies to a cancelled prefill
    fetching: "asyncio.Event | None" = None  # prefetches wait for it
    stop_token: int | None = None  # at which a prefill ends the answer
    twist: int = 0  # added to each token: arithmetic unlike that of other instances
    before_token: "Callable[[int], object] | None" = None
    held: "int | None" = None  # tokens of each prompt in its prefix cache; None: it reports nothing about them
    exports: list[wire.ExportRequest] = field(default_factory=list)
    pulls: list[wire.PullRequest] = field(default_factory=list)
    leaves: list[wire.LeaveRequest] = field(default_factory=list)
    no_export: Exception | None = None
    no_pull: Exception | None = None
    no_leave: Exception | None = None
    holds: bool = True  # what exports are requested of
    arrives: bool = True  # what it pulls
    leaving: dict[str, "asyncio.Future[None]"] = field(default_factory=dict)  # by job
    answers: dict[str, list[int]] = field(default_factory=dict)  # prompt and answer so far of each job that decodes
    prefills: list[wire.PrefillRequest] = field(default_factory=list)
    decodes: list[wire.DecodeRequest] = field(default_factory=list)
    calls: list[ServerCall] = field(default_factory=list)  # of `decodes`
    prefetched: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # cancelled prefetches
    timeouts: list[float] = field(default_factory=list)  # of all calls
    wanted_room: list[bool] = field(default_factory=list)  # of each decode that arrived
    expected: list[wire.ExpectRequest] = field(default_factory=list)
    predictions: list[wire.Predicted] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    server: RpcServer | None = None

    @property
    def ref(self) -> InstanceRef:
        return InstanceRef(self.name, 1, self.address)

    def reset(self) -> None:
        """Forget all requests, and behave."""
        for each in fields(self):
            if each.default is not MISSING and each.name not in ("server", "decode_at"):
                setattr(self, each.name, each.default)
            elif each.default_factory is not MISSING and each.name != "address":
                setattr(self, each.name, each.default_factory())

    async def start(self) -> None:
        handlers = {
            wire.PREFILL: self.prefill,
            wire.PREDICTED: self.predicted,
            wire.DECODE: self.decode,
            wire.EXPECT: self.expect,
            wire.EXPORT: self.export,
            wire.PULL: self.pull,
            wire.LEAVE: self.leave,
            wire.PREFETCH: self.prefetch,
            wire.RELEASE: self.release,
        }
        self.server = await listen(RpcServer(self.sockets, self.address, handlers))

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.__aexit__(None, None, None)
            self.server = None
            # Until libzmq has freed the address, a call may still be sent, and is then lost.
            port = int(self.address.rpartition(":")[2])
            await until(lambda: is_free("127.0.0.1", port))

    def fail_once(self, error: Exception) -> None:
        """The next token fails."""

        def fail(_: int) -> None:
            self.before_token = None
            raise error

        self.before_token = fail

    def hang_at(self, token: int) -> asyncio.Event:
        """Set when the worker waits for ever before that token."""
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await forever()

        self.before_token = lambda count: hang() if count == token else asyncio.sleep(0)
        return reached

    def pause_at(self, token: int, *pauses: wire.Pause, then: Callable[[], Awaitable[object]] = forever) -> None:
        """Report before that token of each decode that the job is paused, and wait for `then`."""

        async def before(count: int) -> None:
            if count == token:
                for pause in pauses:
                    self.calls[-1].send(wire.TokenStep([], pause=pause))
                await then()

        self.before_token = before

    async def prefill(self, request: wire.PrefillRequest, call: ServerCall) -> wire.PrefillReply:
        queued_s = time.time()
        if self.refuse:
            raise self.refuse
        self.prefills.append(request)
        self.timeouts.append(call.timeout_s)
        dispatched = self.decode_at.ref if self.dispatches and self.decode_at else None
        target = request.decode or dispatched
        handle = KvHandle(request.transfer_id, self.name, 1, "f", (), request.prompt_tokens, "bfloat16")
        started_s = time.time()
        try:
            if self.chunked and target is not None:
                call.send(wire.PrefillStarted(target, handle))
            await self._wait(0)
        except asyncio.CancelledError:
            self.cancelled.set()
            if not self.stubborn:
                raise
        token = next_token(unpacked(request.prompt))
        finish = "stop" if request.want_token and token == self.stop_token else ""
        tokens = [token] if request.want_token else []
        times = {"queued_s": queued_s, "started_s": started_s, "ended_s": time.time()}
        return wire.PrefillReply(
            tokens, target, handle, finish, **times, reused=self._reused(request.prompt_tokens, None)
        )

    def _reused(self, prompt: int, handle: KvHandle | None) -> wire.Reused | None:
        if self.held is None:
            return None
        held = min(self.held, prompt)
        tokens = max(held, handle.tokens) if handle is not None else held
        return wire.Reused(tokens, prompt - tokens, tokens - held)

    async def decode(self, request: wire.DecodeRequest, call: ServerCall) -> wire.DecodeReply:
        queued_s, started_s = time.time(), 0.0
        if self.refuse:
            raise self.refuse
        self.wanted_room.append(request.if_room)
        if self.full and request.if_room:
            raise NoRoom(f"{self.name} is full")
        self.decodes.append(request)
        self.calls.append(call)
        self.timeouts.append(call.timeout_s)
        tokens, known = unpacked(request.prompt), unpacked(request.known)
        job_id = request.job.job_id
        self.answers[job_id] = tokens
        left = self.leaving[job_id] = asyncio.get_running_loop().create_future()
        outcome = TransferOutcome.PULLED if request.handle else TransferOutcome.LOCAL
        report = TransferReport(outcome, tokens=request.prompt_tokens)
        try:
            for count in range(request.job.max_tokens):
                await self._wait(count)
                started_s = started_s or time.time()
                if left.done():
                    where = self.leaves[-1]
                    handle = self._handle(where.transfer_id, where.start, len(tokens) - 1)
                    handover = wire.Handover(handle, b"state" if not count else f"after {len(tokens)}".encode())
                    return wire.DecodeReply(report, queued_s, started_s, time.time(), handover)
                if count < len(known):
                    tokens.append(known[count])
                    continue
                tokens.append(next_token(tokens) + self.twist)
                last = count + 1 == request.job.max_tokens
                reused = None if count else self._reused(request.prompt_tokens, request.handle)
                call.send(wire.TokenStep([tokens[-1]], "length" if last else "", reused=reused))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            del self.leaving[job_id], self.answers[job_id]
        return wire.DecodeReply(report, queued_s, started_s, time.time())

    def leave_at(self, token: int, *leaves: wire.Leave, again_at: "asyncio.Event | None" = None) -> None:
        """Ask before that token of each decode that the job migrates, and wait until it leaves, or for the event."""

        async def before(count: int) -> None:
            if count == token:
                for leave in leaves:
                    self.calls[-1].send(wire.TokenStep([], leave=leave))
                left = self.leaving[self.decodes[-1].job.job_id]
                waits = [left] if again_at is None else [left, asyncio.ensure_future(again_at.wait())]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

        self.before_token = before

    async def export(self, request: wire.ExportRequest, _: ServerCall) -> wire.ExportReply:
        self.exports.append(request)
        if self.no_export is not None:
            raise self.no_export
        tokens = len(self.answers[request.job_id]) - 1 if request.job_id else len(unpacked(request.prompt))
        return wire.ExportReply(self._handle(request.transfer_id, request.start, tokens) if self.holds else None)

    async def pull(self, request: wire.PullRequest, _: ServerCall) -> wire.PullReply:
        self.pulls.append(request)
        if self.no_pull is not None:
            raise self.no_pull
        if not self.arrives:
            return wire.PullReply(TransferReport(TransferOutcome.RECOMPUTED, error="peer_lost"))
        return wire.PullReply(TransferReport(TransferOutcome.PULLED, request.handle.tokens), request.handle.tokens)

    async def leave(self, request: wire.LeaveRequest, _: ServerCall) -> None:
        if self.no_leave is not None:
            raise self.no_leave
        self.leaves.append(request)
        self.leaving[request.job_id].set_result(None)

    def _handle(self, transfer_id: str, start: int, tokens: int) -> KvHandle:
        return KvHandle(transfer_id, self.name, 1, "f", (), tokens, "bfloat16", start=start)

    async def _wait(self, count: int) -> None:
        result = self.before_token(count) if self.before_token is not None else asyncio.sleep(0)
        if isinstance(result, Awaitable):
            await result

    async def expect(self, request: wire.ExpectRequest, _: ServerCall) -> None:
        self.expected.append(request)

    async def predicted(self, message: wire.Predicted, _: ServerCall) -> None:
        self.predictions.append(message)

    async def prefetch(self, request: wire.PrefetchRequest, call: ServerCall) -> None:
        self.prefetched.append(request.handle.transfer_id)
        self.timeouts.append(call.timeout_s)
        try:
            if self.fetching is not None:
                await self.fetching.wait()
        except asyncio.CancelledError:
            self.dropped.append(request.handle.transfer_id)
            raise

    async def release(self, request: wire.ReleaseRequest, _: ServerCall) -> None:
        self.released += request.transfer_ids

    async def releases(self, count: int) -> None:
        """Wait until so many transfers were released, each once."""
        await until(lambda: len(self.released) >= count)
        assert len(self.released) == count


@dataclass
class Predictor:
    """Answers with `source` after `takes_s`, while `go` is set; `refuse` is raised instead."""

    source: str = "classifier"
    refuse: Exception | None = None
    takes_s: float = 0.0
    requests: list[wire.PredictRequest] = field(default_factory=list)
    ended: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.go.set()

    async def predict(self, request: wire.PredictRequest, _: ServerCall) -> LengthPrediction:
        self.requests.append(request)
        try:
            await self.go.wait()
            await asyncio.sleep(self.takes_s)
        finally:
            self.ended += 1
        if self.refuse is not None:
            raise self.refuse
        return LengthPrediction(2, 400, 600, 0.8, self.source)

    @asynccontextmanager
    async def serving(self, address: str) -> AsyncIterator[None]:
        sockets = Sockets()
        server = await listen(RpcServer(sockets, address, {wire.PREDICT: self.predict}))
        try:
            yield
        finally:
            self.go.set()
            await server.__aexit__(None, None, None)
            sockets.close()


@dataclass
class Cluster:
    """The scheduler and the instances, and the pipeline of a gateway that uses them."""

    pipeline: Pipeline
    reporter: Reporter
    sockets: Sockets
    prefill: Worker
    decodes: list[Worker]
    scheduler_address: str
    places: list[wire.PlaceRequest] = field(default_factory=list)
    reports: list[wire.JobReport] = field(default_factory=list)
    split: "int | None" = None  # of all routes; None: the whole prompt
    no_route: PolyphaseError = field(default_factory=lambda: Unavailable("no decode instance"))
    no_room: "Callable[[wire.PlaceRequest], PolyphaseError | None]" = lambda _: None
    wants_prefix: bool = False
    saved: int = 0  # tokens of each prompt that its instances are said to hold
    no_move: PolyphaseError | None = None  # the answer where a paused job is to be placed
    on_pause: asyncio.Event = field(default_factory=asyncio.Event)  # a placement for a paused job was requested
    may_move: asyncio.Event | None = None  # for which that placement waits
    binds: bool = False  # routes of whole prompts name the decode instance
    has_room: "Callable[[wire.PlaceRequest], bool]" = lambda _: False  # what routes promise
    no_target: PolyphaseError | None = None  # the answer where a job is to migrate
    pull: PrefixPull | None = None  # of all routes
    scheduler: RpcServer | None = None

    @property
    def workers(self) -> list[Worker]:
        return [self.prefill, *self.decodes]

    @property
    def excluded(self) -> set[str]:
        return {name for request in self.places for name in request.exclude}

    async def completes(self, max_tokens: int = 6, prompt: list[int] = PROMPT, **changes: Any) -> Job:
        """Run a job. Its client gets the tokens of an undisturbed run, each once."""
        job, steps = make_job(prompt, max_tokens, **changes)
        async with asyncio.timeout(60):
            await self.pipeline.run(job)
        assert tokens_of(steps) == answer(prompt, max_tokens)
        return job

    def starts(self, job: Job) -> "asyncio.Task[None]":
        return asyncio.create_task(self.pipeline.run(job))

    async def last_report(self) -> wire.JobReport:
        """The final report of a job that has ended."""
        await self.reporter.flush()
        await until(lambda: self.reports and self.reports[-1].phase.final)
        return self.reports[-1]

    def lose_decodes_at(self, token: int) -> list[str]:
        """Each decode instance fails before that token of each decode; the names, as they fail."""
        lost: list[str] = []

        def failing(worker: Worker) -> Callable[[int], None]:
            def before(count: int) -> None:
                if count == token:
                    lost.append(worker.name)
                    raise EngineFailed("the instance died")

            return before

        for worker in self.decodes:
            worker.before_token = failing(worker)
        return lost

    async def scheduler_down(self) -> None:
        if self.scheduler is not None:
            await self.scheduler.__aexit__(None, None, None)

    async def scheduler_up(self) -> None:
        handlers = {wire.PLACE: self.place, wire.REPORT: self.report}
        self.scheduler = await listen(RpcServer(self.sockets, self.scheduler_address, handlers))

    async def place(self, request: wire.PlaceRequest, _: ServerCall) -> Route:
        self.places.append(request)
        if request.job.pause_s:
            self.on_pause.set()
            if self.may_move is not None:
                await self.may_move.wait()
            if self.no_move is not None:
                raise self.no_move
        if request.job.leaves and self.no_target is not None:
            raise self.no_target
        if (error := self.no_room(request)) is not None:
            raise error
        usable = [worker for worker in self.decodes if worker.name not in request.exclude]
        if not usable:
            raise self.no_route
        split, decode = self.split, usable[0].ref
        more = {"wants_prefix": self.wants_prefix, "has_room": self.has_room(request), "pull": self.pull}
        if request.job.local_only or split == 0:
            return Route(None, decode, 0, "test", decode_saved=self.saved, **more)
        self.prefill.decode_at = usable[0]
        full = split is None or split >= request.job.prompt_tokens
        return Route(
            self.prefill.ref,
            None if full and not self.binds else decode,
            request.job.prompt_tokens if split is None else split,
            "test",
            prefill_saved=self.saved,
            answer_tokens=4 if self.binds else 0,
            **more,
        )

    async def report(self, reports: wire.JobReports, _: ServerCall) -> None:
        self.reports += reports.reports


@asynccontextmanager
async def running_cluster(
    *, second_scheduler: bool = False, decodes: int = 2, **changes: object
) -> AsyncIterator[Cluster]:
    """One prefill and some decode instances, a scheduler (at two addresses, if there is to be a second one), and a
    pipeline with these settings.
    """
    async with AsyncExitStack() as stack:
        sockets = Sockets()
        stack.callback(sockets.close)
        workers = [Worker(name, sockets) for name in ("p0", *(f"d{each}" for each in range(decodes)))]
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        addresses = tuple(free_address() for _ in range(1 + second_scheduler))
        settings = GatewaySettings(schedulers=addresses, model="demo", **changes)
        clients = stack.enter_context(RpcClients(sockets))
        schedulers = SchedulerClient(clients, settings.schedulers)
        metrics = GatewayMetrics("demo", CollectorRegistry())
        reporter = Reporter(schedulers, metrics)
        lengths = LengthClient(clients, settings, metrics.predictions)
        stack.push_async_callback(lengths.close)
        pipeline = Pipeline(settings, clients, schedulers, reporter, lengths)
        cluster = Cluster(pipeline, reporter, sockets, workers[0], workers[1:], addresses[0])
        await cluster.scheduler_up()
        for other in addresses[1:]:
            handlers = {wire.PLACE: cluster.place, wire.REPORT: cluster.report}
            await stack.enter_async_context(RpcServer(sockets, other, handlers))
        stack.push_async_callback(cluster.scheduler_down)
        yield cluster
