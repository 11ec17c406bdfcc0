"""TetriInfer: its testbed (OPT-13B on pairs of V100), its five workloads (5.1), its interference study (2.2, Figs 2
to 5) and its schedulers (5.2, Figs 16, 18 and 19)."""

from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from benchmarks.papers.report import Chart, Row, Section, between, factor, gain, order, points, ratio_gain
from benchmarks.papers.testbed import (
    AtopWatermark,
    Kind,
    Testbed,
    Watermark,
    busy_s,
    change,
    instances,
    mean_jct_s,
    mean_ttft_s,
)
from shared.cost.linear import saturation_tokens
from shared.cost.network import Link
from shared.cost.step import Batch, StepModel
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

# Figures 2 to 5: how requests in one batch slow each other down, from the step model alone. Light prefill: 18 prompt
# tokens. Heavy prefill: 512. Light decode: 20 to 100 tokens, so 48 of context on average (18 + half of 60). Heavy
# decode: more than 512 tokens, so 274 (18 + half of 512). Source: sections 2.2.1 to 2.2.3.

LIGHT, HEAVY = (18, 0), (512, 0)
LIGHT_CONTEXT, HEAVY_CONTEXT = 48, 274
ACCELERATOR, MODEL, DEGREE = "V100-32-PCIe", "OPT-13B", 2


def micro_rows(testbed: Testbed) -> tuple[tuple[Row, ...], Chart]:
    model = testbed.model(ACCELERATOR, MODEL, DEGREE)
    threshold = saturation_tokens(model.prefill_time_s)
    what = "tokens a step at which prefill saturates (ChunkSize)"
    saturation = order("saturation", "Fig 2", what, "512", str(threshold), threshold == 512)
    rows = (saturation, *_slowdowns(model), *_mixed_decodes(model))
    factors = [row for row in rows if row.unit == "x" and row.claimed is not None]
    chart = Chart(
        "tetriinfer_interference",
        "TetriInfer, Figs 3–4: slow-down beside others in the batch",
        "x",
        tuple(row.what for row in factors),
        {"paper": [row.claimed or 0.0 for row in factors], "ours": [row.figure or 0.0 for row in factors]},
    )
    return rows, chart


def _slowdowns(model: StepModel) -> tuple[Row, ...]:
    def beside(alone: Batch, together: Batch) -> float:
        return model.step_time_s(together) / model.step_time_s(alone)

    light, heavy, decode = Batch((LIGHT,)), Batch((HEAVY,)), _decodes((), 1)
    seven_heavy = beside(light, Batch((LIGHT, *(HEAVY,) * 7)))
    lp_hp = between("lp_hp", "Fig 3b", "light prefill, 7 heavy beside it", "x", 10.0, float("inf"), seven_heavy)
    cases = (
        ("lp_7lp", "Fig 3a", "light prefill, 7 light beside it", 2.0, light, Batch((LIGHT,) * 8)),
        ("lp_63lp", "Fig 3a", "light prefill, 63 light beside it", 8.0, light, Batch((LIGHT,) * 64)),
        ("hp_lp", "Fig 3c", "heavy prefill, 63 light beside it", 3.0, heavy, Batch((HEAVY, *(LIGHT,) * 63))),
        ("ld_hp", "Fig 4b", "light decode, a heavy prefill beside it", 5.0, decode, _decodes((HEAVY,), 1)),
        ("lp_ld", "Fig 4c", "light prefill, 127 light decodes beside it", 2.5, light, _decodes((LIGHT,), 127)),
        ("hp_ld", "Fig 4d", "heavy prefill, 127 light decodes beside it", 2.5, heavy, _decodes((HEAVY,), 127)),
    )
    rows = [factor(key, where, what, claimed, beside(*batches)) for key, where, what, claimed, *batches in cases]
    return (*rows[:2], lp_hp, *rows[2:])


def _mixed_decodes(model: StepModel) -> tuple[Row, ...]:
    """A batch of 128, half of it heavy, against all light."""
    all_light = model.decode_time_s(128, 128 * LIGHT_CONTEXT)
    half_heavy = model.decode_time_s(128, 64 * (LIGHT_CONTEXT + HEAVY_CONTEXT))
    what = "batch of 128, half heavy"
    return (
        gain("dd_throughput", "Fig 5", f"{what}: throughput", -16.0, change(all_light, half_heavy)),
        gain("dd_latency", "Fig 5", f"{what}: latency", 23.0, change(half_heavy, all_light)),
    )


def _decodes(chunks: tuple[tuple[int, int], ...], count: int) -> Batch:
    return Batch(chunks, count, count * LIGHT_CONTEXT)


# The testbed: OPT-13B on pairs of V100, a coupled instance against a prefill and a decode instance. Baseline (5,
# 5.2.1): vLLM as it ran in 2023, prefill before any decode, whole prompts, a fixed batch of 16. TetriInfer: chunks of
# 512, shortest first in batches of 16, reserve-dynamic, power of two, buckets of 200 tokens with an accuracy of 74.9
# %. Requests come at once; of the medians of their lengths only one is the paper's.

