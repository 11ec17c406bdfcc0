"""The clusters that scenarios run on, with the load of each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.chaos.wires import ALL_LINKS
from benchmarks.suite import BARE, CPU_ENGINE, DEMO, SPLIT, on_free_ports
from services.launcher.child_process import Limits
from services.launcher.cluster_file import Cluster
from services.launcher.cluster_keys import curve_pair

_MIB = 1 << 20
MEMORY_BYTES = 64 * _MIB  # growth that the arenas of an allocator and filling rings explain

# Steps that are slow enough for two cores to run the bench beside them, and blocks for all users at once.
EMULATED_ENGINE = {
    "engine": "emulated",
    "accelerator": "A100-SXM-80",
    "emulated_step_s": 0.04,
    "emulated_prefill_s_per_token": 0.0002,
    "chunk_size": 128,
    "kv_cache_bytes": 2048 * _MIB,
}
REAL_ENGINE = {**CPU_ENGINE, "chunk_size": 256}
ALONE = {**BARE, "policies": SPLIT}

# The bench kills often what usually runs for weeks. A process counts as stable after a short time, so that the restarts
# of one scenario do not lengthen the launcher's pause before the restarts of the next one.
LIMITS = Limits(stable_s=3.0)
# For faults that have to last until the monitor's verdict names them: a process that was killed stays away for 8 s, and
# one that stands still is not killed.
SLOW_LIMITS = Limits(hang_s=60.0, backoff_s=8.0, backoff_max_s=8.0, stable_s=1.0)


@dataclass(frozen=True, slots=True)
class Testbed:
    """A cluster and its load."""

    name: str
    title: str
    cluster: dict[str, Any]
    prompts: tuple[int, ...] = (8, 90, 300, 900)  # lengths in tokens; some take several chunks
    users: int = 8
    answer_tokens: int = 24
    gateways: int = 2
    curve: bool = False  # CurveZMQ keys are in the cluster file
    host_key: bool = (
        True  # as under `polyphase up`; without a key scenarios show what the messages themselves withstand
    )
    kv_transport: str = "tcp"
    absent: frozenset[str] = frozenset()  # instances of the cluster file that are not started
    proxied: frozenset[str] = ALL_LINKS  # purposes of the links that have a proxy
    api_keys: tuple[str, ...] = ()  # names of the gateways' keys; the steady users have the first
    timed: bool = False  # the times of the gateways' event loops are measured (`LoopTimes`)
    memory_bytes: int = MEMORY_BYTES  # growth of a process that does not count as left behind
    limits: Limits = LIMITS  # of the launcher

    def varied(self, name: str, more: str, cluster: Mapping[str, Any] | None = None, **fields: Any) -> "Testbed":
        """A variant: more words in its title, other sections of the cluster file, other fields."""
        return replace(self, name=name, title=self.title + more, cluster={**self.cluster, **(cluster or {})}, **fields)

    def build(self) -> Cluster:
        """The cluster on ports that no process uses."""
        fixed = {**DEMO, "name": f"chaos {self.name}", **(curve_pair() if self.curve else {})}
        defaults = {"kv_transport": self.kv_transport, **self.cluster.get("instance_defaults", {})}
        return on_free_ports(Cluster.model_validate({**fixed, **self.cluster, "instance_defaults": defaults}))


def secret_of(name: str) -> str:
    return f"pp-chaos-{name}" if name else ""


def instances(prefill: int, decode: int) -> list[dict[str, Any]]:
    return [{"id": "prefill", "count": prefill, "role": "prefill"}, {"id": "decode", "count": decode, "role": "decode"}]


EMULATED = Testbed(
    name="emulated",
    title="two gateways, two schedulers, 2 prefill and 3 decode instances; EMULATED engines",
    cluster={
        "gateway": {"write_timeout_s": 4.0, "max_held_bytes": 64 * _MIB},
        "scheduler": {"count": 2},
        "policies": SPLIT,
        "instance_defaults": EMULATED_ENGINE,
        "instances": instances(2, 3),
    },
)

PAIR = EMULATED.varied("pair", "; two monitors", {"monitors": 2})

KEYED = Testbed(
    name="keyed",
    title="one gateway, one scheduler, 1 prefill and 2 decode instances, CurveZMQ keys; EMULATED engines",
    cluster={**ALONE, "instance_defaults": EMULATED_ENGINE, "instances": instances(1, 2)},
    users=6,
    gateways=1,
    curve=True,
)

REAL = Testbed(
    name="real",
    title="one gateway, one scheduler, 2 prefill and 2 decode instances; vLLM on the CPU, unlike block sizes",
    cluster={
        **ALONE,
        "gateway": {"dtype": "float32"},
        "instance_defaults": REAL_ENGINE,
        "instances": [
            {"id": "prefill-0", "role": "prefill", "block_size": 32},
            {"id": "prefill-1", "role": "prefill", "block_size": 128},
            {"id": "decode-0", "role": "decode", "block_size": 128},
            {"id": "decode-1", "role": "decode", "block_size": 32},
        ],
    },
    prompts=(12, 200, 600, 1000),
    users=4,
    gateways=1,
)

LEASE_S = 2.0
# Blocks for one long prompt, an inbox too small for a prefetch, and a short lease: decodes wait for blocks, with their
# KV staged at the prefill instance.
NARROW = Testbed(
    name="narrow",
    title="one gateway, one scheduler, 1 prefill and 1 decode instance with few blocks; vLLM on the CPU",
    cluster={
        **ALONE,
        "gateway": {"dtype": "float32"},
        "instance_defaults": {**REAL_ENGINE, "inbox_bytes": _MIB, "lease_s": LEASE_S},
        "instances": [
            {"id": "prefill", "role": "prefill"},
            {"id": "decode", "role": "decode", "kv_cache_bytes": 14 * _MIB},
        ],
    },
    prompts=(12, 200, 600, 1500),
    users=2,
    gateways=1,
)

# Placement may have prefixes pulled; staged KV has a short lease, too.
MOBILE = REAL.varied(
    "mobile",
    f"; placement by adaptive, leases of {LEASE_S:g} s",
    {"policies": {**SPLIT, "placement": "adaptive"}, "instance_defaults": {**REAL_ENGINE, "lease_s": LEASE_S}},
    prompts=(12, 200, 900),
    users=2,
)

OPEN = EMULATED.varied("open", "; without keys", host_key=False)
OPEN_PAIR = PAIR.varied("open-pair", "; without keys", host_key=False)

QUEUED_TOKENS = 16_384  # at each gateway; half of it for a key
CALLERS = EMULATED.varied(
    "callers",
    "; two API keys",
    {
        "gateway": {**EMULATED.cluster["gateway"], "max_queued_tokens": QUEUED_TOKENS},
        "instance_defaults": {**EMULATED_ENGINE, "chunk_size": 1_024},
    },
    api_keys=("users", "greedy"),
)

CONTEXT = 131_072
# Only the gateway is measured: engines compute a prompt of the whole context in a few steps, and send no KV.
LONG_CONTEXT = Testbed(
    name="long-context",
    title=f"one gateway whose event loop is timed, a context of {CONTEXT:,} tokens; EMULATED engines",
    cluster={
        **ALONE,
        "max_model_len": CONTEXT,
        "policies": {**SPLIT, "split": "none"},
        "instance_defaults": {**EMULATED_ENGINE, "chunk_size": 65_536, "emulated_prefill_s_per_token": 1e-7},
        "instances": instances(1, 2),
    },
    prompts=(8, 90, 300),
    users=16,
    gateways=1,
    proxied=frozenset(),
    timed=True,
    memory_bytes=256 * _MIB,  # the allocator's arenas for bodies of 4 MB and of 131,072 tokens
)

KEPT_ROWS = 2_000
BACKLOG = EMULATED.varied(
    "backlog",
    f"; the database keeps {KEPT_ROWS:,} requests",
    {"scheduler": {"count": 2, "retention_rows": KEPT_ROWS, "prune_period_s": 2.0}},
)

LOGPROBS = REAL.varied("logprobs", "; 16 users", users=16, timed=True, memory_bytes=256 * _MIB)

# The verdict covers 10 s in place of 60 s, so that a problem is over sooner after its fault. `instant` and `swift` are
# classes that no engine here can serve in time.
_SHORT_WINDOW = {"slo_windows_s": [10.0, 60.0]}
_CLASSES = {
    "default": {"ttft_s": 1.5, "tpot_s": 0.2},
    "instant": {"ttft_s": 0.03, "tpot_s": 0.2},
    "swift": {"ttft_s": 1.5, "tpot_s": 0.02},
}
JOB_S = 10.0  # the longest time of a request
QUEUED = 40  # jobs that do not decode yet and that a gateway accepts
_SMALL_KV = {"kv_cache_bytes": 512 * _MIB}  # 4,096 tokens of an emulated Llama-3-8B
VERDICT = EMULATED.varied(
    "verdict",
    "; a verdict over 10 s",
    {
        "monitor": _SHORT_WINDOW,
        "planner": {"enabled": False},
        "gateway": {"slo": _CLASSES, "job_timeout_s": JOB_S, "max_queued_jobs": QUEUED, "patience_s": 3.0},
        "instances": [
            {"id": "prefill", "count": 2, "role": "prefill"},
            {"id": "decode", "count": 3, "role": "decode", **_SMALL_KV},
        ],
    },
    prompts=(90, 300),
    users=4,
    proxied=frozenset({"broadcasts", "heartbeats"}),
    limits=SLOW_LIMITS,
)

LATE = "decode-late"
VERDICT_LATE = VERDICT.varied(
    "verdict-late",
    "; a fourth decode instance does not start",
    {"instances": [*VERDICT.cluster["instances"], {"id": LATE, "role": "decode"}]},
    absent=frozenset({LATE}),
)

VERDICT_REAL = replace(
    VERDICT,
    name="verdict-real",
    title="one gateway, one scheduler, 1 prefill and 1 decode instance; vLLM on the CPU; a verdict over 10 s",
    cluster={
        **ALONE,
        "monitor": _SHORT_WINDOW,
        "gateway": {"dtype": "float32", "slo": _CLASSES},
        "instance_defaults": REAL_ENGINE,
        "instances": instances(1, 1),
    },
    users=2,
    gateways=1,
    proxied=frozenset({"kv"}),
)
