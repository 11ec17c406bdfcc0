import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.cost import read_run, run_cost_bench, run_errors, silicon_errors
from shared.cost.library import Library
from shared.cost.step import StepModel
from shared.errors import NotFound
from shared.sim.spec import EngineLimits

META: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "engine_kwargs": {"tensor_parallel_size": 1, "max_num_seqs": 16, "max_num_batched_tokens": 512},
    "kv_cache": {"num_kv_tokens": 41408, "block_size": 32},
}
ROWS = [
    {
        "input_toks": 100,
        "output_toks": 11,
        "arrival_time": 1000.0,
        "queued_ts": 5.0,
        "first_token_ts": 5.5,
        "last_token_ts": 6.5,
    },
    {
        "input_toks": 50,
        "output_toks": 1,
        "arrival_time": 1001.0,
        "queued_ts": 6.25,
        "first_token_ts": 6.5,
        "last_token_ts": 6.5,
    },
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "profiles" / "llmservingsim" / "bench" / "RTX4090_Llama-3.1-8B"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps(META), encoding="utf-8")
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return folder


def test_a_run_is_read_on_one_clock(run: Path, library: Library) -> None:
    got = read_run(run, library)
    (instance,) = got.instances
    assert isinstance(instance.model, StepModel)
    assert instance.model.accelerator.name == "RTX-4090"
    assert (instance.limits, instance.kv_tokens) == (EngineLimits(512, 16, 32), 41408)
    assert got.workload.arrival_s.tolist() == [0.0, 1.0]
    assert got.workload.prompt_tokens.tolist() == [100, 50]
    assert got.workload.output_tokens.tolist() == [11, 1]
    # The second was queued a quarter of a second late: its time to first token counts from its arrival.
    assert [o.ttft_s for o in got.measured] == [0.5, 0.5]
    assert got.measured[0].tpot_s == pytest.approx(0.1)
    assert got.measured[1].tpot_s == 0.0


def test_the_cluster_file_names_the_hardware(run: Path, library: Library) -> None:
    config = {"nodes": [{"instances": [{"hardware": "RTXPRO6000"}]}]}
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = read_run(run, library).instances[0].model
    assert isinstance(model, StepModel)
    assert model.accelerator.name == "RTX-PRO-6000-Server"


def test_kv_capacity_is_worked_out_where_the_run_does_not_say(run: Path, library: Library) -> None:
    bare = {**META, "hardware": {"device_total_memory_bytes": 25250627584}}
    del bare["kv_cache"]
    (run / "meta.json").write_text(json.dumps(bare), encoding="utf-8")
    assert read_run(run, library).instances[0].kv_tokens == pytest.approx(41408, rel=0.02)


def test_a_run_of_an_unknown_model_is_a_note(run: Path, library: Library) -> None:
    (run / "meta.json").write_text(json.dumps({**META, "model": "acme/Unheard-Of"}), encoding="utf-8")
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": []}
    run_errors(run, library, result)
    assert result["aims"] == {}
    assert "no bundled geometry for the model 'acme/Unheard-Of'" in result["notes"][0]


def test_figures_and_aims_have_the_agreed_form(run: Path, library: Library) -> None:
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": []}
    run_errors(run, library, result)
    assert set(result["aims"]) == {f"rtx4090_llama_3_1_8b_{w}_mean_off_percent" for w in ("ttft", "tpot", "jct")}
    for aim in result["aims"].values():
        assert set(aim) == {"want", "got", "met"}
    assert all(isinstance(value, float) for value in result["figures"].values())


def test_no_data_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no profiles below"):
        run_cost_bench(tmp_path / "nowhere")


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