ROCE = Link(25e9, latency_s=1e-5, efficiency=1.0)  # 200 Gb/s, as the paper's own emulation counts it
PREDICTOR_COST = 1.1  # the predictor runs beside the model: prefill takes 10 % longer (Fig 17)
PREDICTOR = Prediction(width_tokens=200, buckets=10, accuracy=0.749)
COUPLED = Kind(ACCELERATOR, MODEL, DEGREE, EngineLimits(batched_tokens=32768, sequences=16, prefill_first=True))
PREFILL = Kind(ACCELERATOR, MODEL, DEGREE, EngineLimits(batched_tokens=512), ROCE, slowed=PREDICTOR_COST)
DECODE = Kind(ACCELERATOR, MODEL, DEGREE, EngineLimits(batched_tokens=2048), ROCE)
TETRI = RunSpec(
    label="TetriInfer",
    policies=Policies(placement=LeastLoad(), split=FullSplit(), dispatch=PowerOfTwo()),
    prefill_order=Sjf(16),
    decode_admission=AtopWatermark(ReserveDynamic()),
    prediction=PREDICTOR,
    streaming=False,  # KV leaves a request at a time (3.3.4)
)
SEEDS = (0, 1, 2)
# For studies of decode alone: prompts take no time, as the paper's emulation has their KV at hand (section 4).
INSTANT = replace(PREFILL, slowed=1e-3, link=Link(1e12, latency_s=0.0, efficiency=1.0))


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


# Figs 16, 18 and 19: prefill order, decode admission and dispatch, each against the alternatives.

_SURE = Prediction(width_tokens=200, buckets=10, accuracy=1.0)


def scheduler_rows(testbed: Testbed) -> tuple[Row, ...]:
    return (*_prefill_order(testbed), *_admission(testbed), *_dispatch(testbed))


def _prefill_order(testbed: Testbed) -> tuple[Row, ...]:
    """Fig 16: 128 requests of the mixed workload, all at once."""

    def ttft(policy: PrefillOrder) -> float:
        run = replace(TETRI, prefill_order=policy)
        return fmean(mean_ttft_s(disaggregated(testbed, tetri("Mixed", 128, seed), run)) for seed in SEEDS)

    def waiting(policy: PrefillOrder) -> float:
        run = replace(TETRI, prefill_order=policy)
        return fmean(_mean_wait_s(testbed, disaggregated(testbed, tetri("Mixed", 128, seed), run)) for seed in SEEDS)

    fixed = fmean(mean_ttft_s(coupled(testbed, tetri("Mixed", 128, seed))) for seed in SEEDS)
    batch = "chunked prefill, FCFS, against a fixed batch: mean prefill latency"
    wait = "SJF against FCFS: mean prefill waiting, window of 16"
    window = "SJF: mean TTFT, window of 128 against 16"
    return (
        gain("chunked", "Fig 16", batch, -86.4, change(ttft(Fcfs()), fixed)),
        gain("sjf", "Fig 16", wait, -7.8, change(waiting(Sjf(16)), waiting(Fcfs()))),
        gain("sjf_window", "Fig 16", window, -46.5, change(ttft(Sjf(128)), ttft(Sjf(16)))),
    )


def _mean_wait_s(testbed: Testbed, result: SimResult) -> float:
    """Mean time to the first token less what each prompt takes by itself."""
    model = testbed.model(PREFILL.accelerator, PREFILL.model, PREFILL.tensor_parallel)
    own = [PREFILL.slowed * model.prefill_time_s(int(tokens)) for tokens in result.outcomes.prompt_tokens]
    return mean_ttft_s(result) - fmean(own)


def _admission(testbed: Testbed) -> tuple[Row, ...]:
    """Fig 18: 256 requests, one decode instance."""

    def jct(policy: DecodeAdmission, prediction: Prediction) -> float:
        run = replace(TETRI, decode_admission=policy, prediction=prediction)
        workloads = ((seed, tetri("Mixed", 256, seed)) for seed in SEEDS)
        return fmean(
            mean_jct_s(disaggregated(testbed, one, run, prefill=INSTANT, seed=seed)) for seed, one in workloads
        )

    greedy = jct(Watermark(), _SURE)
    dynamic, static = AtopWatermark(ReserveDynamic()), AtopWatermark(ReserveStatic())
    usual, sure, fixed = (
        change(jct(policy, prediction), greedy)
        for policy, prediction in ((dynamic, TETRI.prediction or _SURE), (dynamic, _SURE), (static, _SURE))
    )
    what = "against greedy: mean JCT, accuracy"
    return (
        points("rd_749", "Fig 18", f"reserve-dynamic {what} 74.9 %", 0.0, usual, 5.0),
        gain("rd_100", "Fig 18", f"reserve-dynamic {what} 100 %", -12.0, sure),
        gain("rs_100", "Fig 18", f"reserve-static {what} 100 %", -10.0, fixed),
    )


