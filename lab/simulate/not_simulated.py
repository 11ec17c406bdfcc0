"""Settings of a cluster file that make no difference to a simulation, each with its reason.

A test holds that every setting is here or changes what is simulated, so that none is ignored in silence.
"""

from collections.abc import Mapping

from gateway.settings import GatewaySettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings
from shared.runtime.settings import ServiceSettings

_ADDRESS = "where a process listens: nothing travels in a simulation but KV, over `link`"
_DATABASE = "nothing waits for the database"
_LOG = "what is logged, not what is done"
_SEED = "draws follow the simulation's own seed"
_NO_FAULTS = "nothing fails in the simulation of a cluster file"
_LINES = "all requests are of the class default; where that one yields, its line may be as long as the trace"
_CONNECTIONS = "requests of a trace come without connections"
_BODIES = "each request of a trace is one job of known lengths, and has no body"
_PREDICTOR = "whether lengths are predicted, how well and how soon, is a simulation file's `prediction`"
_MEMORY = "prefetched KV that has no room is pulled again; in a simulation it always has room"
_LATE_KV = "KV on its way never comes too late for its deadline in a simulation"

NOT_SIMULATED: Mapping[type[ServiceSettings], Mapping[str, str]] = {
    WorkerSettings: {
        "host": _ADDRESS,
        "advertise_host": _ADDRESS,
        "log_level": _LOG,
        "tracing": _LOG,
        "drain_s": "no instance of a simulation is told to end",
        "served_model_name": "what a model is called in metrics",
        "policy_seed": _SEED,
        "async_scheduling": "step times hold what an engine's scheduler costs, and whether that is hidden",
        "hang_s": _NO_FAULTS,
        "inbox_bytes": _MEMORY,
        "kv_transport": "what a link carries is the file's `network`, whatever moves it",
        "kv_nixl_trusted": "what a link carries is the file's `network`, whatever moves it",
        "kv_connections": "what a link carries is the file's `network`, over however many connections",
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
        "ring_jobs": "how many timelines are kept to be looked at",
        "prefix_blocks": "a simulation always knows 1,000,000 blocks at most",
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
        "drain_s": "no gateway of a simulation is told to end",
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
        "processes": "a request takes the same time in the gateway, however many there are",
        "dtype": "of the front end; the instances' own counts",
        "vllm_args": "of the front end: templates and parsers, which a trace of lengths does not meet",
        "api_keys_file": "requests of a trace have no keys",
        "caller_share": "requests of a trace have no keys",
        "record_lengths": "it costs no request anything",
        "record_bytes": "it costs no request anything",
        "lean_streams": "who writes the events of a stream; the gateway's time is the simulation's `gateway_s`",
        "stream_interval_share": "a busy gateway's; its time is the simulation's `gateway_s`",
        "grammar_cpu_s": "requests of a trace have no grammars",
        "grammar_cache_bytes": "requests of a trace have no grammars",
        "service_tiers": "all requests are of the class default",
        "max_delayed_jobs": _LINES,
        "max_delayed_tokens": _LINES,
        "max_body_bytes": _BODIES,
        "body_timeout_s": _BODIES,
        "max_jobs_a_body": _BODIES,
        "max_items_per_body": _BODIES,
        "max_held_bytes": _BODIES,
        "write_timeout_s": "clients of a trace read their answers",
        "jobs_at_once": _BODIES,
        "max_prompt_logprobs": _BODIES,
        "attempts": _NO_FAULTS,
        "loss_forgiven_tokens": _NO_FAULTS,
        "losses_at_one_token": _NO_FAULTS,
    },
}

# Of a worker's `engine_args`: what the simulation reads, and what makes no difference to it. Others are refused.
ENGINE_ARGS: Mapping[str, str] = {
    "enable_prefix_caching": "read",
    "gpu_memory_utilization": "KV is `kv_cache_bytes`",
    "seed": "tokens have no content",
    "load_format": "start-up is not simulated",
    "download_dir": "start-up is not simulated",
    "trust_remote_code": "start-up is not simulated",
    "disable_log_stats": _LOG,
}
