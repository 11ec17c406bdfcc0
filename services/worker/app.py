"""Assembles one instance: engine, KV side, prefill and decode services, roles, telemetry, HTTP."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Response
from prometheus_client import CollectorRegistry

from services.worker.chunk_size import ChunkSize
from services.worker.details import Details, routes
from services.worker.engine_start import start_engine
from services.worker.engines.base import Engine
from services.worker.finishing import finish
from services.worker.handlers import handlers
from services.worker.instance_info import instance_info
from services.worker.jobs.codecs import Codecs
from services.worker.jobs.decode import DecodeService
from services.worker.jobs.dispatcher import Dispatcher
from services.worker.jobs.prefill import PrefillService
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from services.worker.listening import listen
from services.worker.live_rates import LEARN_S, KnownRates, LiveRates
from services.worker.metrics import WorkerMetrics
from services.worker.policies import FollowedPolicies
from services.worker.prefixes.feed import PrefixFeed
from services.worker.settings import WorkerSettings
from services.worker.telemetry import HEARTBEAT_S, Telemetry
from services.worker.transfer_metrics import TransferMetrics
from shared.domain.instance import InstanceInfo
from shared.runtime.http import service_app
from shared.runtime.logs import LogTail, get_log
from shared.runtime.tasks import Background, background
from shared.runtime.tracing import tracing
from shared.wire.broadcast import Publisher
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import PREFIXES
from shared.wire.rpc_server import RpcServer
from shared.wire.sockets import Sockets

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Instance:
    """Everything of a running instance that its routes show."""

    info: InstanceInfo
    telemetry: Telemetry
    roles: RoleState
    engine: Engine
    policies: FollowedPolicies
    chunk_size: ChunkSize
    transfers: TransferMetrics
    details: Details

    def describe(self) -> dict[str, Any]:
        """As JSON, as it is right now."""
        return {
            "info": msgspec.to_builtins(self.telemetry.info),
            "role": self.roles.role.value,
            "draining": self.roles.draining,
            "load": self.telemetry.load().by_name(),
            "flips": self.roles.flips,
            "refused": self.telemetry.refused,
            "chunk_size": self.chunk_size.describe(),
            "policies": {**self.engine.policies.names(), **self.policies.describe()},
        }


def create_app(settings: WorkerSettings, tail: LogTail | None = None) -> FastAPI:
    """The HTTP side; its lifespan is the instance. `tail` keeps the newest lines of its log."""
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings, registry) as instance:
            app.state.instance = instance
            yield

    def trouble() -> str:
        running: Instance = app.state.instance
        step_s = running.engine.step_s
        return f"the engine's step has lasted {step_s:.0f} s" if step_s > settings.hang_s else ""

    app = service_app(
        "worker", lifespan, registry, trouble, lambda: app.state.instance.telemetry.unready, token=settings.token()
    )
    app.include_router(routes(lambda request: request.app.state.instance.details, tail or LogTail()))

    @app.get("/instance")
    async def instance() -> dict[str, Any]:
        """Who this instance is and what it does right now."""
        running: Instance = app.state.instance
        return {**running.describe(), "threads": settings.threads, "max_seqs": settings.max_seqs}

    @app.get("/steps")
    async def steps(
        since: Annotated[int, Query(ge=-1)] = -1, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> Response:
        """A StepPage: the engine's steps from number `since` on; without it the newest ones."""
        running: Instance = app.state.instance
        page = running.engine.steps.page(running.info.instance_id, running.info.generation, since, limit)
        return Response(msgspec.json.encode(page), media_type="application/json")

    return app


