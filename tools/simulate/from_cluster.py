"""A cluster file as a simulation: what its services would do with their settings.

Settings that make no difference to a simulation are listed with their reasons; a test holds that each setting is in the
list or changes the simulation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gateway.settings import GatewaySettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher.cluster_file import Cluster, InstanceSection, load_cluster
from services.launcher.plan import settings_of
from services.worker.settings import WorkerSettings
from shared.cost.library import Library
from shared.cost.rates_file import CalibratedKind, Calibration, Kind
from shared.errors import InvalidRequest, NotFound
from shared.files.faults import describe
from shared.runtime.settings import ServiceSettings
from tools.simulate.sim_file import SimFile, SloEntry

_ADDRESS = "an address; of the network a simulation has KV transfers alone, over `link`"
_DATABASE = "requests do not wait for the database"
_LOG = "logs do not change decisions"
_SEED = "a simulation has a seed of its own"
_NO_FAULTS = "the simulation of a cluster file has no faults"
_QUEUES = "all requests have the class default; if it is delayed, its queue may be as long as the trace"
_CONNECTIONS = "requests of a trace have no connections"
_BODIES = "each request of a trace is one job of known lengths, and has no body"
_PREDICTOR = "whether lengths are predicted, how well and how soon, is a simulation file's `prediction`"
_MEMORY = "a simulation has unlimited room for prefetched KV"
_LATE_KV = "no KV transfer of a simulation misses its deadline"

NOT_SIMULATED: Mapping[type[ServiceSettings], Mapping[str, str]] = {
    WorkerSettings: {
        "host": _ADDRESS,
        "advertise_host": _ADDRESS,
        "log_level": _LOG,
        "tracing": _LOG,
        "drain_s": "no instance of a simulation is stopped",
        "served_model_name": "the name of the model in metrics",
        "policy_seed": _SEED,
        "async_scheduling": "step times include the cost of an engine's scheduler",
        "hang_s": _NO_FAULTS,
        "inbox_bytes": _MEMORY,
        "kv_transport": "the rate of a link is that of the file's `network`, for any transport",
        "kv_nixl_trusted": "the rate of a link is that of the file's `network`, for any transport",
        "kv_connections": "the rate of a link is that of the file's `network`, for any number of connections",
        "lease_s": _LATE_KV,
        "lease_renewals": _LATE_KV,
        "pull_timeout_s": _LATE_KV,
        "kv_fault": _NO_FAULTS,
    },
    SchedulerSettings: {
        "log_level": _LOG,
        "tracing": _LOG,
        "queue_rows": _DATABASE,
        "retention_s": _DATABASE,
        "retention_rows": _DATABASE,
        "retention_bytes": _DATABASE,
        "prune_period_s": _DATABASE,
        "lost_after_s": _NO_FAULTS,
        "ring_jobs": "the number of timelines that are kept",
        "prefix_blocks": "a simulation has an index of 1,000,000 blocks",
        "policy_seed": _SEED,
        "decision_log": _LOG,
        "decision_log_bytes": _LOG,
    },
    MonitorSettings: {
        "log_level": _LOG,
        "lease_s": _NO_FAULTS,
        "silence_s": _NO_FAULTS,
        "connect_timeout_s": _NO_FAULTS,
        "quiet_start_s": "the monitor of a simulation is never restarted",
        "fingerprint": "one model is simulated",
        "rpc_timeout_s": _NO_FAULTS,
        "verify_timeout_s": _NO_FAULTS,
        "slo_windows_s": "SLO attainment is that of the whole run",
        "queue_rows": _DATABASE,
        "load_sample_s": _DATABASE,
        "slo_sample_s": _DATABASE,
        "prune_period_s": _DATABASE,
        "retention_loads_s": _DATABASE,
        "retention_slo_s": _DATABASE,
        "retention_flips_s": _DATABASE,
        "retention_events_s": _DATABASE,
        "retention_rows": _DATABASE,
        "retention_bytes": _DATABASE,
        "retention_served_s": _DATABASE,
        "served_late_s": _DATABASE,
        "retention_fine_s": _DATABASE,
        "retention_load_steps_s": _DATABASE,
    },
    GatewaySettings: {
        "log_level": _LOG,
        "tracing": _LOG,
        "drain_s": "no gateway of a simulation is stopped",
        "head_timeout_s": _CONNECTIONS,
        "idle_timeout_s": _CONNECTIONS,
        "max_connections": _CONNECTIONS,
        "max_connections_an_address": _CONNECTIONS,
        "proxy_addresses": _CONNECTIONS,
        "predict": _PREDICTOR,
        "predict_wait_s": _PREDICTOR,
        "predict_timeout_s": _PREDICTOR,
        "host": _ADDRESS,
        "port": _ADDRESS,
        "processes": "the time of a request in the gateway does not depend on the number of processes",
        "dtype": "of the front end; the instances have their own",
        "vllm_args": "of the front end: a trace of lengths uses no templates and parsers",
        "api_keys_file": "requests of a trace have no keys",
        "caller_share": "requests of a trace have no keys",
        "record_lengths": "it does not delay requests",
        "record_bytes": "it does not delay requests",
        "lean_streams": "the gateway's time is the simulation's `gateway_s`",
        "stream_interval_share": "the gateway's time is the simulation's `gateway_s`",
        "grammar_cpu_s": "requests of a trace have no grammars",
        "grammar_cache_bytes": "requests of a trace have no grammars",
        "service_tiers": "all requests have the class default",
        "max_delayed_jobs": _QUEUES,
        "max_delayed_tokens": _QUEUES,
        "max_body_bytes": _BODIES,
        "body_timeout_s": _BODIES,
        "max_jobs_a_body": _BODIES,
        "max_items_per_body": _BODIES,
        "max_held_bytes": _BODIES,
        "write_timeout_s": "clients of a trace read their answers at once",
        "jobs_at_once": _BODIES,
        "max_prompt_logprobs": _BODIES,
        "attempts": _NO_FAULTS,
        "loss_forgiven_tokens": _NO_FAULTS,
        "losses_at_one_token": _NO_FAULTS,
    },
}

# Keys of a worker's `engine_args` that the simulation reads, or that make no difference to it. It refuses others.
ENGINE_ARGS: Mapping[str, str] = {
    "enable_prefix_caching": "read",
    "gpu_memory_utilization": "KV is `kv_cache_bytes`",
    "seed": "tokens have no content",
    "load_format": "start-up is not simulated",
    "download_dir": "start-up is not simulated",
    "trust_remote_code": "start-up is not simulated",
    "disable_log_stats": _LOG,
}

# Settings that the launcher derives, and that a simulation does not use.
_WORKER = {
    "rpc_port": 0,
    "http_port": 0,
    "kv_port": 0,
    "monitor_url": "",
    "heartbeat_address": "",
    "broadcast_address": "",
}


@dataclass(frozen=True, slots=True)
class ClusterRead:
    """A cluster file as a simulation file.

    measured: by entry, the calibration of its instances; None without one, so that they report no rates. Instances of
    entries that are missing report the rates of the cost model.
    """

    sim: SimFile
    measured: Mapping[str, CalibratedKind | None]


def read_cluster(file: Path) -> ClusterRead:
    """The instances, policies, limits and SLO of a cluster file.

    Emulated engines have the model that they imitate, and send KV when the whole prompt is computed. The size of KV is
    that of the file; links have `emulated_link_gbps`, or the rate of the catalogue's network. Raises InvalidRequest
    that names file and key, with the sentence of the service that would refuse the setting.
    """
    cluster = load_cluster(file)
    places = cluster.places(str(file))
    entries = [_Entry(file, cluster, section) for section in cluster.instances if section.enabled]
    if not entries:
        raise InvalidRequest(places.tell("instances", "no instance is enabled"))
    models = {entry.model for entry in entries}
    if len(models) > 1:
        raise InvalidRequest(
            places.tell("instances", f"only one model can be simulated, got {', '.join(sorted(models))}")
        )
    given = {"schedulers": (), "model": cluster.model, **cluster.gateway.extra}
    gateway = settings_of(GatewaySettings, places, "gateway", given)
    monitor = settings_of(MonitorSettings, places, "monitor", cluster.monitor.extra)
    settings_of(SchedulerSettings, places, "scheduler", cluster.scheduler.extra)  # raises for wrong settings
    data = {
        "name": cluster.name,
        "model": models.pop(),
        "instances": [entry.as_instance() for entry in entries],
        "network": cluster.network.model_dump(exclude_unset=True) if cluster.network is not None else None,
        "policies": cluster.policies,
        "slo": gateway.slo["default"].model_dump(include=set(SloEntry.model_fields)),
        "run": {**_run(gateway, monitor), "streaming": not all(entry.emulated for entry in entries)},
    }
    try:
        sim = SimFile.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(describe(places, error, kind=SimFile)) from error
    found = [(entry.name, entry.measured()) for entry in entries if entry.measurable]
    return ClusterRead(sim, dict(found))


def _run(gateway: GatewaySettings, monitor: MonitorSettings) -> dict[str, Any]:
    """Settings of gateway and monitor as those of a run."""
    return {
        "codec": gateway.kv_codec,
        "patience_s": gateway.patience_s,
        "moves": gateway.moves,
        "job_timeout_s": gateway.job_timeout_s,
        "max_queued_jobs": gateway.max_queued_jobs,
        "max_queued_tokens": gateway.max_queued_tokens,
        "broadcast_s": monitor.broadcast_period_s,
        "role_flip_every_s": monitor.role_flip_period_s,
        "role_flip_respects_s": monitor.role_flip_respects_s,
        "drain_timeout_s": monitor.drain_timeout_s,
    }


class _Entry:
    """An entry of the file with the settings of its workers."""

    def __init__(self, file: Path, cluster: Cluster, section: InstanceSection) -> None:
        self._places = cluster.places(str(file))
        self._section = section
        self._at = f"instances.{section.id}"
        values = {
            **_WORKER,
            "instance_id": section.id,
            "role": section.role,
            "model": cluster.model,
            "max_model_len": cluster.max_model_len,
            **section.extra,
        }
        self.settings = settings_of(WorkerSettings, self._places, self._at, values)
        self.emulated = self.settings.engine == "emulated"
        self.model = self.settings.emulated_model if self.emulated else cluster.model
        self.name = section.id

    def as_instance(self) -> dict[str, Any]:
        """The entry of a simulation file."""
        s = self.settings
        args = {} if self.emulated else self._engine_args()
        return {
            "id": self.name,
            "role": s.role,
            "count": self._section.count,
            "accelerator": s.accelerator,
            "dtype": s.dtype,
            "tensor_parallel": s.tensor_parallel,
            "pipeline_parallel": s.pipeline_parallel,
            "pipeline_layers": s.pipeline_layers,
            "stage_accelerators": s.stage_accelerators,
            "hop": s.emulated_hop.model_dump() if s.emulated_hop is not None else None,
            "node": s.node,
            "weight": s.weight,
            "chunk_size": s.chunk_size,
            "max_chunk_size": s.max_chunk_size,
            "max_seqs": s.max_seqs,
            "block_size": s.block_size,
            "max_model_len": s.max_model_len,
            "staging_bytes": None if self.emulated else self._staging,
            "kv_cache_bytes": s.kv_cache_bytes if self.emulated else int(s.kv_cache_bytes * self._fullest),
            "prefix_cache": s.emulated_prefix_cache if self.emulated else bool(args.get("enable_prefix_caching", True)),
            "link": {"gbps": s.emulated_link_gbps} if s.emulated_link_gbps else None,
            "slowdown": s.emulated_slowdown if self.emulated else 1.0,
            "step_s": s.emulated_step_s if self.emulated else None,
            "prefill_s_per_token": (s.emulated_prefill_s_per_token or 0.0) if self.emulated else 0.0,
        }

    @property
    def _staging(self) -> int | str:
        """Over all ranks: the worker's setting is per rank."""
        size = self.settings.staging_bytes
        return "auto" if size is None else int(size * self._fullest)

    @property
    def _fullest(self) -> float:
        """KV of the whole model over that of the rank with most layers: KV is full when that rank's is."""
        held = self.settings.pipeline_layers
        stages = sum(held) / max(held) if held else self.settings.pipeline_parallel
        return self.settings.tensor_parallel * stages

    @property
    def measurable(self) -> bool:
        """Whether its rates differ from those of the cost model."""
        return bool(self.settings.rates_file) or not self.emulated

    def measured(self) -> CalibratedKind | None:
        """The kind's entry in the calibration that the settings name; None without one."""
        s = self.settings
        if not s.rates_file:
            return None
        name = Library.built_in().geometry(self.model).name if self.emulated else Path(self.model).name
        kind = Kind(s.engine, s.accelerator, name, s.dtype, s.tensor_parallel, s.threads, s.pipeline_parallel)
        try:
            return Calibration.read(Path(s.rates_file)).of(kind)
        except NotFound as error:
            raise NotFound(self._places.tell(f"{self._at}.rates_file", error.message)) from error

    def _engine_args(self) -> dict[str, Any]:
        args = self.settings.engine_args
        for key in args:
            if key not in ENGINE_ARGS:
                message = f"{key!r} cannot be simulated (known: {', '.join(ENGINE_ARGS)})"
                raise InvalidRequest(self._places.tell(f"{self._at}.engine_args", message))
        return args
