"""`polyphase bench sim`: how fast the simulator is, and whether its macro-steps give what single steps give."""

import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import log
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np

from benchmarks.papers.testbed import CONVERSATION
from benchmarks.results import Result, at_least, at_most, result
from shared.cost.geometry import kv_capacity_tokens
from shared.cost.library import Library
from shared.domain.instance import Role
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from shared.sim.traces import read_trace
from shared.sim.workload import Workload, poisson, synthetic

MODEL = "Llama-3-8B"
KINDS = ("A100-SXM-80", "L40S", "A10", "H100-SXM")
ROUNDS = 3
SYNTHETIC_REQUESTS = 19_366  # as many as the trace has
LARGE_REQUESTS, LARGE_INSTANCES, LARGE_RATE = 1_000_000, 1_000, 1_500.0


def run_sim_bench(data: Path) -> Result:
    """Times are CPU times of one process, medians of three runs."""
    if (data / CONVERSATION).exists():
        workload, source = read_trace(data / CONVERSATION), f"Azure's conversation trace ({CONVERSATION.name})"
    else:
        lengths = synthetic(SYNTHETIC_REQUESTS, 1155, 211, prompt_cv=1.0, output_cv=1.0, seed=0)
        workload, source = poisson(lengths, 5.5, seed=0), f"no {data / CONVERSATION}: synthetic requests of its means"
    cluster = mixed_cluster(8)
    quarter = workload.head(len(workload) // 4)
    trace_s, quarter_s = (median(_cpu_s(each, cluster)[1] for _ in range(ROUNDS)) for each in (workload, quarter))
    growth, n_log_n = trace_s / quarter_s, 4.0 * log(len(workload)) / log(len(quarter))
    (macro, macro_s), (steps, steps_s) = (
        _cpu_s(workload.head(1000), cluster, run) for run in (RunSpec(), RunSpec(stepwise=True))
    )
    both = [(getattr(macro.outcomes, name), getattr(steps.outcomes, name)) for name in ("ttft_s", "jct_s")]
    difference = max(float(np.nanmax(np.abs(a - b) / b)) for a, b in both)
    large = _in_own_process(large_run)
    figures = {
        "trace_requests": len(workload),
        "trace_cpu_s": round(trace_s, 3),
        "trace_requests_per_s": round(len(workload) / trace_s),
        "growth_for_4x_requests": round(growth, 3),
        "macro_step_difference_relative": difference,
        "macro_step_speedup": round(steps_s / macro_s, 2),
        **{f"large_{name}": value for name, value in large.items()},
    }
    aims = {
        f"trace of {len(workload):,} requests on 8 instances": at_most(5.0, trace_s),
        "requests per second": at_least(4000, len(workload) / trace_s, 0),
        "growth for 4x requests": at_most(n_log_n * 1.1, growth),
        "macro-steps equal stepping (relative)": at_most(1e-9, difference, 15),
        "1,000,000 requests on 1,000 instances": at_most(600.0, large["wall_s"]),
        "peak memory of that run": at_most(4.0, large["peak_gib"]),
    }
    return result(figures, aims, [f"workload: {source}"])


def mixed_cluster(count: int) -> list[InstanceSpec]:
    """Instances of four kinds in turn, half of each kind for prefill."""
    library = Library.built_in()
    kinds = []
    for name in KINDS:
        model = library.step_model(name, MODEL)
        tokens, kv_bytes = kv_capacity_tokens(model.accelerator, model.geometry), model.geometry.kv_bytes_per_token(2.0)
        limits = EngineLimits(batched_tokens=2048, sequences=256)
        kinds.append(InstanceSpec(name, model, Role.PREFILL, tokens, kv_bytes, limits, accelerator=name))
    roles = (Role.PREFILL, Role.DECODE)
    return [
        replace(kinds[at // 2 % len(kinds)], instance_id=f"{at:04}-{KINDS[at // 2 % len(kinds)]}", role=roles[at % 2])
        for at in range(count)
    ]


def large_run() -> dict[str, float]:
    """A million requests on a thousand instances; wall and CPU time, and this process's peak memory."""
    lengths = synthetic(LARGE_REQUESTS, 512, 128, prompt_cv=1.0, output_cv=1.0, longest_tokens=8192, seed=1)
    workload = poisson(lengths, LARGE_RATE, seed=2)
    began_mono = perf_counter()
    found, cpu_s = _cpu_s(workload, mixed_cluster(LARGE_INSTANCES))
    return {
        "wall_s": round(perf_counter() - began_mono, 1),
        "cpu_s": round(cpu_s, 1),
        "events": found.events,
        "completed": int(found.outcomes.completed.sum()),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def _cpu_s(workload: Workload, cluster: list[InstanceSpec], run: RunSpec | None = None) -> tuple[SimResult, float]:
    began_s = process_time()
    return simulate(workload, cluster, run or RunSpec()), process_time() - began_s


def _in_own_process(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work).result(timeout=3600)
