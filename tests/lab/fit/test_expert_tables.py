from pathlib import Path

import pandas as pd
import pytest

from lab.fit.efficiencies import fit_table
from lab.fit.profilers import Table, aiconfigurator_experts, llmservingsim_experts
from shared.cost.library import Library
from shared.errors import InvalidRequest


def test_a_table_of_expert_kernels(tmp_path: Path) -> None:
    path = tmp_path / "h100_sxm_vllm-0.14.0_moe_perf.parquet"
    row = {
        "kernel_source": "vllm_fused_moe",
        "moe_dtype": "fp8_block",
        "num_tokens": 4,
        "hidden_size": 2048,
        "topk": 8,
        "inter_size": 768,
        "num_experts": 128,
        "moe_tp_size": 2,
        "moe_ep_size": 1,
        "distribution": "balanced",
        "latency": 0.5,
    }
    skewed, dealt = {**row, "distribution": "power_law_1.2"}, {**row, "moe_ep_size": 4}
    other = {**row, "kernel_source": "vllm_marlin_moe"}
    pd.DataFrame([row, skewed, dealt, other]).to_parquet(path)
    ((name, rows),) = aiconfigurator_experts(path)
    assert (name, rows.precision, len(rows)) == ("fp8_block", "fp8", 1)
    assert (rows.rows[0], rows.width[0], rows.hidden[0], rows.seconds[0]) == (32.0, 384.0, 2048.0, 5e-4)
    assert rows.active[0] == pytest.approx(128 * (1 - (1 - 8 / 128) ** 4))


def test_a_table_names_the_experts_that_were_reached(tmp_path: Path) -> None:
    path = tmp_path / "RTXPRO6000_Qwen3-30B-A3B_tp1_moe.csv"
    path.write_text("tokens,activated_experts,time_us\n16,64,424\n", encoding="utf-8")
    rows = llmservingsim_experts(path)
    assert (rows.rows[0], rows.active[0], rows.width[0], rows.hidden[0]) == (128.0, 64.0, 768.0, 2048.0)
    assert rows.seconds[0] == pytest.approx(424e-6)
    with pytest.raises(InvalidRequest, match="Llama-3-8B has no experts"):
        llmservingsim_experts(path.rename(tmp_path / "RTX4090_Llama-3-8B_tp1_moe.csv"))


def test_measured_expert_kernels(profiles: Path, library: Library) -> None:
    rows = llmservingsim_experts(profiles / "moe" / "RTXPRO6000_Qwen3-30B-A3B_tp1_moe.csv")
    got = fit_table(Table(library.catalogue.get("RTX-PRO-6000"), "experts", "", rows), library.efficiencies)
    assert got.mape < 0.1
    assert got.mape < 0.6 * got.naive_mape
