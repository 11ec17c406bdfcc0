"""The scheduler's ZeroMQ ends: the RPC that gateways call, and the monitor's broadcast."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.global_scheduler.demand import DemandTeller
from services.global_scheduler.placer import Placer
from services.global_scheduler.prefix_watch import PrefixWatch
from services.global_scheduler.reports import Reports
from services.global_scheduler.settings import SchedulerSettings
from shared.domain.cluster import ClusterDelta
from shared.domain.route import Route
from shared.runtime.tasks import Background
from shared.wire.cluster_feed import ClusterFeed
from shared.wire.messages import PlaceRequest
from shared.wire.methods import PLACE, REPORT
from shared.wire.rpc_clients import SWEEP_S, RpcClients
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets

if TYPE_CHECKING:
    from shared.runtime.otlp import Tracer

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
        from services.global_scheduler.tracing import traced

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
