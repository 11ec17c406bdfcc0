"""The cost model against whole engines on H100 and H200: aiconfigurator's `silicon_sample.csv`.

Each row is a closed loop at its concurrency. No constant is fitted to a row. Rows of dense models have an aim; those of
mixtures are predicted with vLLM's expert kernels and only told: TensorRT-LLM and SGLang bring faster ones of their own,
which no table here has, and rows of wide expert parallelism (64 ranks) cross hosts, of whose links nothing is known.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pandas as pd

from lab.bench.replayed import COUPLED, Result, at_most, coupled, mean_s, word
from shared.cost.geometry import ExpertSplit, kv_capacity_tokens
from shared.cost.library import Library
from shared.cost.step import Lockstep, StepModel
from shared.errors import InvalidRequest, NotFound
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits
from shared.sim.workload import Workload

_AIM = 18.0
_SYSTEMS = ("h100_sxm", "h200_sxm")
_DENSE, _MIXTURES = "Llama|Qwen3-32B", "Qwen3-235B|DeepSeek-V3$|DeepSeek-R1$"
_LIKE = {"DeepSeek-R1": "DeepSeek-V3", "Qwen3-235B-A22B-FP8": "Qwen3-235B-A22B"}  # the same shapes
_MODES: Mapping[str, str] = {"fp8_block": "fp8_block", "fp8": "fp8", "nvfp4": "fp4", "int4": "int4", "int8": "int8"}
_LEAST_COMPUTED = 30.0  # percent of the prompts; no error of ours explains less


@dataclass(frozen=True, slots=True)
class Loop:
    """One row: a closed loop of equal requests. computed_percent: see `_computed_percent`."""

    word: str
    error: float  # predicted over measured mean TPOT, less 1
    computed_percent: float


def silicon_errors(sample: Path, library: Library, result: Result) -> None:
    """Aim 2: aggregated rows of dense models; beside them those of mixtures, without an aim."""
    frame = pd.read_csv(sample)
    frame = frame[(frame["mode"] == "agg") & frame["system"].isin(_SYSTEMS)]
    dense = _told(frame[frame["model_path"].str.contains(_DENSE)], library, result, "silicon")
    _told(frame[frame["model_path"].str.contains(_MIXTURES)], library, result, "silicon_moe")
    qwen = [loop for loop in dense if loop.word.startswith("qwen3_32b_h100")]
    for name, loops in (("dense", dense), ("qwen3_32b_h100", qwen)):
        if loops:
            aim = f"silicon_{name}_tpot_mape_percent"
            result["aims"][aim] = at_most(_AIM, _mape_percent(loops))
    if qwen:
        _figures(result, "silicon_qwen3_32b_h100_sxm", qwen)
    if dense:
        _figures(result, "silicon_all", dense)


def _told(rows: pd.DataFrame, library: Library, result: Result, prefix: str) -> Sequence[Loop]:
    """All rows' errors; figures by model, system and engine; a note on what could not be predicted, or not measured."""
    loops = tuple(_loops(rows, library, result))
    for name in sorted({loop.word for loop in loops}):
        group = [loop for loop in loops if loop.word == name]
        _figures(result, f"{prefix}_{name}", group)
        shares = [loop.computed_percent for loop in group if not isnan(loop.computed_percent)]
        if prefix == "silicon" and shares and (share := median(shares)) < _LEAST_COMPUTED:
            result["figures"][f"{prefix}_{name}_prompts_computed_percent"] = round(share, 1)
            result["notes"].append(
                f"{prefix} {name}: besides decode steps the measured times have room to compute {share:.0f} % of "
                "the prompts (median): the rest came from a prefix cache, of which the sample says nothing. "
                "Predicted as if all were computed; the rows count in the aim all the same"
            )
    return loops


def _figures(result: Result, name: str, loops: Sequence[Loop]) -> None:
    result["figures"][f"{name}_tpot_mape_percent"] = round(_mape_percent(loops), 2)
    result["figures"][f"{name}_rows"] = len(loops)


