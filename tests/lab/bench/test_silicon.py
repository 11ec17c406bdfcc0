from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lab.bench.cost import silicon_errors
from shared.cost.library import Library

ROW: dict[str, Any] = {
    "id": "a",
    "backend": "vllm",
    "model_path": "meta-llama/Llama-3.1-8B-Instruct",
    "system": "h200_sxm",
    "mode": "agg",
    "isl": 1000,
    "osl": 100,
    "gemm_quant_mode": "fp8",
    "batch_size": 8,
    "tp_size": 1,
    "attention_dp_size": float("nan"),
    "moe_ep_size": 1,
    "silicon_ttft_ms": 100.0,
    "silicon_tpot_ms": 10.0,
}


def errors_of(tmp_path: Path, library: Library, *rows: dict[str, Any]) -> dict[str, Any]:
    pd.DataFrame(rows).to_csv(tmp_path / "sample.csv", index=False)
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": []}
    silicon_errors(tmp_path / "sample.csv", library, result)
    return result


def test_rows_of_dense_models_have_an_aim_and_others_none(tmp_path: Path, library: Library) -> None:
    mixture = {
        **ROW,
        "model_path": "Qwen/Qwen3-235B-A22B-FP8",
        "tp_size": 4,
        "moe_ep_size": 8,
        "attention_dp_size": 2.0,
    }
    got = errors_of(tmp_path, library, ROW, mixture, {**ROW, "mode": "disagg"}, {**ROW, "system": "b200_sxm"})
    assert set(got["aims"]) == {"silicon_dense_tpot_mape_percent"}
    assert got["figures"]["silicon_llama_3_1_8b_instruct_h200_sxm_vllm_rows"] == 1
    assert got["figures"]["silicon_all_rows"] == 1
    assert got["figures"]["silicon_moe_qwen3_235b_a22b_fp8_h200_sxm_vllm_rows"] == 1


def test_scales_of_blocks_cost_a_kernel_more(tmp_path: Path, library: Library) -> None:
    plain, blocks = (library.step_model("H200", "Llama-3.1-8B", 1, 1, dtype) for dtype in ("fp8", "fp8_block"))
    assert 1.2 < blocks.prefill_time_s(4096) / plain.prefill_time_s(4096) < 2.0
    assert blocks.dtype == plain.dtype == "fp8"
    assert "fp8" in library.efficiencies.for_device("L40S").gemm


def test_a_tpot_without_time_for_its_prompts_is_told(tmp_path: Path, library: Library) -> None:
    # 128 requests of 1000 tokens in and 100 out: 128 prefills of 16 ms besides 100 decode steps of 9 ms.
    crowded = {**ROW, "batch_size": 128}
    computed = errors_of(tmp_path, library, {**crowded, "silicon_tpot_ms": 30.0})
    assert computed["notes"] == []
    cached = errors_of(tmp_path, library, {**crowded, "silicon_tpot_ms": 11.25})
    name = "silicon_llama_3_1_8b_instruct_h200_sxm_vllm_prompts_computed_percent"
    assert cached["figures"][name] == pytest.approx(15.0, abs=5.0)
    assert "prefix cache" in cached["notes"][0]
    assert not cached["aims"]["silicon_dense_tpot_mape_percent"]["met"]


def test_a_row_that_does_not_fit_is_a_note(tmp_path: Path, library: Library) -> None:
    got = errors_of(tmp_path, library, {**ROW, "model_path": "meta-llama/Llama-3.1-70B", "gemm_quant_mode": "bfloat16"})
    assert "does not fit the KV capacity" in got["notes"][0]
    assert got["aims"] == {}
