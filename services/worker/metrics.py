"""The Prometheus metrics of a worker. `WorkerMetrics` reads state that other objects keep, at each scrape;
`TransferMetrics` counts the ends of imports.

Names are vLLM's where vLLM has the metric, with its labels and meaning. No series names the instance: that is the
target's label, as service discovery gives it. KV transfers are counted by transport and without a label for the
exporter, so that the number of series stays bounded.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.engines.base import Engine, EngineStats
from services.worker.jobs.prefill import Dispatcher
from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from services.worker.monitor_link import Telemetry
from shared.domain.instance import InstanceInfo, InstanceLoad, Role
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.runtime.metrics import Bound
from shared.wire.rpc_server import RpcServer

_VLLM = ("model_name", "engine")  # the only engine of its process is 0
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
NOTHING = "none"  # the transport of an import that moved no bytes


class WorkerMetrics(Collector):
    """Collects from the live objects; registers itself. `model`: the name that clients use for it."""

    def __init__(
        self,
        info: InstanceInfo,
        model: str,
        telemetry: Telemetry,
        roles: RoleState,
        engine: Engine,
        kv: KvPort,
        server: RpcServer,
        dispatcher: Dispatcher,
        registry: CollectorRegistry,
    ) -> None:
        self._info = info
        self._model = model
        self._telemetry = telemetry
        self._roles = roles
        self._engine = engine
        self._kv = kv
        self._server = server
        self._dispatcher = dispatcher
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        load = self._telemetry.load()
        stats = self._engine.stats()
        yield from self._of_engine(load, stats)
        yield from self._of_instance(load, stats)
        yield from self._counted(stats)
        info = {
            "model_name": self._model,
            "accelerator": self._info.accelerator,
            "emulated": str(self._info.compatibility.engine == "emulated").lower(),
            "engine": self._info.compatibility.engine,
            "engine_version": self._info.compatibility.engine_version,
            "dtype": self._info.dtype,
            "tensor_parallel": str(self._info.tensor_parallel),
            "pipeline_parallel": str(self._info.pipeline_parallel),
        }
        described = GaugeMetricFamily("polyphase_instance_info", "What the instance is; always 1.", labels=list(info))
        described.add_metric(list(info.values()), 1.0)
        yield described

    def _of_engine(self, load: InstanceLoad, stats: EngineStats) -> Iterator[Metric]:
        labels = (self._model, "0")
        used, steps = load.kv_used_share(self._info.total_blocks), self._engine.steps
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that the engine steps.", load.running),
            ("vllm:num_requests_waiting", "Requests in the engine's queue, KV waiters included.", load.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used),
        ):
            gauge = GaugeMetricFamily(name, text, labels=_VLLM)
            gauge.add_metric(labels, float(value))
            yield gauge
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache or the host tier.", stats.hit_tokens),
            ("vllm:num_preemptions", "How often a request lost its KV blocks, and began again.", stats.preemptions),
            ("vllm:spec_decode_num_drafts", "Drafts of speculative decoding that were verified.", steps.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Tokens of these drafts.", steps.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Of these, accepted ones.", steps.accepted_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=_VLLM)
            counter.add_metric(labels, float(value))
            yield counter

    def _of_instance(self, load: InstanceLoad, stats: EngineStats) -> Iterator[Metric]:
        gauges = {
            "queued_prefill_jobs": ("Jobs whose prompt is not computed yet.", load.queued_prefill),
            "queued_prefill_tokens": ("Prompt tokens not yet computed.", load.queued_prefill_tokens),
            "decode_jobs": ("Decode jobs accepted and not finished.", load.decoding),
            "heavy_decode_jobs": ("Of those, predicted long.", load.heavy_decodes),
            "decode_context_tokens": ("Context of the decode jobs.", load.context_tokens),
            "inflight_jobs": ("Jobs accepted and not finished.", load.inflight),
            "kv_blocks": ("KV blocks of the engine's cache.", self._info.total_blocks),
            "staged_bytes": ("KV that waits for an importer.", load.staged_bytes),
            "inbound_bytes": ("KV on its way here.", load.inbound_bytes),
            "host_kv_bytes": ("KV in host memory that left the engine's cache.", stats.host.held_bytes),
            "host_load_token_seconds": (
                "Seconds by which a prompt token that is loaded from host memory makes a step longer.",
                self._telemetry.info.rates.host_token_s,
            ),
            "disk_kv_bytes": ("KV on the disk that left host memory.", stats.host.disk.held_bytes),
            "disk_off": ("1 where an error has switched the disk tier off.", float(bool(stats.host.disk.fault))),
            "chunk_tokens": ("Tokens that a step may hold.", self._telemetry.info.chunk_size),
            "sessions": ("Sessions whose KV is kept until their next turn.", stats.sessions),
            "session_blocks": ("KV blocks that are kept for them.", stats.session_blocks),
            "draining": ("1 while it takes no new jobs.", float(self._roles.draining)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"polyphase_instance_{name}", text, value=float(value))
        role = GaugeMetricFamily("polyphase_instance_role", "1 for the present role, 0 for the other.", labels=["role"])
        for each in Role:
            role.add_metric([each.value], float(self._roles.role is each))
        yield role

    def _counted(self, stats: EngineStats) -> Iterator[Metric]:
        host, disk = stats.host, stats.host.disk
        for name, text, value in (
            ("instance_host_stored_blocks", "KV blocks copied to host memory.", host.stored_blocks),
            ("instance_host_loaded_blocks", "KV blocks loaded back from host memory.", host.loaded_blocks),
            ("instance_host_evicted_blocks", "KV blocks that left full host memory.", host.evicted_blocks),
            ("instance_host_tokens", "Prompt tokens loaded from host memory, not computed.", host.served_tokens),
            ("instance_disk_written_blocks", "KV blocks written to the disk.", disk.written_blocks),
            ("instance_disk_read_blocks", "KV blocks read from the disk to host memory.", disk.read_blocks),
            ("instance_disk_evicted_blocks", "KV blocks that left a full disk.", disk.evicted_blocks),
            ("instance_disk_dropped_blocks", "KV blocks not written: others still were.", disk.dropped_blocks),
            ("instance_disk_lost_blocks", "KV blocks damaged on the disk or not readable.", disk.lost_blocks),
            ("instance_flips", "Role flips.", self._roles.flips),
            ("instance_dispatched_jobs", "Jobs sent on to instances of its choice.", self._dispatcher.dispatched),
            ("instance_sessions_yielded", "Sessions whose kept KV blocks requests needed.", stats.sessions_yielded),
            ("kv_nixl_failures", "Pairs that both have NIXL and had to go on over TCP.", self._kv.nixl_failures),
        ):
            yield CounterMetricFamily(f"polyphase_{name}", text, value=float(value))
        dropped = CounterMetricFamily(
            "polyphase_wire_dropped", "Messages dropped, by socket and cause.", labels=["socket", "cause"]
        )
        for cause, count in self._server.dropped.items():
            dropped.add_metric(["rpc", cause], float(count))
        yield dropped


class TransferMetrics:
    """Imports of this instance. `then` is called with each, too."""

    def __init__(self, registry: CollectorRegistry, then: Callable[[KvHandle, TransferReport], None]) -> None:
        self._then = then
        by = ["transport", "codec"]
        imports = Counter(
            "polyphase_kv_imports",
            "Imports of KV that came with jobs from other instances, by outcome.",
            [*by, "outcome"],
            registry=registry,
        )
        moved = Counter("polyphase_kv_import_bytes", "Of those, bytes on the wire.", by, registry=registry)
        tokens = Counter("polyphase_kv_import_tokens", "Of those, prompt tokens.", by, registry=registry)
        took = Histogram(
            "polyphase_kv_import_seconds", "Time of those that moved bytes.", by, buckets=_SECONDS, registry=registry
        )
        self._imports, self._bytes, self._tokens, self._took = Bound(imports), Bound(moved), Bound(tokens), Bound(took)

    def ended(self, handle: KvHandle, report: TransferReport) -> None:
        self._then(handle, report)
        transport, codec = report.transport or NOTHING, handle.codec.value
        self._imports.labels(transport, codec, report.outcome.value).inc()
        if report.outcome is TransferOutcome.PULLED:
            self._bytes.labels(transport, codec).inc(report.wire_bytes)
            self._tokens.labels(transport, codec).inc(report.tokens)
            self._took.labels(transport, codec).observe(max(0.0, report.ended_s - report.started_s))
