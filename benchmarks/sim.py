"""How fast the simulator is, and whether its macro-steps give what stepping gives."""

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks.results import at_least, at_most
from shared.cost.geometry import kv_capacity_tokens
from shared.cost.library import Library
from shared.domain.instance import Role
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from shared.sim.traces import read_trace
from shared.sim.workload import Workload, poisson, synthetic

AZURE = Path("traces/azure2023/AzureLLMInferenceTrace_conv.csv")
MODEL = "Llama-3-8B"
KINDS = ("A100-SXM-80", "L40S", "A10", "H100-SXM")
ROUNDS = 3
STAND_IN_REQUESTS = 19_366  # as many as the trace has
LARGE_REQUESTS, LARGE_INSTANCES, LARGE_RATE = 1_000_000, 1_000, 1_500.0


def run_sim_bench(data: Path) -> dict[str, Any]:
    """Times are CPU times of one process; the trace's run is the median of three."""
    workload, source = _workload(data)
    cluster = mixed_cluster(8)
    trace_s = _cpu_s(lambda: simulate(workload, cluster))
    quarter = workload.head(len(workload) // 4)
    growth = trace_s / _cpu_s(lambda: simulate(quarter, cluster))
    bound = 4.0 * log(len(workload)) / log(len(quarter))
    difference, speedup = _macro_against_stepping(workload.head(1000), cluster)
    large = _in_own_process(large_run)
    figures = {
        "trace_requests": len(workload),
        "trace_cpu_s": round(trace_s, 3),
        "trace_requests_per_s": round(len(workload) / trace_s),
        "growth_for_4x_requests": round(growth, 3),
        "macro_step_difference_relative": difference,
        "macro_step_speedup": round(speedup, 2),
        **{f"large_{name}": value for name, value in large.items()},
    }
    aims = {
        f"trace of {len(workload):,} requests on 8 instances": at_most(5.0, trace_s),
        "requests per second": at_least(4000, len(workload) / trace_s, 0),
        # n log n for fourfold n, and a tenth for noise.
        "growth for 4x requests": at_most(bound * 1.1, growth),
        "macro-steps equal stepping (relative)": at_most(1e-9, difference, 15),
        "1,000,000 requests on 1,000 instances": at_most(600.0, large["wall_s"]),
        "peak memory of that run": at_most(4.0, large["peak_gib"]),
    }
    return {"figures": figures, "aims": aims, "notes": [f"workload: {source}"]}


def mixed_cluster(count: int) -> list[InstanceSpec]:
    """Instances of four kinds in turn, half of each kind for prefill."""
    library = Library.built_in()
    geometry = library.geometry(MODEL)
    kinds = []
    for name in KINDS:
        model = library.step_model(name, MODEL)
        tokens = kv_capacity_tokens(model.accelerator, geometry)
        bytes_per_token = geometry.kv_bytes_per_token(2.0)
        limits = EngineLimits(batched_tokens=2048, sequences=256)
        kinds.append(InstanceSpec(name, model, Role.PREFILL, tokens, bytes_per_token, limits, accelerator=name))
    roles = (Role.PREFILL, Role.DECODE)
    return [
        replace(kinds[at // 2 % len(kinds)], instance_id=f"{at:04}-{KINDS[at // 2 % len(kinds)]}", role=roles[at % 2])
        for at in range(count)
    ]


def large_run() -> dict[str, float]:
    """A million requests on a thousand instances; wall and CPU time, and this process's peak memory."""
    workload = poisson(
        synthetic(LARGE_REQUESTS, 512, 128, prompt_cv=1.0, output_cv=1.0, longest_tokens=8192, seed=1),
        LARGE_RATE,
        seed=2,
    )
    began, cpu = perf_counter(), process_time()
    result = simulate(workload, mixed_cluster(LARGE_INSTANCES))
    return {
        "wall_s": round(perf_counter() - began, 1),
        "cpu_s": round(process_time() - cpu, 1),
        "events": result.events,
        "completed": int(result.outcomes.completed.sum()),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def _workload(data: Path) -> tuple[Workload, str]:
    if (data / AZURE).exists():
        return read_trace(data / AZURE), f"Azure's conversation trace ({AZURE.name})"
    lengths = synthetic(STAND_IN_REQUESTS, 1155, 211, prompt_cv=1.0, output_cv=1.0, seed=0)
    return poisson(lengths, 5.5, seed=0), f"no {data / AZURE}: drawn lengths of its means, Poisson at its rate"


def _macro_against_stepping(workload: Workload, cluster: list[InstanceSpec]) -> tuple[float, float]:
    """Largest relative difference of any request's times, and how much less CPU time macro-steps take."""
    results: list[SimResult] = []
    times = [
        _cpu_s(lambda run=run: results.append(simulate(workload, cluster, run)), rounds=1)  # type: ignore[misc]
        for run in (RunSpec(), RunSpec(stepwise=True))
    ]
    macro, steps = results[0].outcomes, results[1].outcomes
    both = ((macro.ttft_s, steps.ttft_s), (macro.jct_s, steps.jct_s))
    return max(float(np.nanmax(np.abs(a - b) / b)) for a, b in both), times[1] / times[0]


def _cpu_s(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        began = process_time()
        work()
        times.append(process_time() - began)
    return median(times)


def _in_own_process(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work).result(timeout=3600)
