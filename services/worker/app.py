"""Assembles one instance: engine, KV side, prefill and decode services, roles, the monitor link and the HTTP routes.

The routes include those that describe the engine in detail. Shutdown finishes the work that the instance has accepted
before the engine stops.
"""

import asyncio
import platform
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request, Response
from prometheus_client import CollectorRegistry

from services.worker.engine_start import start_engine
from services.worker.engines.base import Engine
from services.worker.identity import instance_info
from services.worker.jobs.adapters import Adapters
from services.worker.jobs.decode import DecodeService
from services.worker.jobs.exports import ExportService
from services.worker.jobs.prefill import REST_S, Codecs, Dispatcher, PrefillService
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from services.worker.metrics import TransferMetrics, WorkerMetrics
from services.worker.monitor_link import HEARTBEAT_S, FollowedPolicies, Telemetry, follow_monitor
from services.worker.prefix_feed import PrefixFeed
from services.worker.rpc import handlers, traced
from services.worker.settings import WorkerSettings
from services.worker.step_costs import LEARN_S, ChunkSize, KnownRates, LiveRates
from shared.domain.instance import InstanceInfo
from shared.domain.prompt import BLOCK_TOKENS
from shared.domain.rates import StepRates
from shared.policy.leaving import LOOK_S
from shared.runtime.http import json_response, service_app
from shared.runtime.logs import LogTail, get_log
from shared.runtime.tasks import background
from shared.runtime.tracing import tracing
from shared.wire.api.monitor import LoadByName
from shared.wire.api.worker import (
    ChunkSizeStatus,
    InstanceDetails,
    InstanceStatus,
    LogLines,
    PolicyStatus,
    PrefixCache,
    Step,
    StepCosts,
    Steps,
)
from shared.wire.broadcast import Publisher
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import PREFIXES, StepRecord
from shared.wire.rpc_server import RpcServer
from shared.wire.sockets import Sockets

log = get_log(__name__)
STEPS = 200
PACKAGES = ("polyphase", "vllm", "torch", "transformers", "pyzmq", "nixl")
_LOOK_S = 0.05


