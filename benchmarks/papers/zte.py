"""ZTE: prefill on GPU B and decode on GPU A against GPU A alone (Figs 9, 10), and the P:D studies (Figs 7, 8)."""

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from benchmarks.papers.report import Chart, Row, Section, gain, informative, order
from benchmarks.papers.testbed import Kind, Testbed, Watermark, change, instances, p99_ttft_s
from shared.cost.catalogue import Accelerator
from shared.cost.geometry import ModelGeometry
from shared.cost.network import Link
from shared.domain.instance import Role
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, RunSpec
from shared.sim.workload import poisson, synthetic

_MODEL = "Llama-2-7B"
_RDMA = Link(25e9, efficiency=0.8)
_TTFT_SLO_S = 2.0
_ARRIVALS_S = 60.0
_SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    where: str
    prompt: int
    output: int
    rate: float
    before: float
    after: float


_CASES = (_Case("512", "Fig 9", 512, 1024, 3.0, 19.3, 22.6), _Case("1024", "Fig 10", 1024, 1024, 2.0, 19.2, 25.0))


def zte_section(testbed: Testbed) -> Section:
    cases = [row for case in _CASES for row in _case_rows(testbed, case)]
    ratios, chart = _ratio_rows(testbed)
    rows = (*cases, *ratios, *_long_rows(testbed), *_formula_rows(testbed))
    figures = {row.key: row.figure or 0.0 for row in rows}
    bars = Chart(
        "zte_split",
        "ZTE, Figs 9–10: gain in throughput of splitting over GPU B and GPU A",
        "%",
        tuple(f"{case.prompt}+{case.output}, {case.rate:g} req/s" for case in _CASES),
        {
            "paper": [change(case.after, case.before) for case in _CASES],
            "ours": [figures[f"gain_{case.name}"] for case in _CASES],
        },
    )
    return Section("zte", "ZTE: prefill and decode on GPUs of two vendors", rows, (bars, chart))


def _case_rows(testbed: Testbed, case: _Case) -> tuple[Row, ...]:
    alone = [_run(testbed, case.prompt, case.output, case.rate, 0, 1, seed) for seed in _SEEDS]
    split = [_run(testbed, case.prompt, case.output, case.rate, 1, 1, seed) for seed in _SEEDS]
    speeds = [fmean(map(user_tokens_per_s, runs)) for runs in (alone, split)]
    ttft = [fmean(map(p99_ttft_s, runs)) for runs in (alone, split)]
    what = f"{case.prompt}+{case.output} at {case.rate:g} req/s"
    where, name = case.where, case.name
    claimed, ours = round(change(case.after, case.before)), change(speeds[1], speeds[0])
    slo = f"{ttft[1]:.2f} s against {ttft[0]:.2f} s"
    met = ttft[1] <= _TTFT_SLO_S < ttft[0]
    return (
        gain(f"gain_{name}", where, f"{what}: throughput, split against integrated", claimed, ours),
        informative(f"alone_{name}", where, f"{what}: integrated", "tokens/s", f"{case.before:g}", speeds[0]),
        informative(f"split_{name}", where, f"{what}: split", "tokens/s", f"{case.after:g}", speeds[1]),
        order(f"ttft_{name}", where, f"{what}: TTFT within the SLO", "split meets it, integrated does not", slo, met),
    )


def _ratio_rows(testbed: Testbed) -> tuple[tuple[Row, ...], Chart]:
    """Fig 7: 256+256 tokens at 2 requests a second."""
    found = {
        (p, d): fmean(user_tokens_per_s(_run(testbed, 256, 256, 2.0, p, d, seed)) for seed in _SEEDS)
        for p, d in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3))
    }
    rows = []
    for two, three in (((2, 1), (3, 1)), ((1, 2), (1, 3))):
        first, second = change(found[two], found[1, 1]), change(found[three], found[1, 1])
        names = f"{_name(two)} and {_name(three)}"
        what, ours = f"throughput of {names} against 1P1D", f"{first:+.2f} % and {second:+.2f} %"
        held = first > 0 and abs(second - first) < 2.0
        rows.append(order(f"ratio_{two[0]}p{two[1]}d", "Fig 7", what, "both higher, and alike", ours, held))
    chart = Chart(
        "zte_ratio",
        "ZTE, Fig 7: throughput by P:D, 256+256 at 2 req/s",
        "tokens/s a request",
        tuple(map(_name, found)),
        {"ours": list(found.values())},
    )
    return tuple(rows), chart


def _long_rows(testbed: Testbed) -> tuple[Row, ...]:
    """Fig 8: 1024+1024 tokens at 3 requests a second, whose figures are not in the text."""
    runs = {
        (p, d): [_run(testbed, 1024, 1024, 3.0, p, d, seed) for seed in _SEEDS]
        for p, d in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3))
    }
    tpot = [1e3 * fmean(map(mean_tpot_s, runs[1, d])) for d in (1, 2, 3)]
    ttft = [1e3 * fmean(map(p99_ttft_s, runs[p, 1])) for p in (1, 2, 3)]
    return (
        _falling("long_decodes", "mean TPOT of 1P1D, 1P2D, 1P3D", tpot),
        _falling("long_prefills", "P99 of TTFT of 1P1D, 2P1D, 3P1D", ttft),
    )