@asynccontextmanager
async def running(settings: WorkerSettings, registry: CollectorRegistry) -> AsyncIterator[Instance]:
    """Start in the order of need; stop in reverse. `registry`: of its metrics."""
    generation = time.time_ns()
    async with AsyncExitStack() as stack:
        sockets = Sockets.of(settings)
        stack.callback(sockets.close)
        roles, known, prefixes = RoleState(settings.role), KnownRates(), PrefixFeed(generation)
        engine, engine_info, kv = await start_engine(settings, generation, known.step, prefixes.take, stack)
        tasks = await stack.enter_async_context(background())
        kv.start(tasks)
        info = instance_info(settings, engine_info, generation)
        rates = LiveRates(settings, info, engine.steps, engine.set_chunk_size)
        known.rates = rates
        dispatcher = Dispatcher(_seed(settings, generation))
        codecs = Codecs(lambda: rates.of(info), dispatcher, settings.lossy_kv)
        prefill = PrefillService(engine, kv, roles, dispatcher, codecs, lambda: rates.chunk.tokens)
        transfers = TransferMetrics(registry, rates.transferred)
        decode = DecodeService(engine, kv, roles, transfers.ended, lambda: rates.of(info))
        server = await _answering(
            stack, settings, registry, sockets, tasks, prefill, decode, roles, kv, prefixes, lambda: rates.chunk.tokens
        )
        policies = FollowedPolicies(engine)
        telemetry = await _telemetry(
            settings, info, roles, engine, kv, prefill, decode, rates, policies, dispatcher, sockets, stack, tasks
        )
        stack.push_async_callback(telemetry.leave)
        stack.push_async_callback(finish, roles, kv, settings.drain_s)
        WorkerMetrics(info, settings.served_name, telemetry, roles, engine, kv, server, dispatcher, registry)
        log.info("instance is ready", instance_id=info.instance_id, role=roles.role.value, engine=settings.engine)
        details = Details(telemetry, rates, engine, prefixes)
        yield Instance(info, telemetry, roles, engine, policies, rates.chunk, transfers, details)


async def _answering(
    stack: AsyncExitStack,
    settings: WorkerSettings,
    registry: CollectorRegistry,
    sockets: Sockets,
    tasks: Background,
    prefill: PrefillService,
    decode: DecodeService,
    roles: RoleState,
    kv: KvPort,
    prefixes: PrefixFeed,
    chunk_tokens: Callable[[], int],
) -> RpcServer:
    """Take calls, until the stack is closed."""
    answers = handlers(prefill, decode, roles, kv)
    tracer = await stack.enter_async_context(tracing(settings.tracing, "worker", settings.instance_id, registry))
    if tracer is not None:
        from services.worker.tracing import traced

        answers = traced(answers, tracer, settings.instance_id, chunk_tokens)

    async def release_of(peer: bytes) -> None:
        await kv.release_of(peer)
        await decode.drop_of(peer)

    server = RpcServer(
        sockets,
        settings.address(settings.rpc_port),
        {**answers, PREFIXES: prefixes.prefixes},
        on_peer_gone=lambda peer: tasks.start("release what a gone peer held", release_of(peer)),
    )
    return await stack.enter_async_context(server)


def _seed(settings: WorkerSettings, generation: int) -> int | str:
    """Each start of each instance draws its own random numbers, unless told which."""
    given = settings.policy_seed
    return f"{settings.instance_id}:{generation}" if given is None else given


async def _telemetry(
    settings: WorkerSettings,
    info: InstanceInfo,
    roles: RoleState,
    engine: Engine,
    kv: KvPort,
    prefill: PrefillService,
    decode: DecodeService,
    rates: LiveRates,
    policies: FollowedPolicies,
    dispatcher: Dispatcher,
    sockets: Sockets,
    stack: AsyncExitStack,
    tasks: Background,
) -> Telemetry:
    publisher = Publisher(sockets, settings.heartbeat_address)
    stack.callback(publisher.close)
    monitor = await stack.enter_async_context(MonitorClient(settings.monitor_url, token=settings.token()))
    telemetry = Telemetry(info, roles, engine, kv, prefill, decode, rates, policies, publisher, monitor)

    listen(sockets, settings, telemetry, policies, dispatcher, roles, stack, tasks)
    tasks.every("rates", LEARN_S, rates.learn)
    tasks.every("heartbeat", HEARTBEAT_S, telemetry.beat)
    tasks.every("registration", HEARTBEAT_S, telemetry.keep_registered)
    return telemetry