def create_app(settings: WorkerSettings, tail: LogTail | None = None) -> FastAPI:
    """The HTTP side; its lifespan is the instance. `tail` keeps the newest lines of the log."""
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings, registry) as instance:
            app.state.instance = instance
            yield

    def trouble() -> str:
        step_s = app.state.instance.engine.step_s
        return f"the engine's step has lasted {step_s:.0f} s" if step_s > settings.hang_s else ""

    app = service_app(
        "worker", lifespan, registry, trouble, lambda: app.state.instance.telemetry.unready, token=settings.token()
    )
    app.include_router(routes(lambda request: request.app.state.instance.details, tail or LogTail()))

    @app.get("/instance")
    async def instance() -> Response:
        """The identity and the present work of this instance."""
        shown: Instance = app.state.instance
        return json_response(shown.status(settings))

    @app.get("/steps")
    async def steps(
        since: Annotated[int, Query(ge=-1)] = -1, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> Response:
        """A StepPage: the engine's steps from number `since` on; without it the newest steps."""
        shown: Instance = app.state.instance
        page = shown.engine.steps.page(shown.info.instance_id, shown.info.generation, since, limit)
        return json_response(page)

    return app


@dataclass(frozen=True, slots=True)
class Instance:
    """The parts of a running instance that its routes show."""

    info: InstanceInfo
    telemetry: Telemetry
    roles: RoleState
    engine: Engine
    policies: FollowedPolicies
    chunk_size: ChunkSize
    transfers: TransferMetrics
    details: "Details"

    def status(self, settings: WorkerSettings) -> InstanceStatus:
        """`GET /instance`."""
        policies, chunk = self.engine.policies, self.chunk_size
        return InstanceStatus(
            info=self.telemetry.info,
            role=self.roles.role,
            draining=self.roles.draining,
            load=LoadByName.from_load(self.telemetry.load()),
            flips=self.roles.flips,
            refused=self.telemetry.refused,
            chunk_size=ChunkSizeStatus(chunk.tokens, chunk.why),
            policies=PolicyStatus(
                policies.order.name,
                policies.admission.name,
                policies.step_budget,
                self.policies.revision,
                self.policies.trouble,
            ),
            threads=settings.threads,
            max_seqs=settings.max_seqs,
        )


@asynccontextmanager
async def running(settings: WorkerSettings, registry: CollectorRegistry) -> AsyncIterator[Instance]:
    """An instance that runs until the context ends. What starts later depends on what started before; it all stops in
    reverse order. `registry`: of its metrics.
    """
    generation = time.time_ns()
    async with AsyncExitStack() as stack:
        sockets = Sockets.from_settings(settings)
        stack.callback(sockets.close)
        roles, known, prefixes = (
            RoleState(settings.role),
            KnownRates(),
            PrefixFeed(generation, tiered=settings.host_kv_bytes > 0),
        )
        engine, engine_info, kv = await start_engine(settings, generation, known.step, prefixes.receive, stack)
        tasks = await stack.enter_async_context(background())
        kv.start(tasks)
        info = instance_info(settings, engine_info, generation)

        def host_token_s() -> float:
            block_tokens = engine.stats().host.block_tokens
            return kv.host_block_s / block_tokens if block_tokens else 0.0

        rates = known.rates = LiveRates(settings, info, engine.steps, engine.set_chunk_size, host_token_s)
        # Each start of each instance draws random numbers of its own, unless a seed is set.
        seed = f"{settings.instance_id}:{generation}" if settings.policy_seed is None else settings.policy_seed
        dispatcher = Dispatcher(seed)
        codecs = Codecs(lambda: rates.with_rates(info), dispatcher, settings.lossy_kv)
        transfers = TransferMetrics(registry, rates.transferred)
        prefill = PrefillService(engine, kv, roles, dispatcher, codecs, lambda: rates.chunk.tokens, transfers.ended)
        decode = DecodeService(engine, kv, roles, transfers.ended, lambda: rates.with_rates(info))
        exports = ExportService(engine, kv, roles, decode, transfers.ended, info, engine_info.cached_tokens)

        adapters = Adapters(settings.lora, engine, engine_info.adapters)
        methods = handlers(prefill, decode, exports, roles, kv, adapters)
        tracer = await stack.enter_async_context(tracing(settings.tracing, "worker", settings.instance_id, registry))
        if tracer is not None:
            methods = traced(methods, tracer, settings.instance_id, lambda: rates.chunk.tokens)

        async def release_all_of(peer: bytes) -> None:
            await kv.release_of(peer)
            await decode.drop_of(peer)

        server = RpcServer(
            sockets,
            settings.address(settings.rpc_port),
            {**methods, PREFIXES: prefixes.prefixes},
            on_peer_gone=lambda peer: tasks.start("release what a gone peer held", release_all_of(peer)),
        )
        await stack.enter_async_context(server)

        policies = FollowedPolicies(engine)
        publisher = Publisher(sockets, settings.heartbeat_address)
        stack.callback(publisher.close)
        monitor = await stack.enter_async_context(MonitorClient(settings.monitor_url, token=settings.token()))
        telemetry = Telemetry(
            info=info,
            roles=roles,
            engine=engine,
            kv=kv,
            prefills=prefill,
            decodes=decode,
            rates=rates,
            policies=policies,
            adapters=adapters,
            publisher=publisher,
            monitor=monitor,
        )
        stack.callback(follow_monitor(sockets, settings, telemetry, policies, dispatcher, roles).close)
        tasks.every("rest", REST_S, dispatcher.rest)
        tasks.every("rates", LEARN_S, rates.learn)
        tasks.every("migrations", LOOK_S, decode.look)
        tasks.every("heartbeat", HEARTBEAT_S, telemetry.beat)
        tasks.every("registration", HEARTBEAT_S, telemetry.keep_registered)
        stack.push_async_callback(telemetry.leave)
        stack.push_async_callback(finish, roles, kv, settings.drain_s)
        WorkerMetrics(
            info=info,
            model=settings.served_name,
            telemetry=telemetry,
            roles=roles,
            engine=engine,
            kv=kv,
            server=server,
            dispatcher=dispatcher,
            registry=registry,
        )
        log.info("instance is ready", instance_id=info.instance_id, role=roles.role.value, engine=settings.engine)
        details = Details(telemetry, rates, engine, prefixes)
        yield Instance(info, telemetry, roles, engine, policies, rates.chunk, transfers, details)


async def finish(roles: RoleState, kv: KvPort, within_s: float) -> None:
    """Accept no new jobs and wait for those under way, and until their KV was fetched; at most `within_s` seconds.

    What is left then continues on other instances, as after a failure. 0: at once.
    """
    if not within_s:
        return
    until = time.monotonic() + within_s
    reply = await roles.drain(within_s)
    await asyncio.sleep(_LOOK_S)  # the last replies leave; a job whose reply is lost is retried on another instance
    while kv.staged_bytes and time.monotonic() < until:  # noqa: ASYNC110 - exports end by messages of several kinds
        await asyncio.sleep(_LOOK_S)
    log.info("shutting down", waited_s=round(reply.duration_s, 3), left=reply.remaining, staged_bytes=kv.staged_bytes)


class Details:
    """Reads what `/details` shows, at each request for it."""

    def __init__(self, telemetry: Telemetry, rates: LiveRates, engine: Engine, prefixes: PrefixFeed) -> None:
        self._telemetry = telemetry
        self._rates = rates
        self._engine = engine
        self._prefixes = prefixes
        self._versions = {name: found for name in PACKAGES if (found := _version(name))}

    def describe(self) -> InstanceDetails:
        info, stats, rates = self._telemetry.info, self._engine.stats(), self._rates.current
        page = self._engine.steps.page(info.instance_id, info.generation, -1, STEPS)
        started_s = info.generation / 1e9
        return InstanceDetails(
            instance_id=info.instance_id,
            started_s=started_s,
            uptime_s=max(0.0, time.time() - started_s),
            versions={"python": platform.python_version(), **self._versions},
            steps=Steps(page.next, [self._step(record) for record in page.steps]),
            rates=StepCosts(self._rates.start, rates.step),
            link=rates.link,
            codecs=rates.codecs,
            prefixes=PrefixCache(
                blocks=len(self._prefixes.held.reachable.blocks),
                block_tokens=BLOCK_TOKENS,
                asked_tokens=stats.prompt_tokens,
                hit_tokens=stats.hit_tokens,
            ),
            preemptions=stats.preemptions,
            drafted_tokens=self._engine.steps.drafted_tokens,
            accepted_tokens=self._engine.steps.accepted_tokens,
        )

    def _step(self, record: StepRecord) -> Step:
        return Step(
            ended_s=record.ended_s,
            seconds=record.seconds,
            prefill_tokens=sum(computed for computed, _ in record.prefill),
            decodes=record.decode_count,
            context_tokens=record.decode_context_tokens,
            expected_s=expected_s(self._rates.start, record),
            learned_s=expected_s(self._rates.step, record),
        )


def expected_s(rates: StepRates | None, step: StepRecord) -> float | None:
    """The predicted time of a step; None where no rates are known."""
    if rates is None:
        return None
    form = rates.prefill if step.decode_count <= 0 else rates.mixed
    if not step.prefill:
        return rates.decode_s(step.decode_count, step.decode_context_tokens)
    chunks_s = sum(now * (form.token_s + form.position_s * (before + now / 2.0)) for now, before in step.prefill)
    decodes_s = form.sequence_s * step.decode_count + form.context_s * step.decode_context_tokens
    return form.fixed_s + chunks_s + (decodes_s if step.decode_count > 0 else 0.0)


def routes(details: Callable[[Request], Details], tail: LogTail) -> APIRouter:
    """`/details`, and `/log` with what `tail` has kept."""
    router = APIRouter()

    @router.get("/details")
    async def get_details(request: Request) -> Response:
        """The engine's newest steps, learned rates and prefix cache."""
        return json_response(details(request).describe())

    @router.get("/log")
    async def get_log_tail(lines: Annotated[int, Query(ge=1, le=2_000)] = 200) -> Response:
        """The last lines of its log, oldest first."""
        return json_response(LogLines(tail.newest(lines)))

    return router


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
