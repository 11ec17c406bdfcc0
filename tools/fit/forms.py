"""The operators that calibration fits: constants with bounds, and the prediction of a table's rows.

Attention is fitted for decodes alone, for prefill chunks alone, and for both in one kernel. Parameters carry the names
of the operators' fields; a `Memory` has the parameters `share`, `cache_gain` (of the cache's share over `share`) and
`cache_bytes`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from shared.cost.catalogue import Accelerator, bytes_of
from shared.cost.operators import (
    Collective,
    DecodeAttention,
    Device,
    Elementwise,
    ExpertMlp,
    Gemm,
    Memory,
    Mlp,
    Quantisation,
    VarlenAttention,
    device_of,
)
from tools.fit.least_squares import (
    AllReduceRows,
    AttentionRows,
    ElementwiseRows,
    ExpertRows,
    Floats,
    Form,
    GemmRows,
    MlpRows,
    Parameter,
)

_US, _NS, _MB = 1e-6, 1e-9, 1e6
# A small transfer may be slower than a large one, but must not end after it (`Memory`, p = 8).
_MIN_GAIN = 0.65
Values = Mapping[str, float]
_ROWS, _PACKED_ROWS = 64.0, 128.0  # query rows of a tile, see VarlenAttention


def gemm_form(
    accelerator: Accelerator, precision: str, *, quantised: bool, cached: bool, blocks: bool = False
) -> Form[Gemm, GemmRows]:
    """Matrix products. quantised: times include quantising the activations; blocks: block by block.

    cached: the products were repeated, so that weights came from the cache where they fit in it.
    """
    device, width = device_of(accelerator, precision), bytes_of(precision)
    parameters = {
        "overhead_s": Parameter(3.0, 0.1, 60.0, _US),
        "compute": Parameter(0.85, 0.2, 1.3),
        "tile_penalty": Parameter(0.3, 0.0, 1.5),
        "depth_s": Parameter(0.5, 0.0, 5.0, _NS),
        "split_s": Parameter(2.0, 0.0, 20.0, _US),
        "sharpness": Parameter(2.0, 1.0, 12.0),
        "share": Parameter(0.8, 0.3, 1.1),
        "weight_cache_gain": Parameter(1.0, _MIN_GAIN, 12.0).only_if(cached),
        "weight_cache_bytes": Parameter(20.0, 1.0, 300.0, _MB).only_if(cached),
        "activation_cache_gain": Parameter(1.0, _MIN_GAIN, 12.0),
        "activation_cache_bytes": Parameter(40.0, 0.5, 400.0, _MB),
    }
    if quantised:
        # Quantising is a kernel of its own; the launch of the product is fixed at that of plain products.
        parameters |= {
            "overhead_s": Parameter(2.7, 2.7, 2.7, _US),
            "quant_launch_s": Parameter(9.0, 0.0, 60.0, _US),
            "quant_element_s": Parameter(1.0, 0.0, 50.0, _NS),
            "quant_exponent": Parameter(1.0, 0.3, 1.5),
            "quant_rows_per_unit": Parameter(4.0, 0.05, 50.0),
            "quant_ramp": Parameter(2.0, 0.5, 8.0),
            "quant_spill_s_byte": Parameter(1.0, 0.0, 100.0, _NS),
            "quant_spill_bytes": Parameter(30.0, 1.0, 200.0, _MB),
        }

    def build(v: Values) -> Gemm:
        quantisation = Quantisation(**_fields(Quantisation, v, "quant_"), fused=not blocks) if quantised else None
        weights, activations = _memory(v, "weight_"), _memory(v, "activation_")
        return Gemm(**_fields(Gemm, v), weights=weights, activations=activations, quantisation=quantisation)

    def predict(gemm: Gemm, rows: GemmRows) -> Floats:
        return np.asarray(gemm.time_s(rows.m, rows.n, rows.k, width, device))

    def naive(rows: GemmRows) -> Floats:
        return _product_roofline(rows.m, rows.n, rows.k, width, device)

    return Form(f"gemm {precision}", parameters, build, predict, naive)


def mlp_form(accelerator: Accelerator, precision: str) -> Form[Mlp, MlpRows]:
    device, width = device_of(accelerator, precision), bytes_of(precision)
    products = gemm_form(accelerator, precision, quantised=False, cached=True)
    activation = elementwise_form(accelerator)
    parameters = dict(products.parameters) | {f"act_{name}": p for name, p in activation.parameters.items()}

    def build(v: Values) -> Mlp:
        own = {name.removeprefix("act_"): value for name, value in v.items() if name.startswith("act_")}
        return Mlp(products.build(v), activation.build(own))

    def predict(mlp: Mlp, rows: MlpRows) -> Floats:
        return np.asarray(mlp.time_s(rows.tokens, rows.up, rows.width, rows.hidden, width, device))

    def naive(rows: MlpRows) -> Floats:
        up_s = _product_roofline(rows.tokens, rows.up, rows.hidden, width, device)
        down_s = _product_roofline(rows.tokens, rows.hidden, rows.width, width, device)
        return up_s + down_s + rows.tokens * (rows.up + rows.width) * 2.0 / device.bandwidth

    return Form("MLP", parameters, build, predict, naive)


def experts_form(accelerator: Accelerator, precision: str, elementwise: Elementwise) -> Form[Gemm, ExpertRows]:
    """Grouped products of a mixture's experts, which reach less of the peak. elementwise: already fitted."""
    device, width = device_of(accelerator, precision), bytes_of(precision)
    products = gemm_form(accelerator, precision, quantised=False, cached=False)
    slower = {"compute": Parameter(0.5, 0.03, 1.3), "overhead_s": Parameter(8.0, 0.1, 60.0, _US)}

    def predict(gemm: Gemm, rows: ExpertRows) -> Floats:
        one = ExpertMlp(gemm, elementwise)
        return np.asarray(one.time_s(rows.rows, rows.active, 2.0 * rows.width, rows.width, rows.hidden, width, device))

    def naive(rows: ExpertRows) -> Floats:
        weights = 3.0 * rows.hidden * rows.width
        moved = rows.active * weights * width + 4.0 * rows.rows * rows.hidden
        return _roofline(2.0 * rows.rows * weights, moved, device)

    return Form(f"experts {precision}", {**products.parameters, **slower}, products.build, predict, naive)


