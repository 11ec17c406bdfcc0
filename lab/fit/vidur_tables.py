"""Vidur's operator tables (microsoft/vidur, `data/profiling`), and attention tables with its columns."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from lab.fit.rows import AttentionRows, ElementwiseRows, Floats, GemmRows, MlpRows
from lab.fit.tables import Table, column, read_csv
from shared.cost.catalogue import Accelerator, Catalogue

_MS = 1e-3


def vidur_tables(path: Path, catalogue: Catalogue) -> Iterator[Table]:
    """`{device}_{model}_mlp.csv` and attention tables; times in ms with a resolution of 1 µs."""
    if path.name.startswith("net_") or "cpu_overheads" in path.name:
        return
    accelerator = catalogue.get(path.name.split("_")[0])
    frame = read_csv(path)
    if "attention" in path.name:
        yield from vidur_attention(frame, accelerator, "vidur")
    elif path.name.endswith("_mlp.csv"):
        yield from _vidur_mlp(frame, accelerator)


def _vidur_mlp(frame: pd.DataFrame, accelerator: Accelerator) -> Iterator[Table]:
    tokens, degree = column(frame, "num_tokens"), column(frame, "num_tensor_parallel_workers")
    hidden, width = column(frame, "n_embd"), column(frame, "n_expanded_embd") / degree
    dim = hidden / column(frame, "n_head")
    heads, kv_heads = column(frame, "n_head") / degree, np.ceil(column(frame, "n_kv_head") / degree)
    up = width * np.where(frame["use_gated_mlp"].to_numpy(dtype=np.bool_), 2.0, 1.0)
    products = {
        "attn_pre_proj": ((heads + 2.0 * kv_heads) * dim, hidden),
        "attn_post_proj": (hidden, heads * dim),
        "mlp_up_proj": (up, hidden),
        "mlp_down_proj": (hidden, width),
    }
    for name, (n, k) in products.items():
        yield Table(accelerator, "gemm", "vidur", GemmRows(_median(frame, name), tokens, n, k, "fp16"), cached=True)
    moved = {
        "input_layernorm": hidden * 6.0,
        "attn_rope": (heads + kv_heads) * dim * 4.0,
        "mlp_act": width * 6.0,
        "add": hidden * 6.0,
    }
    for name, each in moved.items():
        times = _median(frame, name)
        rows = ElementwiseRows(times, tokens * each).where(times > 0)
        yield Table(accelerator, "elementwise", "vidur", rows)
    total = _median(frame, "mlp_up_proj") + _median(frame, "mlp_act") + _median(frame, "mlp_down_proj")
    yield Table(accelerator, "mlp", "vidur", MlpRows(total, tokens, up, width, hidden, "fp16"), cached=True)


def vidur_attention(
    frame: pd.DataFrame, accelerator: Accelerator, origin: str, *, shared_context: bool = False
) -> Iterator[Table]:
    """`shared_context`: the context of a decode row is the batch's total, evenly divided."""
    prefill = frame["is_prefill"].to_numpy(dtype=np.bool_)
    degree = column(frame, "num_tensor_parallel_workers")
    times = np.where(prefill, _median(frame, "attn_prefill"), _median(frame, "attn_decode"))
    batch, cached = column(frame, "batch_size"), column(frame, "kv_cache_size")
    each = np.floor(cached / batch) if shared_context else cached
    rows = AttentionRows(
        seconds=times,
        sequences=np.where(prefill, batch, 0.0),
        tokens=np.where(prefill, column(frame, "prefill_chunk_size"), 0.0),
        context=np.where(prefill, cached, 0.0),
        decodes=np.where(prefill, 0.0, batch),
        decode_context=np.where(prefill, 0.0, each),
        heads=column(frame, "n_q_head") / degree,
        kv_heads=column(frame, "n_kv_head") / degree,
        head_dim=int(frame["n_embd"].iloc[0] // frame["n_q_head"].iloc[0]),
        kv_precision="bf16",
        kv_width=2.0,
    )
    measured = np.isfinite(times) & (times > 0)
    yield Table(accelerator, "decode", origin, rows.where(~prefill & measured & (each > 0)))
    yield Table(accelerator, "prefill", origin, rows.where(prefill & measured & (rows.tokens > 0)))


def _median(frame: pd.DataFrame, name: str) -> Floats:
    return column(frame, f"time_stats.{name}.median") * _MS
