"""Huawei: the ranking of tensor-parallel degrees (5.1), and placement on two heterogeneous clusters (5.2, 5.3)."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np

from benchmarks.papers.report import Chart, Row, Section, gain, order
from benchmarks.papers.testbed import Kind, Testbed, Watermark, change, instances, sharegpt, tokens_per_s, weighed
from shared.cost.linear import huawei_of
from shared.domain.instance import Role
from shared.plan.methods.papers import estimated_throughput
from shared.policy.dispatch import RandomDispatch
from shared.policy.papers.huawei import Memory, Single, Weighted
from shared.policy.papers.huawei import Workload as LeastWorkload
from shared.policy.placement import Placement, Policies, RoundRobin
from shared.policy.split import NoSplit
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from shared.sim.workload import Workload, poisson

# vLLM 0.6.0 as it comes: prefill first, whole prompts, 256 sequences.
_LIMITS = EngineLimits(batched_tokens=8192, sequences=256, prefill_first=True)
_LLAMA, _QWEN = "Llama-3-8B", "Qwen2.5-14B"  # the latter is the geometry of R1-Distill-Qwen-14B
_V100, _A800 = "V100-32-PCIe", "A800-PCIe-80"
_DEGREES = (1, 2, 4, 8)
_RATES = (8.0, 16.0, 24.0, inf)
_REQUESTS = 4000
_TIE = 0.03  # strategies this near to each other change places with the seed


def huawei_section(testbed: Testbed, data: Path) -> Section:
    figures = {rate: _strategies(testbed, data, rate) for rate in _RATES}
    estimated, simulated = _degrees(testbed, sharegpt(data, 200, seed=1), sharegpt(data, 250, seed=2))
    rows = (*_ranking_rows(estimated, simulated), *_strategy_rows(figures), _second_cluster(testbed, data))
    charts = (
        Chart(
            "huawei_degrees",
            "Huawei, Fig 4: throughput by tensor-parallel degree (8 V100)",
            "tokens/s",
            tuple(f"t = {t}" for t in _DEGREES),
            {"Algorithm 1's estimate": list(estimated.values()), "simulated": list(simulated.values())},
        ),
        Chart(
            "huawei_strategies",
            "Huawei, Fig 5: throughput by scheduling strategy, 4 + 1 V100",
            "tokens/s",
            tuple("all at once" if rate == inf else f"{rate:g} req/s" for rate in _RATES),
            {name: [figures[rate][name] for rate in _RATES] for name in figures[inf]},
        ),
    )
    return Section("huawei", "Huawei: high throughput on heterogeneous clusters", rows, charts)


def _degrees(testbed: Testbed, sample: Workload, sent: Workload) -> tuple[dict[int, float], dict[int, float]]:
    """Throughput of the machine by degree: estimated by Algorithm 1, and simulated.

    As in the paper the requests are there 8 times over and go round, so each of 8/t instances computes every request t
    times; they are alike, and one is simulated.
    """
    estimated, simulated = {}, {}
    pairs = list(zip(sample.prompt_tokens.tolist(), sample.output_tokens.tolist(), strict=True))
    for degree in _DEGREES:
        count = _DEGREES[-1] // degree
        capacity = testbed.kv_tokens(_V100, _LLAMA, degree)
        estimated[degree] = count * estimated_throughput(
            huawei_of(testbed.model(_V100, _LLAMA, degree)), capacity, pairs
        )
        repeated = replace(
            sent,
            arrival_s=np.zeros(len(sent) * degree),
            prompt_tokens=np.repeat(sent.prompt_tokens, degree),
            output_tokens=np.repeat(sent.output_tokens, degree),
        )
        cluster = instances(testbed, Kind(_V100, _LLAMA, degree, _LIMITS), Role.DECODE)
        simulated[degree] = count * tokens_per_s(simulate(repeated, cluster, RunSpec(decode_admission=Watermark())))
    return estimated, simulated


def _ranking_rows(estimated: Mapping[int, float], simulated: Mapping[int, float]) -> tuple[Row, ...]:
    ours, real = (sorted(figures, key=lambda t: -figures[t]) for figures in (estimated, simulated))
    shown = f"estimate {_ranks(ours)}; simulated {_ranks(real)}"
    what = "ranking of t in {1, 2, 4, 8}: Algorithm 1's estimate against the run"
    paper = "identical (the order is lost in the text)"
    return (order("degrees", "5.1, Fig 4", what, paper, shown, ours == real),)


def _strategies(testbed: Testbed, data: Path, rate: float) -> dict[str, float]:
    strong, weak = (
        instances(testbed, Kind(_V100, _LLAMA, degree, _LIMITS), Role.DECODE, prefix=f"t{degree}")[0]
        for degree in (4, 1)
    )
    cluster = (weighed(strong, 4.0), weighed(weak, 1.0))
    mean = _mean_output(data)
    placements: dict[str, Placement] = {
        "RR": RoundRobin(),
        "SI": Single(strong.instance_id),
        "MB": Memory(unpredicted_tokens=mean),
        "OS": LeastWorkload(unpredicted_tokens=mean),
        "WRR": Weighted(),
    }
    return {name: _throughput(data, rate, cluster, placement) for name, placement in placements.items()}


def _strategy_rows(figures: Mapping[float, Mapping[str, float]]) -> tuple[Row, ...]:
    where = "5.2, Fig 5"
    better = change(figures[24.0]["OS"], figures[24.0]["RR"])
    rows = [gain("os_rr", where, "OS against RR at 24 req/s: throughput", 122.5, better)]
    for rate, best in ((8.0, "OS"), (16.0, "OS"), (24.0, "WRR"), (inf, "WRR")):
        by = figures[rate]
        ranked = sorted(by, key=lambda name: -by[name])
        name = "inf" if rate == inf else f"{rate:g}"
        listed = ", ".join(f"{one} {by[one]:,.0f}" for one in ranked)
        near = by[best] >= (1 - _TIE) * by[ranked[0]]
        rows.append(order(f"best_{name}", where, f"highest at {name} req/s", best, listed, near))
        if best == "WRR":
            last, what = ranked[-1], f"lowest at {name} req/s"
            rows.append(order(f"worst_{name}", where, what, "RR, below SI", last, last == "RR"))
    below = [rate for rate in _RATES if figures[rate]["MB"] <= (1 + _TIE) * figures[rate]["OS"]]
    what, shown = "MB below OS, slightly or by less than seeds differ", f"at {len(below)} of {len(_RATES)} rates"
    rows.append(order("mb_os", where, what, "at all rates", shown, len(below) == len(_RATES)))
    return tuple(rows)


def _second_cluster(testbed: Testbed, data: Path) -> Row:
    cluster = (
        *instances(testbed, Kind(_V100, _QWEN, 2, _LIMITS), Role.DECODE, 4, "v100"),
        *instances(testbed, Kind(_A800, _QWEN, 1, _LIMITS), Role.DECODE, 1, "a800"),
    )
    ours = _throughput(data, 16.0, cluster, LeastWorkload(unpredicted_tokens=_mean_output(data)))
    base = _throughput(data, 16.0, cluster, RoundRobin())
    return gain(
        "cluster2", "5.3, Fig 6", "OS against RR at 16 req/s, 8 V100 + 1 A800: throughput", 33.6, change(ours, base)
    )


def _throughput(data: Path, rate: float, cluster: tuple[InstanceSpec, ...], placement: Placement) -> float:
    run = RunSpec(
        label=placement.name, policies=Policies(placement, NoSplit(), RandomDispatch()), decode_admission=Watermark()
    )
    workload = sharegpt(data, _REQUESTS)
    return tokens_per_s(simulate(workload if rate == inf else poisson(workload, rate), cluster, run))


def _mean_output(data: Path) -> int:
    return round(float(sharegpt(data, 1000, seed=9).output_tokens.mean()))


def _ranks(degrees: list[int]) -> str:
    return " > ".join(f"{degree}" for degree in degrees)
