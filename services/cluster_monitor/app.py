"""Puts the cluster monitor together: sockets, registry, the store, HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.audit import Audit
from services.cluster_monitor.auto_flips import AutoFlips, seen_now
from services.cluster_monitor.broadcaster import Broadcaster
from services.cluster_monitor.demand import DemandService
from services.cluster_monitor.events import EventKind, Events
from services.cluster_monitor.flips import Operations
from services.cluster_monitor.followers import Followers
from services.cluster_monitor.heartbeats import Heartbeats
from services.cluster_monitor.history import History
from services.cluster_monitor.memory import Memory
from services.cluster_monitor.metrics import ClusterCollector, count_detections
from services.cluster_monitor.policy_book import PolicyBook
from services.cluster_monitor.policy_routes import router as policy_router
from services.cluster_monitor.registry import MAX_DEAD, Registry
from services.cluster_monitor.routes import State, router
from services.cluster_monitor.settings import MonitorSettings
from services.cluster_monitor.slo import SloService
from shared.domain.policies import PolicySet
from shared.errors import PolyphaseError
from shared.policy.role_flip import Seen
from shared.policy.written import from_file
from shared.runtime.http import service_app
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background, background
from shared.store.database import open_engine
from shared.store.retention import Retention
from shared.store.write_behind import WriteBehind
from shared.wire.broadcast import Publisher, Subscriber
from shared.wire.messages import Heartbeat
from shared.wire.sockets import Curve, Sockets

log = get_log(__name__)
AGAIN_S = 1.0
DEMAND_S = 1.0  # between two looks at what schedulers tell


def create_app(settings: MonitorSettings) -> FastAPI:
    """The service. Raises InvalidRequest for an unknown policy before anything starts."""
    metrics = CollectorRegistry()
    file = from_file(settings.policies)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.monitor = await _start(stack, settings, metrics, file)
            yield

    app = service_app("cluster_monitor", lifespan, metrics)
    app.include_router(router)
    app.include_router(policy_router)
    return app


async def _start(
    stack: AsyncExitStack, settings: MonitorSettings, metrics: CollectorRegistry, file: PolicySet
) -> State:
    engine = open_engine(settings.database_url)
    stack.push_async_callback(engine.dispose)
    store = WriteBehind(engine, metrics, capacity=settings.queue_rows)
    sockets = _sockets(stack, settings)
    registry = Registry(settings, sockets)
    stack.callback(registry.close)
    memory, events = Memory(), Events(store)
    audit = Audit(store, metrics, events.operated)
    registry.on_change(events.changed)
    registry.on_gone(lambda record, how, why: events.note(EventKind(how), why, record.instance_id, record.role.value))
    slo = SloService(settings.slo_windows_s, store)
    demand = DemandService(events, metrics)
    history = History(registry, store)
    count_detections(registry, metrics)
    book, broadcaster = _broadcasting(stack, settings, sockets, registry, memory, events, store, file)
    beats = Heartbeats(registry, memory, settings.broadcast_period_s)
    subscriber = Subscriber(sockets, settings.heartbeat_address, Heartbeat, beats.take, bind=True)
    stack.callback(subscriber.close)
    metrics.register(ClusterCollector(registry, beats, slo, subscriber))

    tasks = await stack.enter_async_context(background())
    tasks.start("write-behind", store.run())
    tasks.start("recall", _recall(settings, store, engine, registry, memory, (audit, events)))
    tasks.start("recall policies", _recall_policies(store, engine, book))
    tasks.every("policies", settings.prune_period_s, book.keep_again)
    _repeat(tasks, settings, beats, broadcaster, history, slo, engine, store)
    tasks.every("demand", DEMAND_S, demand.step)
    operations = Operations(settings, registry, audit)
    auto = _flip_by_itself(tasks, settings, broadcaster, demand, audit, operations)
    followers = Followers(registry)
    return State(registry, memory, operations, audit, events, slo, demand, auto, broadcaster, book, followers, store)


def _broadcasting(
    stack: AsyncExitStack,
    settings: MonitorSettings,
    sockets: Sockets,
    registry: Registry,
    memory: Memory,
    events: Events,
    store: WriteBehind,
    file: PolicySet,
) -> tuple[PolicyBook, Broadcaster]:
    """The policies in force, and who sends them and the loads."""
    publisher = Publisher(sockets, settings.broadcast_address)
    stack.callback(publisher.close)

    def policies_changed(text: str, who: str) -> None:
        broadcaster.soon()
        if text:
            events.note(EventKind.POLICIES_CHANGED, f"by {who}: {text}")

    book = PolicyBook(file, store, policies_changed)
    broadcaster = Broadcaster(registry, book, publisher, memory, settings.quiet_start_s)
    stack.callback(broadcaster.close)
    return book, broadcaster


def _flip_by_itself(
    tasks: Background,
    settings: MonitorSettings,
    broadcaster: Broadcaster,
    demand: DemandService,
    audit: Audit,
    operations: Operations,
) -> AutoFlips:
    def seen() -> Seen:
        return seen_now(demand.demand(), audit, settings.role_flip_respects_s)

    auto = AutoFlips(broadcaster.view, seen, operations, tasks)
    tasks.every("role-flip", settings.role_flip_period_s, auto.step)
    return auto


def _sockets(stack: AsyncExitStack, settings: MonitorSettings) -> Sockets:
    curve = Curve(settings.curve_public, settings.curve_secret) if settings.curve_public else None
    sockets = Sockets(curve)
    stack.callback(sockets.close)
    return sockets


def _repeat(
    tasks: Background,
    settings: MonitorSettings,
    beats: Heartbeats,
    broadcaster: Broadcaster,
    history: History,
    slo: SloService,
    engine: AsyncEngine,
    store: WriteBehind,
) -> None:
    def turn() -> None:
        beats.tick()
        broadcaster.publish()

    keep_s = {
        "loads": settings.retention_loads_s,
        "slo_windows": settings.retention_slo_s,
        "flips": settings.retention_flips_s,
        "events": settings.retention_events_s,
    }
    tasks.every("broadcast", settings.broadcast_period_s, turn)
    tasks.every("loads", settings.load_sample_s, history.sample)
    tasks.every("slo", settings.slo_sample_s, slo.sample)
    tasks.every("retention", settings.prune_period_s, Retention(engine, keep_s, store.ready).step)


async def _recall_policies(store: WriteBehind, engine: AsyncEngine, book: PolicyBook) -> None:
    """Once the database answers, what people changed before holds again."""
    await store.ready.wait()
    while True:
        try:
            await book.recall(engine)
        except PolyphaseError as error:
            log.error("changed policies are not known yet; trying on", reason=error.message)
            await asyncio.sleep(AGAIN_S)
        else:
            return


async def _recall(
    settings: MonitorSettings,
    store: WriteBehind,
    engine: AsyncEngine,
    registry: Registry,
    memory: Memory,
    logs: tuple[Audit, Events],
) -> None:
    """Once the database answers, remember what this monitor's predecessor knew; bury who does not return."""
    await store.ready.wait()
    for log_book in logs:
        try:
            await log_book.load(engine)
        except PolyphaseError as error:
            log.warning("nothing remembered", reason=error.message)
    try:
        dead = await memory.load(engine)
    except PolyphaseError as error:
        log.warning("no instance remembered", reason=error.message)
        return
    for known in dead[-MAX_DEAD:]:
        registry.remember_dead(known.info, known.role, "died before the monitor was restarted", news=False)
    await asyncio.sleep(settings.connect_timeout_s)
    for known in memory.give_up():
        registry.remember_dead(known.info, known.role, "did not return when the monitor was restarted", news=True)