def _mape_percent(loops: Sequence[Loop]) -> float:
    return 100.0 * fmean(abs(loop.error) for loop in loops)


def _loops(rows: pd.DataFrame, library: Library, result: Result) -> Iterator[Loop]:
    models: dict[Any, StepModel] = {}
    for row in rows.to_dict("records"):
        name = word(f"{row['model_path'].rpartition('/')[2]}_{row['system']}_{row['backend']}")
        try:
            model = _model(row, library, models)
            error = _predicted_ms(row, model) / float(row["silicon_tpot_ms"]) - 1.0
        except (InvalidRequest, NotFound) as problem:
            result["notes"].append(f"silicon row {row['id']}: {problem.message}")
            continue
        yield Loop(name, error, _computed_percent(row, model))


def _model(row: Mapping[Any, Any], library: Library, models: dict[Any, StepModel]) -> StepModel:
    """Step times of one engine of the row."""
    mode, path = str(row["gemm_quant_mode"]), str(row["model_path"])
    name = _LIKE.get(path.rpartition("/")[2], path)
    dtype = next((short for prefix, short in _MODES.items() if mode.startswith(prefix)), "bf16")
    engines = row["attention_dp_size"]
    experts = ExpertSplit(int(row["moe_ep_size"]), 1 if np.isnan(engines) else int(engines))
    key = (str(row["system"]), name, int(row["tp_size"]), dtype, experts)
    if key not in models:
        models[key] = library.step_model(key[0], name, key[2], 1, dtype, experts)
    return models[key]


def _predicted_ms(row: Mapping[Any, Any], model: StepModel) -> float:
    """Mean TPOT of the row."""
    concurrency, prompt, output = _shape(row)
    engines, backend = model.experts.engines, str(row["backend"])
    room = engines * kv_capacity_tokens(
        model.accelerator,
        model.geometry,
        tensor_parallel=model.tensor_parallel,
        dtype=model.dtype,
        experts=model.experts,
    )
    if room < prompt + output:
        raise InvalidRequest(f"a request of {prompt} + {output} tokens does not fit the KV capacity of {room} tokens")
    limits = EngineLimits(
        batched_tokens=8192 * engines,  # all three engines' default for a server on such a GPU
        sequences=1024 * engines,
        reserves_output=backend == "trtllm",
        prefill_first=backend == "sglang",
    )
    requests = concurrency * (3 if output <= 2048 else 2)
    workload = Workload(backend, np.zeros(requests), np.full(requests, prompt), np.full(requests, output))
    instance = coupled(Lockstep(model) if engines > 1 else model, model.geometry, limits, room)
    outcomes = simulate(workload, (instance,), replace(COUPLED, concurrency=concurrency)).outcomes
    return 1e3 * mean_s(outcomes, "tpot")


def _computed_percent(row: Mapping[Any, Any], model: StepModel) -> float:
    """Percent of the prompts for whose prefill the measured times leave time.

    In a closed loop of n requests the engine computes n prompts, and all their outputs in steps of n, in the time that
    one request takes from its start to its end. Not a number where prompts are less than a third of that time.
    """
    concurrency, prompt, output = _shape(row)
    count = -(-concurrency // model.experts.engines)
    request_ms = float(row["silicon_ttft_ms"]) + float(row["silicon_tpot_ms"]) * (output - 1)
    decodes_ms = 1e3 * model.decode_time_s(count, count * (prompt + output // 2)) * output
    prefills_ms = 1e3 * model.prefill_time_s(prompt) * count
    return 100.0 * (request_ms - decodes_ms) / prefills_ms if prefills_ms > decodes_ms / 2.0 else nan


def _shape(row: Mapping[Any, Any]) -> tuple[int, int, int]:
    """Concurrency, prompt tokens and output tokens."""
    return int(row["batch_size"]), int(row["isl"]), int(row["osl"])
