"""`polyphase bench cost`: the cost model against public operator tables and measured runs, errors as aims.

Nothing here feeds back into the constants: tables are fitted on one half and judged on the other, and the runs are
predicted with the constants that ship (fitted to operator tables alone).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from lab.bench.replayed import COUPLED, Result, at_most, coupled, mean_s, word
from lab.bench.silicon import silicon_errors
from lab.fit.efficiencies import TableFit, fit_tables
from lab.fit.profilers import read_tables
from shared.cost.geometry import ExpertSplit, kv_capacity_tokens
from shared.cost.library import Library
from shared.cost.step import Lockstep
from shared.errors import NotFound
from shared.files.text import read_json, read_records
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, InstanceSpec
from shared.sim.workload import Workload

# The most that each error may be, in percent.
_TABLE_AIMS: Mapping[str, float] = {"gemm": 15.0, "mlp": 8.0, "decode": 12.0, "prefill": 18.0, "mixed": 10.0}
_RUN_AIMS: Mapping[str, float] = {"ttft": 20.0, "tpot": 10.0, "jct": 10.0}


def run_cost_bench(data_dir: Path) -> Result:
    """All of it, from the folder that holds `profiles/`.

    Returns {"figures": {name_unit: number}, "aims": {name: {"want", "got", "met"}}, "notes": [str]}.
    """
    profiles = data_dir / "profiles" if (data_dir / "profiles").is_dir() else data_dir
    if not profiles.is_dir():
        raise NotFound(f"no profiles below {data_dir}; give the folder that holds `profiles/`")
    library = Library.built_in()
    result: Result = {"figures": {}, "aims": {}, "notes": []}
    table_errors(profiles, library, result)
    for run in sorted((profiles / "llmservingsim" / "bench").glob("*/meta.json")):
        run_errors(run.parent, library, result)
    sample = profiles / "aiconfigurator" / "silicon_sample.csv"
    if sample.is_file():
        silicon_errors(sample, library, result)
    return result


def table_errors(profiles: Path, library: Library, result: Result) -> None:
    """Aim 1: held-out error of every operator table, with the naive peak roofline's beside it."""
    fits = fit_tables(read_tables(profiles, library.catalogue), library.efficiencies)
    for one in fits:
        name = _table_name(one)
        if one.fit is None:
            result["notes"].append(
                f"{name}: {one.table.rejected} rows beat the device's peak rate; the table is set aside"
            )
            continue
        got = 100.0 * one.fit.mape
        result["figures"][f"{name}_mape_percent"] = round(got, 2)
        result["figures"][f"{name}_naive_mape_percent"] = round(100.0 * one.fit.naive_mape, 2)
        if one.table.operator in _TABLE_AIMS:
            result["aims"][f"{name}_mape_percent"] = at_most(_TABLE_AIMS[one.table.operator], got)


