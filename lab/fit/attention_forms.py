"""Attention, fitted: decodes alone, prefill chunks alone, and both in one kernel."""

from collections.abc import Mapping

import numpy as np

from lab.fit.forms import fixed_unless
from lab.fit.least_squares import Form, Parameter
from lab.fit.rows import AttentionRows, Floats
from shared.cost.catalogue import Accelerator
from shared.cost.operators import DecodeAttention, Memory, VarlenAttention, device_of

_US, _NS, _MB = 1e-6, 1e-9, 1e6
_ROWS, _PACKED_ROWS = 64.0, 128.0  # query rows of a tile, see VarlenAttention
Values = Mapping[str, float]


def decode_form(accelerator: Accelerator) -> Form[DecodeAttention, AttentionRows]:
    """Attention of decodes alone."""
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
        "decode_share": fixed_unless(mixed, 0.93, 0.85, 1.0),
        "decode_sharpness": fixed_unless(mixed, 5.0, 1.0, 12.0),
        "cache_use": fixed_unless(mixed, 1.1, 0.3, 2.0),
    }


def varlen_form(
    accelerator: Accelerator, *, mixed: bool, packs_groups: bool, contexts: bool = True
) -> Form[VarlenAttention, AttentionRows]:
    """Attention of prefill chunks. `mixed`: the table has decodes in the same kernel too, so their cost is fitted.

    `contexts`: some chunks follow earlier tokens; else nothing tells a kernel that skips the future from a fast one.
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
