"""Huawei: the ranking of tensor-parallel degrees (5.1), and placement on two heterogeneous clusters (5.2, 5.3)."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np

from benchmarks.papers.report import Figure, Section, section_of
from benchmarks.papers.testbed import Kind, Testbed, Watermark, change, instances, sharegpt, tokens_per_s, weighed
from shared.domain.instance import Role
from shared.plan.methods.papers import batch_cost, estimated_throughput
from shared.policy.dispatch import RandomDispatch
from shared.policy.papers.huawei import Memory, Single, Weighted
from shared.policy.papers.huawei import Workload as LeastWorkload
from shared.policy.placement import Placement, Policies, RoundRobin
from shared.policy.split import NoSplit
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from shared.sim.workload import poisson

# vLLM 0.6.0 as it comes: prefill first, whole prompts, 256 sequences.
LIMITS = EngineLimits(batched_tokens=8192, sequences=256, prefill_first=True)
LLAMA, QWEN = "Llama-3-8B", "Qwen2.5-14B"  # the latter is the geometry of R1-Distill-Qwen-14B
V100, A800 = "V100-32-PCIe", "A800-PCIe-80"
DEGREES = (1, 2, 4, 8)
BEST = {8.0: "OS", 16.0: "OS", 24.0: "WRR", inf: "WRR"}  # the best strategy by the rate of requests
REQUESTS = 4000
TIE = 0.03  # strategies this near to each other change places with the seed


def huawei_section(testbed: Testbed, data: Path) -> Section:
    figures = {
        "degrees": degrees(testbed, data),
        **strategies(testbed, data),
        "cluster2": second_cluster(testbed, data),
    }
    return section_of("huawei", "Huawei: high throughput on heterogeneous clusters", figures)


def degrees(testbed: Testbed, data: Path) -> Figure:
    """Throughput of 8 V100 by tensor-parallel degree: estimated by Algorithm 1, and simulated.

    As in the paper the requests are there 8 times over and go round, so each of 8/t instances computes every request t
    times; they are alike, and one is simulated.
    """
    estimated, simulated = {}, {}
    sample, sent = sharegpt(data, 200, seed=1), sharegpt(data, 250, seed=2)
    pairs = list(zip(sample.prompt_tokens.tolist(), sample.output_tokens.tolist(), strict=True))
    for degree in DEGREES:
        count = DEGREES[-1] // degree
        cost = batch_cost(testbed.model(V100, LLAMA, degree))
        estimated[degree] = count * estimated_throughput(cost, testbed.kv_tokens(V100, LLAMA, degree), pairs)
        repeated = replace(
            sent,
            arrival_s=np.zeros(len(sent) * degree),
            prompt_tokens=np.repeat(sent.prompt_tokens, degree),
            output_tokens=np.repeat(sent.output_tokens, degree),
        )
        cluster = instances(testbed, Kind(V100, LLAMA, degree, LIMITS), Role.DECODE)
        simulated[degree] = count * tokens_per_s(
            simulate(repeated, cluster, RunSpec(migration=False, decode_admission=Watermark()))
        )
    ours, real = (" > ".join(map(str, sorted(by, key=lambda t: -by[t]))) for by in (estimated, simulated))
    return f"estimate {ours}; simulated {real}", ours == real


def strategies(testbed: Testbed, data: Path) -> dict[str, Figure]:
    by_rate = {rate: _strategies(testbed, data, rate) for rate in BEST}
    figures: dict[str, Figure] = {"os_rr": change(by_rate[24.0]["OS"], by_rate[24.0]["RR"])}
    for rate, best in BEST.items():
        by = by_rate[rate]
        ranked = sorted(by, key=lambda strategy: -by[strategy])
        listed = ", ".join(f"{one} {by[one]:,.0f}" for one in ranked)
        figures[f"best_{rate:g}"] = listed, by[best] >= (1 - TIE) * by[ranked[0]]
        figures[f"worst_{rate:g}"] = ranked[-1], ranked[-1] == "RR"
    below = sum(by["MB"] <= (1 + TIE) * by["OS"] for by in by_rate.values())
    return figures | {"mb_os": (f"at {below} of {len(BEST)} rates", below == len(BEST))}


def _strategies(testbed: Testbed, data: Path, rate: float) -> Mapping[str, float]:
    """Throughput of each strategy on an instance of 4 V100 and one of 1."""
    strong, weak = (
        instances(testbed, Kind(V100, LLAMA, degree, LIMITS), Role.DECODE, prefix=f"t{degree}")[0] for degree in (4, 1)
    )
    mean = _mean_output(data)
    placements: dict[str, Placement] = {
        "RR": RoundRobin(),
        "SI": Single(strong.instance_id),
        "MB": Memory(unpredicted_tokens=mean),
        "OS": LeastWorkload(unpredicted_tokens=mean),
        "WRR": Weighted(),
    }
    cluster = (weighed(strong, 4.0), weighed(weak, 1.0))
    return {name: _throughput(data, rate, cluster, placement) for name, placement in placements.items()}


def second_cluster(testbed: Testbed, data: Path) -> float:
    cluster = (
        *instances(testbed, Kind(V100, QWEN, 2, LIMITS), Role.DECODE, 4, "v100"),
        *instances(testbed, Kind(A800, QWEN, 1, LIMITS), Role.DECODE, 1, "a800"),
    )
    placements = LeastWorkload(unpredicted_tokens=_mean_output(data)), RoundRobin()
    ours, base = (_throughput(data, 16.0, cluster, placement) for placement in placements)
    return change(ours, base)


def _throughput(data: Path, rate: float, cluster: tuple[InstanceSpec, ...], placement: Placement) -> float:
    """Tokens a second."""
    policies = Policies(placement, NoSplit(), RandomDispatch())
    workload = sharegpt(data, REQUESTS)
    workload = workload if rate == inf else poisson(workload, rate)
    return tokens_per_s(
        simulate(workload, cluster, RunSpec(migration=False, policies=policies, decode_admission=Watermark()))
    )


def _mean_output(data: Path) -> int:
    return round(float(sharegpt(data, 1000, seed=9).output_tokens.mean()))