def elementwise_form(accelerator: Accelerator) -> Form[Elementwise, ElementwiseRows]:
    device = device_of(accelerator, "bf16")
    parameters = {
        "overhead_s": Parameter(2.5, 0.5, 20.0, _US),
        "share": Parameter(0.8, 0.1, 1.2),
        "cache_gain": Parameter(1.5, _MIN_GAIN, 8.0),
        "cache_bytes": Parameter(40.0, 0.5, 300.0, _MB),
    }

    def build(v: Values) -> Elementwise:
        return Elementwise(v["overhead_s"], _memory(v))

    def predict(one: Elementwise, rows: ElementwiseRows) -> Floats:
        return np.asarray(one.time_s(rows.moved, device))

    return Form("elementwise", parameters, build, predict, lambda rows: rows.moved / device.bandwidth)


def all_reduce_form(accelerator: Accelerator) -> Form[Collective, AllReduceRows]:
    link = accelerator.links.scale_up
    parameters = {
        "latency_s": Parameter(4.0, 0.1, 100.0, _US),
        "latency_rank_s": Parameter(0.5, 0.0, 30.0, _US),
        "share": Parameter(0.3, 0.02, 1.5),
        "ring_latency_s": Parameter(30.0, 1.0, 300.0, _US),
        "ring_share": Parameter(0.4, 0.02, 1.5),
        "contention": Parameter(0.1, -0.5, 3.0),
    }

    def predict(one: Collective, rows: AllReduceRows) -> Floats:
        return np.asarray(one.all_reduce_s(rows.moved, rows.ranks, link))

    def naive(rows: AllReduceRows) -> Floats:
        return 2.0 * (rows.ranks - 1.0) / rows.ranks * rows.moved / link

    return Form("all-reduce", parameters, lambda v: Collective(**v), predict, naive)


def decode_form(accelerator: Accelerator) -> Form[DecodeAttention, AttentionRows]:
    device = device_of(accelerator, "bf16")
    parameters = {
        "overhead_s": Parameter(10.0, 1.0, 60.0, _US),
        "long_s": Parameter(2.0, 0.0, 20.0, _US),
        "grouped_s": Parameter(1.0, 0.0, 30.0, _US),
        "depth_s": Parameter(1.0, 0.0, 60.0, _NS),
        "depth_tokens": Parameter(10e3, 500.0, 100e3),
        "depth_items": Parameter(16.0, 0.5, 2000.0),
        "item_s": Parameter(25.0, 0.0, 300.0, _NS),
        "splits": Parameter(32.0, 1.0, 2000.0),
        "ungrouped_splits": Parameter(4.0, 0.2, 2000.0),
        "compute": Parameter(0.6, 0.1, 1.0),
        "share": Parameter(0.9, 0.2, 1.1),
        "cache_gain": Parameter(1.5, 1.0, 8.0),
        "cache_bytes": Parameter(45.0, 1.0, 200.0, _MB),
    }

    def build(v: Values) -> DecodeAttention:
        return DecodeAttention(**_fields(DecodeAttention, v), memory=_memory(v))

    def predict(one: DecodeAttention, rows: AttentionRows) -> Floats:
        return np.asarray(one.time_s(rows.decodes, rows.decode_context, rows.shape(), device))

    def naive(rows: AttentionRows) -> Floats:
        shape, positions = rows.shape(), rows.decodes * rows.decode_context
        moved = positions * shape.kv_bytes + rows.decodes * shape.query_bytes
        return _roofline(positions * shape.flops, moved, device)

    return Form("decode attention", parameters, build, predict, naive)


