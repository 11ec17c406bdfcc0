"""The scheduler's ZeroMQ ends: the RPC that gateways call, and the monitor's broadcast."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Protocol

import structlog
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.global_scheduler.news import DemandTeller
from services.global_scheduler.placer import Placer
from services.global_scheduler.reports import Reports
from services.global_scheduler.settings import SchedulerSettings
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import ClusterView, InstanceInfo
from shared.domain.prompt import PrefixDelta
from shared.domain.route import Route
from shared.errors import PeerLost, PolyphaseError
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background
from shared.wire.broadcast import ClusterFeed
from shared.wire.messages import PLACE, PREFIXES, REPORT, PlaceRequest, PrefixesRequest
from shared.wire.rpc_client import SWEEP_S, RpcClients
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets

if TYPE_CHECKING:
    from shared.runtime.otlp import Tracer

# MERGED prefix_watch.py
# What instances tell of their prefix caches, into the index that placement looks at.


log = get_log(__name__)
RETRY_S = 1.0
CALL_S = 86_400.0  # then it begins anew


class PrefixSink(Protocol):
    """Who wants to know."""

    def tell(self, instance_id: str, delta: PrefixDelta) -> bool:
        """Take what an instance tells; False when something before it was lost."""
        ...

    def forget(self, instance_id: str) -> None:
        """Know nothing of that instance."""
        ...


class PrefixWatch:
    """One call to each instance of the broadcast, which lasts as long as both do.

    While there is none, or once something in it was lost, nothing is known of that instance.
    """

    def __init__(self, clients: RpcClients, prefixes: PrefixSink) -> None:
        self._clients = clients
        self._prefixes = prefixes
        self._tasks: dict[str, tuple[int, asyncio.Task[None]]] = {}  # generation and call, by instance

    @property
    def calls(self) -> int:
        """Instances that are asked."""
        return len(self._tasks)

    def update(self, view: ClusterView, *, wanted: bool) -> None:
        """Ask those of a broadcast and nobody else; nobody at all while no policy wants to know."""
        there = {one.info.instance_id: one.info for one in view.instances} if wanted else {}
        for instance_id, (generation, task) in list(self._tasks.items()):
            if instance_id not in there or there[instance_id].generation != generation or task.done():
                task.cancel()
                del self._tasks[instance_id]
                self._prefixes.forget(instance_id)
        for instance_id, info in there.items():
            if instance_id not in self._tasks:
                task = asyncio.get_running_loop().create_task(self._follow(info), name=f"prefixes of {instance_id}")
                task.add_done_callback(_ended)
                self._tasks[instance_id] = info.generation, task

    async def close(self) -> None:
        """Ask nobody."""
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, info: InstanceInfo) -> None:
        said = ""

        def take(delta: PrefixDelta) -> None:
            ours = self._asks(info) and delta.generation == info.generation
            if not ours or not self._prefixes.tell(info.instance_id, delta):
                raise PeerLost("something that the instance told of its prefix cache was lost")

        while True:
            try:
                client = self._clients.to(info.rpc)
                await client.call(PREFIXES, PrefixesRequest(), timeout_s=CALL_S, on_item=take)
            except PolyphaseError as error:
                if said != error.message:  # once a second, one line
                    said = error.message
                    log.info("prefixes are not told", instance_id=info.instance_id, reason=said)
            if self._asks(info):
                self._prefixes.forget(info.instance_id)
            await asyncio.sleep(RETRY_S)

    def _asks(self, info: InstanceInfo) -> bool:
        known = self._tasks.get(info.instance_id)
        return known is not None and known[0] == info.generation


def _ended(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("prefixes are told no more; the next broadcast asks again", task=task.get_name(), exc_info=error)


Place = Callable[[PlaceRequest, ServerCall], Route]
ASK_AGAIN_S = 1.0  # so often whoever does not tell of its prefixes any more is asked again


def open_sockets(stack: AsyncExitStack, settings: SchedulerSettings) -> Sockets:
    """The process's ZeroMQ context, encrypted when keys are set."""
    sockets = Sockets.of(settings)
    stack.callback(sockets.close)
    return sockets


