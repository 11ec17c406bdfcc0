"""Assembles the cluster monitor: sockets, leader election, the parts of an acting monitor, HTTP."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.adapter_book import RECONCILE_S, AdapterBook
from services.cluster_monitor.broadcaster import EARLY_S, Broadcaster, Heartbeats, Wires
from services.cluster_monitor.events import Events
from services.cluster_monitor.history import SERVED_S, History
from services.cluster_monitor.lease import NAME, LeaderTerm, Lease
from services.cluster_monitor.metrics import ClusterCollector, count_detections
from services.cluster_monitor.operation_log import OperationLog
from services.cluster_monitor.operations import Operations
from services.cluster_monitor.policy_book import Followers, PolicyBook
from services.cluster_monitor.registry import MAX_DEAD, Memory, Registry
from services.cluster_monitor.roles import RoleController
from services.cluster_monitor.routes import router, targets_router
from services.cluster_monitor.settings import MonitorSettings
from services.cluster_monitor.situation import PERIOD_S as WATCH_S
from services.cluster_monitor.situation import Judge, Peers, Watch
from services.cluster_monitor.slo import DemandService, SloService
from services.cluster_monitor.state import Leadership, State
from shared.domain.policies import PolicySet
from shared.errors import PolyphaseError
from shared.policy.registry import from_file
from shared.runtime.http import service_app
from shared.runtime.logs import get_log
from shared.runtime.tasks import background
from shared.store.database import open_engine
from shared.store.lease import LeaseStore
from shared.store.migrate import migrated
from shared.store.reading import read_request
from shared.store.retention import Limit, Retention
from shared.store.write_behind import WriteBehind
from shared.wire.api import EventKind
from shared.wire.api.scheduler import StoredRequest
from shared.wire.sockets import Sockets, open_sockets

log = get_log(__name__)
Found = TypeVar("Found")
RETRY_S = 1.0
DEMAND_S = 1.0  # between two looks at what schedulers report


def create_app(settings: MonitorSettings, sockets: Sockets | None = None) -> FastAPI:
    """The service. sockets: of the process; None: it has its own. Raises InvalidRequest for an unknown policy before
    anything starts.
    """
    metrics, leadership = CollectorRegistry(), Leadership(settings.monitor_id)
    metrics.register(leadership)
    file = from_file(settings.policies)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.leadership = leadership
        async with AsyncExitStack() as stack:
            shared = sockets if sockets is not None else await stack.enter_async_context(open_sockets(settings))
            wires = Wires(stack, settings, shared)
            (await stack.enter_async_context(background())).start("heartbeats", wires.run())
            if settings.lease_s:
                await _act_in_terms(stack, settings, leadership, wires, file)
            else:
                leadership.state = await _act(stack, settings, leadership, wires, LeaderTerm(), file)
            yield

    app = service_app("cluster_monitor", lifespan, metrics, standing=leadership.describe, token=settings.token())
    app.include_router(router)
    app.include_router(targets_router(settings.scrape))
    return app


async def _act_in_terms(
    stack: AsyncExitStack, settings: MonitorSettings, leadership: Leadership, wires: Wires, file: PolicySet
) -> None:
    """Act whenever this monitor holds the lease."""
    store = LeaseStore(settings.database_url, NAME, settings.lease_s / 3)
    stack.push_async_callback(store.close)
    lease = leadership.lease = Lease(store, settings.monitor_id, settings.url, settings.lease_s)
    wires.on_epoch = lease.note_epoch
    stack.push_async_callback(lease.give_back)

    async def take_terms() -> None:
        await migrated(settings.database_url)
        tasks.start("lease", lease.run())
        while True:
            term = await lease.gained()
            async with AsyncExitStack() as parts:
                leadership.state = await _act(parts, settings, leadership, wires, term, file)
                await lease.lost(term.epoch)
                leadership.state = None

    tasks = await stack.enter_async_context(background())
    tasks.start("terms", take_terms())


async def _act(
    stack: AsyncExitStack,
    settings: MonitorSettings,
    leadership: Leadership,
    wires: Wires,
    term: LeaderTerm,
    file: PolicySet,
) -> State:
    """The parts of an acting monitor, at work until the stack closes."""
    metrics = leadership.metrics = CollectorRegistry()
    engine = open_engine(settings.database_url, idle_s=None if term.alone else settings.lease_s / 2)
    stack.push_async_callback(engine.dispose)
    store = WriteBehind(engine, metrics, capacity=settings.queue_rows, fence=term.fence())

    registry, memory, events = Registry(settings, wires.sockets), Memory(), Events(store)
    stack.callback(registry.close)
    registry.on_change(events.changed)
    registry.on_gone(events.gone)
    count_detections(registry, metrics)
    # The verdict's window is made of steps of the history.
    history = History(registry, store, max(settings.served_late_s, min(settings.slo_windows_s)))
    slo = SloService(settings.slo_windows_s, store, history.ended)
    demand = DemandService(events, metrics)

    def policies_changed(text: str, who: str) -> None:
        broadcaster.soon()
        if text:
            events.note(EventKind.POLICIES_CHANGED, f"by {who}: {text}")

    book, followers = PolicyBook(file, store, policies_changed), Followers(registry)
    adapters = AdapterBook(
        settings,
        registry,
        store,
        term,
        lambda text, who: events.note(EventKind.ADAPTERS_CHANGED, f"by {who}: {text}" if who else text),
    )
    early_s = max(EARLY_S, wires.slack_s)
    broadcaster = Broadcaster(settings, registry, book, wires.publisher, memory, term, early_s)
    stack.callback(broadcaster.close)
    beats = Heartbeats(registry, memory, broadcaster, settings)
    stack.enter_context(wires.handing_to(beats))
    metrics.register(ClusterCollector(registry, beats, broadcaster, slo, wires.subscriber))

    operation_log = OperationLog(store, metrics, events.operated)
    operations = Operations(
        settings, registry, operation_log, term, lambda job_id: read_request(engine, StoredRequest, job_id)
    )
    controller = RoleController(
        broadcaster.view, demand.demand, operations, operation_log, settings.role_flip_respects_s
    )

    def control_roles() -> None:
        if broadcaster.loud:  # else not all instances are known yet, or another monitor acts
            controller.step(tasks)

    window_s, expected = min(settings.slo_windows_s), settings.expected_instances
    judge = Judge(window_s, expected, registry, history.served, demand, followers, Peers())
    watch = Watch(lambda: judge.verdict(book.policies), judge.at_rest, events)

    tasks = await stack.enter_async_context(background())
    stack.callback(history.close)
    tasks.start("write-behind", store.run(migrated=not term.alone))
    tasks.start("recall", _recall(settings, store, engine, registry, memory, operation_log, events))
    tasks.start("recall policies", _recall_kept("policies", store, lambda: book.recall(engine)))
    tasks.start("recall adapters", _recall_kept("adapters", store, lambda: adapters.recall(engine)))
    tasks.every("policies", settings.prune_period_s, book.keep_again)
    if settings.lora.allow_runtime_updating:
        tasks.every("adapters", RECONCILE_S, adapters.reconcile)
        tasks.every("keep adapters", settings.prune_period_s, adapters.keep_again)
    tasks.every("loads", settings.load_sample_s, history.sample)
    tasks.every("served", SERVED_S, history.sample_served)
    tasks.every("slo", settings.slo_sample_s, slo.sample)
    tasks.every("retention", settings.prune_period_s, _retention(settings, engine, store).step)
    tasks.every("demand", DEMAND_S, demand.step)
    tasks.every("role-flip", settings.role_flip_period_s, control_roles)
    tasks.every("watch", WATCH_S, watch.step)
    return State(
        registry=registry,
        memory=memory,
        operations=operations,
        operation_log=operation_log,
        events=events,
        slo=slo,
        demand=demand,
        controller=controller,
        broadcaster=broadcaster,
        policies=book,
        followers=followers,
        adapters=adapters,
        store=store,
        engine=engine,
        judge=judge,
    )


def _retention(settings: MonitorSettings, engine: AsyncEngine, store: WriteBehind) -> Retention:
    keep_s = {
        "loads": settings.retention_loads_s,
        "load_steps": settings.retention_load_steps_s,
        "served": settings.retention_served_s,
        "slo_windows": settings.retention_slo_s,
        "flips": settings.retention_flips_s,
        "events": settings.retention_events_s,
    }
    limits = {name: Limit(age_s, settings.retention_rows, settings.retention_bytes) for name, age_s in keep_s.items()}
    return Retention(engine, limits, store.ready, settings.retention_fine_s)


async def _recall_kept(what: str, store: WriteBehind, recall: Callable[[], Awaitable[None]]) -> None:
    """Once the database answers, the changes that people made before hold again."""
    await store.ready.wait()
    while True:
        try:
            await recall()
        except PolyphaseError as error:
            log.error("what was changed before could not be read; trying again", what=what, reason=error.message)
            await asyncio.sleep(RETRY_S)
        else:
            return


async def _recall(
    settings: MonitorSettings,
    store: WriteBehind,
    engine: AsyncEngine,
    registry: Registry,
    memory: Memory,
    operation_log: OperationLog,
    events: Events,
) -> None:
    """Once the database answers, remember what the monitor before this one knew; instances that do not return are dead.

    Instances come before events: broadcasts begin once all instances are back.
    """
    await store.ready.wait()
    await _remember("operations", operation_log.load(engine))
    dead = await _remember("instances", memory.load(engine)) or []
    await _remember("events", events.load(engine))
    if not memory.loaded:
        return
    for info, role in dead[-MAX_DEAD:]:
        registry.remember_dead(info, role, "died before the monitor was restarted", news=False)
    await asyncio.sleep(settings.connect_timeout_s)
    for info, role in memory.give_up():
        registry.remember_dead(info, role, "did not return when the monitor was restarted", news=True)


async def _remember(what: str, reading: Awaitable[Found]) -> Found | None:
    try:
        return await reading
    except PolyphaseError as error:
        log.warning("not remembered", what=what, reason=error.message)
        return None
