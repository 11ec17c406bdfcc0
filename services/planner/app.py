"""Assembles the planner: the monitor's broadcast, the watch over the cluster, proposals, searches, the store, HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from services.planner.fleet import FleetPages
from services.planner.proposals import PERIOD_S, Decider, ProposalEvents, Proposals
from services.planner.routes import State, router
from services.planner.searches import Searches
from services.planner.settings import PlannerSettings
from services.planner.watch import Watch
from shared.cost.library import Library
from shared.domain.cluster import ClusterDelta, ClusterState
from shared.errors import PolyphaseError
from shared.runtime.http import service_app
from shared.runtime.logs import get_log
from shared.runtime.tasks import background
from shared.store.database import open_engine
from shared.store.retention import Limit, Retention
from shared.store.write_behind import WriteBehind
from shared.wire.broadcast import ClusterFeed
from shared.wire.clients.monitor import MonitorClient
from shared.wire.sockets import Sockets

log = get_log(__name__)
RETRY_S = 1.0
LOADS_S = 0.1  # between two updates with loads alone


def create_app(settings: PlannerSettings) -> FastAPI:
    """The service. Raises InvalidRequest for an unknown database before anything starts."""
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.planner = await _start(stack, settings, registry)
            yield

    app = service_app("planner", lifespan, registry, token=settings.token())
    app.include_router(router)
    return app


async def _start(stack: AsyncExitStack, settings: PlannerSettings, registry: CollectorRegistry) -> State:
    engine = open_engine(settings.database_url)
    stack.push_async_callback(engine.dispose)
    store = WriteBehind(engine, registry, capacity=settings.queue_rows)
    sockets = Sockets.from_settings(settings)
    stack.callback(sockets.close)
    monitor = await stack.enter_async_context(MonitorClient(settings.monitor_url, token=settings.token()))
    events = ProposalEvents(monitor)
    proposals = Proposals(store, registry, settings.hold_s, events.record)
    library = await asyncio.to_thread(Library.built_in)
    tasks = await stack.enter_async_context(background())
    searches = Searches(settings, store, tasks)
    stack.callback(searches.close)
    decider = Decider(settings, monitor, proposals, tasks)
    watch = Watch(settings, monitor, proposals, library, decider.proposed)

    cluster, updated_mono = ClusterState(), 0.0

    def apply(delta: ClusterDelta) -> bool:
        nonlocal updated_mono
        at_once = cluster.moved(delta) or delta.policies is not None
        if not cluster.apply(delta):
            return False
        now = time.monotonic()
        if at_once or now - updated_mono >= LOADS_S:
            updated_mono = now
            decider.view = cluster.view()
            watch.update(decider.view)
        return True

    feed = ClusterFeed(sockets, settings.broadcast_address, apply)
    stack.callback(feed.close)
    limit = Limit(settings.retention_s, settings.retention_rows, settings.retention_bytes)
    retention = Retention(engine, {"plans": limit, "proposals": limit}, store.ready)
    tasks.start("write-behind", store.run())
    tasks.start("recall", _recall(engine, store, proposals, searches))
    tasks.every("report proposals", PERIOD_S, events.step)
    tasks.every("retention", settings.prune_period_s, retention.step)
    tasks.start("watch", watch.run())
    return State(settings, watch, proposals, decider, searches, FleetPages(monitor, watch))


async def _recall(engine: AsyncEngine, store: WriteBehind, proposals: Proposals, searches: Searches) -> None:
    """Once the database answers, read the proposals and searches of earlier planner processes."""
    await store.ready.wait()
    for book in (proposals, searches):
        while True:
            try:
                await book.recall(engine)
                break
            except PolyphaseError as error:
                log.error("earlier proposals or searches could not be read; trying again", reason=error.message)
                await asyncio.sleep(RETRY_S)
