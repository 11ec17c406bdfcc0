"""Assembles the global scheduler: sockets, placement, reports, the store, HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.ext.asyncio import AsyncEngine

from services.global_scheduler.forward import DeliveryQueue, ForwardMetrics, post_all
from services.global_scheduler.journal import Journal
from services.global_scheduler.monitor_reporter import GatewayLiveness, MonitorReporter
from services.global_scheduler.placer import Placer, SchedulerMetrics, traced
from services.global_scheduler.prefixes import PrefixWatch
from services.global_scheduler.reports import SWEEP_S, Reports
from services.global_scheduler.routes import State, router
from services.global_scheduler.settings import SchedulerSettings
from shared.domain.adapters import AdapterSet
from shared.domain.cluster import ClusterDelta
from shared.policy.demand import KEPT
from shared.policy.truth import What
from shared.runtime.http import service_app
from shared.runtime.logs import get_log
from shared.runtime.tasks import background
from shared.runtime.tracing import tracing
from shared.store.database import open_engine
from shared.store.retention import Limit, Retention, close_lost
from shared.store.write_behind import WriteBehind
from shared.wire.broadcast import ClusterFeed
from shared.wire.clients.http import JsonClient
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import ADAPTERS, LOAD, PLACE, REPORT, UNLOAD, AdaptersRequest, LoadRequest, UnloadRequest
from shared.wire.rpc_client import SWEEP_S as SWEEP_CLIENTS_S
from shared.wire.rpc_client import RpcClients
from shared.wire.rpc_server import Handlers, RpcServer, ServerCall
from shared.wire.sockets import Sockets, open_sockets

log = get_log(__name__)
FORWARD_S = 1.0
FOLLOW_AGAIN_S = 1.0  # a failed call for prefixes is begun again with the broadcasts this often


def create_app(settings: SchedulerSettings, sockets: Sockets | None = None) -> FastAPI:
    """The service. sockets: of the process; None: it has its own. Raises InvalidRequest for an unknown database before
    anything starts.
    """
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.scheduler = await _start(stack, settings, registry, sockets)
            yield

    def unready() -> str:
        state: State = app.state.scheduler
        return "" if state.placer.broadcast_age_s < float("inf") else "no broadcast of the cluster has come yet"

    app = service_app("global_scheduler", lifespan, registry, unready=unready, token=settings.token())
    app.include_router(router)
    return app


async def _start(
    stack: AsyncExitStack, settings: SchedulerSettings, registry: CollectorRegistry, sockets: Sockets | None
) -> State:
    engine = open_engine(settings.database_url)
    stack.push_async_callback(engine.dispose)
    store = WriteBehind(engine, registry, capacity=settings.queue_rows)
    metrics, forwarded = SchedulerMetrics(registry), ForwardMetrics(registry)

    monitor = None
    if settings.monitor_url:
        monitor = await stack.enter_async_context(MonitorClient(settings.monitor_url, token=settings.token()))
    predictors = []
    for index, url in enumerate(settings.predictor_urls):  # each replica has a queue of its own
        client = await stack.enter_async_context(JsonClient(url, token=settings.token()))
        queue = DeliveryQueue("predictor" if len(settings.predictor_urls) == 1 else f"predictor-{index}", forwarded)
        predictors.append((queue, client))
    journal = None
    if settings.decision_log is not None:
        journal = stack.enter_context(Journal(settings.decision_log, settings.decision_log_bytes))

    placer = Placer(metrics, settings.policy_seed, journal, settings.prefix_blocks)
    outcomes, seconds = DeliveryQueue("monitor", forwarded), DeliveryQueue("demand", forwarded, capacity=KEPT)
    gateways = GatewayLiveness(time.monotonic)
    reporter = MonitorReporter(settings.scheduler_id, placer, monitor, outcomes, seconds, gateways)
    reports = Reports(settings, store, metrics, placer, reporter, [queue for queue, _ in predictors], gateways)
    stack.push_async_callback(reporter.leave)  # after the background tasks have ended

    tasks = await stack.enter_async_context(background())
    tasks.start("write-behind", store.run())
    for index, (queue, client) in enumerate(predictors):
        tasks.every(f"forward-lengths-{index}", FORWARD_S, partial(post_all, queue, client, "/v1/observations"))
    tasks.every("sweep", SWEEP_S, reports.sweep)
    if monitor is not None:
        tasks.start("report to the monitor", reporter.run())
    tasks.start("former jobs", _close_former(settings, engine, store))
    limit = Limit(settings.retention_s, settings.retention_rows, settings.retention_bytes)
    tasks.every("retention", settings.prune_period_s, Retention(engine, {"requests": limit}, store.ready).step)

    if sockets is None:
        sockets = await stack.enter_async_context(open_sockets(settings))
    clients = stack.enter_context(RpcClients(sockets))
    tasks.every("sweep-clients", SWEEP_CLIENTS_S, clients.sweep)
    prefixes = PrefixWatch(clients, placer)
    stack.push_async_callback(prefixes.close)
    followed, followed_mono = (-1, False), 0.0

    def apply(delta: ClusterDelta) -> bool:
        nonlocal followed, followed_mono
        if not placer.apply(delta):
            return False
        now, decider = time.monotonic(), placer.decider
        wanted = decider.loads.moves, decider.wants_prefixes
        if wanted != followed or now - followed_mono > FOLLOW_AGAIN_S:
            followed, followed_mono = wanted, now
            prefixes.update(placer.view, wanted=decider.wants_prefixes)
        return True

    feed = ClusterFeed(sockets, settings.broadcast_address, apply)
    stack.callback(feed.close)
    tracer = await stack.enter_async_context(tracing(settings.tracing, "scheduler", settings.scheduler_id, registry))
    place = reports.place if tracer is None else traced(reports.place, tracer)
    handlers: Handlers = {PLACE: place, REPORT: reports.handle}
    if monitor is not None:
        handlers = {**handlers, **of_monitor(monitor)}
    server = RpcServer(sockets, settings.rpc_address, handlers)
    await stack.enter_async_context(server)

    registry.register(DroppedInput({"rpc": server.dropped, "broadcast": feed.dropped}))
    age = Gauge("polyphase_scheduler_broadcast_age_seconds", "Age of the newest broadcast", registry=registry)
    age.set_function(lambda: placer.broadcast_age_s)
    blocks = Gauge("polyphase_scheduler_prefix_blocks", "Blocks known to be in prefix caches", registry=registry)
    blocks.set_function(lambda: len(placer.decider.prefixes))
    registry.register(PredictionErrors(placer))
    return State(placer, reports, engine, store)


def of_monitor(monitor: MonitorClient) -> Handlers:
    """Calls of gateways that the monitor answers: gateways know the schedulers only, and have no cluster token."""

    async def adapters(request: AdaptersRequest, _: ServerCall) -> AdapterSet:
        return await monitor.follow_adapters(request)

    async def load(request: LoadRequest, _: ServerCall) -> AdapterSet:
        return await monitor.load_adapter(request)

    async def unload(request: UnloadRequest, _: ServerCall) -> AdapterSet:
        return await monitor.unload_adapter(request)

    return {ADAPTERS: adapters, LOAD: load, UNLOAD: unload}


class PredictionErrors(Collector):
    """The rolling errors of estimates, of the instances that are known now."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer

    def collect(self) -> Iterator[Metric]:
        errors = GaugeMetricFamily(
            "polyphase_scheduler_instance_prediction_error_ratio",
            "Absolute error of the last estimates for an instance, over the time observed, by quantile",
            labels=("what", "instance_id", "quantile"),
        )
        bias = GaugeMetricFamily(
            "polyphase_scheduler_instance_prediction_bias_ratio",
            "Median error of the last estimates for an instance, over the time observed; below 0: predicted too short",
            labels=("what", "instance_id"),
        )
        for each in self._placer.predictions.instances:
            for what, figures in ((What.TTFT.value, each.ttft), (What.TPOT.value, each.tpot)):
                if figures is not None:
                    errors.add_metric((what, each.instance_id, "0.5"), figures.median)
                    errors.add_metric((what, each.instance_id, "0.9"), figures.p90)
                    bias.add_metric((what, each.instance_id), figures.bias)
        yield errors
        yield bias


class DroppedInput(Collector):
    """Messages dropped, by socket and cause."""

    def __init__(self, sockets: Mapping[str, Mapping[str, int]]) -> None:
        self._sockets = sockets

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "polyphase_wire_dropped", "Messages dropped, by socket and cause", labels=("socket", "cause")
        )
        for socket, causes in self._sockets.items():
            for cause, number in causes.items():
                family.add_metric((socket, cause), number)
        yield family


async def _close_former(settings: SchedulerSettings, engine: AsyncEngine, store: WriteBehind) -> None:
    """Close the jobs that an earlier process of this scheduler left open, once living gateways have reported theirs."""
    started_s = time.time()
    await store.ready.wait()
    await asyncio.sleep(2 * settings.lost_after_s)
    try:
        closed = await close_lost(engine, settings.scheduler_id, started_s)
    except Exception as error:  # a boundary: housekeeping may fail, serving goes on
        log.warning("former jobs not closed", error=f"{type(error).__name__}: {error}"[:300])
        return
    if closed:
        log.warning("jobs of an earlier process are lost", count=closed)
