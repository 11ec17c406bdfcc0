"""The worker's metrics, read when somebody asks; names are vLLM's where it has one."""

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.engines.base import Engine
from services.worker.jobs.dispatcher import Dispatcher
from services.worker.jobs.roles import RoleState
from services.worker.telemetry import Telemetry
from shared.domain.instance import InstanceInfo
from shared.wire.rpc_server import RpcServer


class WorkerMetrics(Collector):
    """Collects from the live objects; registers itself."""

    def __init__(
        self,
        info: InstanceInfo,
        telemetry: Telemetry,
        roles: RoleState,
        engine: Engine,
        server: RpcServer,
        dispatcher: Dispatcher,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._info = info
        self._telemetry = telemetry
        self._roles = roles
        self._engine = engine
        self._server = server
        self._dispatcher = dispatcher
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        load, total = self._telemetry.load(), max(1, self._info.total_blocks)
        gauges = {
            "vllm:num_requests_running": ("Requests the engine steps.", load.running),
            "vllm:num_requests_waiting": ("Requests in the engine's queue, KV waiters included.", load.waiting),
            "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", 1 - load.free_blocks / total),
            "polyphase_queued_prefill_tokens": ("Prompt tokens not yet computed.", load.queued_prefill_tokens),
            "polyphase_decoding": ("Decode jobs accepted and not finished.", load.decoding),
            "polyphase_staged_bytes": ("KV that waits for an importer.", load.staged_bytes),
            "polyphase_chunk_size": ("Tokens of a step, prefill and decode together.", self._telemetry.info.chunk_size),
            "polyphase_inflight": ("Jobs accepted and not finished.", load.inflight),
            "polyphase_draining": ("1 while draining.", float(self._roles.draining)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=float(value))
        role = GaugeMetricFamily("polyphase_role", "The present role.", labels=["role"])
        role.add_metric([self._roles.role.value], 1.0)
        yield role
        stats = self._engine.stats()
        queried, hit = "Prompt tokens looked up in the prefix cache.", "Prompt tokens found in the prefix cache."
        yield CounterMetricFamily("vllm:prefix_cache_queries", queried, value=float(stats.prompt_tokens))
        yield CounterMetricFamily("vllm:prefix_cache_hits", hit, value=float(stats.hit_tokens))
        preempted = "How often a request lost its KV blocks to others, and began again."
        yield CounterMetricFamily("vllm:num_preemptions", preempted, value=float(stats.preemptions))
        yield CounterMetricFamily("polyphase_flips", "Role flips.", value=float(self._roles.flips))
        yield _counter("polyphase_rpc_dropped", "RPC input dropped, by cause.", "cause", self._server.dropped)
        yield _counter("polyphase_dispatched", "Jobs dispatched, by instance.", "instance", self._dispatcher.choices)


def _counter(name: str, text: str, label: str, counts: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in counts.items():
        family.add_metric([key], float(value))
    return family
