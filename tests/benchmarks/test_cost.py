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
NAMES = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
# The second was queued a quarter of a second late: its time to first token counts from its arrival.
ROWS = [(100, 11, 1000.0, 5.0, 5.5, 6.5), (50, 1, 1001.0, 6.25, 6.5, 6.5)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "profiles" / "llmservingsim" / "bench" / "RTX4090_Llama-3.1-8B"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps(META))
    (folder / "requests.jsonl").write_text("\n".join(json.dumps(dict(zip(NAMES, r, strict=True))) for r in ROWS))
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
    assert [one.ttft_s for one in got.measured] == [0.5, 0.5]
    assert [one.tpot_s for one in got.measured] == pytest.approx([0.1, 0.0])


def test_what_a_run_does_not_say_is_derived(run: Path, library: Library) -> None:
    bare = {**META, "hardware": {"device_total_memory_bytes": 25250627584}}
    del bare["kv_cache"]
    (run / "meta.json").write_text(json.dumps(bare))
    assert read_run(run, library).instances[0].kv_tokens == pytest.approx(41408, rel=0.02)
    (run / "config.json").write_text(json.dumps({"nodes": [{"instances": [{"hardware": "RTXPRO6000"}]}]}))
    model = read_run(run, library).instances[0].model
    assert isinstance(model, StepModel)
    assert model.accelerator.name == "RTX-PRO-6000-Server"


def test_a_run_has_an_aim_for_each_latency(run: Path, library: Library) -> None:
    aims = run_errors(run, library)["aims"]
    assert set(aims) == {f"rtx4090_llama_3_1_8b_{what}_mean_off_percent" for what in ("ttft", "tpot", "jct")}
    (run / "meta.json").write_text(json.dumps({**META, "model": "acme/Unheard-Of"}))
    unknown = run_errors(run, library)
    assert unknown["aims"] == {}
    assert "no bundled geometry for the model 'acme/Unheard-Of'" in unknown["notes"][0]


def test_no_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no profiles below"):
        run_cost_bench(tmp_path / "nowhere")


def test_rows_of_dense_models_are_predicted(tmp_path: Path, library: Library) -> None:
    row: dict[str, Any] = {
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
        "silicon_tpot_ms": 10.0,
    }
    cached = {**row, "batch_size": 112, "silicon_tpot_ms": 8.0}
    too_large = {**row, "model_path": "meta-llama/Llama-3.1-70B", "gemm_quant_mode": "bfloat16"}
    others = {"mode": "disagg"}, {"system": "b200_sxm"}, {"model_path": "Qwen/Qwen3-235B-A22B-FP8"}
    sample = tmp_path / "sample.csv"
    pd.DataFrame([row, cached, too_large, *({**row, **other} for other in others)]).to_csv(sample, index=False)
    got = silicon_errors(sample, library)
    assert set(got["aims"]) == {"silicon_dense_tpot_mape_percent"}
    assert got["figures"]["silicon_llama_3_1_8b_instruct_h200_sxm_vllm_rows"] == got["figures"]["silicon_all_rows"] == 1
    assert "does not fit the KV capacity" in got["notes"][0]
    assert got["notes"][1].startswith(
        "silicon rows that are set aside: 1, whose prompts alone would need more than 0.95"
    )


def test_scales_of_blocks_cost_a_kernel_more(library: Library) -> None:
    plain, blocks = (library.step_model("H200", "Llama-3.1-8B", 1, 1, dtype) for dtype in ("fp8", "fp8_block"))
    assert 1.2 < blocks.prefill_time_s(4096) / plain.prefill_time_s(4096) < 2.0
    assert blocks.dtype == plain.dtype == "fp8"
    assert "fp8" in library.efficiencies.for_device("L40S").gemm
