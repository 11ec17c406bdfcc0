"""`polyphase bench cost`: the cost model against public operator tables and measured runs, errors as aims.

Nothing here feeds back into the constants: tables are fitted on one half and judged on the other, and the runs are
predicted with the constants that ship (fitted to operator tables alone).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from lab.fit.efficiencies import TableFit, fit_tables
from lab.fit.tables import read_tables
from shared.cost.library import Library
from shared.cost.memory import kv_capacity_tokens
from shared.cost.step import StepModel
from shared.domain.instance import Role
from shared.errors import InvalidRequest, NotFound
from shared.policy.dispatch import RandomDispatch
from shared.policy.placement import LeastLoad, Policies
from shared.policy.split import NoSplit
from shared.sim.cluster import simulate
from shared.sim.outcomes import Outcomes
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from shared.sim.workload import Workload

# Issue 3, "what it must show": the most that each error may be, in percent.
_TABLE_AIMS: Mapping[str, float] = {"gemm": 15.0, "mlp": 8.0, "decode": 12.0, "prefill": 18.0}
_RUN_AIMS: Mapping[str, float] = {"ttft": 20.0, "tpot": 10.0, "jct": 10.0}
_SILICON_AIM = 18.0
_MODES: Mapping[str, str] = {"fp8": "fp8", "nvfp4": "fp4", "int4": "int4", "int8": "int8"}

_COUPLED = RunSpec(policies=Policies(LeastLoad(), NoSplit(), RandomDispatch()))

Result = dict[str, Any]


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
            result["aims"][f"{name}_mape_percent"] = _at_most(_TABLE_AIMS[one.table.operator], got)


def run_errors(folder: Path, library: Library, result: Result) -> None:
    """Aim 2: a measured vLLM run, replayed request by request."""
    try:
        run = read_run(folder, library)
    except NotFound as error:
        result["notes"].append(f"{folder.name}: {error.message}")
        return
    outcomes = simulate(run.workload, run.instances, _COUPLED).outcomes
    name = _word(folder.name)
    for what, aim in _RUN_AIMS.items():
        measured = fmean(getattr(outcome, f"{what}_s") for outcome in run.measured)
        predicted = _mean_s(outcomes, what)
        off = 100.0 * (predicted / measured - 1.0)
        result["figures"][f"{name}_{what}_measured_ms"] = round(1e3 * measured, 2)
        result["figures"][f"{name}_{what}_predicted_ms"] = round(1e3 * predicted, 2)
        result["figures"][f"{name}_{what}_mean_off_percent"] = round(off, 2)
        result["aims"][f"{name}_{what}_mean_off_percent"] = _at_most(aim, abs(off))


def silicon_errors(sample: Path, library: Library, result: Result) -> None:
    """Aim 2: aggregated rows of dense models on H100 and H200, each a closed loop at its concurrency."""
    frame = pd.read_csv(sample)
    dense = frame["model_path"].str.contains("Llama|Qwen3-32B")
    frame = frame[(frame["mode"] == "agg") & frame["system"].isin(["h100_sxm", "h200_sxm"]) & dense]
    models: dict[tuple[str, str, int, str], StepModel] = {}
    errors: dict[str, list[float]] = {}
    for row in frame.to_dict("records"):
        word = _word(f"{row['model_path'].rpartition('/')[2]}_{row['system']}_{row['backend']}")
        try:
            errors.setdefault(word, []).append(_silicon_error(row, library, models))
        except (InvalidRequest, NotFound) as error:
            result["notes"].append(f"silicon row {row['id']}: {error.message}")
    everything = [error for group in errors.values() for error in group]
    qwen = [e for word, group in errors.items() if word.startswith("qwen3_32b_h100") for e in group]
    for word, group in (*sorted(errors.items()), ("all", everything), ("qwen3_32b_h100_sxm", qwen)):
        if group:
            result["figures"][f"silicon_{word}_tpot_mape_percent"] = round(100.0 * fmean(map(abs, group)), 2)
            result["figures"][f"silicon_{word}_rows"] = len(group)
    if not everything:
        return
    result["aims"]["silicon_dense_tpot_mape_percent"] = _at_most(_SILICON_AIM, 100.0 * fmean(map(abs, everything)))
    if qwen:
        name = "silicon_qwen3_32b_h100_tpot_mape_percent"
        result["aims"][name] = _at_most(_SILICON_AIM, 100.0 * fmean(map(abs, qwen)))


def _silicon_error(row: Mapping[Any, Any], library: Library, models: dict[Any, StepModel]) -> float:
    """Relative error of the mean TPOT of one row."""
    mode = str(row["gemm_quant_mode"])
    dtype = next((short for prefix, short in _MODES.items() if mode.startswith(prefix)), "bf16")
    key = (str(row["system"]), str(row["model_path"]), int(row["tp_size"]), dtype)
    if key not in models:
        models[key] = library.step_model(key[0], key[1], key[2], 1, dtype)
    model = models[key]
    concurrency, prompt, output = int(row["batch_size"]), int(row["isl"]), int(row["osl"])
    room = kv_capacity_tokens(model.accelerator, model.geometry, tensor_parallel=key[2], dtype=dtype)
    backend = str(row["backend"])
    limits = EngineLimits(
        batched_tokens=8192,  # all three engines' default for a server on such a GPU
        sequences=1024,
        reserves_output=backend == "trtllm",
        prefill_first=backend == "sglang",
    )
    requests = concurrency * (3 if output <= 2048 else 2)
    workload = Workload(backend, np.zeros(requests), np.full(requests, prompt), np.full(requests, output))
    outcomes = simulate(workload, (_coupled(model, limits, room),), replace(_COUPLED, concurrency=concurrency)).outcomes
    if not outcomes.completed.all():
        raise InvalidRequest(f"a request of {prompt} + {output} tokens does not fit the KV capacity of {room} tokens")
    return 1e3 * _mean_s(outcomes, "tpot") / float(row["silicon_tpot_ms"]) - 1.0


def _coupled(model: StepModel, limits: EngineLimits, kv_tokens: int, at: int = 0) -> InstanceSpec:
    """An instance that computes whole requests."""
    return InstanceSpec(str(at), model, Role.DECODE, kv_tokens, model.geometry.kv_bytes_per_token(), limits)


def _mean_s(outcomes: Outcomes, what: str) -> float:
    """Mean of a latency; a request of one token has a TPOT of 0."""
    return float(np.nan_to_num(getattr(outcomes, f"{what}_s")).mean())


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one request as it was measured, seconds. `tpot_s` is 0 for a single output token."""

    ttft_s: float
    tpot_s: float
    jct_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run: what was asked, of which instances, and how it went; requests in order of arrival."""

    instances: tuple[InstanceSpec, ...]
    workload: Workload
    measured: tuple[Measured, ...]


def read_run(folder: Path, library: Library) -> Run:
    """A run as LLMServingSim's bench records it: `meta.json`, `config.json`, `requests.jsonl`."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    asked = meta["engine_kwargs"]
    degree, stages = int(asked.get("tensor_parallel_size", 1)), int(asked.get("pipeline_parallel_size", 1))
    model = library.step_model(_hardware(folder), str(meta["model"]), degree, stages)
    total = (meta.get("hardware") or {}).get("device_total_memory_bytes")
    device = replace(model.accelerator, memory_bytes=float(total)) if total else model.accelerator
    stated = (meta.get("kv_cache") or {}).get("num_kv_tokens")
    room = stated or kv_capacity_tokens(
        device, model.geometry, tensor_parallel=degree, pipeline_parallel=stages,
        utilisation=float(asked.get("gpu_memory_utilization") or 0.9),
    )  # fmt: skip
    limits = EngineLimits(
        batched_tokens=int(asked.get("max_num_batched_tokens") or 8192),
        sequences=int(asked.get("max_num_seqs") or 256),
        block_tokens=int((meta.get("kv_cache") or {}).get("block_size") or 16),
    )
    workload, measured = _read_requests(folder)
    copies = range(int(asked.get("data_parallel_size") or 1))
    return Run(tuple(_coupled(model, limits, int(room), at) for at in copies), workload, measured)