def _dispatch(testbed: Testbed) -> tuple[Row, ...]:
    """Fig 19: 32 requests a decode instance, 2 to 8 of them."""
    rows = []
    for count in (2, 4, 8):
        took = {
            name: fmean(_decode_s(testbed, policy, count, seed) for seed in range(5))
            for name, policy in _DISPATCHERS.items()
        }
        ranking = sorted(took, key=lambda name: took[name])
        ours = " < ".join(f"{name} {took[name]:.1f} s" for name in ranking)
        ranking.remove("spread")  # ours, beside the paper's three
        what, best = f"total decode time, {count} decode instances", ranking[0] == "power of two"
        rows.append(order(f"dispatch_{count}", "Fig 19", what, "power of two is least", ours, best))
    return tuple(rows)


_DISPATCHERS: dict[str, DispatchPolicy] = {
    "power of two": PowerOfTwo(),
    "spread": Spread(),
    "random": RandomDispatch(),
    "imbalance": WorstCase(),
}


def _decode_s(testbed: Testbed, policy: DispatchPolicy, count: int, seed: int) -> float:
    """Seconds from the first token of all to the last one."""
    run = replace(TETRI, policies=Policies(LeastLoad(), FullSplit(), policy))
    result = disaggregated(testbed, tetri("Mixed", 32 * count, seed), run, prefill=INSTANT, decodes=count, seed=seed)
    return float(np.nanmax(result.outcomes.last_token_s) - np.nanmin(result.outcomes.first_token_s))


@dataclass(frozen=True, slots=True)
class _Claim:
    workload: str
    where: str
    ttft: float | None  # changes in percent
    jct: float
    resource: float
    perf: float  # ratio


_CLAIMS = (
    _Claim("LPLD", "Fig 11", -44.0, -40.0, 0.0, 1.4),
    _Claim("LPHD", "Fig 12", -97.0, -47.0, -38.0, 2.4),
    _Claim("HPLD", "Fig 13", -9.0, -23.0, 43.0, 0.86),
    _Claim("HPHD", "Fig 14", None, -19.0, 7.0, 1.1),
    _Claim("Mixed", "Fig 15", -85.0, -50.0, -21.0, 1.9),
)


def tetriinfer_section(testbed: Testbed) -> Section:
    micro, interference = micro_rows(testbed)
    workloads = [_workload_rows(testbed, claim) for claim in _CLAIMS]
    rows = (*micro, *(row for group in workloads for row in group), *scheduler_rows(testbed))
    return Section(
        "tetriinfer",
        "TetriInfer: inference without interference",
        rows,
        (
            interference,
            _chart("ttft", "mean TTFT", [claim.ttft or 0.0 for claim in _CLAIMS], rows),
            _chart("jct", "mean JCT", [claim.jct for claim in _CLAIMS], rows),
            _chart("resource", "resource time", [claim.resource for claim in _CLAIMS], rows),
        ),
    )


def _workload_rows(testbed: Testbed, claim: _Claim) -> tuple[Row, ...]:
    pairs = []
    for seed in SEEDS:
        workload = tetri(claim.workload, 128, seed)
        pairs.append((coupled(testbed, workload), disaggregated(testbed, workload, seed=seed)))
    ttft = fmean(change(mean_ttft_s(ours), mean_ttft_s(base)) for base, ours in pairs)
    jct = fmean(change(mean_jct_s(ours), mean_jct_s(base)) for base, ours in pairs)
    resource = fmean(change(busy_s(ours), base.duration_s) for base, ours in pairs)
    perf = fmean(_perf(ours, busy_s(ours)) / _perf(base, base.duration_s) for base, ours in pairs)
    name, kind, where = claim.workload.lower(), claim.workload, claim.where
    return (
        gain(f"{name}_ttft", where, f"{kind}: mean TTFT", claim.ttft, ttft)
        if claim.ttft is not None
        else between(f"{name}_ttft", where, f"{kind}: mean TTFT", "%", -100.0, -9.0, ttft, "< -9 (more than HPLD's)"),
        gain(f"{name}_jct", where, f"{kind}: mean JCT", claim.jct, jct),
        gain(f"{name}_resource", where, f"{kind}: resource time", claim.resource, resource)
        if claim.resource
        else points(f"{name}_resource", where, f"{kind}: resource time", claim.resource, resource, 10.0),
        ratio_gain(f"{name}_perf", where, f"{kind}: perf/$", claim.perf, perf),
    )


def _perf(result: SimResult, resource_s: float) -> float:
    return 1.0 / (mean_jct_s(result) * resource_s)


def _chart(what: str, title: str, paper: list[float], rows: tuple[Row, ...]) -> Chart:
    ours = {row.key: row.figure or 0.0 for row in rows}
    kinds = tuple(claim.workload for claim in _CLAIMS)
    return Chart(
        f"tetriinfer_{what}",
        f"TetriInfer, Figs 11–15: change of {title}",
        "%",
        kinds,
        {"paper": paper, "ours": [ours[f"{kind.lower()}_{what}"] for kind in kinds]},
    )
