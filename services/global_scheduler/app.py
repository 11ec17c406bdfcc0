"""Puts the global scheduler together: sockets, policies, the store, HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from services.global_scheduler.forward import Forwarder, ForwardMetrics, Waiting
from services.global_scheduler.journal import Journal
from services.global_scheduler.news import DemandTeller, Gateways, MonitorNews
from services.global_scheduler.placer import Placer, SchedulerMetrics
from services.global_scheduler.reports import SWEEP_S, OpenJobs, Reports
from services.global_scheduler.routes import State, router
from services.global_scheduler.settings import SchedulerSettings
from services.global_scheduler.wiring import open_broadcast, open_prefixes, open_rpc, open_sockets, watch
from shared.policy.demand import KEPT
from shared.runtime.http import service_app
from shared.runtime.logs import get_log
from shared.runtime.tasks import background
from shared.runtime.tracing import tracing
from shared.store.database import open_engine
from shared.store.retention import Limit, Retention, close_lost
from shared.store.write_behind import WriteBehind
from shared.wire.clients.http import JsonClient
from shared.wire.clients.monitor import MonitorClient

log = get_log(__name__)
FORWARD_S = 1.0


def create_app(settings: SchedulerSettings) -> FastAPI:
    """The service. Raises InvalidRequest for an unknown database before anything starts."""
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.scheduler = await _start(stack, settings, registry)
            yield

    def unready() -> str:
        state: State = app.state.scheduler
        return "" if state.placer.broadcast_age_s < float("inf") else "it has not heard of the cluster yet"

    app = service_app("global_scheduler", lifespan, registry, unready=unready, token=settings.token())
    app.include_router(router)
    return app


async def _start(stack: AsyncExitStack, settings: SchedulerSettings, registry: CollectorRegistry) -> State:
    engine = open_engine(settings.database_url)
    stack.push_async_callback(engine.dispose)
    store = WriteBehind(engine, registry, capacity=settings.queue_rows)
    metrics, forwarded = SchedulerMetrics(registry), ForwardMetrics(registry)
    monitor = await _to_monitor(stack, settings)
    lengths = await _to_predictors(stack, settings, forwarded)
    placer = Placer(metrics, settings.policy_seed, _open_journal(stack, settings), settings.prefix_blocks)
    name, ring = settings.scheduler_id, settings.ring_jobs
    demand = DemandTeller(name, placer)
    outcomes, seconds = Waiting("monitor", forwarded), Waiting("demand", forwarded, capacity=KEPT)
    gateways = Gateways(time.monotonic)
    news = MonitorNews(name, placer, demand, monitor, outcomes, seconds, gateways)
    open_jobs = OpenJobs(settings.lost_after_s, asyncio.get_running_loop().time())

    def ended(job_id: str, output_tokens: int, met: bool | None) -> None:
        placer.ended(job_id, output_tokens, met)
        demand.ended(job_id, output_tokens)

    reports = Reports(name, ring, store, metrics, news.ended, lengths, open_jobs, placer.decodes, ended, gateways)
    stack.push_async_callback(news.leave)  # once more, when the loops have ended

    tasks = await stack.enter_async_context(background())
    tasks.start("write-behind", store.run())
    for index, replica in enumerate(lengths):
        tasks.every(f"forward-lengths-{index}", FORWARD_S, replica.step)
    tasks.every("sweep", SWEEP_S, reports.sweep)
    if monitor is not None:
        tasks.start("tell-monitor", news.run())
    tasks.start("former jobs", _close_former(settings, engine, store))
    limit = Limit(settings.retention_s, settings.retention_rows, settings.retention_bytes)
    retention = Retention(engine, {"requests": limit}, store.ready)
    tasks.every("retention", settings.prune_period_s, retention.step)

    sockets = open_sockets(stack, settings)
    prefixes = open_prefixes(stack, sockets, tasks, placer)
    feed = open_broadcast(stack, sockets, settings, placer, prefixes)
    tracer = await stack.enter_async_context(tracing(settings.tracing, "scheduler", name, registry))
    server = await open_rpc(stack, sockets, settings, placer, reports, demand, tracer)
    watch(registry, placer, server, feed)
    return State(placer, reports, engine, store)


async def _to_monitor(stack: AsyncExitStack, settings: SchedulerSettings) -> MonitorClient | None:
    if not settings.monitor_url:
        return None
    return await stack.enter_async_context(MonitorClient(settings.monitor_url, token=settings.token()))


async def _to_predictors(
    stack: AsyncExitStack, settings: SchedulerSettings, forwarded: ForwardMetrics
) -> list[Forwarder]:
    """One for each replica: what one of them has not taken waits for that one alone."""
    lengths = []
    for index, url in enumerate(settings.predictor_urls):
        client = await stack.enter_async_context(JsonClient(url, token=settings.token()))
        name = "predictor" if len(settings.predictor_urls) == 1 else f"predictor-{index}"
        lengths.append(Forwarder(Waiting(name, forwarded), client, "/v1/observations"))
    return lengths


def _open_journal(stack: AsyncExitStack, settings: SchedulerSettings) -> Journal | None:
    if settings.decision_log is None:
        return None
    return stack.enter_context(Journal(settings.decision_log, settings.decision_log_bytes))


async def _close_former(settings: SchedulerSettings, engine: AsyncEngine, store: WriteBehind) -> None:
    """Once living gateways have told of their open jobs, what a former life of this scheduler left open is lost."""
    started_s = time.time()
    await store.ready.wait()
    await asyncio.sleep(2 * settings.lost_after_s)
    try:
        closed = await close_lost(engine, settings.scheduler_id, started_s)
    except Exception as error:  # a boundary: housekeeping may fail, serving goes on
        log.warning("former jobs not closed", error=f"{type(error).__name__}: {error}"[:300])
        return
    if closed:
        log.warning("jobs of a former life are lost", count=closed)
