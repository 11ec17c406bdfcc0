"""The operators that calibration fits: constants with bounds, and the prediction of a table's rows.

Attention is fitted for decodes alone, for prefill chunks alone, and for both in one kernel.
"""

from collections.abc import Mapping

import numpy as np

from shared.cost.catalogue import Accelerator, bytes_of
from shared.cost.operators import (
    Collective,
    DecodeAttention,
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
    device = device_of(accelerator, precision)
    width = bytes_of(precision)
    parameters = _gemm_parameters(cached=cached) | (_quantisation_parameters() if quantised else {})

    def build(v: Values) -> Gemm:
        weight_cache_share = v["share"] * v["weight_cache_gain"]
        return Gemm(
            overhead_s=v["overhead_us"] * _US,
            compute=v["compute"],
            tile_penalty=v["tile_penalty"],
            depth_s=v["depth_ns"] * _NS,
            split_s=v["split_us"] * _US,
            sharpness=v["sharpness"],
            weights=Memory(v["share"], weight_cache_share, v["weight_cache_mb"] * _MB),
            activations=Memory(v["share"], v["share"] * v["activation_cache_gain"], v["activation_cache_mb"] * _MB),
            quantisation=_quantisation(v, fused=not blocks) if quantised else None,
        )

    def predict(gemm: Gemm, rows: GemmRows) -> Floats:
        return np.asarray(gemm.time_s(rows.m, rows.n, rows.k, width, device))

    def naive(rows: GemmRows) -> Floats:
        moved = rows.n * rows.k * width + 2.0 * rows.m * (rows.n + rows.k)
        return np.maximum(2.0 * rows.m * rows.n * rows.k / device.flops, moved / device.bandwidth)

    return Form(f"gemm {precision}", parameters, build, predict, naive)


def mlp_form(accelerator: Accelerator, precision: str) -> Form[Mlp, MlpRows]:
    device = device_of(accelerator, precision)
    width = bytes_of(precision)
    products = gemm_form(accelerator, precision, quantised=False, cached=True)
    activation = elementwise_form(accelerator)
    parameters = dict(products.parameters) | {f"act_{name}": p for name, p in activation.parameters.items()}

    def build(v: Values) -> Mlp:
        own = {name.removeprefix("act_"): value for name, value in v.items() if name.startswith("act_")}
        return Mlp(products.build(v), activation.build(own))

    def predict(mlp: Mlp, rows: MlpRows) -> Floats:
        return np.asarray(mlp.time_s(rows.tokens, rows.up, rows.width, rows.hidden, width, device))

    def naive(rows: MlpRows) -> Floats:
        total = np.zeros(len(rows))
        for n, k in ((rows.up, rows.hidden), (rows.hidden, rows.width)):
            moved = n * k * width + 2.0 * rows.tokens * (n + k)
            total += np.maximum(2.0 * rows.tokens * n * k / device.flops, moved / device.bandwidth)
        return total + rows.tokens * (rows.up + rows.width) * 2.0 / device.bandwidth

    return Form("MLP", parameters, build, predict, naive)


def experts_form(accelerator: Accelerator, precision: str, elementwise: Elementwise) -> Form[Gemm, ExpertRows]:
    """Grouped products of a mixture's experts, which reach less of the peak. elementwise: already fitted."""
    device = device_of(accelerator, precision)
    width = bytes_of(precision)
    products = gemm_form(accelerator, precision, quantised=False, cached=False)
    parameters = {**products.parameters, "compute": Parameter(0.5, 0.03, 1.3), "overhead_us": Parameter(8.0, 0.1, 60.0)}

    def predict(gemm: Gemm, rows: ExpertRows) -> Floats:
        one = ExpertMlp(gemm, elementwise)
        return np.asarray(one.time_s(rows.rows, rows.active, 2.0 * rows.width, rows.width, rows.hidden, width, device))

    def naive(rows: ExpertRows) -> Floats:
        weights = 3.0 * rows.hidden * rows.width
        moved = rows.active * weights * width + 4.0 * rows.rows * rows.hidden
        return np.maximum(2.0 * rows.rows * weights / device.flops, moved / device.bandwidth)

    return Form(f"experts {precision}", parameters, products.build, predict, naive)


def elementwise_form(accelerator: Accelerator) -> Form[Elementwise, ElementwiseRows]:
    device = device_of(accelerator, "bf16")
    parameters = {
        "overhead_us": Parameter(2.5, 0.5, 20.0),
        "share": Parameter(0.8, 0.1, 1.2),
        "cache_gain": Parameter(1.5, _MIN_GAIN, 8.0),
        "cache_mb": Parameter(40.0, 0.5, 300.0),
    }

    def build(v: Values) -> Elementwise:
        return Elementwise(
            v["overhead_us"] * _US, Memory(v["share"], v["share"] * v["cache_gain"], v["cache_mb"] * _MB)
        )

    def predict(one: Elementwise, rows: ElementwiseRows) -> Floats:
        return np.asarray(one.time_s(rows.moved, device))

    return Form("elementwise", parameters, build, predict, lambda rows: rows.moved / device.bandwidth)


def all_reduce_form(accelerator: Accelerator) -> Form[Collective, AllReduceRows]:
    link = accelerator.links.scale_up
    parameters = {
        "latency_us": Parameter(4.0, 0.1, 100.0),
        "latency_rank_us": Parameter(0.5, 0.0, 30.0),
        "share": Parameter(0.3, 0.02, 1.5),
        "ring_latency_us": Parameter(30.0, 1.0, 300.0),
        "ring_share": Parameter(0.4, 0.02, 1.5),
        "contention": Parameter(0.1, -0.5, 3.0),
    }

    def build(v: Values) -> Collective:
        return Collective(
            v["latency_us"] * _US,
            v["latency_rank_us"] * _US,
            v["share"],
            v["ring_latency_us"] * _US,
            v["ring_share"],
            v["contention"],
        )

    def predict(one: Collective, rows: AllReduceRows) -> Floats:
        return np.asarray(one.all_reduce_s(rows.moved, rows.ranks, link))

    def naive(rows: AllReduceRows) -> Floats:
        return 2.0 * (rows.ranks - 1.0) / rows.ranks * rows.moved / link

    return Form("all-reduce", parameters, build, predict, naive)


def decode_form(accelerator: Accelerator) -> Form[DecodeAttention, AttentionRows]:
    device = device_of(accelerator, "bf16")
    parameters = {
        "overhead_us": Parameter(10.0, 1.0, 60.0),
        "long_us": Parameter(2.0, 0.0, 20.0),
        "grouped_us": Parameter(1.0, 0.0, 30.0),
        "depth_ns": Parameter(1.0, 0.0, 60.0),
        "depth_tokens": Parameter(10e3, 500.0, 100e3),
        "depth_items": Parameter(16.0, 0.5, 2000.0),
        "item_ns": Parameter(25.0, 0.0, 300.0),
        "splits": Parameter(32.0, 1.0, 2000.0),
        "ungrouped_splits": Parameter(4.0, 0.2, 2000.0),
        "compute": Parameter(0.6, 0.1, 1.0),
        "share": Parameter(0.9, 0.2, 1.1),
        "cache_gain": Parameter(1.5, 1.0, 8.0),
        "cache_mb": Parameter(45.0, 1.0, 200.0),
    }

    def build(v: Values) -> DecodeAttention:
        return DecodeAttention(
            overhead_s=v["overhead_us"] * _US,
            long_s=v["long_us"] * _US,
            grouped_s=v["grouped_us"] * _US,
            depth_s=v["depth_ns"] * _NS,
            depth_tokens=v["depth_tokens"],
            depth_items=v["depth_items"],
            item_s=v["item_ns"] * _NS,
            splits=v["splits"],
            ungrouped_splits=v["ungrouped_splits"],
            compute=v["compute"],
            memory=Memory(v["share"], v["share"] * v["cache_gain"], v["cache_mb"] * _MB),
        )

    def predict(one: DecodeAttention, rows: AttentionRows) -> Floats:
        return np.asarray(one.time_s(rows.decodes, rows.decode_context, rows.shape(), device))

    def naive(rows: AttentionRows) -> Floats:
        shape, positions = rows.shape(), rows.decodes * rows.decode_context
        moved = positions * shape.kv_bytes + rows.decodes * shape.query_bytes
        return np.maximum(positions * shape.flops / device.flops, moved / device.bandwidth)

    return Form("decode attention", parameters, build, predict, naive)


def varlen_form(
    accelerator: Accelerator, *, mixed: bool, packs_groups: bool, contexts: bool = True
) -> Form[VarlenAttention, AttentionRows]:
    """Attention of prefill chunks. mixed: the table has decodes in the same kernel, whose cost is fitted too.

    contexts: some chunks follow earlier tokens. Otherwise the table cannot tell a kernel that skips future tokens from
    a fast one.
    """
    device = device_of(accelerator, "bf16")
    parameters = _varlen_parameters(mixed, contexts)

    def build(v: Values) -> VarlenAttention:
        return VarlenAttention(
            overhead_s=v["overhead_us"] * _US,
            compute=v["compute"],
            tile_rows=v["tile_rows"],
            depth_s=v["depth_ns"] * _NS,
            sharpness=v["sharpness"],
            memory=Memory(v["share"], v["share"] * v["cache_gain"], v["cache_mb"] * _MB),
            decode_rows=_PACKED_ROWS if packs_groups else _ROWS,
            decode_item_s=v["decode_item_ns"] * _NS,
            packs_groups=packs_groups,
            decode_share=v["decode_share"],
            decode_sharpness=v["decode_sharpness"],
            cache_use=v["cache_use"],
            triangle=v["triangle"],
        )

    def predict(one: VarlenAttention, rows: AttentionRows) -> Floats:
        shape, contexts = rows.shape(), rows.decodes * (rows.decode_context + 1.0)
        positions = rows.sequences * one.positions(rows.tokens, rows.context, np.maximum)
        moved = rows.sequences * (rows.tokens + rows.context) * shape.kv_bytes
        moved = moved + rows.sequences * rows.tokens * shape.query_bytes
        longest = np.maximum(rows.tokens + rows.context, rows.decode_context)
        decode_s = one.decode_s(rows.decodes, contexts, shape, device, np.minimum, np.maximum)
        return np.asarray(one.time_s(positions, moved, longest, shape, device, decode_s))

    def naive(rows: AttentionRows) -> Floats:
        shape, contexts = rows.shape(), rows.decodes * (rows.decode_context + 1.0)
        positions = rows.sequences * rows.tokens * (rows.context + rows.tokens / 2.0) + contexts
        moved = (rows.sequences * (rows.tokens + rows.context) + contexts) * shape.kv_bytes
        moved = moved + (rows.sequences * rows.tokens + rows.decodes) * shape.query_bytes
        return np.maximum(positions * shape.flops / device.flops, moved / device.bandwidth)

    return Form("prefill attention", parameters, build, predict, naive)


def _varlen_parameters(mixed: bool, contexts: bool) -> dict[str, Parameter]:
    return {
        "overhead_us": Parameter(9.0, 1.0, 60.0),
        "compute": Parameter(0.55, 0.02, 1.2),
        "tile_rows": Parameter(64.0, 1.0, 256.0),
        "depth_ns": Parameter(15.0, 0.0, 300.0),
        "sharpness": Parameter(1.3, 1.0, 12.0),
        "share": Parameter(0.8, 0.1, 1.2),
        "triangle": Parameter(0.55, 0.5, 1.0) if contexts else Parameter(0.5, 0.5, 0.5),
        "cache_gain": Parameter(1.2, 0.65, 8.0),
        "cache_mb": Parameter(40.0, 1.0, 300.0),
        "decode_item_ns": Parameter(10.0, 0.0, 200.0) if mixed else Parameter(0.0, 0.0, 0.0),
        "decode_share": _fixed_unless(mixed, 0.93, 0.85, 1.0),
        "decode_sharpness": _fixed_unless(mixed, 5.0, 1.0, 12.0),
        "cache_use": _fixed_unless(mixed, 1.1, 0.3, 2.0),
    }


def _gemm_parameters(*, cached: bool) -> dict[str, Parameter]:
    return {
        "overhead_us": Parameter(3.0, 0.1, 60.0),
        "compute": Parameter(0.85, 0.2, 1.3),
        "tile_penalty": Parameter(0.3, 0.0, 1.5),
        "depth_ns": Parameter(0.5, 0.0, 5.0),
        "split_us": Parameter(2.0, 0.0, 20.0),
        "sharpness": Parameter(2.0, 1.0, 12.0),
        "share": Parameter(0.8, 0.3, 1.1),
        "weight_cache_gain": _fixed_unless(cached, 1.0, _MIN_GAIN, 12.0),
        "weight_cache_mb": _fixed_unless(cached, 20.0, 1.0, 300.0),
        "activation_cache_gain": Parameter(1.0, _MIN_GAIN, 12.0),
        "activation_cache_mb": Parameter(40.0, 0.5, 400.0),
    }


def _quantisation_parameters() -> dict[str, Parameter]:
    """Quantising is a kernel of its own; the launch of the product is fixed at that of plain products."""
    return {
        "overhead_us": Parameter(2.7, 2.7, 2.7),
        "quant_launch_us": Parameter(9.0, 0.0, 60.0),
        "quant_ns": Parameter(1.0, 0.0, 50.0),
        "quant_exponent": Parameter(1.0, 0.3, 1.5),
        "quant_rows": Parameter(4.0, 0.05, 50.0),
        "quant_ramp": Parameter(2.0, 0.5, 8.0),
        "spill_s_gb": Parameter(1.0, 0.0, 100.0),
        "spill_mb": Parameter(30.0, 1.0, 200.0),
    }


def _quantisation(v: Values, *, fused: bool) -> Quantisation:
    return Quantisation(
        v["quant_launch_us"] * _US,
        v["quant_ns"] * _NS,
        v["quant_exponent"],
        v["quant_rows"],
        v["quant_ramp"],
        v["spill_s_gb"] * 1e-9,
        v["spill_mb"] * _MB,
        fused,
    )


def _fixed_unless(free: bool, start: float, low: float, high: float) -> Parameter:
    """A parameter that is fitted when the table determines it, and stays at its start otherwise."""
    return Parameter(start, low, high) if free else Parameter(start, start, start)
