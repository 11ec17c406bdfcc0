"""The Triton kernels that move KV between paged caches and contiguous memory: unchanged, or coded as fp8, int8 or
int4. They produce the same bytes as `numba_kernels`.

`like` is any of the caches, for its dtype; `pointers` to `step_head` are of `device_codec.Places`. `side` to `bits`
are those of a section of `device_codec`. Kernels that code write one payload or several, each of `sides` K and V,
`spaced` bytes apart; one lane has one value. `flat` holds [layers, 2, tokens, heads, head_dim] in the caches' dtype.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# Whole numbers that change from call to call: a kernel is not compiled again for those that are 1 or a multiple of 16.
_VARYING = ("tokens", "values", "first", "group", "at", "apart", "codes", "count", "sides", "spaced")
jit: Callable[[Any], Any] = triton.jit(do_not_specialize=_VARYING)


@jit
def address_of(like, pointers, which, slot, head, channel, block, step_block, step_offset, step_head):
    """Where a value lies; `which` is layer * 2 + side."""
    base = tl.load(pointers + which).to(tl.pointer_type(like.dtype.element_ty))
    step = slot // block * step_block + slot % block * step_offset
    return base + step + head * step_head + channel


@jit
def bits_of(value):
    """Of a float32."""
    return value.to(tl.uint32, bitcast=True)


@jit
def float_of(number):
    """Of those bits."""
    return number.to(tl.uint32).to(tl.float32, bitcast=True)


@jit
def lowered(value, like):
    """A float32 as the cache has it, rounded half to even: Triton's interpreter cuts bfloat16 off."""
    if like.dtype.element_ty == tl.bfloat16:
        bits = bits_of(value)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505  # Triton needs both ways to end alike
        return value.to(like.dtype.element_ty)


@jit
def tops(
    like, pointers, slots, block, step_block, step_offset, step_head, tokens, heads, dim, tops, DIM: tl.constexpr,
    TOKENS: tl.constexpr
):  # fmt: skip
    """Bits of the greatest magnitude of each head of a layer's K or V."""
    which, head = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, DIM)[None, :]
    mask = (token < tokens) & (channel < dim)
    slot = tl.load(slots + token, mask=token < tokens, other=0)
    place = address_of(like, pointers, which, slot, head, channel, block, step_block, step_offset, step_head)
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    magnitude = (bits_of(value) & 0x7FFFFFFF).to(tl.int32)
    tl.atomic_max(tops + which * heads + head, tl.max(tl.max(magnitude, axis=1), axis=0))


