"""ThunderServe, Tables 5 and 8: 4 A40 and 4 3090 Ti, coupled, split, and split with 16-bit KV."""

from dataclasses import replace

from lab.papers.clusters import tokens_per_s
from lab.papers.rows import Row, ratio_gain, told
from lab.papers.stages import Stage, staged
from lab.papers.testbed import Testbed
from lab.papers.thunderserve_ratio import NETWORK, RUN
from lab.papers.watermark import Watermark
from shared.cost.transfer import Link
from shared.domain.instance import Role
from shared.domain.kv import Codec
from shared.sim.arrivals import synthetic
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec

MODEL, LAYERS = "LLaMA-30B", 60
INSIDE = Link(16e9, latency_s=1e-4)  # between stages of one host, over PCIe
_LIMITS = EngineLimits(batched_tokens=2048)
_COUPLED = EngineLimits(batched_tokens=2048, prefill_first=True)
_OUTPUT = 28  # mean of coding; the paper gives the input alone
_DEGREES = (4, 2, 1)


def link_rows(testbed: Testbed) -> tuple[Row, ...]:
    """Gains of splitting and of compression at 40 Gb/s."""
    workload = synthetic(200, 1024, _OUTPUT)
    prefill = best(testbed, "A40", Role.PREFILL)
    decode = best(testbed, "RTX-3090-Ti", Role.DECODE)
    coupled = tuple(best(testbed, accelerator, Role.DECODE, _COUPLED) for accelerator in ("A40", "RTX-3090-Ti"))
    packed = tokens_per_s(simulate(workload, (prefill, decode), RUN))
    raw = tokens_per_s(simulate(workload, (prefill, decode), replace(RUN, codec=Codec.RAW)))
    base = tokens_per_s(simulate(workload, coupled, RunSpec(label="coupled", decode_admission=Watermark())))
    return (
        ratio_gain("split", "Table 5", "throughput: split over 40 Gb/s against two coupled",
                   3292 / 1610, packed / base),
        ratio_gain("bits", "Table 8", "throughput: KV in 4 bits against 16", 3292 / 2450, packed / raw),
        told("split_tokens", "Table 5", "throughput: split, 4 bits", "tokens/s", "3292", packed),
    )  # fmt: skip


def best(testbed: Testbed, accelerator: str, role: Role, limits: EngineLimits = _LIMITS) -> InstanceSpec:
    """4 accelerators as (TP, PP) by the paper's rule: least prefill latency, or highest decode throughput (3.3)."""
    candidates = []
    for degree in _DEGREES:
        count = 4 // degree
        stages = (Stage(accelerator, LAYERS // count, degree),) * count
        spec = staged(testbed, f"{accelerator}-{role}", MODEL, stages, role, limits, NETWORK, INSIDE)
        candidates.append((_worth(spec, role), degree, spec))
    return max(candidates, key=lambda one: one[:2])[2]


def _worth(spec: InstanceSpec, role: Role) -> float:
    if role is Role.PREFILL:
        cost = spec.rates.prefill
        assert cost is not None
        return -cost.time_s(1024)
    batch = max(1, spec.kv_tokens // spec.lanes // 1100)
    return spec.lanes * batch / spec.model.decode_time_s(batch, batch * 1050)
