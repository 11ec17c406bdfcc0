"""TetriInfer: its interference study (2.2, Figs 2 to 5), its five workloads (5.1, Figs 11 to 15) and its schedulers
(5.2, Figs 16, 18 and 19), with OPT-13B on pairs of V100.

The baseline is a coupled instance like vLLM of 2023 (5, 5.2.1): prefill before any decode, whole prompts, a fixed batch
of 16. TetriInfer has a prefill and a decode instance: chunks of 512, shortest first in batches of 16, reserve-dynamic,
power of two, buckets of 200 tokens with an accuracy of 74.9 %. Requests come at once.
"""

from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from benchmarks.papers.report import Row, Section, between, factor, gain, order, points, ratio_gain
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
    label="TetriInfer",
    policies=Policies(placement=LeastLoad(), split=FullSplit(), dispatch=PowerOfTwo()),
    prefill_order=Sjf(16),
    decode_admission=AtopWatermark(ReserveDynamic()),
    prediction=PREDICTOR,
    streaming=False,  # KV leaves a request at a time (3.3.4)
)
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Claim:
    """The paper's figures of one workload: changes in percent, and a ratio."""

    workload: str
    where: str
    ttft: float | None
    jct: float
    resource: float
    perf: float


CLAIMS = (
    Claim("LPLD", "Fig 11", -44.0, -40.0, 0.0, 1.4),
    Claim("LPHD", "Fig 12", -97.0, -47.0, -38.0, 2.4),
    Claim("HPLD", "Fig 13", -9.0, -23.0, 43.0, 0.86),
    Claim("HPHD", "Fig 14", None, -19.0, 7.0, 1.1),
    Claim("Mixed", "Fig 15", -85.0, -50.0, -21.0, 1.9),
)


def tetriinfer_section(testbed: Testbed) -> Section:
    workloads = [row for claim in CLAIMS for row in _workload_rows(testbed, claim)]
    schedulers = (*_prefill_order(testbed), *_admission(testbed), *_dispatch(testbed))
    rows = (*interference_rows(testbed), *workloads, *schedulers)
    return Section("tetriinfer", "TetriInfer: inference without interference", rows)


def interference_rows(testbed: Testbed) -> tuple[Row, ...]:
    """How requests in one batch slow each other down, from the step model alone."""
    model = testbed.model(ACCELERATOR, MODEL, DEGREE)

    def decodes(count: int, *chunks: tuple[int, int]) -> Batch:
        return Batch(chunks, count, count * LIGHT_CONTEXT)

    def slowdown(alone: Batch, together: Batch) -> float:
        return model.step_time_s(together) / model.step_time_s(alone)

    threshold = saturation_tokens(model.prefill_time_s)
    light, heavy, decode = Batch((LIGHT,)), Batch((HEAVY,)), decodes(1)
    all_light = model.decode_time_s(128, 128 * LIGHT_CONTEXT)
    half_heavy = model.decode_time_s(128, 64 * (LIGHT_CONTEXT + HEAVY_CONTEXT))
    cases = (
        ("lp_7lp", "Fig 3a", "light prefill, 7 light beside it", 2.0, light, Batch((LIGHT,) * 8)),
        ("lp_63lp", "Fig 3a", "light prefill, 63 light beside it", 8.0, light, Batch((LIGHT,) * 64)),
        ("hp_lp", "Fig 3c", "heavy prefill, 63 light beside it", 3.0, heavy, Batch((HEAVY, *(LIGHT,) * 63))),
        ("ld_hp", "Fig 4b", "light decode, a heavy prefill beside it", 5.0, decode, decodes(1, HEAVY)),
        ("lp_ld", "Fig 4c", "light prefill, 127 light decodes beside it", 2.5, light, decodes(127, LIGHT)),
        ("hp_ld", "Fig 4d", "heavy prefill, 127 light decodes beside it", 2.5, heavy, decodes(127, HEAVY)),
    )
    factors = [factor(key, where, what, claimed, slowdown(*batches)) for key, where, what, claimed, *batches in cases]
    seven = slowdown(light, Batch((LIGHT, *(HEAVY,) * 7)))
    saturation = "tokens a step at which prefill saturates (ChunkSize)"
    halves = "batch of 128, half heavy"
    return (
        order("saturation", "Fig 2", saturation, "512", str(threshold), threshold == 512),
        *factors[:2],
        between("lp_hp", "Fig 3b", "light prefill, 7 heavy beside it", "x", 10.0, float("inf"), seven),
        *factors[2:],
        gain("dd_throughput", "Fig 5", f"{halves}: throughput", -16.0, change(all_light, half_heavy)),
        gain("dd_latency", "Fig 5", f"{halves}: latency", 23.0, change(half_heavy, all_light)),
    )


def coupled(testbed: Testbed, workload: Workload) -> SimResult:
    run = RunSpec(label="vLLM 2023", decode_admission=Watermark())
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


