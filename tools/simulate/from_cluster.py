"""A cluster file as a simulation file: what its services would do with their settings.

Settings that make no difference to a simulation are listed with their reasons; a test holds that each setting is in the
list or changes the simulation.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from gateway.settings import GatewaySettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.cluster_sections import InstanceSection
from services.launcher.plan import settings_of
from services.worker.identity import precision_of
from services.worker.settings import WorkerSettings
from shared.cost.library import Library
from shared.cost.rates_file import CalibratedKind, Calibration, Kind
from shared.domain.precision import stored_in
from shared.errors import InvalidRequest
from shared.files.faults import describe
from shared.files.places import Places
from shared.runtime.settings import ServiceSettings
from tools.simulate.sim_file import InstanceEntry, RunEntry, SimFile, SloEntry, at_key

_ADDRESS = "an address; of the network a simulation has KV transfers alone, over `link`"
_DATABASE = "requests do not wait for the database"
_LOG = "logs do not change decisions"
_SEED = "a simulation has a seed of its own"
_NO_FAULTS = "the simulation of a cluster file has no faults"
_STOP = "no process of a simulation is stopped"

# By reason, the settings that make no difference.
NOT_SIMULATED: Mapping[type[ServiceSettings], Mapping[str, tuple[str, ...]]] = {
    WorkerSettings: {
        _ADDRESS: ("host", "advertise_host"),
        _LOG: ("log_level", "tracing"),
        _STOP: ("drain_s",),
        _SEED: ("policy_seed",),
        _NO_FAULTS: ("hang_s", "peer_silence_s", "kv_fault"),
        "the name of the model in metrics": ("served_model_name",),
        "each data-parallel rank is simulated as an instance of its own, whose steps wait for no other's": (
            *("rank_of", "data_parallel", "data_parallel_rank", "data_parallel_port"),
        ),
        "start-up is not simulated": ("trust_remote_code",),
        "step times include the cost of an engine's scheduler": ("async_scheduling",),
        "a simulated instance keeps no KV on a disk": ("disk_kv_bytes", "disk_kv_folder"),
        "a simulation has unlimited room for prefetched KV": ("inbox_bytes",),
        "the rate of a link is that of the file's `network`": ("kv_transport", "kv_nixl_trusted", "kv_connections"),
        "no KV transfer of a simulation misses its deadline": ("lease_s", "lease_renewals", "pull_timeout_s"),
    },
    SchedulerSettings: {
        _LOG: ("log_level", "tracing", "decision_log", "decision_log_bytes"),
        _DATABASE: ("queue_rows", "retention_s", "retention_rows", "retention_bytes", "prune_period_s"),
        _SEED: ("policy_seed",),
        _NO_FAULTS: ("lost_after_s", "peer_silence_s"),
        "the number of timelines that are kept": ("ring_jobs",),
        "a simulation has an index of 1,000,000 blocks": ("prefix_blocks",),
    },
    MonitorSettings: {
        _LOG: ("log_level",),
        _NO_FAULTS: (
            "lease_s",
            "silence_s",
            "peer_silence_s",
            "connect_timeout_s",
            "rpc_timeout_s",
            "verify_timeout_s",
        ),
        _DATABASE: (
            *("queue_rows", "load_sample_s", "slo_sample_s", "served_late_s", "prune_period_s"),
            *("retention_loads_s", "retention_slo_s", "retention_flips_s", "retention_events_s", "retention_rows"),
            *("retention_bytes", "retention_served_s", "retention_fine_s", "retention_load_steps_s"),
        ),
        "the monitor of a simulation is never restarted": ("quiet_start_s",),
        "a simulation loads no adapters": ("adapter_linger_s",),
        "one model is simulated, at the precisions that the instances have": ("fingerprint", "mixed_precision"),
        "SLO attainment is that of the whole run": ("slo_windows_s",),
    },
    GatewaySettings: {
        _ADDRESS: ("host", "port"),
        _LOG: ("log_level", "tracing"),
        _STOP: ("drain_s",),
        _NO_FAULTS: ("attempts", "peer_silence_s", "loss_forgiven_tokens", "losses_at_one_token"),
        "requests of a trace have no connections": (
            *("head_timeout_s", "idle_timeout_s", "max_connections", "max_connections_an_address", "proxy_addresses"),
        ),
        "each request of a trace is one job of known lengths, and has no body": (
            *("max_body_bytes", "body_timeout_s", "max_jobs_a_body", "max_items_per_body", "max_held_bytes"),
            *("jobs_at_once", "max_prompt_logprobs", "max_media_bytes"),
        ),
        "whether lengths are predicted, how well and how soon, is a simulation file's `prediction`": (
            *("predict", "predict_wait_s", "predict_timeout_s"),
        ),
        "the gateway's time is the simulation's `gateway_s`, whatever its processes": (
            *("processes", "lean_streams", "stream_interval_share", "record_lengths", "record_bytes"),
        ),
        "of the front end: the instances have their own, and a trace of lengths needs no templates and parsers": (
            *("dtype", "vllm_args", "trust_remote_code"),
        ),
        "the clients of a trace send no hints, for which prompts are kept": ("session_bytes",),
        "requests of a trace have no keys": ("api_keys_file", "caller_share"),
        "requests of a trace have no grammars": ("grammar_cpu_s", "grammar_cache_bytes"),
        "all requests have the class default": ("service_tiers",),
        "if the class default is delayed, its queue may be as long as the trace": (
            *("max_delayed_jobs", "max_delayed_tokens"),
        ),
        "clients of a trace read their answers at once": ("write_timeout_s",),
    },
}

# Keys of a worker's `engine_args` that the simulation reads, or that make no difference to it. It refuses others.
ENGINE_ARGS: Mapping[str, str] = {
    "enable_prefix_caching": "read",
    "quantization": "read",
    "gpu_memory_utilization": "KV is `kv_cache_bytes`",
    "seed": "tokens have no content",
    "load_format": "start-up is not simulated",
    "download_dir": "start-up is not simulated",
    "disable_log_stats": _LOG,
}

# Settings that the launcher derives, and that a simulation does not use.
_DERIVED: dict[str, object] = {"rpc_port": 0, "http_port": 0, "kv_port": 0}
_DERIVED |= {"monitor_url": "", "heartbeat_address": "", "broadcast_address": ""}


# By entry, the calibration of its instances; None without one, so that they report no rates.
Measured = Mapping[str, CalibratedKind | None]


def read_cluster(file: Path) -> tuple[SimFile, Measured]:
    """The instances, policies, limits and SLO of a cluster file, and which instances report other rates than those of
    the cost model.

    Emulated engines have the model that they imitate, and send KV when the whole prompt is computed. The size of KV is
    that of the file; links have `emulated_link_gbps`, or the rate of the catalogue's network. Raises InvalidRequest or
    NotFound that names file and key, with the sentence of the service that would refuse the setting.
    """
    cluster = load_cluster(file)
    places = cluster.places(str(file))
    workers = [(one, _worker(cluster, one, places)) for one in cluster.instances if one.enabled]
    if not workers:
        raise InvalidRequest(places.tell("instances", "no instance is enabled"))
    models = {worker.emulated_model if _emulated(worker) else cluster.model for _, worker in workers}
    if len(models) > 1:
        both = ", ".join(sorted(models))
        raise InvalidRequest(places.tell("instances", f"only one model can be simulated, got {both}"))
    model = models.pop()
    given = {"schedulers": (), "model": cluster.model, **cluster.gateway.extra}
    gateway = settings_of(GatewaySettings, places, "gateway", given)
    monitor = settings_of(MonitorSettings, places, "monitor", cluster.monitor.extra)
    settings_of(SchedulerSettings, places, "scheduler", cluster.scheduler.extra)  # raises for wrong settings
    run = set(RunEntry.model_fields)
    data = {
        "name": cluster.name,
        "model": model,
        "instances": [_instance(section, worker, places) for section, worker in workers],
        "network": cluster.network.model_dump(exclude_unset=True) if cluster.network is not None else None,
        "policies": cluster.policies,
        "slo": gateway.slo["default"].model_dump(include=set(SloEntry.model_fields)),
        "run": {
            **gateway.model_dump(include=run),
            **monitor.model_dump(include=run),
            "codec": gateway.kv_codec,
            "sessions": gateway.sessions > 0,
            "broadcast_s": monitor.broadcast_period_s,
            "role_flip_every_s": monitor.role_flip_period_s,
            "streaming": not all(_emulated(worker) for _, worker in workers),
        },
    }
    try:
        sim = SimFile.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(describe(places, error, kind=SimFile)) from error
    measured = {
        section.id: _calibrated(worker, model, places)
        for section, worker in workers
        if worker.rates_file or not _emulated(worker)
    }
    return sim, measured


def _worker(cluster: Cluster, section: InstanceSection, places: Places) -> WorkerSettings:
    values = {
        **_DERIVED,
        "instance_id": section.id,
        "role": section.role,
        "model": cluster.model,
        "max_model_len": cluster.max_model_len,
        **section.extra,
    }
    return settings_of(WorkerSettings, places, f"instances.{section.id}", values)


def _emulated(worker: WorkerSettings) -> bool:
    return worker.engine == "emulated"


def _instance(section: InstanceSection, worker: WorkerSettings, places: Places) -> dict[str, object]:
    """The entry of a simulation file."""
    same = worker.model_dump(include=set(InstanceEntry.model_fields))
    entry: dict[str, object] = {**same, "id": section.id, "count": len(section.ids)}
    if weights := stored_in(precision_of(worker)):
        entry |= {"dtype": weights, "kv_dtype": worker.dtype}
    entry["hop"] = worker.emulated_hop.model_dump() if worker.emulated_hop is not None else None
    entry["link"] = {"gbps": worker.emulated_link_gbps} if worker.emulated_link_gbps else None
    if _emulated(worker):
        return entry | {
            "staging_bytes": None,
            "prefix_cache": worker.emulated_prefix_cache and worker.pipeline_parallel == 1,
            "slowdown": worker.emulated_slowdown,
            "step_s": worker.emulated_step_s,
            "prefill_s_per_token": worker.emulated_prefill_s_per_token or 0.0,
        }
    for key in worker.engine_args:
        if key not in ENGINE_ARGS:
            message = f"{key!r} cannot be simulated (known: {', '.join(ENGINE_ARGS)})"
            raise InvalidRequest(places.tell(f"instances.{section.id}.engine_args", message))
    ranks = _full_ranks(worker)
    return entry | {
        "kv_cache_bytes": int(worker.kv_cache_bytes * ranks),
        "host_kv_bytes": int(worker.host_kv_bytes * ranks),
        "staging_bytes": "auto" if worker.staging_bytes is None else int(worker.staging_bytes * ranks),
        "prefix_cache": bool(worker.engine_args.get("enable_prefix_caching", True)),
    }


def _full_ranks(worker: WorkerSettings) -> float:
    """KV of the whole model over that of the rank with most layers: KV is full when that rank's is."""
    layers = worker.pipeline_layers
    stages = sum(layers) / max(layers) if layers else worker.pipeline_parallel
    return worker.tensor_parallel * stages


def _calibrated(worker: WorkerSettings, model: str, places: Places) -> CalibratedKind | None:
    """The kind's entry in the calibration that the settings name; None without one."""
    if not worker.rates_file:
        return None
    name = Library.built_in().geometry(model).name if _emulated(worker) else Path(model).name
    kind = Kind(
        worker.engine,
        worker.accelerator,
        name,
        worker.dtype,
        worker.tensor_parallel,
        worker.threads,
        worker.pipeline_parallel,
        stored_in(precision_of(worker)) or precision_of(worker),
    )
    with at_key(places, f"instances.{worker.instance_id}.rates_file"):
        return Calibration.read(Path(worker.rates_file)).for_kind(kind)
