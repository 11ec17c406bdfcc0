"""ZTE: prefill on GPU B and decode on GPU A against GPU A alone (Figs 9, 10), and the P:D studies (Figs 7, 8)."""

from itertools import pairwise
from statistics import fmean

import numpy as np

from benchmarks.papers.report import Figure, Section, section_of
from benchmarks.papers.testbed import Kind, Shares, Testbed, Watermark, change, instances, p99_ttft_s
from shared.cost.catalogue import Accelerator
from shared.cost.geometry import ModelGeometry
from shared.cost.network import Link
from shared.domain.instance import Role
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, RunSpec
from shared.sim.workload import poisson, synthetic

MODEL = "Llama-2-7B"
RDMA = Link(25e9, efficiency=0.8)
TTFT_SLO_S = 2.0
ARRIVALS_S = 60.0
SEEDS = (0, 1, 2)
ALONE = (0, 1)  # GPU A computes whole requests
SPLITS = ((512, 1024, 3.0), (1024, 1024, 2.0))  # prompt, output, requests a second of Figs 9 and 10


def zte_section(testbed: Testbed) -> Section:
    figures = {**splits(testbed), **ratios(testbed), **long_requests(testbed), **formulas(testbed)}
    return section_of("zte", "ZTE: prefill and decode on GPUs of two vendors", figures)


def _runs(testbed: Testbed, prompt: int, output: int, rate: float, ratio: tuple[int, int]) -> list[SimResult]:
    """A run for each seed. ratio: prefill and decode instances; without prefill instances the others do it all."""
    limits = EngineLimits(batched_tokens=4096, prefill_first=ratio[0] == 0)
    cluster = (
        *instances(testbed, Kind("ZTE-GPU-B", MODEL, 1, limits, RDMA), Role.PREFILL, ratio[0]),
        *instances(testbed, Kind("ZTE-GPU-A", MODEL, 1, limits, RDMA), Role.DECODE, ratio[1]),
    )
    lengths = synthetic(round(rate * ARRIVALS_S), prompt, output)
    return [
        simulate(
            poisson(lengths, rate, seed), cluster, RunSpec(migration=False, decode_admission=Watermark(), seed=seed)
        )
        for seed in SEEDS
    ]


def splits(testbed: Testbed) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for prompt, output, rate in SPLITS:
        alone, split = (_runs(testbed, prompt, output, rate, ratio) for ratio in (ALONE, (1, 1)))
        speeds = [_user_tokens_per_s(runs) for runs in (alone, split)]
        ttft_s = [fmean(map(p99_ttft_s, runs)) for runs in (alone, split)]
        slo = f"{ttft_s[1]:.2f} s against {ttft_s[0]:.2f} s", ttft_s[1] <= TTFT_SLO_S < ttft_s[0]
        figures |= {f"alone_{prompt}": speeds[0], f"split_{prompt}": speeds[1], f"ttft_{prompt}": slo}
        figures[f"gain_{prompt}"] = change(speeds[1], speeds[0])
    return figures


def ratios(testbed: Testbed) -> dict[str, Figure]:
    """Fig 7: 256+256 tokens at 2 requests a second."""
    figures: dict[str, Figure] = {}
    base = _user_tokens_per_s(_runs(testbed, 256, 256, 2.0, (1, 1)))
    for key, pair in (("ratio_2p1d", ((2, 1), (3, 1))), ("ratio_1p2d", ((1, 2), (1, 3)))):
        first, second = (change(_user_tokens_per_s(_runs(testbed, 256, 256, 2.0, each)), base) for each in pair)
        figures[key] = f"{first:+.2f} % and {second:+.2f} %", first > 0 and abs(second - first) < 2.0
    return figures


def long_requests(testbed: Testbed) -> dict[str, Figure]:
    """Fig 8: 1024+1024 tokens at 3 requests a second, whose figures are not in the text."""
    ratios = ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3))
    runs = {ratio: _runs(testbed, 1024, 1024, 3.0, ratio) for ratio in ratios}
    tpot_ms = [1e3 * fmean(map(_mean_tpot_s, runs[1, decodes])) for decodes in (1, 2, 3)]
    ttft_ms = [1e3 * fmean(map(p99_ttft_s, runs[prefills, 1])) for prefills in (1, 2, 3)]

    def falls(values: list[float]) -> Figure:
        return f"{', '.join(f'{one:.3g}' for one in values)} ms", all(b < a for a, b in pairwise(values))

    return {"long_decodes": falls(tpot_ms), "long_prefills": falls(ttft_ms)}


def _mean_tpot_s(result: SimResult) -> float:
    out, done = result.outcomes, result.outcomes.completed
    return float(np.mean((out.jct_s[done] - out.ttft_s[done]) / (out.output_tokens[done] - 1)))


def _user_tokens_per_s(runs: list[SimResult]) -> float:
    """Mean over runs and requests of output tokens over the time from arrival to the last one."""

    def mean(result: SimResult) -> float:
        done = result.outcomes.completed
        return float(np.mean(result.outcomes.output_tokens[done] / result.outcomes.jct_s[done]))

    return fmean(map(mean, runs))


def formulas(testbed: Testbed) -> dict[str, float]:
    """Eqs 2 and 5 beside the step model, with what it reaches of the peaks as the discount factors."""
    shares, geometry = testbed.coefficients.default, testbed.geometry(MODEL)
    first, second = (testbed.catalogue.get(name) for name in ("ZTE-GPU-A", "ZTE-GPU-B"))
    return {
        "eq2": 1e3 * first_token_s(second, geometry, 1024, shares),
        "eq5": 1e3 * output_token_s(first, geometry, 32, 1024, shares),
        "model_ttft": 1e3 * testbed.model("ZTE-GPU-B", MODEL).prefill_time_s(1024),
        "model_tpot": 1e3 * testbed.model("ZTE-GPU-A", MODEL).decode_time_s(32, 32 * 1024),
    }


def first_token_s(device: Accelerator, model: ModelGeometry, prompt: int, reached: Shares) -> float:
    """l_p = c_p/(λR_p) on one rank, without the all-reduces of several. The paper leaves λ open."""
    attention = 2.0 * model.layers * model.hidden * prompt * prompt  # causal: half of QKᵀ and of PV
    work = model.matmul_flops_per_token() * prompt + attention
    return work / (reached.compute * device.flops("fp16"))


def output_token_s(device: Accelerator, model: ModelGeometry, batch: int, context: float, reached: Shares) -> float:
    """l_d = e_vram/(αB_vram): weights once, KV of every request; computation hides behind it. One rank."""
    moved = model.weight_bytes(2.0) + batch * context * model.kv_bytes_per_token(2.0)
    return moved / (reached.bandwidth * device.bandwidth_bytes_s)
