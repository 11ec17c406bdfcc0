"""Operator tables of public profilers (CSV, parquet), read as rows of measured times.

Formats, with where to get them: NVIDIA aiconfigurator (ai-dynamo/aiconfigurator, `systems/data`), LLMServingSim
(casys-kaist/LLMServingSim, `profiler/perf`), Vidur (microsoft/vidur, `data/profiling`). The repository contains none of
the data.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from shared.cost.catalogue import Accelerator, Catalogue, bytes_of, precision_of
from shared.cost.geometry import ModelGeometry
from shared.cost.library import bundled_geometry
from shared.errors import InvalidRequest, NotFound
from shared.files.text import open_text
from tools.fit.least_squares import (
    AllReduceRows,
    AttentionRows,
    ElementwiseRows,
    ExpertRows,
    Floats,
    GemmRows,
    MlpRows,
    Rows,
)

_MS, _US, _NS = 1e-3, 1e-6, 1e-9
# A kernel that exceeds this multiple of the data sheet's peak rate did not do the work of its row.
IMPOSSIBLE = 1.5
_MAX_TOKENS = 16384  # of a step


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one operator on one accelerator, from one profiler."""

    accelerator: Accelerator
    operator: str  # gemm, experts, decode, prefill, mixed, elementwise, all_reduce, mlp
    origin: str  # the profiler, and what distinguishes its tables of one operator
    rows: Rows
    rejected: int = 0  # rows that cannot be measurements
    cached: bool = False  # weights may have come from the cache
    quantised: bool = False  # times include quantising the activations
    blocks: bool = False  # weights are scaled block by block


def read_tables(profiles: Path, catalogue: Catalogue) -> tuple[Table, ...]:
    """All operator tables below a folder laid out as `aiconfigurator/`, `llmservingsim/{perf,v0}`, `vidur/`, `moe/`."""
    readers = (
        ("aiconfigurator", "*_perf.parquet", _aiconfigurator),
        ("llmservingsim/perf", "*.csv", _llmservingsim),
        ("llmservingsim/v0", "*.csv", _llmservingsim_v0),
        ("vidur", "*.csv", _vidur),
        ("moe", "*_moe_perf.parquet", _aiconfigurator_experts),
        ("moe", "*_moe.csv", _llmservingsim_experts),
    )
    found: list[Table] = []
    for folder, pattern, reader in readers:
        for path in sorted((profiles / folder).glob(pattern)):
            found.extend(reader(path, catalogue))
    if not found:
        raise NotFound(f"no operator tables below {profiles}; see tools/fit/profilers.py for the formats")
    return _merged(found)


def _merged(tables: Iterable[Table]) -> tuple[Table, ...]:
    """Concatenate tables of the same accelerator, operator and origin."""
    groups: dict[tuple[str, str, str], list[Table]] = {}
    for table in tables:
        groups.setdefault((table.accelerator.name, table.operator, table.origin), []).append(table)
    return tuple(
        replace(
            group[0],
            rows=group[0].rows.followed_by([table.rows for table in group[1:]]),
            rejected=sum(table.rejected for table in group),
        )
        for group in groups.values()
    )


def _aiconfigurator(path: Path, catalogue: Catalogue) -> Iterator[Table]:
    """`{system}_{framework}-{version}_{operator}_perf.parquet`; latency in ms, memory-cold only beyond the cache."""
    accelerator = catalogue.get(path.name.split("_vllm-")[0].split("_nccl")[0])
    frame = pd.read_parquet(path)
    if "gemm_perf" in path.name:
        for name, part in frame.groupby("gemm_dtype"):
            precision = precision_of(str(name))
            m, n, k = (column(part, size) for size in ("m", "n", "k"))
            yield Table(
                accelerator,
                "gemm",
                f"aiconfigurator {name}",
                GemmRows(column(part, "latency") * _MS, m, n, k, precision),
                cached=True,
                quantised=bytes_of(precision) < 2,
                blocks=str(name).endswith("_block"),
            )
    elif "attention_perf" in path.name:
        operator = "prefill" if "context" in path.name else "decode"
        for name, part in frame.groupby("kv_cache_dtype"):
            timed, rejected = _possible(_aic_attention(part, str(name), operator == "prefill"), accelerator)
            yield Table(accelerator, operator, f"aiconfigurator kv {name}", timed, rejected)
    elif "custom_allreduce" in path.name:
        graph = frame[frame["backend"] == "vllm_graph"]
        times, moved, ranks = (column(graph, name) for name in ("latency", "message_size", "num_gpus"))
        yield Table(accelerator, "all_reduce", "aiconfigurator custom", AllReduceRows(times * _MS, moved, ranks))


