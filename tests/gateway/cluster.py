"""A cluster without engines: a scheduler and workers on real sockets that follow the protocol."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from gateway.job import Job, JobSpec
from gateway.lengths import LengthClient
from gateway.metrics import GatewayMetrics
from gateway.pipeline import Pipeline
from gateway.reports import Reporter
from gateway.settings import GatewaySettings
from shared.domain.job import Generation, Slo
from shared.domain.route import Route
from shared.errors import PolyphaseError, Unavailable
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import PLACE, REPORT, JobReport, JobReports, PlaceRequest, TokenStep
from shared.wire.rpc_client import RpcClients
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets
from tests.gateway.worker import Worker, listen
from tests.ports import free_address


@dataclass
class Cluster:
    """Everything but the gateway's HTTP side."""

    pipeline: Pipeline
    reporter: Reporter
    sockets: Sockets
    prefill: Worker
    decodes: list[Worker]
    scheduler: RpcServer
    scheduler_address: str
    places: list[PlaceRequest]
    reports: list[JobReport]
    split: "Callable[[PlaceRequest], int | None]"
    no_route: PolyphaseError = field(default_factory=lambda: Unavailable("no decode instance"))
    wants_prefix: bool = False
    saved: int = 0  # tokens of each prompt that its instances are said to hold
    no_move: PolyphaseError | None = None  # the answer where a paused job is to be placed
    on_pause: asyncio.Event = field(default_factory=asyncio.Event)  # a place was asked for a paused job
    may_answer: asyncio.Event | None = None  # until then that question waits
    binds: bool = False  # routes of whole prompts name the decode instance, too
    has_room: "Callable[[PlaceRequest], bool]" = lambda _: False  # what routes say

    async def scheduler_down(self) -> None:
        await self.scheduler.__aexit__(None, None, None)

    async def scheduler_up(self) -> None:
        server = RpcServer(self.sockets, self.scheduler_address, {PLACE: self.place, REPORT: self.report})
        self.scheduler = await listen(server)

    async def place(self, request: PlaceRequest, _: ServerCall) -> Route:
        self.places.append(request)
        if request.job.pause_s:
            self.on_pause.set()
            if self.may_answer is not None:
                await self.may_answer.wait()
            if self.no_move is not None:
                raise self.no_move
        usable = [worker for worker in self.decodes if worker.name not in request.exclude]
        if not usable:
            raise self.no_route
        split = self.split(request)
        if request.job.local_only or split == 0:
            return Route(
                None,
                usable[0].ref,
                0,
                "test",
                wants_prefix=self.wants_prefix,
                decode_saved=self.saved,
                has_room=self.has_room(request),
            )
        self.prefill.decode_at = usable[0]
        full = split is None or split >= request.job.prompt_tokens
        return Route(
            self.prefill.ref,
            None if full and not self.binds else usable[0].ref,
            request.job.prompt_tokens if split is None else split,
            "test",
            wants_prefix=self.wants_prefix,
            prefill_saved=self.saved,
            answer_tokens=4 if self.binds else 0,
            has_room=self.has_room(request),
        )

    async def report(self, reports: JobReports, _: ServerCall) -> None:
        self.reports += reports.reports


@asynccontextmanager
async def running_cluster(*, second_scheduler: bool = False, **changes: object) -> AsyncIterator[Cluster]:
    """One prefill and two decode instances, a scheduler, and a pipeline over them. second_scheduler: it may be called
    by two addresses.
    """
    async with AsyncExitStack() as stack:
        sockets = Sockets()
        stack.callback(sockets.close)
        workers = [Worker(name, sockets) for name in ("p0", "d0", "d1")]
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        address = free_address()
        addresses = (address, free_address()) if second_scheduler else (address,)
        settings = GatewaySettings(schedulers=addresses, model="demo", **changes)  # type: ignore[arg-type]
        clients = stack.enter_context(RpcClients(sockets))
        schedulers = SchedulerClient(clients, settings.schedulers)
        metrics = GatewayMetrics("demo", CollectorRegistry())
        reporter = Reporter(schedulers, metrics)
        lengths = LengthClient(clients, settings, metrics.predictions)
        stack.push_async_callback(lengths.close)
        pipeline = Pipeline(settings, clients, schedulers, reporter, lengths)
        cluster = Cluster(
            pipeline,
            reporter,
            sockets,
            workers[0],
            workers[1:],
            None,
            address,
            [],
            [],
            lambda _: None,  # type: ignore[arg-type]
        )
        await cluster.scheduler_up()
        for other in addresses[1:]:
            handlers = {PLACE: cluster.place, REPORT: cluster.report}
            await stack.enter_async_context(RpcServer(sockets, other, handlers))
        stack.push_async_callback(cluster.scheduler_down)
        yield cluster


_numbers = itertools.count()


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
    came_s: float = 0.0,
) -> tuple[Job, list[TokenStep]]:
    """A job and the list in which its steps gather. came_s: from now."""
    steps: list[TokenStep] = []
    job_id = job_id or f"job-{next(_numbers)}"
    spec = JobSpec(
        job_id, prompt, Generation(b"", time.time() + came_s, salt), max_tokens, carry, local_only, Slo(), caller
    )
    return Job(spec, steps.append, "gateway-0", time.monotonic() + timeout_s), steps


def tokens_of(steps: list[TokenStep]) -> list[int]:
    return [token for step in steps for token in step.tokens]
