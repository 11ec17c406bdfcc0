"""KV in the paged caches of one rank's GPU, moved by Triton kernels: unchanged, coded on its way out, or decoded on
its way in. The payloads are those of `codec`, bit for bit.

Kernels read the cache in place, by slots, and write bytes of the payload; values in between stay in registers.
Divisions are IEEE's and no multiplication is fused with an addition, for otherwise the last bits would differ.

In kernels, `like` is any of the caches, for its dtype; `pointers` to `step_head` are of `Places`; `side` to `bits` are
those of a section. Kernels that code write one payload or several, each of `sides` K and V, `spaced` bytes apart; one
lane has one value. `flat` holds [layers, 2, tokens, heads, head_dim] in the caches' dtype.

The module requires Triton. Where a kernel fails, KV is copied without kernels and a warning is logged.
"""

# Kernels have no annotations: Triton reads their source.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, ANN202

import logging
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from services.worker.kv import KvError, KvFault
from services.worker.kv.codec import Shape, check_head_dim, check_size, payload_bytes
from services.worker.kv.layout import StridedLayout
from services.worker.kv.shards import RankShape
from services.worker.kv.staging import CodedLayers, CodedSegment
from shared.domain.kv import TOKEN_GROUP, Codec, channel_group

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
def head_tops(
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


_INFINITE = 0x7F800000  # magnitudes from here on are not finite
_ALIGNED = 16
_TILE = 1024  # coded values of a program
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class Places:
    """Tokens in the caches of some layers.

    views: K and V of each layer, [blocks, offset, heads, head_dim], all with the strides of the first. slots: int64
    [tokens] on the device, block * block size + offset. pointers: as `pointers_of` gives them.
    """

    views: list[torch.Tensor]
    pointers: torch.Tensor
    slots: torch.Tensor

    @property
    def shape(self) -> Shape:
        """Of the KV: [layers, 2, tokens, heads, head_dim]."""
        _, _, heads, dim = self.views[0].shape
        return len(self.views) // 2, 2, self.slots.numel(), heads, dim

    def of_layers(self, start: int, end: int) -> "Places":
        sides = slice(2 * start, 2 * end)
        return Places(self.views[sides], self.pointers[sides], self.slots)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The first arguments of every kernel, `like` to `step_head`: among them the block size, and by how many values
        blocks, offsets and heads are apart.
        """
        first = self.views[0]
        return first, self.pointers, self.slots, first.shape[1], first.stride(0), first.stride(1), first.stride(2)


def pointers_of(views: list[torch.Tensor]) -> torch.Tensor:
    """Addresses of the views, int64, on the host. Raises ValueError unless kernels can count from them alike."""
    first = views[0]
    if first.stride(3) != 1 or any(view.stride() != first.stride() or view.dtype != first.dtype for view in views):
        raise ValueError("KV caches with unlike strides, or channels that do not lie together")
    return torch.tensor([view.data_ptr() for view in views], dtype=torch.int64)


def spacing(shape: Shape, dtype: torch.dtype, codec: Codec) -> int:
    """How far apart `encode_into` writes payloads of that shape: scales may be float32."""
    return -(-payload_bytes(shape, dtype, codec) // _ALIGNED) * _ALIGNED


def encode_into(places: Places, codec: Codec, each: int, payloads: torch.Tensor, tops: torch.Tensor) -> None:
    """A payload of every `each` layers, and one of those that are left, `spacing` apart into `payloads` (uint8, aligned
    to 16 bytes); what `require_finite` judges into `tops`, int32 [layers, 2, heads]. So many launches whatever the
    layers. Issued on the current stream. Raises KvError(CODEC) for an odd head_dim with INT4.
    """
    layers, _, tokens, heads, dim = places.shape
    check_head_dim(dim, codec)
    first, whole = places.views[0], layers // each * each
    tops.zero_()
    grid = (2 * layers, heads, triton.cdiv(tokens, TOKEN_GROUP))
    head_tops[grid](*places.arguments, tokens, heads, dim, tops, triton.next_power_of_2(dim), TOKEN_GROUP, **_EXACT)
    spaced = spacing((each, 2, tokens, heads, dim), first.dtype, codec)
    for start, end, one in ((0, whole, each), (whole, layers, layers - whole)):
        if start < end:
            shape = (one, 2, tokens, heads, dim)
            given = _Payloads(shape, (end - start) // one, spaced, payloads[start // each * spaced :])
            encode = _encode_fp8 if codec is Codec.FP8 else _encode_ints
            encode(places.of_layers(start, end), given, codec, tops[start:end])


@dataclass(frozen=True, slots=True)
class _Payloads:
    """So many of one shape, so many bytes apart, from the first byte on."""

    shape: Shape
    count: int
    spaced: int
    at: torch.Tensor

    @property
    def sides(self) -> int:
        return 2 * self.shape[0]


def gather_places(places: Places, out: torch.Tensor) -> None:
    """What lies at the places into `out` [layers, 2, tokens, heads, head_dim] of their dtype, contiguous."""
    layers, _, tokens, heads, dim = places.shape
    values = tokens * heads * dim
    grid = (2 * layers, triton.cdiv(values, _TILE), 1)
    move_raw[grid](*places.arguments, values, heads, dim, out, False, _TILE)


def require_finite(tops: torch.Tensor) -> None:
    """Raises KvError(CODEC) when what was coded held values that are not finite. `tops` is on the host."""
    if bool((tops >= _INFINITE).any()):
        raise KvError(KvFault.CODEC, "values that are not finite")


def decode_places(payload: torch.Tensor, places: Places, wire: torch.dtype, codec: Codec) -> None:
    """Write what a payload (uint8, on the device) holds to its places, in the caches' dtype, on the current stream.

    `wire` is the exporter's dtype; for RAW it is the caches'. Raises KvError(PROTOCOL) when the size does not fit.
    """
    layers, _, tokens, heads, dim = places.shape
    check_size(payload, places.shape, wire, codec)
    target, values = places.arguments, tokens * heads * dim
    grid = (2 * layers, triton.cdiv(values, _TILE), 1)
    if codec is Codec.RAW:
        move_raw[grid](*target, values, heads, dim, payload.view(wire), True, _TILE)
        return
    if codec is Codec.FP8:
        decode_fp8[grid](*target, values, heads, dim, payload, 8 * layers * heads, _TILE, **_EXACT)
        return
    for section in _sections(places.shape, codec):
        grid = (triton.cdiv(section.values, _TILE), 1, 1)
        decode_section[grid](*target, *section.arguments, payload, _TILE, **_EXACT)


@dataclass(frozen=True, slots=True)
class _Section:
    """A part of an int8 or int4 payload: K's whole groups, K's last group, or V. Offsets are in bytes."""

    side: int
    at: int
    layers: int
    first: int
    tokens: int
    group: int  # of tokens for K, of channels for V
    heads: int
    dim: int
    bits: int

    @property
    def values(self) -> int:
        return self.layers * self.tokens * self.heads * self.dim

    @property
    def apart(self) -> int:
        """By how much zeros are behind scales, and coded values behind zeros: a float16 for each group."""
        return 2 * self.values // self.group

    @property
    def end(self) -> int:
        return self.at + 2 * self.apart + self.values * self.bits // 8

    @property
    def arguments(self) -> tuple[int, ...]:
        """The arguments of a section, `side` to `bits`."""
        places = (self.side, self.at, self.apart, self.at + 2 * self.apart, self.values)
        return (*places, self.first, self.tokens, self.group, self.heads, self.dim, self.bits)


def _sections(shape: Shape, codec: Codec) -> list[_Section]:
    layers, _, tokens, heads, dim = shape
    bits, whole = (8 if codec is Codec.INT8 else 4), tokens // TOKEN_GROUP * TOKEN_GROUP
    cuts = [(0, 0, whole, TOKEN_GROUP), (0, whole, tokens - whole, tokens - whole), (1, 0, tokens, channel_group(dim))]
    sections, at = list[_Section](), 8 * layers
    for side, first, count, group in cuts:
        if count:
            sections.append(
                _Section(
                    side=side,
                    at=at,
                    layers=layers,
                    first=first,
                    tokens=count,
                    group=group,
                    heads=heads,
                    dim=dim,
                    bits=bits,
                )
            )
            at = sections[-1].end
    return sections


def _encode_fp8(places: Places, given: _Payloads, codec: Codec, tops: torch.Tensor) -> None:
    layers, _, tokens, heads, dim = given.shape
    scales, values = 2 * layers * heads, tokens * heads * dim
    grid = (triton.cdiv(scales, _TILE), given.count, 1)
    scales_fp8[grid](tops, given.at, scales, given.spaced, _TILE, **_EXACT)
    grid = (given.sides * given.count, triton.cdiv(values, _TILE), 1)
    encode_fp8[grid](
        *places.arguments, values, heads, dim, given.at, 4 * scales, given.sides, given.spaced, _TILE, **_EXACT
    )


def _encode_ints(places: Places, given: _Payloads, codec: Codec, tops: torch.Tensor) -> None:
    layers, _, _, heads, dim = given.shape
    spread = (given.at, given.sides, given.spaced)
    units[(given.sides * given.count,)](
        tops, given.at, heads, given.sides, given.spaced, triton.next_power_of_2(heads), **_EXACT
    )
    for section in _sections(given.shape, codec):
        key = section.side == 0
        groups = triton.cdiv(section.tokens, section.group) if key else triton.cdiv(section.tokens, TOKEN_GROUP)
        channels = dim if key else section.group
        grid = (layers * given.count, groups, heads * (dim // channels))
        tile = (triton.next_power_of_2(channels), TOKEN_GROUP)
        grids[grid](*places.arguments, *section.arguments, channels, *spread, *tile, **_EXACT)
        grid = (triton.cdiv(section.values * section.bits // 8, _TILE), given.count, 1)
        encode_section[grid](*places.arguments, *section.arguments, *spread, _TILE, **_EXACT)


_log = logging.getLogger(__name__)

# What a kernel raises that cannot be compiled or loaded here: Triton's own errors (a compile error, too little shared
# memory), those of the compilers that it runs and cannot find or write for, and its drivers'. A device that has failed
# altogether raises a RuntimeError, too, and raises it again in torch's kernels.
KERNEL_FAULTS = (TritonError, subprocess.SubprocessError, OSError, RuntimeError)
Upload = Callable[[torch.Tensor], torch.Tensor]
_WARM_TOKENS = TOKEN_GROUP + 1  # a whole group and a rest


def warn_of_fallback(error: BaseException) -> None:
    """KV is moved by torch's own kernels from now on."""
    _log.warning("KV is moved without Triton kernels, and coded on the CPU: %s: %s", type(error).__name__, error)


class DeviceCodec:
    """All calls issue work on the calling thread's stream, but `prepare`, which waits for it.

    A kernel is compiled anew for other sizes than those of `prepare`. Where that fails, a warning names the reason, and
    from then on nothing is moved here: see the results of `gather`, `decode` and `coding`.
    """

    def __init__(self, caches: list[torch.Tensor], layout: StridedLayout, shape: RankShape, upload: Upload) -> None:
        """`upload` brings a tensor to where caches are. Raises ValueError for caches that kernels cannot address."""
        self._layout = layout
        self.shape = shape
        self._upload = upload
        self._views = [view for cache in caches for view in layout.views(cache)]
        self._pointers = pointers_of(self._views).to(caches[0].device)
        self._failed = False
        self._lock = threading.Lock()

    @property
    def dtype(self) -> torch.dtype:
        return self._views[0].dtype

    def prepare(self, *, lossy: bool) -> None:
        """Have the kernels compiled, so that no step and no transfer waits for them. Block 0 is written to: vLLM has
        it for nothing. Raises KERNEL_FAULTS.
        """
        slots = torch.arange(_WARM_TOKENS) % self._layout.block_size
        places = self.places((0, len(self._views) // 2), (0, self._layout.kv_heads), slots)
        kv = torch.zeros(places.shape, dtype=self.dtype, device=self._pointers.device)
        gather_places(places, kv)
        decode_places(kv.view(torch.uint8).reshape(-1), places, self.dtype, Codec.RAW)
        for codec in self._codecs if lossy else ():
            coding = DeviceCoding(self, codec, lambda *_: slots)
            out = torch.empty(coding.size(_WARM_TOKENS), dtype=torch.uint8, device=kv.device)
            coding.encode(places, out)
            for each in coding.payloads(_WARM_TOKENS, out):
                decode_places(each.payload, places.of_layers(each.start, each.end), self.dtype, codec)
        if kv.device.type != "cpu":  # the CPU is that of Triton's interpreter
            torch.get_device_module(kv.device).synchronize(kv.device)

    def gather(self, slots: torch.Tensor, out: torch.Tensor) -> bool:
        """KV of those slots (int64, on the host) as it is into `out` [layers, 2, tokens, heads, head_dim]; False where
        kernels have failed.
        """
        return self.moved(lambda: gather_places(self.places((0, out.shape[0]), (0, out.shape[3]), slots), out))

    def coding(self, codec: Codec, tokens: int, slots: Callable[[int, int], torch.Tensor]) -> "DeviceCoding | None":
        """How so many tokens are coded that lie in `slots(first, until)`; None where that would not make them smaller,
        as with few tokens that share scales, and where kernels have failed or the codec is not one for this KV.
        """
        segment = self.shape.segment_tokens()
        if self._failed or codec not in self._codecs:
            return None
        coding = DeviceCoding(self, codec, slots)
        coding.total_bytes = sum(coding.size(min(segment, tokens - first)) for first in range(0, tokens, segment))
        fits = coding.size(min(segment, tokens)) <= self.shape.chunk_bytes(segment)
        return coding if fits and coding.total_bytes < self.shape.chunk_bytes(tokens) else None

    @property
    def _codecs(self) -> list[Codec]:
        return [each for each in Codec if each.lossy and not (each is Codec.INT4 and self.shape.head_dim % 2)]

    def decode(
        self,
        layers: tuple[int, int],
        heads: tuple[int, int],
        slots: torch.Tensor,
        payload: torch.Tensor,
        dtype: torch.dtype,
        codec: Codec,
    ) -> bool:
        """Write what a payload (uint8, on the host, there until this returns) holds to those slots; layers and heads
        are this rank's. `dtype` is the exporter's: RAW takes the caches' only. False where kernels have failed: some of
        it may have been written.
        """
        return self.moved(lambda: decode_places(self._upload(payload), self.places(layers, heads, slots), dtype, codec))

    def moved(self, issue: Callable[[], None]) -> bool:
        """Issue work; False where kernels have failed."""
        with self._lock:
            if self._failed:
                return False
        try:
            issue()
        except KERNEL_FAULTS as error:
            with self._lock:
                first, self._failed = not self._failed, True
            if first:
                warn_of_fallback(error)
            return False
        return True

    def places(self, layers: tuple[int, int], heads: tuple[int, int], slots: torch.Tensor) -> Places:
        sides = slice(2 * layers[0], 2 * layers[1])
        views = [view[:, :, slice(*heads)] for view in self._views[sides]]
        past = heads[0] * views[0].stride(2) * views[0].element_size()
        pointers = self._pointers[sides]
        return Places(views, pointers + past if past else pointers, self._upload(slots))


class DeviceCoding:
    """See Coding. Coded KV of a segment is payloads of some layers each, spaced, and behind them what tells whether all
    of it was finite.
    """

    total_bytes = 0

    def __init__(self, device: DeviceCodec, codec: Codec, slots: Callable[[int, int], torch.Tensor]) -> None:
        self._device = device
        self._codec = codec
        self._slots = slots

    def size(self, tokens: int) -> int:
        shape = self._device.shape.chunk_shape(tokens)
        layers, _, _, heads, _ = shape
        each = self._layers_a_payload(shape)
        sizes = [self._spacing(min(each, layers - first), shape) for first in range(0, layers, each)]
        return sum(sizes) + 8 * layers * heads

    def code(self, start: int, end: int, out: torch.Tensor) -> None:
        """See Coding. Raises KvError(CODEC) where kernels have failed: the importer computes this KV, and what comes
        after it is coded on the CPU.
        """
        device, slots = self._device, self._slots(start, end)
        layers, _, _, heads, _ = device.shape.chunk_shape(1)
        if not device.moved(lambda: self.encode(device.places((0, layers), (0, heads), slots), out)):
            raise KvError(KvFault.CODEC, "the kernels that code KV cannot be compiled on this device")

    def staged(self, start: int, end: int, coded: torch.Tensor) -> CodedSegment:
        require_finite(self._tops(coded))
        return CodedSegment(start, end, self._codec, self.payloads(end - start, coded))

    def encode(self, places: Places, out: torch.Tensor) -> None:
        encode_into(places, self._codec, self._layers_a_payload(places.shape), out, self._tops(out))

    def payloads(self, tokens: int, coded: torch.Tensor) -> tuple[CodedLayers, ...]:
        shape = self._device.shape.chunk_shape(tokens)
        layers, each = shape[0], self._layers_a_payload(shape)
        payloads = []
        for number, first in enumerate(range(0, layers, each)):
            last, at = min(first + each, layers), number * self._spacing(each, shape)
            size = payload_bytes((last - first, *shape[1:]), self._device.dtype, self._codec)
            payloads.append(CodedLayers(first, last, coded[at : at + size]))
        return tuple(payloads)

    def _layers_a_payload(self, shape: Shape) -> int:
        return self._device.shape.layers_a_frame(shape[2], shape[3], self._codec)

    def _spacing(self, layers: int, shape: Shape) -> int:
        return spacing((layers, *shape[1:]), self._device.dtype, self._codec)

    def _tops(self, coded: torch.Tensor) -> torch.Tensor:
        layers, _, _, heads, _ = self._device.shape.chunk_shape(1)
        return coded[coded.numel() - 8 * layers * heads :].view(torch.int32).view(layers, 2, heads)