def _workload_rows(testbed: Testbed, claim: Claim) -> tuple[Row, ...]:
    """Means of 128 requests; resource time is that in which an instance works, of the coupled one the whole run."""
    ttft, jct, resource, perf = [], [], [], []
    for seed in SEEDS:
        workload = tetri(claim.workload, 128, seed)
        base, ours = coupled(testbed, workload), disaggregated(testbed, workload, seed=seed)
        busy_s = sum(use.busy_s for use in ours.instances)
        ttft.append(change(mean_ttft_s(ours), mean_ttft_s(base)))
        jct.append(change(mean_jct_s(ours), mean_jct_s(base)))
        resource.append(change(busy_s, base.duration_s))
        perf.append((1.0 / (mean_jct_s(ours) * busy_s)) / (1.0 / (mean_jct_s(base) * base.duration_s)))
    name, kind, where = claim.workload.lower(), claim.workload, claim.where
    first = f"{name}_ttft", where, f"{kind}: mean TTFT"
    used = f"{name}_resource", where, f"{kind}: resource time"
    return (
        between(*first, "%", -100.0, -9.0, fmean(ttft), "< -9 (more than HPLD's)")
        if claim.ttft is None
        else gain(*first, claim.ttft, fmean(ttft)),
        gain(f"{name}_jct", where, f"{kind}: mean JCT", claim.jct, fmean(jct)),
        gain(*used, claim.resource, fmean(resource))
        if claim.resource
        else points(*used, claim.resource, fmean(resource), 10.0),
        ratio_gain(f"{name}_perf", where, f"{kind}: perf/$", claim.perf, fmean(perf)),
    )


def _prefill_order(testbed: Testbed) -> tuple[Row, ...]:
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

    fixed = fmean(mean_ttft_s(coupled(testbed, workload)) for workload in workloads)
    batch = "chunked prefill, FCFS, against a fixed batch: mean prefill latency"
    wait = "SJF against FCFS: mean prefill waiting, window of 16"
    window = "SJF: mean TTFT, window of 128 against 16"
    return (
        gain("chunked", "Fig 16", batch, -86.4, change(ttft_s(Fcfs()), fixed)),
        gain("sjf", "Fig 16", wait, -7.8, change(waiting_s(Sjf(16)), waiting_s(Fcfs()))),
        gain("sjf_window", "Fig 16", window, -46.5, change(ttft_s(Sjf(128)), ttft_s(Sjf(16)))),
    )


def _admission(testbed: Testbed) -> tuple[Row, ...]:
    """Fig 18: 256 requests, one decode instance."""

    def jct_s(policy: DecodeAdmission, prediction: Prediction) -> float:
        run = replace(TETRI, decode_admission=policy, prediction=prediction)
        return fmean(
            mean_jct_s(disaggregated(testbed, tetri("Mixed", 256, seed), run, prefill=INSTANT, seed=seed))
            for seed in SEEDS
        )

    greedy_s = jct_s(Watermark(), CERTAIN)
    dynamic, static = AtopWatermark(ReserveDynamic()), AtopWatermark(ReserveStatic())
    cases = (dynamic, PREDICTOR), (dynamic, CERTAIN), (static, CERTAIN)
    usual, certain, fixed = (change(jct_s(*case), greedy_s) for case in cases)
    what = "against greedy: mean JCT, accuracy"
    return (
        points("rd_749", "Fig 18", f"reserve-dynamic {what} 74.9 %", 0.0, usual, 5.0),
        gain("rd_100", "Fig 18", f"reserve-dynamic {what} 100 %", -12.0, certain),
        gain("rs_100", "Fig 18", f"reserve-static {what} 100 %", -10.0, fixed),
    )


DISPATCHERS: dict[str, DispatchPolicy] = {
    "power of two": PowerOfTwo(),
    "spread": Spread(),  # ours, beside the paper's three
    "random": RandomDispatch(),
    "imbalance": WorstCase(),
}


def _dispatch(testbed: Testbed) -> list[Row]:
    """Fig 19: 32 requests a decode instance, 2 to 8 of them; seconds from the first token of all to the last one."""

    def decode_s(policy: DispatchPolicy, count: int, seed: int) -> float:
        run = replace(TETRI, policies=Policies(LeastLoad(), FullSplit(), policy))
        workload = tetri("Mixed", 32 * count, seed)
        out = disaggregated(testbed, workload, run, prefill=INSTANT, decodes=count, seed=seed).outcomes
        return float(np.nanmax(out.last_token_s) - np.nanmin(out.first_token_s))

    rows = []
    for count in (2, 4, 8):
        took = {n: fmean(decode_s(policy, count, seed) for seed in range(5)) for n, policy in DISPATCHERS.items()}
        ranking = sorted(took, key=lambda name: took[name])
        ours = " < ".join(f"{name} {took[name]:.1f} s" for name in ranking)
        ranking.remove("spread")
        what, best = f"total decode time, {count} decode instances", ranking[0] == "power of two"
        rows.append(order(f"dispatch_{count}", "Fig 19", what, "power of two is least", ours, best))
    return rows