def _aic_attention(frame: pd.DataFrame, kv_dtype: str, prefill: bool) -> AttentionRows:
    batch, none = column(frame, "batch_size"), np.zeros(len(frame))
    step = column(frame, "step")
    return AttentionRows(
        seconds=column(frame, "latency") * _MS,
        sequences=batch if prefill else none,
        tokens=column(frame, "isl") if prefill else none,
        context=step if prefill else none,
        decodes=none if prefill else batch,
        decode_context=none if prefill else step + 1.0,
        heads=column(frame, "num_heads"),
        kv_heads=column(frame, "num_key_value_heads"),
        head_dim=int(frame["head_dim"].iloc[0]),
        kv_precision=precision_of(kv_dtype),
        kv_width=bytes_of(kv_dtype),
    )


def _possible(rows: AttentionRows, accelerator: Accelerator) -> tuple[AttentionRows, int]:
    """Without rows that exceed the device's peak rate, and their number. With more than a few none is kept."""
    flops = accelerator.flops("fp8" if rows.kv_width < 2 else "bf16")
    pairs = rows.sequences * rows.tokens * (rows.context + rows.tokens / 2.0)
    possible = rows.seconds >= pairs * rows.shape().flops / (flops * IMPOSSIBLE)
    bad = int(np.sum(~possible))
    return rows.where(possible & (bad <= 0.02 * len(rows))), bad


def _aiconfigurator_experts(path: Path, catalogue: Catalogue) -> Iterator[Table]:
    """`{system}_vllm-{version}_moe_perf.parquet`; latency in ms.

    Rows with expert parallelism are left out, because the table lacks the number of tokens that reached the rank. Of
    the distributions over experts the most even one is read.
    """
    accelerator = catalogue.get(path.name.split("_vllm-")[0])
    frame = pd.read_parquet(path)
    plain = (frame["moe_ep_size"] == 1) & (frame["num_tokens"] <= _MAX_TOKENS)
    frame = frame[plain & (frame["kernel_source"] == "vllm_fused_moe")]
    even = min(frame["distribution"].unique())
    for name, part in frame[frame["distribution"] == even].groupby("moe_dtype"):
        tokens, count, picked = (column(part, key) for key in ("num_tokens", "num_experts", "topk"))
        rows = ExpertRows(
            seconds=column(part, "latency") * _MS,
            rows=tokens * picked,
            active=count * (1.0 - (1.0 - picked / count) ** tokens),  # see Experts.expected_active
            hidden=column(part, "hidden_size"),
            width=column(part, "inter_size") / column(part, "moe_tp_size"),
            precision=precision_of(str(name)),
        )
        yield Table(accelerator, "experts", f"aiconfigurator {name}", rows, blocks=str(name).endswith("_block"))


def _llmservingsim_experts(path: Path, catalogue: Catalogue) -> Iterator[Table]:
    """`{device}_{model}_tp{n}_moe.csv`: tokens, activated experts, time in µs."""
    accelerator, geometry, _ = _named(path, catalogue)
    if geometry.experts is None:
        raise InvalidRequest(f"{path.name}: {geometry.name} has no experts")
    frame = read_csv(path)
    same = np.ones(len(frame))
    rows = ExpertRows(
        seconds=column(frame, "time_us") * _US,
        rows=column(frame, "tokens") * geometry.experts.per_token,
        active=column(frame, "activated_experts"),
        hidden=same * geometry.hidden,
        width=same * geometry.experts.intermediate,
        precision=precision_of(geometry.dtype),
    )
    yield Table(accelerator, "experts", "llmservingsim", rows)


def _llmservingsim(path: Path, catalogue: Catalogue) -> Iterator[Table]:
    """`{device}_{model}_tp{n}_{dense,per_sequence,attention}.csv`; time in µs, one kernel each, in a running vLLM."""
    accelerator, geometry, degree = _named(path, catalogue)
    frame = read_csv(path)
    if path.name.endswith("_attention.csv"):
        yield from _llm_attention(frame, accelerator, geometry, degree)
        return
    counts = "sequences" if path.name.endswith("_per_sequence.csv") else "tokens"
    matmuls = (*geometry.attention_matmuls(), *geometry.mlp_matmuls())
    shapes = {f"{m.name}_proj": m.shard(degree) for m in matmuls} | {"lm_head": geometry.lm_head().shard(degree)}
    rotated = (geometry.heads + geometry.kv_heads) // degree * geometry.head_dim * 4.0
    moved = {  # bytes that an elementwise operator moves for each token
        "layernorm": geometry.hidden * 8.0,
        "final_layernorm": geometry.hidden * 8.0,
        "rotary_emb": rotated,
        "qk_norm": rotated,
        "act_fn": geometry.intermediate / degree * 6.0,
    }
    for layer, part in frame.groupby("layer"):
        times, count = column(part, "time_us") * _US, column(part, counts)
        if layer in shapes:
            products = _products(times, count, *shapes[str(layer)], geometry)
            yield Table(accelerator, "gemm", "llmservingsim", products)
        if layer in moved:
            rows = ElementwiseRows(times, count * moved[str(layer)])
            yield Table(accelerator, "elementwise", "llmservingsim", rows)
    if counts == "tokens":
        yield Table(accelerator, "mlp", "llmservingsim", _llm_mlp(frame, geometry, degree))