@jit
def _load_half(payload, at, mask):
    """A float16 at any address."""
    low = tl.load(payload + at, mask=mask, other=0).to(tl.uint16)
    high = tl.load(payload + at + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _store_half(payload, at, value, mask):
    bits = value.to(tl.uint16, bitcast=True)
    tl.store(payload + at, (bits & 255).to(tl.uint8), mask=mask)
    tl.store(payload + at + 1, (bits >> 8).to(tl.uint8), mask=mask)


@jit
def units(tops, payload, heads, sides, spaced, HEADS: tl.constexpr):
    """2^(ceil(log2(top)) - 14) of a layer's K or V."""
    which, head = tl.program_id(0), tl.arange(0, HEADS)
    frame = which // sides
    payload += frame.to(tl.int64) * spaced
    top = tl.max(tl.load(tops + which * heads + head, mask=head < heads, other=0), axis=0)
    top = tl.maximum(top, 47 << 23)  # 2^-80
    exponent = (top + 0x7FFFFF) >> 23
    tl.store(payload.to(tl.pointer_type(tl.float32)) + which % sides, float_of((exponent - 14) << 23))


@jit
def grids(
    like, pointers, slots, block, step_block, step_offset, step_head, side: tl.constexpr, at, apart, codes, values,
    first, tokens, group, heads, dim, bits: tl.constexpr, channels, payload, sides, spaced, CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr
):  # fmt: skip
    """Scales and zeros: of a channel over a group of tokens of K, of a token over a group of channels of V."""
    layer, number, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    frame = layer * 2 // sides
    layer -= frame * sides // 2
    pointers += frame * sides
    payload += frame.to(tl.int64) * spaced
    parts = dim // channels
    head = part // parts
    inner = tl.arange(0, CHANNELS)[None, :]
    channel = part % parts * channels + inner
    token = number * TOKENS + tl.arange(0, TOKENS)[:, None]
    mask = (token < tokens) & (inner < channels)
    slot = tl.load(slots + first + token, mask=token < tokens, other=0)
    place = address_of(like, pointers, layer * 2 + side, slot, head, channel, block, step_block, step_offset, step_head)
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    unit = tl.load(payload.to(tl.pointer_type(tl.float32)) + layer * 2 + side)
    low = tl.where(mask, value, float("inf"))
    high = tl.where(mask, value, float("-inf"))
    if side == 0:
        groups = tokens // group
        where = ((layer * groups + number) * heads + head) * dim + channel
        _store_grid(tl.min(low, axis=0)[None, :], tl.max(high, axis=0)[None, :], unit, bits, payload,
                    at + 2 * where, apart, inner < channels)  # fmt: skip
    else:
        where = ((layer * tokens + token) * heads + head) * parts + part % parts
        _store_grid(tl.min(low, axis=1)[:, None], tl.max(high, axis=1)[:, None], unit, bits, payload,
                    at + 2 * where, apart, token < tokens)  # fmt: skip


@jit
def _store_grid(low, high, unit, bits: tl.constexpr, payload, at, apart, mask):
    """A scale, rounded up, and a zero, rounded down: (x - zero) / scale rounds to 0 … 2^bits - 1."""
    levels = (1 << bits) - 1.0
    ulp = 0.0009765625  # 2^-10: spacing of float16 numbers, relative
    tiny = 5.9604644775390625e-08  # 2^-24: the smallest positive float16
    least = tl.div_rn(tl.where(mask, low, 0.0), unit) + 0.0
    most = tl.div_rn(tl.where(mask, high, 0.0), unit) + 0.0
    near = least.to(tl.float16)
    below = (least - tl.abs(least) * ulp - tiny).to(tl.float16)
    zero = tl.where(near.to(tl.float32) > least, below, near)
    exact = tl.div_rn(most - zero.to(tl.float32), tl.zeros_like(least) + levels)
    near = exact.to(tl.float16)
    above = (exact * (1.0 + ulp) + tiny).to(tl.float16)
    scale = tl.where(near.to(tl.float32) < exact, above, near)
    scale = tl.where(scale.to(tl.float32) > 0.0, scale, (tl.zeros_like(least) + tiny).to(tl.float16))
    _store_half(payload, at, scale, mask)
    _store_half(payload, at + apart, zero, mask)


@jit
def _place_of(index, side: tl.constexpr, tokens, group, heads, dim):
    """Of a coded value of a section: layer, token, head, channel, and the number of its scale."""
    channel = index % dim
    head = index // dim % heads
    token = index // (dim * heads) % tokens
    layer = index // (dim * heads * tokens)
    row = head * dim + channel
    if side == 0:
        scale = (layer * (tokens // group) + token // group) * (heads * dim) + row
    else:
        scale = (layer * tokens + token) * (heads * dim // group) + row // group
    return layer, token, head, channel, scale


@jit
def _code(
    like, pointers, slots, block, step_block, step_offset, step_head, side: tl.constexpr, at, apart, first, tokens,
    group, heads, dim, payload, index, mask
):  # fmt: skip
    layer, token, head, channel, scale = _place_of(tl.where(mask, index, 0), side, tokens, group, heads, dim)
    slot = tl.load(slots + first + token, mask=mask, other=0)
    place = address_of(like, pointers, layer * 2 + side, slot, head, channel, block, step_block, step_offset, step_head)
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    unit = tl.load(payload.to(tl.pointer_type(tl.float32)) + layer * 2 + side, mask=mask, other=1.0)
    step = _load_half(payload, at + 2 * scale, mask) * unit
    zero = _load_half(payload, at + apart + 2 * scale, mask) * unit
    step = tl.where(mask, step, 1.0)
    whole = tl.div_rn(value - zero, step) + 12582912.0  # a sum with it is rounded to a whole number: its lowest bits
    return bits_of(whole) & 255


@jit
def encode_section(
    like, pointers, slots, block, step_block, step_offset, step_head, side: tl.constexpr, at, apart, codes, values,
    first, tokens, group, heads, dim, bits: tl.constexpr, payload, sides, spaced, TILE: tl.constexpr
):  # fmt: skip
    """Coded values, one a byte or two."""
    frame = tl.program_id(1)
    pointers += frame * sides
    payload += frame.to(tl.int64) * spaced
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    size = values * bits // 8
    mask = index < size
    code = _code(like, pointers, slots, block, step_block, step_offset, step_head,
                 side, at, apart, first, tokens, group, heads, dim, payload, index, mask)  # fmt: skip
    if bits == 4:
        upper = _code(like, pointers, slots, block, step_block, step_offset, step_head,
                      side, at, apart, first, tokens, group, heads, dim, payload, index + size, mask)  # fmt: skip
        code = code | (upper << 4)
    tl.store(payload + codes + index, code.to(tl.uint8), mask=mask)


@jit
def decode_section(
    like, pointers, slots, block, step_block, step_offset, step_head, side: tl.constexpr, at, apart, codes, values,
    first, tokens, group, heads, dim, bits: tl.constexpr, payload, TILE: tl.constexpr
):  # fmt: skip
    """Values, to where they belong."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < values
    size = values * bits // 8
    upper = (index >= size) & (bits == 4)
    code = tl.load(payload + codes + tl.where(upper, index - size, index), mask=mask, other=0).to(tl.uint32)
    if bits == 4:
        code = tl.where(upper, code >> 4, code & 15)
    layer, token, head, channel, scale = _place_of(tl.where(mask, index, 0), side, tokens, group, heads, dim)
    unit = tl.load(payload.to(tl.pointer_type(tl.float32)) + layer * 2 + side, mask=mask, other=1.0)
    step = _load_half(payload, at + 2 * scale, mask) * unit
    zero = _load_half(payload, at + apart + 2 * scale, mask) * unit
    value = code.to(tl.float32) * step + zero
    slot = tl.load(slots + first + token, mask=mask, other=0)
    place = address_of(like, pointers, layer * 2 + side, slot, head, channel, block, step_block, step_offset, step_head)
    tl.store(place, lowered(value, like), mask=mask)


# fp8 (e4m3fn) by the bits of float32: it works on GPUs without the format too.


@jit
def scales_fp8(tops, payload, count, spaced, TILE: tl.constexpr):
    """Of each head of K and V in a payload, which are `count`."""
    frame, index = tl.program_id(1), tl.program_id(0) * TILE + tl.arange(0, TILE)
    top = float_of(tl.load(tops + frame * count + index, mask=index < count, other=0))
    payload += frame.to(tl.int64) * spaced
    scale = tl.maximum(tl.div_rn(top, tl.zeros_like(top) + 448.0), 1.1754943508222875e-38)  # 2^-126
    tl.store(payload.to(tl.pointer_type(tl.float32)) + index, scale, mask=index < count)


@jit
def encode_fp8(
    like, pointers, slots, block, step_block, step_offset, step_head, values, heads, dim, payload, codes, sides,
    spaced, TILE: tl.constexpr
):  # fmt: skip
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
    like, pointers, slots, block, step_block, step_offset, step_head, values, heads, dim, payload, codes,
    TILE: tl.constexpr
):  # fmt: skip
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


# Unchanged KV: one launch for all layers.


@jit
def move_raw(
    like, pointers, slots, block, step_block, step_offset, step_head, values, heads, dim, flat,
    INTO_CACHES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Between the caches and `flat`; `values` of each K or V."""
    which, index = tl.program_id(0), tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < values
    channel, head, token = index % dim, index // dim % heads, index // (dim * heads)
    slot = tl.load(slots + token, mask=mask, other=0)
    place = address_of(like, pointers, which, slot, head, channel, block, step_block, step_offset, step_head)
    there = flat + which.to(tl.int64) * values + index
    if INTO_CACHES:
        tl.store(place, tl.load(there, mask=mask), mask=mask)
    else:
        tl.store(there, tl.load(place, mask=mask), mask=mask)
