from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from shared.cost.catalogue import Catalogue
from shared.cost.library import Library
from shared.errors import InvalidRequest, NotFound
from tools.fit.efficiencies import fit_table
from tools.fit.least_squares import AttentionRows, ElementwiseRows, ExpertRows, GemmRows, MlpRows
from tools.fit.profilers import Table, read_tables

CATALOGUE = Catalogue.built_in()


def _read(root: Path) -> dict[tuple[str, str], Table]:
    return {(t.operator, t.origin): t for t in read_tables(root, CATALOGUE)}


def _folder(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    return folder


def test_aiconfigurator_products(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"gemm_dtype": ["bfloat16", "fp8"], "m": [1, 2], "n": [3, 4], "k": [5, 6], "latency": [0.5, 0.25]}
    )
    frame.to_parquet(_folder(tmp_path, "aiconfigurator") / "h100_sxm_vllm-0.14.0_gemm_perf.parquet")
    found = _read(tmp_path)
    half, quarter = found["gemm", "aiconfigurator bfloat16"], found["gemm", "aiconfigurator fp8"]
    assert half.accelerator.name == "H100-SXM"
    assert isinstance(half.rows, GemmRows)
    assert (half.rows.m[0], half.rows.n[0], half.rows.k[0], half.rows.seconds[0]) == (1, 3, 5, 5e-4)
    assert half.cached
    assert (half.quantised, quarter.quantised) == (False, True)


def _context_attention(latency_ms: float) -> pd.DataFrame:
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"batch_size": 2, "isl": 1024, "step": 0, "latency": latency_ms}
    return pd.DataFrame({"kv_cache_dtype": ["bfloat16"] * 100, **heads, **sizes})


def test_aiconfigurator_attention(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "aiconfigurator")
    _context_attention(0.2).to_parquet(folder / "h100_sxm_vllm-0.14.0_context_attention_perf.parquet")
    decode = _context_attention(0.1).assign(isl=1, step=511)
    decode.to_parquet(folder / "h100_sxm_vllm-0.14.0_generation_attention_perf.parquet")
    found = _read(tmp_path)
    prefill, generation = (found[name, "aiconfigurator kv bfloat16"].rows for name in ("prefill", "decode"))
    assert isinstance(prefill, AttentionRows)
    assert isinstance(generation, AttentionRows)
    assert (prefill.sequences[0], prefill.tokens[0], prefill.decodes[0]) == (2, 1024, 0)
    assert (generation.decodes[0], generation.decode_context[0]) == (2, 512)
    shape = prefill.shape()
    assert (shape.kv_bytes[0], shape.flops[0]) == (2 * 8 * 128 * 2, 4 * 32 * 128)  # type: ignore[index]


def test_a_table_that_beats_the_peak_is_no_measurement(tmp_path: Path) -> None:
    # 2 · 1024²/2 pairs of 16384 operations in a microsecond: 17 PFLOPS on an H100.
    folder = _folder(tmp_path, "aiconfigurator")
    _context_attention(1e-3).to_parquet(folder / "h100_sxm_vllm-0.14.0_context_attention_perf.parquet")
    table = _read(tmp_path)["prefill", "aiconfigurator kv bfloat16"]
    assert len(table.rows) == 0
    assert table.rejected == 100


def test_llmservingsim_layers_and_whole_mlps(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "llmservingsim/perf")
    layers = ("qkv_proj", "gate_up_proj", "down_proj", "act_fn", "layernorm")
    text = "layer,tokens,time_us\n" + "".join(f"{layer},{t},{10 * t}\n" for layer in layers for t in (1, 2))
    (folder / "RTX4090_Llama-3.1-8B_tp1_dense.csv").write_text(text, encoding="utf-8")
    (folder / "RTX4090_Llama-3.1-8B_tp1_per_sequence.csv").write_text(
        "layer,sequences,time_us\nlm_head,4,1100\nsampler,4,25\n", encoding="utf-8"
    )
    found = _read(tmp_path)
    products, mlp = found["gemm", "llmservingsim"].rows, found["mlp", "llmservingsim"].rows
    assert isinstance(products, GemmRows)
    assert isinstance(mlp, MlpRows)
    shapes = {(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096)}
    assert set(zip(products.n, products.k, strict=True)) == shapes
    assert mlp.seconds == pytest.approx([30e-6, 60e-6])
    assert (mlp.up[0], mlp.width[0], mlp.hidden[0]) == (28672, 14336, 4096)
    elementwise = found["elementwise", "llmservingsim"].rows
    assert isinstance(elementwise, ElementwiseRows)
    assert sorted(elementwise.moved) == [4096 * 8, 4096 * 16, 14336 * 6, 14336 * 12]


def test_llmservingsim_attention_apart_and_mixed(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "llmservingsim/perf")
    text = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,4,512,20\n64,128,0,0,10\n64,128,4,512,30\n"
    (folder / "RTX4090_Llama-3.1-8B_tp1_attention.csv").write_text(text, encoding="utf-8")
    found = _read(tmp_path)
    assert [len(found[name, "llmservingsim"].rows) for name in ("decode", "prefill", "mixed")] == [1, 1, 2]
    assert found["decode", "llmservingsim"].rows.seconds[0] == pytest.approx(20e-6)


