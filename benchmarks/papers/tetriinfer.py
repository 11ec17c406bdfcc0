"""TetriInfer: its interference study (2.2, Figs 2 to 5), its five workloads (5.1, Figs 11 to 15) and its schedulers
(5.2, Figs 16, 18 and 19), with OPT-13B on pairs of V100.

The baseline is a coupled instance like vLLM of 2023 (5, 5.2.1): prefill before any decode, whole prompts, a fixed batch
of 16. TetriInfer has a prefill and a decode instance: chunks of 512, shortest first in batches of 16, reserve-dynamic,
power of two, buckets of 200 tokens with an accuracy of 74.9 %. Requests come at once.
"""

from dataclasses import replace
from statistics import fmean

import numpy as np

from benchmarks.papers.report import Figure, Section, section_of
from benchmarks.papers.testbed import (
    AtopWatermark,
    Kind,
    Testbed,
    Watermark,
    change,
    instances,
    mean_jct_s,
    mean_ttft_s,
)
from shared.cost.network import Link
from shared.cost.step import Batch
from shared.cost.step_rates import saturation_tokens
from shared.domain.instance import Role
from shared.policy.decode_admission import DecodeAdmission
from shared.policy.dispatch import DispatchPolicy, PowerOfTwo, RandomDispatch, Spread
from shared.policy.papers.tetriinfer import ReserveDynamic, ReserveStatic, WorstCase
from shared.policy.placement import LeastLoad, Policies
from shared.policy.prefill_order import Fcfs, PrefillOrder, Sjf
from shared.policy.split import FullSplit
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.prediction import Prediction
from shared.sim.spec import EngineLimits, RunSpec
from shared.sim.workload import Workload, tetri

# Prompts are light with 18 tokens and heavy with 512. Light decodes have 20 to 100 tokens, so 48 of context on average
# (18 + half of 60); heavy ones more than 512, so 274 (18 + half of 512). Source: sections 2.2.1 to 2.2.3.
LIGHT, HEAVY = (18, 0), (512, 0)
LIGHT_CONTEXT, HEAVY_CONTEXT = 48, 274
ACCELERATOR, MODEL, DEGREE = "V100-32-PCIe", "OPT-13B", 2

ROCE = Link(25e9, latency_s=1e-5, efficiency=1.0)  # 200 Gb/s, as the paper's own emulation counts it
PREDICTOR_COST = 1.1  # the predictor runs beside the model: prefill takes 10 % longer (Fig 17)
PREDICTOR = Prediction(width_tokens=200, buckets=10, accuracy=0.749)
CERTAIN = replace(PREDICTOR, accuracy=1.0)
COUPLED = Kind(ACCELERATOR, MODEL, DEGREE, EngineLimits(batched_tokens=32768, sequences=16, prefill_first=True))
PREFILL = Kind(ACCELERATOR, MODEL, DEGREE, EngineLimits(batched_tokens=512), ROCE, slowed=PREDICTOR_COST)
DECODE = Kind(ACCELERATOR, MODEL, DEGREE, EngineLimits(batched_tokens=2048), ROCE)
# For studies of decode alone: prompts take no time, as the paper's emulation has their KV at hand (section 4).
INSTANT = replace(PREFILL, slowed=1e-3, link=Link(1e12, latency_s=0.0, efficiency=1.0))
TETRI = RunSpec(
    migration=False,
    label="TetriInfer",
    policies=Policies(placement=LeastLoad(), split=FullSplit(), dispatch=PowerOfTwo()),
    prefill_order=Sjf(16),
    decode_admission=AtopWatermark(ReserveDynamic()),
    prediction=PREDICTOR,
    streaming=False,  # KV leaves a request at a time (3.3.4)
)
SEEDS = (0, 1, 2)


WORKLOADS = ("LPLD", "LPHD", "HPLD", "HPHD", "Mixed")


def tetriinfer_section(testbed: Testbed) -> Section:
    figures: dict[str, Figure] = {**interference(testbed), **prefill_orders(testbed), **admissions(testbed)}
    for kind in WORKLOADS:
        figures |= {f"{kind.lower()}_{name}": value for name, value in against_coupled(testbed, kind).items()}
    figures |= dispatches(testbed)
    return section_of("tetriinfer", "TetriInfer: inference without interference", figures)


def interference(testbed: Testbed) -> dict[str, Figure]:
    """How requests in one batch slow each other down, from the step model alone."""
    model = testbed.model(ACCELERATOR, MODEL, DEGREE)

    def decodes(count: int, *chunks: tuple[int, int]) -> Batch:
        return Batch(chunks, count, count * LIGHT_CONTEXT)

    def slowdown(alone: Batch, together: Batch) -> float:
        return model.step_time_s(together) / model.step_time_s(alone)

    threshold = saturation_tokens(model.prefill_time_s)
    light, heavy = Batch((LIGHT,)), Batch((HEAVY,))
    all_light = model.decode_time_s(128, 128 * LIGHT_CONTEXT)
    half_heavy = model.decode_time_s(128, 64 * (LIGHT_CONTEXT + HEAVY_CONTEXT))
    return {
        "saturation": (str(threshold), threshold == 512),
        "lp_7lp": slowdown(light, Batch((LIGHT,) * 8)),
        "lp_63lp": slowdown(light, Batch((LIGHT,) * 64)),
        "lp_hp": slowdown(light, Batch((LIGHT, *(HEAVY,) * 7))),
        "hp_lp": slowdown(heavy, Batch((HEAVY, *(LIGHT,) * 63))),
        "ld_hp": slowdown(decodes(1), decodes(1, HEAVY)),
        "lp_ld": slowdown(light, decodes(127, LIGHT)),
        "hp_ld": slowdown(heavy, decodes(127, HEAVY)),
        "dd_throughput": change(all_light, half_heavy),
        "dd_latency": change(half_heavy, all_light),
    }


