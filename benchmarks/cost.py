"""`polyphase bench cost`: errors of the cost model against public operator tables, measured runs, and whole engines on
H100 and H200.

The fits come from `tools.fit`; measured runs are replayed in the simulator on coupled instances.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.results import Result, at_most, merged, result
from shared.cost.geometry import ExpertSplit, kv_capacity_tokens
from shared.cost.library import Library
from shared.cost.step import StepModel
from shared.cost.step_variants import Lockstep
from shared.domain.instance import Role
from shared.errors import InvalidRequest, NotFound
from shared.files.text import read_json, read_records
from shared.policy.dispatch import RandomDispatch
from shared.policy.placement import LeastLoad, Policies
from shared.policy.split import NoSplit
from shared.sim.cluster import simulate
from shared.sim.outcomes import Outcomes
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from shared.sim.workload import Workload
from tools.fit.efficiencies import fit_tables
from tools.fit.profilers import read_tables

COUPLED = RunSpec(policies=Policies(LeastLoad(), NoSplit(), RandomDispatch()))
# The highest error of each, in percent.
TABLE_AIMS: Mapping[str, float] = {"gemm": 15.0, "mlp": 8.0, "decode": 12.0, "prefill": 18.0, "mixed": 10.0}
RUN_AIMS: Mapping[str, float] = {"ttft": 20.0, "tpot": 10.0, "jct": 10.0}
ENGINE_AIM = 18.0
STEP_TOKENS = 8192  # all three engines' default for a server on such a GPU
COMPUTED = 0.95  # share of a run's time that its prompts may need; where they need more, they were not all computed


def run_cost_bench(data: Path) -> Result:
    """data: the folder that holds `profiles/`, or that folder."""
    profiles = data / "profiles" if (data / "profiles").is_dir() else data
    if not profiles.is_dir():
        raise NotFound(f"no profiles below {data}; give the folder that holds `profiles/`")
    library = Library.built_in()
    runs = sorted((profiles / "llmservingsim" / "bench").glob("*/meta.json"))
    parts = [table_errors(profiles, library), *(run_errors(run.parent, library) for run in runs)]
    sample = profiles / "aiconfigurator" / "silicon_sample.csv"
    return merged(*parts, silicon_errors(sample, library) if sample.is_file() else {})


def table_errors(profiles: Path, library: Library) -> Result:
    """Held-out error of every operator table, with that of the peak roofline beside it."""
    parts = []
    for one in fit_tables(read_tables(profiles, library.catalogue), library.efficiencies):
        table = one.table
        name = word(f"{table.operator}_{table.accelerator.name}_{table.origin}")
        if one.fit is None:
            rejected = f"{table.rejected} rows beat the device's peak rate; the table is set aside"
            parts.append(result({}, notes=[f"{name}: {rejected}"]))
            continue
        got, naive = 100.0 * one.fit.mape, 100.0 * one.fit.naive_mape
        figures = {f"{name}_mape_percent": round(got, 2), f"{name}_naive_mape_percent": round(naive, 2)}
        bound = TABLE_AIMS.get(table.operator)
        parts.append(result(figures, {f"{name}_mape_percent": at_most(bound, got, 2)} if bound is not None else {}))
    return merged(*parts)


def instance_of(model: StepModel, limits: EngineLimits, kv_tokens: int, engines: int = 1, at: int = 0) -> InstanceSpec:
    """An instance that computes whole requests. engines: data-parallel engines of a mixture, which step together."""
    if engines > 1:
        sizes = engines * limits.batched_tokens, engines * limits.sequences
        limits = replace(limits, batched_tokens=sizes[0], sequences=sizes[1])
    times = Lockstep(model) if engines > 1 else model
    kv_bytes = model.geometry.kv_bytes_per_token()
    return InstanceSpec(str(at), times, Role.DECODE, engines * kv_tokens, kv_bytes, limits)


def mean_s(outcomes: Outcomes, what: str) -> float:
    """Mean of a latency; a request of one token has a TPOT of 0."""
    return float(np.nan_to_num(getattr(outcomes, f"{what}_s")).mean())


def word(text: str) -> str:
    """A name for figures: lower case, underscores."""
    return "_".join("".join(c.lower() if c.isalnum() else " " for c in text).split())


# Measured vLLM runs, replayed request by request.


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one request as it was measured, seconds. tpot_s: 0 for a single output token."""

    ttft_s: float
    tpot_s: float
    jct_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run; requests in order of arrival."""

    instances: tuple[InstanceSpec, ...]
    workload: Workload
    measured: tuple[Measured, ...]


def run_errors(folder: Path, library: Library) -> Result:
    try:
        run = read_run(folder, library)
    except NotFound as error:
        return result({}, notes=[f"{folder.name}: {error.message}"])
    outcomes = simulate(run.workload, run.instances, COUPLED).outcomes
    name, figures, aims = word(folder.name), {}, {}
    for what, bound in RUN_AIMS.items():
        measured, predicted = fmean(getattr(one, f"{what}_s") for one in run.measured), mean_s(outcomes, what)
        off = 100.0 * (predicted / measured - 1.0)
        figures[f"{name}_{what}_measured_ms"] = round(1e3 * measured, 2)
        figures[f"{name}_{what}_predicted_ms"] = round(1e3 * predicted, 2)
        figures[f"{name}_{what}_mean_off_percent"] = round(off, 2)
        aims[f"{name}_{what}_mean_off_percent"] = at_most(bound, abs(off), 2)
    return result(figures, aims)


def read_run(folder: Path, library: Library) -> Run:
    """A run as LLMServingSim's bench records it: `meta.json`, `config.json`, `requests.jsonl`."""
    meta = read_json(folder / "meta.json")
    args, cache = meta["engine_kwargs"], meta.get("kv_cache") or {}
    degree, stages = int(args.get("tensor_parallel_size", 1)), int(args.get("pipeline_parallel_size", 1))
    copies = int(args.get("data_parallel_size") or 1)
    # vLLM gives the experts to all accelerators of a data-parallel group, or cuts each into as many parts.
    experts = ExpertSplit(degree * copies if args.get("enable_expert_parallel") else 1, copies)
    model = library.step_model(_hardware(folder), str(meta["model"]), degree, stages, experts=experts)
    total = (meta.get("hardware") or {}).get("device_total_memory_bytes")
    device = replace(model.accelerator, memory_bytes=float(total)) if total else model.accelerator
    kv_tokens = cache.get("num_kv_tokens") or kv_capacity_tokens(
        device,
        model.geometry,
        tensor_parallel=degree,
        pipeline_parallel=stages,
        experts=experts,
        utilisation=float(args.get("gpu_memory_utilization") or 0.9),
    )
    limits = EngineLimits(
        batched_tokens=int(args.get("max_num_batched_tokens") or 8192),
        sequences=int(args.get("max_num_seqs") or 256),
        block_tokens=int(cache.get("block_size") or 16),
    )
    workload, measured = _read_requests(folder)
    if copies > 1 and model.geometry.experts:
        return Run((instance_of(model, limits, int(kv_tokens), copies),), workload, measured)
    every = tuple(instance_of(model, limits, int(kv_tokens), at=at) for at in range(copies))
    return Run(every, workload, measured)


