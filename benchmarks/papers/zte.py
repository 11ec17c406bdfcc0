"""ZTE: prefill on GPU B and decode on GPU A against GPU A alone (Figs 9, 10), and the P:D studies (Figs 7, 8)."""

from itertools import pairwise
from statistics import fmean

import numpy as np

from benchmarks.papers.report import Row, Section, gain, informative, order
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
# Prompt, output, requests a second, source, and the paper's throughput integrated and split.
SPLITS = ((512, 1024, 3.0, "Fig 9", 19.3, 22.6), (1024, 1024, 2.0, "Fig 10", 19.2, 25.0))


def zte_section(testbed: Testbed) -> Section:
    rows = (*_split_rows(testbed), *_ratio_rows(testbed), *_long_rows(testbed), *_formula_rows(testbed))
    return Section("zte", "ZTE: prefill and decode on GPUs of two vendors", rows)


def _runs(testbed: Testbed, prompt: int, output: int, rate: float, ratio: tuple[int, int]) -> list[SimResult]:
    """A run for each seed. ratio: prefill and decode instances; without prefill instances the others do it all."""
    limits = EngineLimits(batched_tokens=4096, prefill_first=ratio[0] == 0)
    cluster = (
        *instances(testbed, Kind("ZTE-GPU-B", MODEL, 1, limits, RDMA), Role.PREFILL, ratio[0]),
        *instances(testbed, Kind("ZTE-GPU-A", MODEL, 1, limits, RDMA), Role.DECODE, ratio[1]),
    )
    lengths = synthetic(round(rate * ARRIVALS_S), prompt, output)
    return [
        simulate(poisson(lengths, rate, seed), cluster, RunSpec(decode_admission=Watermark(), seed=seed))
        for seed in SEEDS
    ]


def _split_rows(testbed: Testbed) -> list[Row]:
    rows = []
    for prompt, output, rate, where, before, after in SPLITS:
        alone, split = (_runs(testbed, prompt, output, rate, ratio) for ratio in (ALONE, (1, 1)))
        speeds = [_user_tokens_per_s(runs) for runs in (alone, split)]
        ttft_s = [fmean(map(p99_ttft_s, runs)) for runs in (alone, split)]
        what, claimed = f"{prompt}+{output} at {rate:g} req/s", round(change(after, before))
        slo, met = f"{ttft_s[1]:.2f} s against {ttft_s[0]:.2f} s", ttft_s[1] <= TTFT_SLO_S < ttft_s[0]
        against = f"{what}: throughput, split against integrated"
        rows += [
            gain(f"gain_{prompt}", where, against, claimed, change(speeds[1], speeds[0])),
            informative(f"alone_{prompt}", where, f"{what}: integrated", "tokens/s", f"{before:g}", speeds[0]),
            informative(f"split_{prompt}", where, f"{what}: split", "tokens/s", f"{after:g}", speeds[1]),
            order(
                f"ttft_{prompt}", where, f"{what}: TTFT within the SLO", "split meets it, integrated does not", slo, met
            ),
        ]
    return rows


def _ratio_rows(testbed: Testbed) -> list[Row]:
    """Fig 7: 256+256 tokens at 2 requests a second."""
    rows = []
    base = _user_tokens_per_s(_runs(testbed, 256, 256, 2.0, (1, 1)))
    for ratios in (((2, 1), (3, 1)), ((1, 2), (1, 3))):
        first, second = (change(_user_tokens_per_s(_runs(testbed, 256, 256, 2.0, each)), base) for each in ratios)
        names = [f"{prefills}P{decodes}D" for prefills, decodes in ratios]
        what, ours = f"throughput of {' and '.join(names)} against 1P1D", f"{first:+.2f} % and {second:+.2f} %"
        held = first > 0 and abs(second - first) < 2.0
        rows.append(order(f"ratio_{names[0].lower()}", "Fig 7", what, "both higher, and alike", ours, held))
    return rows


def _long_rows(testbed: Testbed) -> list[Row]:
    """Fig 8: 1024+1024 tokens at 3 requests a second, whose figures are not in the text."""
    ratios = ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3))
    runs = {ratio: _runs(testbed, 1024, 1024, 3.0, ratio) for ratio in ratios}
    tpot_ms = [1e3 * fmean(map(_mean_tpot_s, runs[1, decodes])) for decodes in (1, 2, 3)]
    ttft_ms = [1e3 * fmean(map(p99_ttft_s, runs[prefills, 1])) for prefills in (1, 2, 3)]
    rows = []
    for key, what, found in (
        ("long_decodes", "mean TPOT of 1P1D, 1P2D, 1P3D", tpot_ms),
        ("long_prefills", "P99 of TTFT of 1P1D, 2P1D, 3P1D", ttft_ms),
    ):
        falls, listed = all(after < before for before, after in pairwise(found)), ", ".join(f"{x:.3g}" for x in found)
        rows.append(order(key, "Fig 8", f"1024+1024 at 3 req/s: {what}", "falls", f"{listed} ms", falls))
    return rows


def _mean_tpot_s(result: SimResult) -> float:
    out, done = result.outcomes, result.outcomes.completed
    return float(np.mean((out.jct_s[done] - out.ttft_s[done]) / (out.output_tokens[done] - 1)))


def _user_tokens_per_s(runs: list[SimResult]) -> float:
    """Mean over runs and requests of output tokens over the time from arrival to the last one."""

    def mean(result: SimResult) -> float:
        done = result.outcomes.completed
        return float(np.mean(result.outcomes.output_tokens[done] / result.outcomes.jct_s[done]))

    return fmean(map(mean, runs))


def _formula_rows(testbed: Testbed) -> tuple[Row, ...]:
    """Eqs 2 and 5 beside the step model, with what it reaches of the peaks as the discount factors."""
    shares, geometry = testbed.coefficients.default, testbed.geometry(MODEL)
    first, second = (testbed.catalogue.get(name) for name in ("ZTE-GPU-A", "ZTE-GPU-B"))
    ttft_ms = 1e3 * testbed.model("ZTE-GPU-B", MODEL).prefill_time_s(1024)
    tpot_ms = 1e3 * testbed.model("ZTE-GPU-A", MODEL).decode_time_s(32, 32 * 1024)
    beside = "formula, beside the step model's"
    prompt = f"first token of 1024 tokens on GPU B: {beside} {ttft_ms:.1f} ms"
    token = f"time per output token of 32 requests on GPU A: {beside} {tpot_ms:.1f} ms"
    return (
        informative("eq2", "eq. 2", prompt, "ms", "–", 1e3 * first_token_s(second, geometry, 1024, shares)),
        informative("eq5", "eq. 5", token, "ms", "–", 1e3 * output_token_s(first, geometry, 32, 1024, shares)),
    )


def first_token_s(device: Accelerator, model: ModelGeometry, prompt: int, reached: Shares) -> float:
    """l_p = c_p/(λR_p) on one rank, without the all-reduces of several. The paper leaves λ open."""
    attention = 2.0 * model.layers * model.hidden * prompt * prompt  # causal: half of QKᵀ and of PV
    work = model.matmul_flops_per_token() * prompt + attention
    return work / (reached.compute * device.flops("fp16"))


def output_token_s(device: Accelerator, model: ModelGeometry, batch: int, context: float, reached: Shares) -> float:
    """l_d = e_vram/(αB_vram): weights once, KV of every request; computation hides behind it. One rank."""
    moved = model.weight_bytes(2.0) + batch * context * model.kv_bytes_per_token(2.0)
    return moved / (reached.bandwidth * device.bandwidth_bytes_s)
