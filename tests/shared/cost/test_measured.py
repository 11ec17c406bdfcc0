"""The cost model against public measurements; skipped where they are not at hand. `polyphase bench cost` does all."""

from pathlib import Path

import pytest

from benchmarks.cost import run_errors, silicon_errors
from shared.cost.library import Library
from tools.fit.efficiencies import fit_table
from tools.fit.profilers import Table, read_tables

AIMS = {"gemm": 0.15, "mlp": 0.08, "decode": 0.12, "prefill": 0.18}


@pytest.fixture(scope="module")
def tables(profiles: Path, library: Library) -> dict[tuple[str, str, str], Table]:
    return {(t.accelerator.name, t.operator, t.origin): t for t in read_tables(profiles, library.catalogue)}


@pytest.mark.parametrize(
    "key",
    [
        ("A100-SXM-80", "gemm", "aiconfigurator bfloat16"),
        ("H100-SXM", "gemm", "aiconfigurator bfloat16"),
        ("A40", "gemm", "vidur"),
        ("RTX-4090", "gemm", "llmservingsim"),
        ("RTX-PRO-6000-Server", "decode", "llmservingsim"),
        ("RTX-4090", "decode", "llmservingsim"),
        ("H200-SXM", "decode", "aiconfigurator kv bfloat16"),
        ("L40S", "prefill", "aiconfigurator kv bfloat16"),
        ("A100-SXM-80", "prefill", "vidur"),
        ("RTX-A6000", "prefill", "llmservingsim v0"),
    ],
    ids=" ".join,
)
def test_held_out_errors(
    tables: dict[tuple[str, str, str], Table], library: Library, key: tuple[str, str, str]
) -> None:
    got = fit_table(tables[key], library.efficiencies)
    assert got.mape <= AIMS[key[1]]
    assert got.mape < 0.6 * got.naive_mape


def test_an_impossible_table_is_set_aside(tables: dict[tuple[str, str, str], Table]) -> None:
    assert len(tables["L40S", "prefill", "aiconfigurator kv fp8"].rows) == 0


@pytest.mark.parametrize("run", ["RTX4090_Llama-3.1-8B", "RTXPRO6000_Llama-3.1-8B"])
def test_measured_runs(profiles: Path, library: Library, run: str) -> None:
    aims = run_errors(profiles / "llmservingsim" / "bench" / run, library)["aims"]
    assert len(aims) == 3
    assert all(aim["met"] for aim in aims.values()), aims


def test_silicon_rows_of_one_engine(profiles: Path, library: Library, tmp_path: Path) -> None:
    lines = (profiles / "aiconfigurator" / "silicon_sample.csv").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines[1:] if "Qwen/Qwen3-32B" in line and ",vllm," in line and "h100_sxm" in line]
    sample = tmp_path / "sample.csv"
    sample.write_text("\n".join([lines[0], *kept[:20]]) + "\n", encoding="utf-8")
    assert silicon_errors(sample, library)["aims"]["silicon_dense_tpot_mape_percent"]["met"]