def _hardware(folder: Path) -> str:
    path = folder / "config.json"
    nodes = read_json(path).get("nodes", ()) if path.is_file() else ()
    named = (instance["hardware"] for node in nodes for instance in node.get("instances", ()) if "hardware" in instance)
    return str(next(named, folder.name.split("_")[0]))


def _read_requests(folder: Path) -> tuple[Workload, tuple[Measured, ...]]:
    """Requests and outcomes. Arrivals are wall-clock times, the engine's own a monotonic clock: the smallest gap
    between arrival and queueing tells their offset."""
    found = (row for _, row in read_records(folder / "requests.jsonl"))
    rows = sorted(found, key=lambda row: float(row["arrival_time"]))
    offset = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    measured = []
    for row in rows:
        arrival, gaps = row["arrival_time"] + offset, row["output_toks"] - 1
        tpot = (row["last_token_ts"] - row["first_token_ts"]) / gaps if gaps else 0.0
        measured.append(Measured(row["first_token_ts"] - arrival, tpot, row["last_token_ts"] - arrival))
    workload = Workload(
        folder.name,
        np.array([row["arrival_time"] - rows[0]["arrival_time"] for row in rows]),
        np.array([int(row["input_toks"]) for row in rows]),
        np.array([int(row["output_toks"]) for row in rows]),
    )
    return workload, tuple(measured)


# Whole engines with dense models, from aiconfigurator's `silicon_sample.csv`. Each row is a closed loop of equal
# requests at its concurrency; no constant is fitted to a row.

SYSTEMS = ("h100_sxm", "h200_sxm")
DENSE = "Llama|Qwen3-32B"
MODES: Mapping[str, str] = {"fp8_block": "fp8_block", "fp8": "fp8", "nvfp4": "fp4", "int4": "int4", "int8": "int8"}