def test_vidur_mlp_tables(tmp_path: Path) -> None:
    products = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    names = (*products, "mlp_act", "input_layernorm", "attn_rope", "add")
    sizes = {"n_embd": 4096, "n_expanded_embd": 11008, "n_head": 32, "n_kv_head": 32, "use_gated_mlp": True}
    row = {"num_tokens": 8, "num_tensor_parallel_workers": 2, **sizes}
    row |= {f"time_stats.{name}.median": 0.1 for name in names}
    pd.DataFrame([row]).to_csv(_folder(tmp_path, "vidur") / "a40_Llama-2-7b-hf_mlp.csv", index=False)
    found = _read(tmp_path)
    products, mlp = found["gemm", "vidur"].rows, found["mlp", "vidur"].rows
    assert isinstance(products, GemmRows)
    assert isinstance(mlp, MlpRows)
    shapes = {(3 * 2048, 4096), (4096, 2048), (11008, 4096), (4096, 5504)}
    assert set(zip(products.n, products.k, strict=True)) == shapes
    assert mlp.seconds[0] == pytest.approx(0.3e-3)


def test_a_shared_context_is_divided_over_the_batch(tmp_path: Path) -> None:
    times = {"time_stats.attn_prefill.median": np.nan, "time_stats.attn_decode.median": 0.05}
    heads = {"n_embd": 4096, "n_q_head": 32, "n_kv_head": 8, "num_tensor_parallel_workers": 1}
    sizes = {"batch_size": 4, "prefill_chunk_size": 0, "kv_cache_size": 1024, "is_prefill": False}
    frame = pd.DataFrame([times | heads | sizes])
    name = "A6000_Llama-3.1-8B_tp1_attention.csv"
    frame.to_csv(_folder(tmp_path, "llmservingsim/v0") / name, index=False)
    frame.to_csv(_folder(tmp_path, "vidur") / "a100_old_attention.csv", index=False)
    found = _read(tmp_path)
    shared, own = found["decode", "llmservingsim v0"].rows, found["decode", "vidur"].rows
    assert isinstance(shared, AttentionRows)
    assert isinstance(own, AttentionRows)
    assert (shared.decode_context[0], own.decode_context[0]) == (256, 1024)


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no operator tables below"):
        read_tables(tmp_path, CATALOGUE)
    folder = _folder(tmp_path, "llmservingsim/perf")
    (folder / "RTX4090_dense.csv").write_text("layer\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"RTX4090_dense.csv: want a name of the form DEVICE_MODEL_tpN"):
        read_tables(tmp_path, CATALOGUE)
    (folder / "RTX4090_dense.csv").rename(folder / "RTX4091_Llama-3.1-8B_tp1_dense.csv")
    with pytest.raises(NotFound, match="unknown accelerator 'RTX4091'; did you mean RTX-4090"):
        read_tables(tmp_path, CATALOGUE)
    (folder / "RTX4091_Llama-3.1-8B_tp1_dense.csv").unlink()
    (folder / "RTX4090_Llama-3.1-8B_tp1_dense.csv").write_text("layer,tokens\nqkv_proj,1\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="the table lacks the column 'time_us'; it has layer, tokens"):
        read_tables(tmp_path, CATALOGUE)


EXPERTS = {
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


def test_tables_of_expert_kernels(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "moe")
    others = {"distribution": "power_law_1.2"}, {"moe_ep_size": 4}, {"kernel_source": "vllm_marlin_moe"}
    frame = pd.DataFrame([EXPERTS, *(EXPERTS | other for other in others)])
    frame.to_parquet(folder / "h100_sxm_vllm-0.14.0_moe_perf.parquet")
    csv = folder / "RTXPRO6000_Qwen3-30B-A3B_tp1_moe.csv"
    csv.write_text("tokens,activated_experts,time_us\n16,64,424\n", encoding="utf-8")
    found = _read(tmp_path)
    table = found["experts", "aiconfigurator fp8_block"]
    rows = table.rows
    assert isinstance(rows, ExpertRows)
    assert (table.blocks, rows.precision, len(rows)) == (True, "fp8", 1)
    assert (rows.rows[0], rows.width[0], rows.hidden[0], rows.seconds[0]) == (32.0, 384.0, 2048.0, 5e-4)
    assert rows.active[0] == pytest.approx(128 * (1 - (1 - 8 / 128) ** 4))
    rows = found["experts", "llmservingsim"].rows
    assert isinstance(rows, ExpertRows)
    assert (rows.rows[0], rows.active[0], rows.width[0], rows.hidden[0]) == (128.0, 64.0, 768.0, 2048.0)
    assert rows.seconds[0] == pytest.approx(424e-6)
    csv.rename(folder / "RTX4090_Llama-3-8B_tp1_moe.csv")
    with pytest.raises(InvalidRequest, match="Llama-3-8B has no experts"):
        _read(tmp_path)


def test_measured_expert_kernels(profiles: Path, library: Library) -> None:
    tables = read_tables(profiles, CATALOGUE)
    table = next(t for t in tables if (t.operator, t.origin) == ("experts", "llmservingsim"))
    got = fit_table(table, library.efficiencies)
    assert got.mape < min(0.1, 0.6 * got.naive_mape)