def open_prefixes(stack: AsyncExitStack, sockets: Sockets, tasks: Background, placer: Placer) -> PrefixWatch:
    """Connect to the instances that the monitor tells of, while placement wants to know what they hold."""
    clients = stack.enter_context(RpcClients(sockets))
    tasks.every("sweep-clients", SWEEP_S, clients.sweep)
    prefixes = PrefixWatch(clients, placer)
    stack.push_async_callback(prefixes.close)
    return prefixes


def open_broadcast(
    stack: AsyncExitStack, sockets: Sockets, settings: SchedulerSettings, placer: Placer, prefixes: PrefixWatch
) -> ClusterFeed:
    """Listen to the monitor."""
    known, asked_s = (-1, False), 0.0

    def heard(delta: ClusterDelta) -> bool:
        nonlocal known, asked_s
        if not placer.hear(delta):
            return False
        now = time.monotonic()
        if known != (placer.moves, placer.wants_prefixes) or now - asked_s > ASK_AGAIN_S:
            known, asked_s = (placer.moves, placer.wants_prefixes), now
            prefixes.update(placer.view, wanted=placer.wants_prefixes)
        return True

    feed = ClusterFeed(sockets, settings.broadcast_address, heard)
    stack.callback(feed.close)
    return feed


async def open_rpc(
    stack: AsyncExitStack,
    sockets: Sockets,
    settings: SchedulerSettings,
    placer: Placer,
    reports: Reports,
    demand: DemandTeller,
    tracer: "Tracer | None",
) -> RpcServer:
    """Serve PLACE and REPORT."""

    def place(request: PlaceRequest, _: ServerCall) -> Route:
        reports.learn_targets(request)
        route = placer.place(request)
        if reports.placed(request.job.job_id):
            demand.placed(request.job, route)
        return route

    answer: Place = place
    if tracer is not None:
        answer = traced(place, tracer)
    server = RpcServer(sockets, settings.rpc_address, {PLACE: answer, REPORT: reports.handle})
    return await stack.enter_async_context(server)


class DroppedInput(Collector):
    """Messages dropped, by socket and cause."""

    def __init__(self, sockets: Mapping[str, Mapping[str, int]]) -> None:
        self._sockets = sockets

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        family = CounterMetricFamily(
            "polyphase_wire_dropped", "Messages dropped, by socket and cause", labels=("socket", "cause")
        )
        for socket, causes in self._sockets.items():
            for cause, number in causes.items():
                family.add_metric((socket, cause), number)
        yield family


def watch(registry: CollectorRegistry, placer: Placer, server: RpcServer, feed: ClusterFeed) -> None:
    """Metrics of what comes in: dropped input by socket and cause, age of the newest broadcast, known prefixes."""
    registry.register(DroppedInput({"rpc": server.dropped, "broadcast": feed.dropped}))
    age = Gauge("polyphase_scheduler_broadcast_age_seconds", "Age of the newest broadcast", registry=registry)
    age.set_function(lambda: placer.broadcast_age_s)
    known = Gauge("polyphase_scheduler_prefix_blocks", "Blocks known to be in prefix caches", registry=registry)
    known.set_function(lambda: len(placer.prefixes))


# MERGED tracing.py
# The scheduler's span: one for each question, with the answer and its reasons.


MOST = 16  # reasons that are told


def traced(place: Place, tracer: "Tracer") -> Place:
    """`place`, which tells what it decided where the question belongs to a trace."""

    def told(request: PlaceRequest, call: ServerCall) -> Route:
        trace = tracer.remote(request.trace) if request.trace else None
        if trace is None:
            return place(request, call)
        span = trace.child("place", time.time(), {"polyphase.job.id": request.job.job_id}, "server")
        with structlog.contextvars.bound_contextvars(trace_id=trace.trace_id):
            try:
                route = place(request, call)
            except PolyphaseError as error:
                span.end(time.time(), error=error.code)
                raise
        span.end(time.time(), _figures(route))
        return route

    return told


def _figures(route: Route) -> dict[str, str | int | list[str]]:
    return {
        "polyphase.policy": route.policy,
        "polyphase.split": route.split,
        "polyphase.prefill.instance.id": route.prefill.instance_id if route.prefill is not None else "",
        "polyphase.decode.instance.id": route.decode.instance_id if route.decode is not None else "",
        "polyphase.reasons": [reason.line for reason in route.reasons[:MOST]],
    }
