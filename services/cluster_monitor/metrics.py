"""Prometheus metrics of the cluster, read at each scrape. Workers have the metrics of what instances do."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.cluster_monitor.broadcaster import Broadcaster, Heartbeats
from services.cluster_monitor.registry import Record, Registry
from services.cluster_monitor.slo import SloService
from shared.domain.instance import InstanceState, Role
from shared.wire.broadcast import Subscriber
from shared.wire.messages import Heartbeat


class ClusterCollector(Collector):
    """Instances by role and state, SLO attainment, dropped input."""

    def __init__(
        self,
        registry: Registry,
        beats: Heartbeats,
        broadcaster: Broadcaster,
        slo: SloService,
        subscriber: Subscriber[Heartbeat],
    ) -> None:
        self._registry = registry
        self._beats = beats
        self._broadcaster = broadcaster
        self._slo = slo
        self._subscriber = subscriber

    def collect(self) -> Iterable[Metric]:
        yield self._instances()
        yield from self._attainment()
        yield from self._sockets()

    def _instances(self) -> Metric:
        family = GaugeMetricFamily("polyphase_instances", "Instances", labels=("role", "state"))
        counts = Counter((record.role, record.state) for record in self._registry.all())
        for role in Role:
            for state in InstanceState:
                family.add_metric((role.value, state.value), counts[(role, state)])
        return family

    def _attainment(self) -> Iterator[Metric]:
        share = GaugeMetricFamily(
            "polyphase_slo_attainment_ratio", "Share of requests in time", labels=("slo", "window_s", "target")
        )
        count = GaugeMetricFamily("polyphase_slo_window_requests", "Requests in the window", labels=("slo", "window_s"))
        gap = GaugeMetricFamily(
            "polyphase_slo_longest_gap_seconds",
            "Percentiles of the requests' longest gaps between tokens, and the longest of all",
            labels=("slo", "window_s", "of"),
        )
        for report in self._slo.reports():
            window = f"{report.window_s:g}"
            count.add_metric((report.slo, window), report.requests)
            targets = {
                "ttft": report.ttft_attainment,
                "tpot": report.tpot_attainment,
                "itl": report.itl_attainment,
                "all": report.attainment,
            }
            for target, value in targets.items():
                if value is not None:
                    share.add_metric((report.slo, window, target), value)
            for which, seconds in report.longest_gap_s.items():
                if seconds is not None:
                    gap.add_metric((report.slo, window, which), seconds)
        yield from (share, count, gap)

    def _sockets(self) -> Iterator[Metric]:
        dropped = CounterMetricFamily(
            "polyphase_wire_dropped", "Messages dropped, by socket and cause", labels=("socket", "cause")
        )
        for cause, number in (self._subscriber.dropped + self._beats.ignored).items():
            dropped.add_metric(("heartbeat", cause), number)
        taken = CounterMetricFamily("polyphase_heartbeats", "Heartbeats taken in")
        taken.add_metric((), self._beats.taken)
        sent = CounterMetricFamily("polyphase_broadcast_bytes", "Bytes broadcast, once however many listen")
        sent.add_metric((), self._broadcaster.sent_bytes)
        yield from (dropped, taken, sent)


def count_detections(registry: Registry, metrics: CollectorRegistry) -> None:
    """Count how often an instance was found dead, silent, or back."""
    detections = PrometheusCounter(
        "polyphase_detections", "State changes of instances, by new state", ["state"], registry=metrics
    )

    def changed(record: Record, before: InstanceState) -> None:
        if record.state is not before:
            detections.labels(record.state.value).inc()

    registry.on_change(changed)