def varlen_form(
    accelerator: Accelerator, *, mixed: bool, packs_groups: bool, contexts: bool = True
) -> Form[VarlenAttention, AttentionRows]:
    """Attention of prefill chunks. mixed: the table has decodes in the same kernel, whose cost is fitted too.

    contexts: some chunks follow earlier tokens. Otherwise the table cannot tell a kernel that skips future tokens from
    a fast one.
    """
    device = device_of(accelerator, "bf16")
    parameters = {
        "overhead_s": Parameter(9.0, 1.0, 60.0, _US),
        "compute": Parameter(0.55, 0.02, 1.2),
        "tile_rows": Parameter(64.0, 1.0, 256.0),
        "depth_s": Parameter(15.0, 0.0, 300.0, _NS),
        "sharpness": Parameter(1.3, 1.0, 12.0),
        "share": Parameter(0.8, 0.1, 1.2),
        "triangle": Parameter(0.55, 0.5, 1.0) if contexts else Parameter(0.5, 0.5, 0.5),
        "cache_gain": Parameter(1.2, 0.65, 8.0),
        "cache_bytes": Parameter(40.0, 1.0, 300.0, _MB),
        "decode_item_s": Parameter(10.0, 0.0, 200.0, _NS) if mixed else Parameter(0.0, 0.0, 0.0),
        "decode_share": Parameter(0.93, 0.85, 1.0).only_if(mixed),
        "decode_sharpness": Parameter(5.0, 1.0, 12.0).only_if(mixed),
        "cache_use": Parameter(1.1, 0.3, 2.0).only_if(mixed),
    }

    def build(v: Values) -> VarlenAttention:
        rows = _PACKED_ROWS if packs_groups else _ROWS
        known = _fields(VarlenAttention, v)
        return VarlenAttention(**known, memory=_memory(v), decode_rows=rows, packs_groups=packs_groups)

    def predict(one: VarlenAttention, rows: AttentionRows) -> Floats:
        shape, contexts = rows.shape(), rows.decodes * (rows.decode_context + 1.0)
        positions = rows.sequences * one.positions(rows.tokens, rows.context)
        moved = rows.sequences * (rows.tokens + rows.context) * shape.kv_bytes
        moved = moved + rows.sequences * rows.tokens * shape.query_bytes
        longest = np.maximum(rows.tokens + rows.context, rows.decode_context)
        decode_s = one.decode_s(rows.decodes, contexts, shape, device)
        return np.asarray(one.time_s(positions, moved, longest, shape, device, decode_s))

    def naive(rows: AttentionRows) -> Floats:
        shape, contexts = rows.shape(), rows.decodes * (rows.decode_context + 1.0)
        positions = rows.sequences * rows.tokens * (rows.context + rows.tokens / 2.0) + contexts
        moved = (rows.sequences * (rows.tokens + rows.context) + contexts) * shape.kv_bytes
        moved = moved + (rows.sequences * rows.tokens + rows.decodes) * shape.query_bytes
        return _roofline(positions * shape.flops, moved, device)

    return Form("prefill attention", parameters, build, predict, naive)


def _fields(operator: type[Any], v: Values, prefix: str = "") -> dict[str, Any]:
    """The values of those parameters that are fields of the operator."""
    return {field.name: v[prefix + field.name] for field in fields(operator) if prefix + field.name in v}


def _memory(v: Values, prefix: str = "") -> Memory:
    return Memory(v["share"], v["share"] * v[f"{prefix}cache_gain"], v[f"{prefix}cache_bytes"])


def _roofline(flops: Floats, moved: Floats, device: Device) -> Floats:
    return np.maximum(flops / device.flops, moved / device.bandwidth)


def _product_roofline(m: Floats, n: Floats, k: Floats, width: float, device: Device) -> Floats:
    return _roofline(2.0 * m * n * k, n * k * width + 2.0 * m * (n + k), device)