def _falling(key: str, what: str, found_ms: list[float]) -> Row:
    listed = ", ".join(f"{one:.3g}" for one in found_ms)
    falls = all(after < before for before, after in pairwise(found_ms))
    return order(key, "Fig 8", f"1024+1024 at 3 req/s: {what}", "falls", f"{listed} ms", falls)


def _run(testbed: Testbed, prompt: int, output: int, rate: float, prefills: int, decodes: int, seed: int) -> SimResult:
    """Without prefill instances the others do it all."""
    limits = EngineLimits(batched_tokens=4096, prefill_first=prefills == 0)
    cluster = (
        *instances(testbed, Kind("ZTE-GPU-B", _MODEL, 1, limits, _RDMA), Role.PREFILL, prefills),
        *instances(testbed, Kind("ZTE-GPU-A", _MODEL, 1, limits, _RDMA), Role.DECODE, decodes),
    )
    workload = poisson(synthetic(round(rate * _ARRIVALS_S), prompt, output), rate, seed)
    return simulate(workload, cluster, RunSpec(label=f"{prefills}P{decodes}D", decode_admission=Watermark(), seed=seed))


def mean_tpot_s(result: SimResult) -> float:
    done, found = result.outcomes.completed, result.outcomes
    return float(np.mean((found.jct_s[done] - found.ttft_s[done]) / (found.output_tokens[done] - 1)))


def user_tokens_per_s(result: SimResult) -> float:
    """Mean over requests of output tokens over the time from arrival to the last one."""
    done = result.outcomes.completed
    return float(np.mean(result.outcomes.output_tokens[done] / result.outcomes.jct_s[done]))


def _formula_rows(testbed: Testbed) -> tuple[Row, ...]:
    """Eqs 2 and 5 beside the step model, with what it reaches of the peaks as the discount factors."""
    shares = testbed.coefficients.default
    first, second = (testbed.catalogue.get(name) for name in ("ZTE-GPU-A", "ZTE-GPU-B"))
    geometry = testbed.geometry(_MODEL)
    discounts = Discounts(compute=shares.compute, link=0.8, memory=shares.bandwidth)
    ttft = testbed.model("ZTE-GPU-B", _MODEL).prefill_time_s(1024)
    tpot = testbed.model("ZTE-GPU-A", _MODEL).decode_time_s(32, 32 * 1024)
    first_ms = 1e3 * first_token_s(second, geometry, 1024, discounts)
    next_ms = 1e3 * output_token_s(first, geometry, 32, 1024, discounts)
    beside = "formula, beside the step model's"
    prompt = f"first token of 1024 tokens on GPU B: {beside} {1e3 * ttft:.1f} ms"
    token = f"time per output token of 32 requests on GPU A: {beside} {1e3 * tpot:.1f} ms"
    return (
        informative("eq2", "eq. 2", prompt, "ms", "–", first_ms),
        informative("eq5", "eq. 5", token, "ms", "–", next_ms),
    )


def _name(ratio: tuple[int, int]) -> str:
    return f"{ratio[0]}P{ratio[1]}D"


@dataclass(frozen=True, slots=True)
class Discounts:
    """Shares of the peaks: λ of compute, β of the link, α of the memory bandwidth. The paper leaves them open."""

    compute: float
    link: float
    memory: float


def first_token_s(
    device: Accelerator, model: ModelGeometry, prompt: int, discounts: Discounts, ranks: int = 1
) -> float:
    """l_p = c_p/(λR_p) + e_p/(βB_p): compute, then the all-reduces of tensor parallelism (none on one rank)."""
    attention = 2.0 * model.layers * model.hidden * prompt * prompt  # causal: half of QKᵀ and of PV
    work = model.matmul_flops_per_token() * prompt + attention
    moved = 2.0 * model.layers * prompt * model.hidden * 2.0 * 2.0 * (ranks - 1) / ranks
    return work / ranks / (discounts.compute * device.flops("fp16")) + moved / (discounts.link * device.links.scale_up)


def output_token_s(
    device: Accelerator, model: ModelGeometry, batch: int, context: float, discounts: Discounts
) -> float:
    """l_d = e_vram/(αB_vram): weights once, KV of every request; computation hides behind it. One rank."""
    moved = model.weight_bytes(2.0) + batch * context * model.kv_bytes_per_token(2.0)
    return moved / (discounts.memory * device.bandwidth_bytes_s)


def prefill_memory_bytes(model: ModelGeometry, prompts_in_flight_tokens: int) -> float:
    """m_p = weights + activations (eq. 3; F: + KV of the prompts in flight)."""
    activations = prompts_in_flight_tokens * model.hidden * 2.0 * 2.0
    return model.weight_bytes(2.0) + activations + prompts_in_flight_tokens * model.kv_bytes_per_token(2.0)


def decode_memory_bytes(model: ModelGeometry, batch: int, context: float) -> float:
    """m_d = weights + activations + KV (eq. 6)."""
    return model.weight_bytes(2.0) + batch * (model.hidden * 4.0 + context * model.kv_bytes_per_token(2.0))
