"""Puts the cluster monitor together: sockets, registry, the store, HTTP."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.audit import Audit
from services.cluster_monitor.broadcaster import Broadcaster, Ends, Heartbeats
from services.cluster_monitor.events import EventKind, Events
from services.cluster_monitor.flips import AutoFlips, Operations, seen_now
from services.cluster_monitor.history import SERVED_S, History
from services.cluster_monitor.lease import NAME, Alone, Lease, Turn
from services.cluster_monitor.metrics import ClusterCollector, count_detections
from services.cluster_monitor.policy_book import Followers, PolicyBook
from services.cluster_monitor.registry import MAX_DEAD, Memory, Registry
from services.cluster_monitor.routes import router, targets_router
from services.cluster_monitor.routes import router as console_router
from services.cluster_monitor.routes import router as policy_router
from services.cluster_monitor.settings import MonitorSettings
from services.cluster_monitor.situation import PERIOD_S as WATCH_S
from services.cluster_monitor.situation import Judge, Peers, Watch
from services.cluster_monitor.slo import DemandService, SloService
from services.cluster_monitor.state import State, Turns
from shared.domain.policies import PolicySet
from shared.errors import PolyphaseError
from shared.policy.registry import from_file
from shared.policy.role_flip import Seen
from shared.runtime.http import service_app
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background, background
from shared.store.database import open_engine
from shared.store.lease import LeaseStore
from shared.store.migrate import migrated
from shared.store.retention import Limit, Retention
from shared.store.write_behind import WriteBehind

log = get_log(__name__)
Found = TypeVar("Found")
AGAIN_S = 1.0
DEMAND_S = 1.0  # between two looks at what schedulers tell


def create_app(settings: MonitorSettings) -> FastAPI:
    """The service. Raises InvalidRequest for an unknown policy before anything starts."""
    metrics, turns = CollectorRegistry(), Turns(settings.monitor_id)
    metrics.register(turns)
    file = from_file(settings.policies)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.turns = turns
        async with AsyncExitStack() as stack:
            ends = Ends(stack, settings)
            if settings.lease_s:
                await _by_turns(stack, settings, turns, ends, file)
            else:
                turns.state = await _act(stack, settings, turns, ends, Alone(), file)
            yield

    app = service_app("cluster_monitor", lifespan, metrics, standing=turns.describe, token=settings.token())
    app.include_router(router)
    app.include_router(console_router)
    app.include_router(policy_router)
    app.include_router(targets_router(settings.scrape))
    return app


async def _by_turns(
    stack: AsyncExitStack, settings: MonitorSettings, turns: Turns, ends: Ends, file: PolicySet
) -> None:
    """Act while the lease is ours."""
    store = LeaseStore(settings.database_url, NAME, settings.lease_s / 3)
    stack.push_async_callback(store.close)
    lease = turns.lease = Lease(store, settings.monitor_id, settings.url, settings.lease_s)
    ends.on_epoch = lease.heard
    stack.push_async_callback(lease.give_back)

    async def take_turns() -> None:
        await migrated(settings.database_url)
        tasks.start("lease", lease.run())
        while True:
            turn = await lease.gained()
            async with AsyncExitStack() as parts:
                turns.state = await _act(parts, settings, turns, ends, turn, file)
                await lease.lost(turn.epoch)
                turns.state = None

    tasks = await stack.enter_async_context(background())
    tasks.start("turns", take_turns())


async def _act(
    stack: AsyncExitStack, settings: MonitorSettings, turns: Turns, ends: Ends, turn: Turn, file: PolicySet
) -> State:
    metrics = turns.metrics = CollectorRegistry()
    alone = isinstance(turn, Alone)
    engine = open_engine(settings.database_url, idle_s=None if alone else settings.lease_s / 2)
    stack.push_async_callback(engine.dispose)
    store = WriteBehind(engine, metrics, capacity=settings.queue_rows, fence=turn.fence())
    registry = Registry(settings, ends.sockets)
    stack.callback(registry.close)
    memory, events = Memory(), Events(store)
    audit = Audit(store, metrics, events.operated)
    registry.on_change(events.changed)
    registry.on_gone(lambda record, how, why: events.note(EventKind(how), why, record.instance_id, record.role.value))
    # A verdict's window is made of the steps that are kept.
    history = History(registry, store, max(settings.served_late_s, min(settings.slo_windows_s)))
    slo = SloService(settings.slo_windows_s, store, history.ended)
    demand = DemandService(events, metrics)
    count_detections(registry, metrics)
    book, broadcaster = _broadcasting(stack, settings, ends, turn, registry, memory, events, store, file)
    beats = Heartbeats(registry, memory, broadcaster, settings.broadcast_period_s)
    stack.enter_context(ends.heard_by(beats))
    metrics.register(ClusterCollector(registry, beats, broadcaster, slo, ends.subscriber))

    tasks = await stack.enter_async_context(background())
    stack.callback(history.close)
    tasks.start("write-behind", store.run(migrated=not alone))
    tasks.start("recall", _recall(settings, store, engine, registry, memory, (audit, events)))
    tasks.start("recall policies", _recall_policies(store, engine, book))
    tasks.every("policies", settings.prune_period_s, book.keep_again)
    tasks.start("silence", beats.watch())
    _repeat(tasks, settings, history, slo, engine, store)
    tasks.every("demand", DEMAND_S, demand.step)
    operations = Operations(settings, registry, audit, turn)
    auto = _flip_by_itself(tasks, settings, broadcaster, demand, audit, operations)
    followers = Followers(registry)
    judge = _judging(tasks, settings, registry, history, demand, followers, book, events)
    parts = registry, memory, operations, audit, events, slo, demand, auto, broadcaster, book, followers, store
    return State(*parts, engine, judge)


def _judging(
    tasks: Background,
    settings: MonitorSettings,
    registry: Registry,
    history: History,
    demand: DemandService,
    followers: Followers,
    book: PolicyBook,
    events: Events,
) -> Judge:
    """Who gives the verdict, and tells of it when it changes."""
    window_s, expected = min(settings.slo_windows_s), settings.expected_instances
    judge = Judge(window_s, expected, registry, history.served, demand, followers, Peers())
    watch = Watch(lambda: judge.verdict(book.policies), events)
    tasks.every("watch", WATCH_S, watch.step)
    return judge


def _broadcasting(
    stack: AsyncExitStack,
    settings: MonitorSettings,
    ends: Ends,
    turn: Turn,
    registry: Registry,
    memory: Memory,
    events: Events,
    store: WriteBehind,
    file: PolicySet,
) -> tuple[PolicyBook, Broadcaster]:
    """The policies in force, and who sends them and the loads."""

    def policies_changed(text: str, who: str) -> None:
        broadcaster.soon()
        if text:
            events.note(EventKind.POLICIES_CHANGED, f"by {who}: {text}")

    book = PolicyBook(file, store, policies_changed)
    period_s, quiet_s = settings.broadcast_period_s, settings.quiet_start_s
    broadcaster = Broadcaster(registry, book, ends.publisher, memory, turn, period_s=period_s, quiet_start_s=quiet_s)
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

    def step() -> None:
        if broadcaster.loud:  # neither before it knows all nor while it is not its turn
            auto.step()

    tasks.every("role-flip", settings.role_flip_period_s, step)
    return auto


def _repeat(
    tasks: Background,
    settings: MonitorSettings,
    history: History,
    slo: SloService,
    engine: AsyncEngine,
    store: WriteBehind,
) -> None:
    keep_s = {
        "loads": settings.retention_loads_s,
        "load_steps": settings.retention_load_steps_s,
        "served": settings.retention_served_s,
        "slo_windows": settings.retention_slo_s,
        "flips": settings.retention_flips_s,
        "events": settings.retention_events_s,
    }
    limits = {name: Limit(age_s, settings.retention_rows, settings.retention_bytes) for name, age_s in keep_s.items()}
    tasks.every("loads", settings.load_sample_s, history.sample)
    tasks.every("served", SERVED_S, history.sample_served)
    tasks.every("slo", settings.slo_sample_s, slo.sample)
    tasks.every(
        "retention", settings.prune_period_s, Retention(engine, limits, store.ready, settings.retention_fine_s).step
    )


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
    """Once the database answers, remember what this monitor's predecessor knew; bury who does not return.

    Instances before events: the cluster is told of once all of them are back.
    """
    await store.ready.wait()
    audit, events = logs
    await _remember("operations", audit.load(engine))
    dead = await _remember("instances", memory.load(engine)) or []
    await _remember("events", events.load(engine))
    if not memory.loaded:
        return
    for known in dead[-MAX_DEAD:]:
        registry.remember_dead(known.info, known.role, "died before the monitor was restarted", news=False)
    await asyncio.sleep(settings.connect_timeout_s)
    for known in memory.give_up():
        registry.remember_dead(known.info, known.role, "did not return when the monitor was restarted", news=True)


async def _remember(what: str, reading: Awaitable[Found]) -> Found | None:
    try:
        return await reading
    except PolyphaseError as error:
        log.warning("not remembered", what=what, reason=error.message)
        return None