def silicon_errors(sample: Path, library: Library) -> Result:
    """Errors of the mean TPOT, by model, system and engine.

    Rows whose prompts alone would need more than `COMPUTED` of the measured time are set aside: their engines found
    prompts in their prefix caches.
    """
    frame = pd.read_csv(sample)
    used = (frame["mode"] == "agg") & frame["system"].isin(SYSTEMS) & frame["model_path"].str.contains(DENSE)
    notes: list[str] = []
    errors: dict[str, list[float]] = {}
    for name, error in _row_errors(frame[used], library, notes):
        errors.setdefault(name, []).append(error)
    qwen = [error for name, each in errors.items() if name.startswith("qwen3_32b_h100") for error in each]
    dense = [error for each in errors.values() for error in each]
    figures, aims = {}, {}
    for name, each in {**errors, "qwen3_32b_h100_sxm": qwen, "all": dense}.items():
        if each:
            figures[f"silicon_{name}_tpot_mape_percent"] = round(_mape_percent(each), 2)
            figures[f"silicon_{name}_rows"] = len(each)
    for name, each in (("dense", dense), ("qwen3_32b_h100", qwen)):
        if each:
            aims[f"silicon_{name}_tpot_mape_percent"] = at_most(ENGINE_AIM, _mape_percent(each), 2)
    return result(figures, aims, notes)


def _mape_percent(errors: Sequence[float]) -> float:
    return 100.0 * fmean(map(abs, errors))


def _row_errors(rows: pd.DataFrame, library: Library, notes: list[str]) -> Iterator[tuple[str, float]]:
    """The name and the error of each row; rows that cannot be predicted are noted."""
    models: dict[Any, StepModel] = {}
    cached, highest = Counter[str](), 0.0
    for row in rows.to_dict("records"):
        path, mode = str(row["model_path"]), str(row["gemm_quant_mode"])
        dtype = next((short for prefix, short in MODES.items() if mode.startswith(prefix)), "bf16")
        key = (str(row["system"]), path, int(row["tp_size"]), 1, dtype)
        try:
            model = models[key] = models.get(key) or library.step_model(*key)
            error = _predicted_ms(row, model) / float(row["silicon_tpot_ms"]) - 1.0
        except (InvalidRequest, NotFound) as problem:
            notes.append(f"silicon row {row['id']}: {problem.message}")
            continue
        name = word(f"{path.rpartition('/')[2]}_{row['system']}_{row['backend']}")
        if (share := _prompt_share(row, model)) > COMPUTED:
            cached[name] += 1
            highest = max(highest, share)
        else:
            yield name, error
    if cached:
        by_name = ", ".join(f"{name} {count}" for name, count in sorted(cached.items()))
        notes.append(
            f"silicon rows that are set aside: {cached.total()}, whose prompts alone would need more than {COMPUTED:g} "
            f"of the measured time (up to {highest:.2g} times it), so that they were not all computed ({by_name})"
        )


def _prompt_share(row: Mapping[Any, Any], model: StepModel) -> float:
    """Of the measured time, the share that the prompts would need if they were all computed, without decodes."""
    prompt, output = int(row["isl"]), int(row["osl"])
    chunk = min(prompt, STEP_TOKENS)
    prompt_s = prompt / chunk * model.prefill_time_s(chunk)
    ttft_ms = float(row.get("silicon_ttft_ms", 0.0))
    lasts_s = ((0.0 if isnan(ttft_ms) else ttft_ms) + (output - 1) * float(row["silicon_tpot_ms"])) / 1e3
    return int(row["batch_size"]) * prompt_s / lasts_s if lasts_s > 0.0 else 0.0


def _predicted_ms(row: Mapping[Any, Any], model: StepModel) -> float:
    concurrency, prompt, output = int(row["batch_size"]), int(row["isl"]), int(row["osl"])
    backend = str(row["backend"])
    degree = model.tensor_parallel
    room = kv_capacity_tokens(model.accelerator, model.geometry, tensor_parallel=degree, dtype=model.dtype)
    if room < prompt + output:
        raise InvalidRequest(f"a request of {prompt} + {output} tokens does not fit the KV capacity of {room} tokens")
    limits = EngineLimits(
        batched_tokens=STEP_TOKENS,
        sequences=1024,
        reserves_output=backend == "trtllm",
        prefill_first=backend == "sglang",
    )
    requests = concurrency * (3 if output <= 2048 else 2)
    workload = Workload(backend, np.zeros(requests), np.full(requests, prompt), np.full(requests, output))
    run = replace(COUPLED, concurrency=concurrency)
    return 1e3 * mean_s(simulate(workload, (instance_of(model, limits, room),), run).outcomes, "tpot")