def coupled(testbed: Testbed, workload: Workload) -> SimResult:
    run = RunSpec(migration=False, label="vLLM 2023", decode_admission=Watermark())
    return simulate(workload, instances(testbed, COUPLED, Role.DECODE), run)


def disaggregated(
    testbed: Testbed,
    workload: Workload,
    run: RunSpec = TETRI,
    *,
    prefill: Kind = PREFILL,
    decodes: int = 1,
    seed: int = 0,
) -> SimResult:
    """One prefill instance and that many decode instances."""
    cluster = (*instances(testbed, prefill, Role.PREFILL), *instances(testbed, DECODE, Role.DECODE, decodes))
    return simulate(workload, cluster, replace(run, seed=seed))


def against_coupled(testbed: Testbed, kind: str) -> dict[str, float]:
    """Means of 128 requests; resource time is that in which an instance works, of the coupled one the whole run."""
    rows = []
    for seed in SEEDS:
        workload = tetri(kind, 128, seed)
        base, ours = coupled(testbed, workload), disaggregated(testbed, workload, seed=seed)
        busy_s = sum(use.busy_s for use in ours.instances)
        perf = (1.0 / (mean_jct_s(ours) * busy_s)) / (1.0 / (mean_jct_s(base) * base.duration_s))
        rows.append(
            {
                "ttft": change(mean_ttft_s(ours), mean_ttft_s(base)),
                "jct": change(mean_jct_s(ours), mean_jct_s(base)),
                "resource": change(busy_s, base.duration_s),
                "perf": perf,
            }
        )
    return {name: fmean(row[name] for row in rows) for name in rows[0]}


def prefill_orders(testbed: Testbed) -> dict[str, float]:
    """Fig 16: 128 requests of the mixed workload."""
    model = testbed.model(ACCELERATOR, MODEL, DEGREE)
    workloads = [tetri("Mixed", 128, seed) for seed in SEEDS]

    def ttft_s(policy: PrefillOrder) -> float:
        run = replace(TETRI, prefill_order=policy)
        return fmean(mean_ttft_s(disaggregated(testbed, workload, run)) for workload in workloads)

    def waiting_s(policy: PrefillOrder) -> float:
        """TTFT less what each prompt takes by itself."""
        own_s = fmean(
            fmean(PREFILL.slowed * model.prefill_time_s(int(tokens)) for tokens in workload.prompt_tokens)
            for workload in workloads
        )
        return ttft_s(policy) - own_s

    fixed_s = fmean(mean_ttft_s(coupled(testbed, workload)) for workload in workloads)
    return {
        "chunked": change(ttft_s(Fcfs()), fixed_s),
        "sjf": change(waiting_s(Sjf(16)), waiting_s(Fcfs())),
        "sjf_window": change(ttft_s(Sjf(128)), ttft_s(Sjf(16))),
    }


def admissions(testbed: Testbed) -> dict[str, float]:
    """Fig 18: 256 requests, one decode instance."""

    def jct_s(policy: DecodeAdmission, prediction: Prediction) -> float:
        run = replace(TETRI, decode_admission=policy, prediction=prediction)
        return fmean(
            mean_jct_s(disaggregated(testbed, tetri("Mixed", 256, seed), run, prefill=INSTANT, seed=seed))
            for seed in SEEDS
        )

    greedy_s = jct_s(Watermark(), CERTAIN)
    dynamic, static = AtopWatermark(ReserveDynamic()), AtopWatermark(ReserveStatic())
    return {
        "rd_749": change(jct_s(dynamic, PREDICTOR), greedy_s),
        "rd_100": change(jct_s(dynamic, CERTAIN), greedy_s),
        "rs_100": change(jct_s(static, CERTAIN), greedy_s),
    }


DISPATCHERS: dict[str, DispatchPolicy] = {
    "power of two": PowerOfTwo(),
    "spread": Spread(),  # ours, beside the paper's three
    "random": RandomDispatch(),
    "imbalance": WorstCase(),
}


def dispatches(testbed: Testbed) -> dict[str, Figure]:
    """Fig 19: 32 requests a decode instance, 2 to 8 of them; seconds from the first token of all to the last one."""

    def decode_s(policy: DispatchPolicy, count: int, seed: int) -> float:
        run = replace(TETRI, policies=Policies(LeastLoad(), FullSplit(), policy))
        workload = tetri("Mixed", 32 * count, seed)
        out = disaggregated(testbed, workload, run, prefill=INSTANT, decodes=count, seed=seed).outcomes
        return float(np.nanmax(out.last_token_s) - np.nanmin(out.first_token_s))

    figures: dict[str, Figure] = {}
    for count in (2, 4, 8):
        took = {n: fmean(decode_s(policy, count, seed) for seed in range(5)) for n, policy in DISPATCHERS.items()}
        ranking = sorted(took, key=lambda name: took[name])
        ours = " < ".join(f"{name} {took[name]:.1f} s" for name in ranking)
        ranking.remove("spread")
        figures[f"dispatch_{count}"] = ours, ranking[0] == "power of two"
    return figures
