"""The suites on which `polyphase bench troubles` stages its troubles, and what their classes of requests promise."""

from lab.chaos.clusters import EMULATED_ENGINE, REAL_ENGINE, SPLIT, Testbed
from services.launcher.watch import Limits
from shared.domain.job import Slo

_MIB = 1 << 20
WINDOW_S = 10.0  # of the verdict, in place of 60 s: it is over sooner after a trouble
BACK_S = 8.0  # a process that was killed stays away for so long: the launcher's first pause, in place of 0.2 s
# What stands still is left so: the launcher would put it down after 6 s, and a gateway is missed after 10 s only.
LIMITS = Limits(hang_s=60.0, backoff_s=BACK_S, backoff_max_s=BACK_S, stable_s=1.0)
JOB_S = 10.0  # what a request may take
QUEUED = 40  # jobs that a gateway takes which do not decode yet
LATE = "decode-late"

CLASSES = {
    one.name: one
    for one in (Slo("default", 1.5, 0.2), Slo("instant", 0.03, 0.2), Slo("swift", 1.5, 0.02), Slo("batch", 600.0, 1.0))
}
_SLO = {name: {"ttft_s": one.ttft_s, "tpot_s": one.tpot_s} for name, one in CLASSES.items() if name != "batch"}
_SMALL_KV = 512 * _MIB  # 4,096 tokens of an emulated Llama-3-8B

EMULATED = Testbed(
    name="emulated",
    title="two gateways, two schedulers, 2 prefill and 3 decode instances; EMULATED engines",
    cluster={
        "monitor": {"slo_windows_s": [WINDOW_S, 60.0]},
        "scheduler": {"count": 2},
        "planner": {"enabled": False},
        "policies": SPLIT,
        "gateway": {"slo": _SLO, "job_timeout_s": JOB_S, "max_queued_jobs": QUEUED, "patience_s": 3.0},
        "instance_defaults": EMULATED_ENGINE,
        "instances": [
            {"id": "prefill", "count": 2, "role": "prefill"},
            {"id": "decode", "count": 3, "role": "decode", "kv_cache_bytes": _SMALL_KV},
            {"id": LATE, "role": "decode", "kv_cache_bytes": _SMALL_KV},
        ],
    },
    prompts=(),
    answer_tokens=24,
    users=0,
    absent=frozenset({LATE}),
    proxied=frozenset({"broadcasts", "heartbeats"}),
)

REAL = Testbed(
    name="real",
    title="one gateway, one scheduler, 1 prefill and 1 decode instance; vLLM on the CPU, KV over TCP",
    cluster={
        "monitor": {"slo_windows_s": [WINDOW_S, 60.0]},
        "gateway": {"dtype": "float32", "slo": _SLO},
        "policies": SPLIT,
        "predictor": {"enabled": False},
        "planner": {"enabled": False},
        "instance_defaults": REAL_ENGINE,
        "instances": [{"id": "prefill", "role": "prefill"}, {"id": "decode", "role": "decode"}],
    },
    prompts=(),
    answer_tokens=24,
    users=0,
    gateways=1,
    proxied=frozenset({"kv"}),
)
