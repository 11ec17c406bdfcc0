"""Puts the planner together: the monitor's broadcast, the watch over the cluster, proposals, the store, HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from services.planner.answers import Answers
from services.planner.decider import Decider
from services.planner.fleet_routes import router as fleet_router
from services.planner.proposals import Proposals
from services.planner.search_routes import router as search_router
from services.planner.searches import Searches
from services.planner.settings import PlannerSettings
from services.planner.state import State
from services.planner.watch import Watch
from shared.cost.library import Library
from shared.domain.instance import ClusterView
from shared.errors import PolyphaseError
from shared.runtime.http import service_app
from shared.runtime.logs import get_log
from shared.runtime.tasks import background
from shared.store.database import open_engine
from shared.store.retention import Retention
from shared.store.write_behind import WriteBehind
from shared.wire.broadcast import Subscriber
from shared.wire.clients.monitor import MonitorClient
from shared.wire.sockets import Curve, Sockets

log = get_log(__name__)
AGAIN_S = 1.0


def create_app(settings: PlannerSettings) -> FastAPI:
    """The service. Raises InvalidRequest for an unknown database before anything starts."""
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.planner = await _start(stack, settings, registry)
            yield

    app = service_app("planner", lifespan, registry)
    app.include_router(fleet_router)
    app.include_router(search_router)
    return app


async def _start(stack: AsyncExitStack, settings: PlannerSettings, registry: CollectorRegistry) -> State:
    engine = open_engine(settings.database_url)
    stack.push_async_callback(engine.dispose)
    store = WriteBehind(engine, registry, capacity=settings.queue_rows)
    sockets = Sockets(Curve(settings.curve_public, settings.curve_secret) if settings.curve_public else None)
    stack.callback(sockets.close)
    monitor = await stack.enter_async_context(MonitorClient(settings.monitor_url))
    proposals = Proposals(store, registry, settings.hold_s)
    library = await asyncio.to_thread(Library.built_in)
    tasks = await stack.enter_async_context(background())
    searches = Searches(settings, store, tasks)
    stack.callback(searches.close)
    decider = Decider(settings, monitor, proposals, tasks)
    watch = Watch(settings, monitor, proposals, library, decider.proposed)

    def heard(view: ClusterView) -> None:
        decider.heard(view)
        watch.heard(view)

    subscriber = Subscriber(sockets, settings.broadcast_address, ClusterView, heard)
    stack.callback(subscriber.close)
    retention = Retention(engine, {"plans": settings.retention_s, "proposals": settings.retention_s}, store.ready)
    tasks.start("write-behind", store.run())
    tasks.start("recall", _recall(engine, store, proposals, searches))
    tasks.every("retention", settings.prune_period_s, retention.step)
    tasks.start("watch", watch.run())
    return State(settings, monitor, watch, proposals, decider, searches, Answers())


async def _recall(engine: AsyncEngine, store: WriteBehind, proposals: Proposals, searches: Searches) -> None:
    """Once the database answers, what a former life proposed and searched for is known again."""
    await store.ready.wait()
    for book in (proposals, searches):
        while True:
            try:
                await book.recall(engine)
                break
            except PolyphaseError as error:
                log.error("what was before is not known yet; trying on", reason=error.message)
                await asyncio.sleep(AGAIN_S)
