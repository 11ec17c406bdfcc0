"""ThunderServe, Tables 5 and 8 and section 4: 4 A40 and 4 3090 Ti, coupled and split, with 4 and with 16 bits of KV."""

from dataclasses import replace

from lab.papers.clusters import tokens_per_s
from lab.papers.rows import Row, between, ratio_gain, told, value
from lab.papers.stages import Stage, staged
from lab.papers.testbed import Testbed
from lab.papers.thunderserve_ratio import NETWORK, RUN
from lab.papers.watermark import Watermark
from shared.cost.network import Link, transfer_time_s
from shared.domain.instance import Role
from shared.domain.kv import Codec
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from shared.sim.workload import synthetic

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
        ratio_gain(
            "split", "Table 5", "throughput: split over 40 Gb/s against two coupled", 3292 / 1610, packed / base
        ),
        ratio_gain("bits", "Table 8", "throughput: KV in 4 bits against 16", 3292 / 2450, packed / raw),
        told("split_tokens", "Table 5", "throughput: split, 4 bits", "tokens/s", "3292", packed),
    )


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


CODING_OUTPUT = 13  # median output tokens of coding (Appendix E)
PROMPTS = (512, 1024, 2048)


def kv_rows(testbed: Testbed) -> tuple[Row, ...]:
    """Transfer times of one prompt, and their share of a request's time.

    The two times are what the link's efficiency was taken from (`Link`: 0.56 and 0.61 of nominal, 0.58), so that
    nothing is asked of them; their ratio and the shares do not follow from it alone.
    """
    model = testbed.geometry("LLaMA-30B")
    raw, packed = (1e3 * transfer_time_s(model, 1024, NETWORK, codec) for codec in (Codec.RAW, Codec.INT4))
    rows = [
        told("kv_16bit", "Table 8", "KV of 1024 tokens, LLaMA-30B, 40 Gb/s, 16 bits (fitted)", "ms", "584", raw),
        told("kv_4bit", "Table 8", "the same, 4 bits, ours 4.75 (fitted)", "ms", "133", packed),
        value("kv_ratio", "Table 8", "16 bits over 4 bits", "x", 584.0 / 133.0, raw / packed),
    ]
    for codec, low, high in ((Codec.RAW, 16.0, 30.0), (Codec.INT4, 4.0, 9.0)):
        shares = [kv_share(testbed, prompt, codec) for prompt in PROMPTS]
        name = "16 bits" if codec is Codec.RAW else "4 bits"
        what = f"KV's share of a request, LLaMA-7B, 2 A5000, {name}, mean of prompts 512–2048"
        rows.append(between(f"share_{codec.value}", "4", what, "%", low, high, sum(shares) / len(shares)))
        shown = f"{low:g}–{high:g}"
        rows += [
            told(f"share_{codec.value}_{at}", "4", f"… prompt of {prompt}, {name}", "%", shown, share)
            for at, (prompt, share) in enumerate(zip(PROMPTS, shares, strict=True))
        ]
    return tuple(rows)


def kv_share(testbed: Testbed, prompt: int, codec: Codec) -> float:
    """Percent of prefill, transfer and decode that the transfer takes, for a request that runs alone."""
    model = testbed.model("RTX-A5000", "Llama-2-7B")
    prefill = model.prefill_time_s(prompt)
    transfer = transfer_time_s(model.geometry, prompt, NETWORK, codec)
    decode = sum(model.decode_time_s(1, prompt + at) for at in range(CODING_OUTPUT - 1))
    return 100.0 * transfer / (prefill + transfer + decode)