def _products(times: Floats, m: Floats, n: int, k: int, geometry: ModelGeometry) -> GemmRows:
    return GemmRows(times, m, np.full_like(m, n), np.full_like(m, k), precision_of(geometry.dtype))


def _llm_mlp(frame: pd.DataFrame, geometry: ModelGeometry, degree: int) -> MlpRows:
    wide = frame.pivot_table(index="tokens", columns="layer", values="time_us")
    tokens = wide.index.to_numpy(dtype=np.float64)
    width = np.full_like(tokens, geometry.intermediate // degree)
    return MlpRows(
        seconds=(wide["gate_up_proj"] + wide["act_fn"] + wide["down_proj"]).to_numpy(dtype=np.float64) * _US,
        tokens=tokens,
        up=width * 2,
        width=width,
        hidden=np.full_like(tokens, geometry.hidden),
        precision=precision_of(geometry.dtype),
    )


def _llm_attention(
    frame: pd.DataFrame, accelerator: Accelerator, geometry: ModelGeometry, degree: int
) -> Iterator[Table]:
    chunk, decodes = column(frame, "prefill_chunk"), column(frame, "n_decode")
    everything = AttentionRows(
        seconds=column(frame, "time_us") * _US,
        sequences=(chunk > 0).astype(np.float64),
        tokens=chunk,
        context=column(frame, "kv_prefill"),
        decodes=decodes,
        decode_context=column(frame, "kv_decode"),
        heads=np.full(len(frame), geometry.heads / degree),
        kv_heads=np.full(len(frame), geometry.kv_heads / degree),
        head_dim=geometry.head_dim,
        kv_precision="bf16",
        kv_width=2.0,
    )
    yield Table(accelerator, "decode", "llmservingsim", everything.where(chunk == 0))
    yield Table(accelerator, "prefill", "llmservingsim", everything.where((chunk > 0) & (decodes == 0)))
    yield Table(accelerator, "mixed", "llmservingsim", everything.where(chunk > 0))


def _llmservingsim_v0(path: Path, catalogue: Catalogue) -> Iterator[Table]:
    """An older profiler's tables: `layers.csv` in ns, `attention.csv` in ms with Vidur's columns."""
    accelerator, geometry, degree = _named(path, catalogue)
    frame = read_csv(path)
    if path.name.endswith("_attention.csv"):
        yield from _vidur_attention(frame, accelerator, "llmservingsim v0", shared_context=True)
        return
    heads, kv_heads = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
    hidden, width = geometry.hidden, geometry.intermediate // degree
    shapes = {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
        "lm_head": (geometry.vocab, hidden),
    }
    for layer, part in frame.groupby("layer_name"):
        if layer in shapes:
            times = column(part, "latency(ns)") * _NS
            rows = _products(times, column(part, "input"), *shapes[str(layer)], geometry)
            yield Table(accelerator, "gemm", "llmservingsim v0", rows, cached=True)


def _named(path: Path, catalogue: Catalogue) -> tuple[Accelerator, ModelGeometry, int]:
    parts = path.stem.split("_")
    if len(parts) < 4 or not parts[2].startswith("tp"):
        raise InvalidRequest(f"{path.name}: want a name of the form DEVICE_MODEL_tpN_TABLE.csv")
    return catalogue.get(parts[0]), bundled_geometry(parts[1]), int(parts[2].removeprefix("tp"))


def _vidur(path: Path, catalogue: Catalogue) -> Iterator[Table]:
    """`{device}_{model}_mlp.csv` and attention tables; times in ms with a resolution of 1 µs."""
    if path.name.startswith("net_") or "cpu_overheads" in path.name:
        return
    accelerator = catalogue.get(path.name.split("_")[0])
    frame = read_csv(path)
    if "attention" in path.name:
        yield from _vidur_attention(frame, accelerator, "vidur")
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


def _vidur_attention(
    frame: pd.DataFrame, accelerator: Accelerator, origin: str, *, shared_context: bool = False
) -> Iterator[Table]:
    """Tables with Vidur's columns. shared_context: the context of decodes is the batch's total, evenly divided."""
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


def read_csv(path: Path) -> pd.DataFrame:
    """A profiler's CSV, plain or gzip. Raises InvalidRequest that names the file."""
    with open_text(path) as file:
        try:
            return pd.read_csv(file)
        except ValueError as error:  # pandas' errors of parsing
            raise InvalidRequest(f"{path}: not CSV: {str(error).strip()}") from error


def column(frame: pd.DataFrame, name: str) -> Floats:
    """A column of numbers. Raises InvalidRequest when the table lacks it."""
    if name not in frame.columns:
        raise InvalidRequest(f"the table lacks the column {name!r}; it has {', '.join(map(str, frame.columns))}")
    return frame[name].to_numpy(dtype=np.float64)
