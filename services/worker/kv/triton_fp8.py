"""The Triton kernels of the fp8 codec (e4m3fn), by the bits of float32: GPUs without the format have it, too."""

from typing import Any

import triton.language as tl

from services.worker.kv.triton_bits import address_of, bits_of, float_of, jit, lowered


@jit
def scales_fp8(tops: "Any", payload: "Any", count: "Any", spaced: "Any", TILE: tl.constexpr) -> "Any":
    """Of each head of K and V in a payload, which are `count`."""
    frame, index = tl.program_id(1), tl.program_id(0) * TILE + tl.arange(0, TILE)
    top = float_of(tl.load(tops + frame * count + index, mask=index < count, other=0))
    payload += frame.to(tl.int64) * spaced
    scale = tl.maximum(tl.div_rn(top, tl.zeros_like(top) + 448.0), 1.1754943508222875e-38)  # 2^-126
    tl.store(payload.to(tl.pointer_type(tl.float32)) + index, scale, mask=index < count)


@jit
def encode_fp8(
    like: "Any",
    pointers: "Any",
    slots: "Any",
    block: "Any",
    step_block: "Any",
    step_offset: "Any",
    step_head: "Any",
    values: "Any",
    heads: "Any",
    dim: "Any",
    payload: "Any",
    codes: "Any",
    sides: "Any",
    spaced: "Any",
    TILE: tl.constexpr,
) -> "Any":
    """Coded values."""
    which, index = tl.program_id(0), tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    frame = which // sides
    which -= frame * sides
    pointers += frame * sides
    payload += frame.to(tl.int64) * spaced
    mask = index < values
    channel, head, token = index % dim, index // dim % heads, index // (dim * heads)
    slot = tl.load(slots + token, mask=mask, other=0)
    place = address_of(like, pointers, which, slot, head, channel, block, step_block, step_offset, step_head)
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(payload.to(tl.pointer_type(tl.float32)) + which * heads + head, mask=mask, other=1.0)
    value = tl.minimum(tl.maximum(tl.div_rn(value, scale), -448.0), 448.0)
    bits = bits_of(value)
    sign = (bits & 0x80000000) >> 24
    bits = bits & 0x7FFFFFFF
    small = bits_of(float_of(bits) + 16384.0) - (141 << 23)  # 2^14 has the spacing of the least e4m3fn
    large = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    code = sign | tl.where(bits < (121 << 23), small, large)
    tl.store(payload + codes + which.to(tl.int64) * values + index, code.to(tl.uint8), mask=mask)


@jit
def decode_fp8(
    like: "Any",
    pointers: "Any",
    slots: "Any",
    block: "Any",
    step_block: "Any",
    step_offset: "Any",
    step_head: "Any",
    values: "Any",
    heads: "Any",
    dim: "Any",
    payload: "Any",
    codes: "Any",
    TILE: tl.constexpr,
) -> "Any":
    """Values, to where they belong."""
    which, index = tl.program_id(0), tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < values
    channel, head, token = index % dim, index // dim % heads, index // (dim * heads)
    code = tl.load(payload + codes + which.to(tl.int64) * values + index, mask=mask, other=0).to(tl.uint32)
    scale = tl.load(payload.to(tl.pointer_type(tl.float32)) + which * heads + head, mask=mask, other=1.0)
    value = float_of((code & 0x7F) << 20) * 1.329227995784916e36  # 2^120
    value = float_of(bits_of(value) | ((code & 0x80) << 24)) * scale
    slot = tl.load(slots + token, mask=mask, other=0)
    place = address_of(like, pointers, which, slot, head, channel, block, step_block, step_offset, step_head)
    tl.store(place, lowered(value, like), mask=mask)