def run_errors(folder: Path, library: Library, result: Result) -> None:
    """Aim 2: a measured vLLM run, replayed request by request."""
    try:
        run = read_run(folder, library)
    except NotFound as error:
        result["notes"].append(f"{folder.name}: {error.message}")
        return
    outcomes = simulate(run.workload, run.instances, COUPLED).outcomes
    name = word(folder.name)
    for what, aim in _RUN_AIMS.items():
        measured = fmean(getattr(outcome, f"{what}_s") for outcome in run.measured)
        predicted = mean_s(outcomes, what)
        off = 100.0 * (predicted / measured - 1.0)
        result["figures"][f"{name}_{what}_measured_ms"] = round(1e3 * measured, 2)
        result["figures"][f"{name}_{what}_predicted_ms"] = round(1e3 * predicted, 2)
        result["figures"][f"{name}_{what}_mean_off_percent"] = round(off, 2)
        result["aims"][f"{name}_{what}_mean_off_percent"] = at_most(aim, abs(off))
    if not result["aims"][f"{name}_ttft_mean_off_percent"]["met"]:
        waited = 100.0 * sum(one.waited_s for one in run.measured) / sum(one.ttft_s for one in run.measured)
        result["notes"].append(
            f"{name}: {waited:.0f} % of the measured TTFT is the wait for a place in a full batch, which ends when "
            "others end: what their times are off by comes back in it several times over"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one request as it was measured, seconds. `tpot_s` is 0 for a single output token.

    waited_s: part of the TTFT before its first step.
    """

    ttft_s: float
    tpot_s: float
    jct_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run: what was asked, of which instances, and how it went; requests in order of arrival."""

    instances: tuple[InstanceSpec, ...]
    workload: Workload
    measured: tuple[Measured, ...]


def read_run(folder: Path, library: Library) -> Run:
    """A run as LLMServingSim's bench records it: `meta.json`, `config.json`, `requests.jsonl`."""
    meta = read_json(folder / "meta.json")
    asked = meta["engine_kwargs"]
    degree, stages = int(asked.get("tensor_parallel_size", 1)), int(asked.get("pipeline_parallel_size", 1))
    copies = int(asked.get("data_parallel_size") or 1)
    # vLLM deals the experts to all accelerators of a data-parallel group, or cuts each into as many parts.
    dealt = ExpertSplit(degree * copies if asked.get("enable_expert_parallel") else 1, copies)
    model = library.step_model(_hardware(folder), str(meta["model"]), degree, stages, experts=dealt)
    total = (meta.get("hardware") or {}).get("device_total_memory_bytes")
    device = replace(model.accelerator, memory_bytes=float(total)) if total else model.accelerator
    stated = (meta.get("kv_cache") or {}).get("num_kv_tokens")
    room = stated or kv_capacity_tokens(
        device,
        model.geometry,
        tensor_parallel=degree,
        pipeline_parallel=stages,
        experts=dealt,
        utilisation=float(asked.get("gpu_memory_utilization") or 0.9),
    )
    limits = EngineLimits(
        batched_tokens=int(asked.get("max_num_batched_tokens") or 8192),
        sequences=int(asked.get("max_num_seqs") or 256),
        block_tokens=int((meta.get("kv_cache") or {}).get("block_size") or 16),
    )
    workload, measured = _read_requests(folder)
    if copies > 1 and model.geometry.experts:
        group = EngineLimits(copies * limits.batched_tokens, copies * limits.sequences, limits.block_tokens)
        return Run((coupled(Lockstep(model), model.geometry, group, copies * int(room)),), workload, measured)
    every = tuple(coupled(model, model.geometry, limits, int(room), at) for at in range(copies))
    return Run(every, workload, measured)


def _hardware(folder: Path) -> str:
    """The device's name: from the run's cluster file, else from the folder."""
    path = folder / "config.json"
    if path.is_file():
        config = read_json(path)
        for node in config.get("nodes", ()):
            for instance in node.get("instances", ()):
                if "hardware" in instance:
                    return str(instance["hardware"])
    return folder.name.split("_")[0]


def _read_requests(folder: Path) -> tuple[Workload, tuple[Measured, ...]]:
    """Requests and outcomes. Arrivals are wall-clock times, the engine's own a monotonic clock: the least gap between
    arrival and queueing tells their offset."""
    found = (row for _, row in read_records(folder / "requests.jsonl"))
    rows = sorted(found, key=lambda row: float(row["arrival_time"]))
    offset = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    measured = []
    for row in rows:
        arrival = row["arrival_time"] + offset
        gaps = row["output_toks"] - 1
        tpot = (row["last_token_ts"] - row["first_token_ts"]) / gaps if gaps else 0.0
        waited = row.get("scheduled_ts", row["queued_ts"]) - arrival
        measured.append(Measured(row["first_token_ts"] - arrival, tpot, row["last_token_ts"] - arrival, waited))
    workload = Workload(
        folder.name,
        np.array([row["arrival_time"] - rows[0]["arrival_time"] for row in rows]),
        np.array([int(row["input_toks"]) for row in rows]),
        np.array([int(row["output_toks"]) for row in rows]),
    )
    return workload, tuple(measured)


def failed_aims(result: Result) -> Sequence[str]:
    """Names of the aims that were missed."""
    return [name for name, aim in result["aims"].items() if not aim["met"]]


def _table_name(one: TableFit) -> str:
    return word(f"{one.table.operator}_{one.table.accelerator.name}_{one.table.origin}")