def _hardware(folder: Path) -> str:
    """The device's name: from the run's cluster file, else from the folder."""
    path = folder / "config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        for node in config.get("nodes", ()):
            for instance in node.get("instances", ()):
                if "hardware" in instance:
                    return str(instance["hardware"])
    return folder.name.split("_")[0]


def _read_requests(folder: Path) -> tuple[Workload, tuple[Measured, ...]]:
    """Requests and outcomes. Arrivals are wall-clock times, the engine's own a monotonic clock: the least gap between
    arrival and queueing tells their offset."""
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted((json.loads(line) for line in lines if line.strip()), key=lambda row: float(row["arrival_time"]))
    offset = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    measured = []
    for row in rows:
        arrival = row["arrival_time"] + offset
        gaps = row["output_toks"] - 1
        tpot = (row["last_token_ts"] - row["first_token_ts"]) / gaps if gaps else 0.0
        measured.append(Measured(row["first_token_ts"] - arrival, tpot, row["last_token_ts"] - arrival))
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
    return _word(f"{one.table.operator}_{one.table.accelerator.name}_{one.table.origin}")


def _at_most(want: float, got: float) -> dict[str, Any]:
    return {"want": f"<= {want:g}", "got": round(got, 2), "met": bool(got <= want)}


def _word(text: str) -> str:
    words: Iterable[str] = "".join(c.lower() if c.isalnum() else " " for c in text).split()
    return "_".join(words)
