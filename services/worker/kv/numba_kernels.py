"""The loops of the KV codecs on the CPU, compiled with numba for the machine's vector units: fp8, int8 and int4,
encoded and decoded, and the conversions between number formats on which they rely. `codec` defines the format of the
result.

Values are the bits of bfloat16 (int16) or float32 (int32). KV [layers, 2, tokens, heads, head_dim] is a flat array and
`steps`, by how many values layers, K and V, and tokens are apart; a row is what a token has of all heads, which lies
together. float32, bfloat16, float16 and fp8 (e4m3fn) are rounded half to even, as torch does.

Each operation is cast: whole numbers would otherwise become 64 bits wide, and half as many fit a vector. Both sides
of a choice are computed first, so that it needs no branch.

Importing this takes 0.7 s and 65 MB. A first call compiles, or reads what an earlier process compiled.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from shared.domain.kv import TOKEN_GROUP

Loop = TypeVar("Loop", bound=Callable[..., Any])

F, U = np.float32, np.uint32
_I32 = ir.IntType(32)
INFINITE = U(0x7F800000)  # magnitudes from here on are not finite
MAGNITUDE = U(0x7FFFFFFF)
_SIGN = U(0x80000000)


def kernel(loop: Loop) -> Loop:
    """Compile a loop, which then runs without the GIL. Later processes reuse the compiled code until this file
    changes.
    """
    compiled: Loop = njit(nogil=True, cache=True, error_model="numpy")(loop)
    return compiled


def part(function: Loop) -> Loop:
    """Compile as a part of kernels."""
    compiled: Loop = njit(nogil=True, error_model="numpy")(function)
    return compiled


def _instructions(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = intrinsic(function)
    return made


@_instructions
def float_of(_: Any, bits: Any) -> Any:
    """The float32 of those bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@_instructions
def bits_of(_: Any, value: Any) -> Any:
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), generate


@_instructions
def ordered(_: Any, bits: Any) -> Any:
    """A whole number, as wide as the bits, that is less where the value of those bits is. Its own inverse."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        negative = builder.ashr(arguments[0], kind(kind.width - 1))
        return builder.xor(arguments[0], builder.and_(negative, kind((1 << (kind.width - 1)) - 1)))

    return bits(bits), generate


@_instructions
def raised(_: Any, bits: Any) -> Any:
    """The float32 of a value's bits: a bfloat16's (int16) or a float32's (int32)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = builder.zext(arguments[0], _I32) if bits.bitwidth == 16 else arguments[0]
        return builder.bitcast(builder.shl(wide, _I32(32 - bits.bitwidth)), ir.FloatType())

    return types.float32(bits), generate


@_instructions
def lowered(_: Any, value: Any, like: Any) -> Any:
    """Bits, of the type of `like`, of the value next to a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], _I32)
        if like.bitwidth == 32:
            return bits
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        return builder.trunc(builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), odd), _I32(16)), ir.IntType(16))

    return like(types.float32, like), generate


@part
def half(value: Any) -> Any:
    """Bits of the float16 next to a float32 below 65504."""
    bits = bits_of(value)
    sign = U(U(bits & _SIGN) >> U(16))
    bits = U(bits & MAGNITUDE)
    small = U(bits_of(float_of(bits) + F(0.5)) - U(126 << 23))  # 1/2 has the spacing of the least float16
    odd = U(U(bits >> U(13)) & U(1))
    large = U(U(bits - U(112 << 23) + U(0xFFF) + odd) >> U(13))
    rounded = small if bits < U(113 << 23) else large
    return np.uint16(sign | rounded)


@part
def of_half(bits: Any) -> Any:
    """The float32 of a finite float16's bits."""
    value = float_of(U(U(U(bits) & U(0x7FFF)) << U(13))) * F(2.0**112)
    return float_of(U(bits_of(value) | U(U(U(bits) & U(0x8000)) << U(16))))


@part
def fp8(value: Any) -> Any:
    """Bits of the e4m3fn next to a float32 within ±448."""
    bits = bits_of(value)
    sign = U(U(bits & _SIGN) >> U(24))
    bits = U(bits & MAGNITUDE)
    small = U(bits_of(float_of(bits) + F(2.0**14)) - U(141 << 23))  # 2^14 has the spacing of the least e4m3fn
    odd = U(U(bits >> U(20)) & U(1))
    large = U(U(bits - U(120 << 23) + U(0x7FFFF) + odd) >> U(20))
    rounded = small if bits < U(121 << 23) else large
    return np.uint8(sign | rounded)


@part
def of_fp8(bits: Any) -> Any:
    """The float32 of an e4m3fn's bits; 480 where it is none."""
    value = float_of(U(U(U(bits) & U(0x7F)) << U(20))) * F(2.0**120)
    return float_of(U(bits_of(value) | U(U(U(bits) & U(0x80)) << U(24))))


@part
def read_floats(payload: Any, at: Any, out: Any) -> None:
    """Float32s from bytes at any address."""
    for i in range(out.size):
        low = U(U(payload[at + 4 * i]) | U(U(payload[at + 4 * i + 1]) << U(8)))
        high = U(U(payload[at + 4 * i + 2]) | U(U(payload[at + 4 * i + 3]) << U(8)))
        out[i] = float_of(U(low | U(high << U(16))))


_TOP_EXPONENT = U(14)  # magnitudes up to 2^14 after normalisation: max - min then fits into float16
_LEAST_TOP = U((127 - 80) << 23)  # 2^-80: smaller values are coded as if this were the greatest
_ULP = F(2.0**-10)  # spacing of float16 numbers, relative
_TINY = F(2.0**-24)  # smallest positive float16
_WHOLE = F(3 << 22)  # a sum with it is rounded to a whole number, which its lowest bits are


@part
def _key_ranges(src: Any, at: Any, step: Any, tokens: Any, low: Any, high: Any) -> None:
    """Ordered least and greatest of each channel in each group of tokens of a layer's K: [groups, row]."""
    row = low.shape[1]
    for each in range(low.shape[0]):
        lows, highs = low[each], high[each]
        first = at + each * TOKEN_GROUP * step
        values = src[first : first + row]
        for c in range(row):
            lows[c] = highs[c] = ordered(values[c])
        for token in range(1, min(TOKEN_GROUP, tokens - each * TOKEN_GROUP)):
            values = src[first + token * step : first + token * step + row]
            for c in range(row):
                number = ordered(values[c])
                lows[c], highs[c] = min(lows[c], number), max(highs[c], number)


@part
def _value_ranges(src: Any, at: Any, step: Any, group: Any, low: Any, high: Any) -> None:
    """Ordered least and greatest of each group of channels of each token of a layer's V: [tokens, groups]."""
    for token in range(low.shape[0]):
        for each in range(low.shape[1]):
            first = at + token * step + each * group
            values = src[first : first + group]
            least = most = ordered(values[0])
            for c in range(1, group):
                number = ordered(values[c])
                least, most = min(least, number), max(most, number)
            low[token, each], high[token, each] = least, most


@part
def _top(numbers: Any) -> Any:
    """Bits of the greatest magnitude among ordered numbers."""
    top = U(0)
    for i in range(numbers.size):
        top = max(top, U(bits_of(raised(ordered(numbers[i]))) & MAGNITUDE))
    return top


@part
def _unit(top: Any) -> Any:
    """2^(ceil(log2(top)) - 14), of the bits of a finite top."""
    exponent = U(U(max(top, _LEAST_TOP) + U((1 << 23) - 1)) >> U(23))
    return float_of(U(U(exponent - _TOP_EXPONENT) << U(23)))


@part
def _grids(low: Any, high: Any, unit: Any, bits: Any, scales: Any, zeros: Any) -> None:
    """Bits of each group's scale, rounded up, and zero, rounded down: (x - zero) / scale rounds to 0 … 2^bits - 1."""
    levels = F((1 << bits) - 1)
    for i in range(low.size):
        least = raised(ordered(low[i])) / unit + F(0.0)  # -0 becomes 0
        most = raised(ordered(high[i])) / unit + F(0.0)
        near, below = half(least), half(least - abs(least) * _ULP - _TINY)
        zero = below if of_half(near) > least else near
        exact = (most - of_half(zero)) / levels
        near, above = half(exact), half(exact * (F(1.0) + _ULP) + _TINY)
        scale = above if of_half(near) < exact else near
        scales[i], zeros[i] = max(scale, np.uint16(1)), zero


@part
def _store(scales: Any, zeros: Any, payload: Any, at: Any, apart: Any) -> None:
    """Write scales at `at` and zeros so far behind: in bytes, as sections may lie at odd addresses."""
    for i in range(scales.size):
        payload[at + 2 * i] = np.uint8(scales[i] & np.uint16(255))
        payload[at + 2 * i + 1] = np.uint8(scales[i] >> np.uint16(8))
        payload[at + apart + 2 * i] = np.uint8(zeros[i] & np.uint16(255))
        payload[at + apart + 2 * i + 1] = np.uint8(zeros[i] >> np.uint16(8))


@part
def _encode_keys(src: Any, at: Any, step: Any, unit: Any, scales: Any, zeros: Any, codes: Any) -> None:
    """Code the tokens of one group of a layer's K."""
    row = scales.size
    scale, zero = np.empty(row, np.float32), np.empty(row, np.float32)
    for c in range(row):
        scale[c], zero[c] = of_half(scales[c]) * unit, of_half(zeros[c]) * unit
    for token in range(codes.size // row):
        values, coded = src[at + token * step : at + token * step + row], codes[token * row : (token + 1) * row]
        for c in range(row):
            coded[c] = np.uint8(bits_of((raised(values[c]) - zero[c]) / scale[c] + _WHOLE))


@part
def _encode_values(values: Any, unit: Any, scales: Any, zeros: Any, coded: Any) -> None:
    group = coded.size // scales.size
    for each in range(scales.size):
        scale, zero = of_half(scales[each]) * unit, of_half(zeros[each]) * unit
        some, out = values[each * group : (each + 1) * group], coded[each * group : (each + 1) * group]
        for c in range(group):
            out[c] = np.uint8(bits_of((raised(some[c]) - zero) / scale + _WHOLE))


@part
def _pack(codes: Any, bits: Any, payload: Any, at: Any) -> Any:
    """Write coded values that are not in place yet: two a byte. Where the next section begins."""
    if bits == 8:
        return at + codes.size
    size = codes.size // 2
    low, high, out = codes[:size], codes[size:], payload[at : at + size]
    for i in range(size):
        out[i] = np.uint8(low[i] | np.uint8(high[i] << np.uint8(4)))
    return at + size


@part
def _codes(payload: Any, at: Any, size: Any, bits: Any) -> Any:
    """Where the coded values of a section go, one a byte: there, or where `_pack` finds them."""
    return payload[at : at + size] if bits == 8 else np.empty(size, np.uint8)


@part
def _key_section(kv: Any, ranges: Any, units: Any, span: Any, bits: Any, payload: Any, at: Any) -> Any:
    """Code the groups of K in a `span`: the first one, how many, and tokens of each. Where the next section begins."""
    src, steps = kv
    low, high = ranges
    first, groups, tokens = span
    layers, row = low.shape[0], low.shape[2]
    apart = 2 * layers * groups * row
    scales, zeros = np.empty(row, np.uint16), np.empty(row, np.uint16)
    codes = _codes(payload, at + 2 * apart, layers * groups * tokens * row, bits)
    for number in range(layers * groups):
        layer, each = number // groups, first + number % groups
        _grids(low[layer, each], high[layer, each], units[layer, 0], bits, scales, zeros)
        _store(scales, zeros, payload, at + 2 * number * row, apart)
        start, size = layer * steps[0] + each * TOKEN_GROUP * steps[2], tokens * row
        coded = codes[number * size : (number + 1) * size]
        _encode_keys(src, start, steps[2], units[layer, 0], scales, zeros, coded)
    return _pack(codes, bits, payload, at + 2 * apart)


@part
def _value_section(kv: Any, ranges: Any, units: Any, row: Any, bits: Any, payload: Any, at: Any) -> None:
    src, steps = kv
    low, high = ranges
    layers, tokens, groups = low.shape
    apart = 2 * low.size
    scales, zeros = np.empty(groups, np.uint16), np.empty(groups, np.uint16)
    codes = _codes(payload, at + 2 * apart, layers * tokens * row, bits)
    for number in range(layers * tokens):
        layer, token = number // tokens, number % tokens
        _grids(low[layer, token], high[layer, token], units[layer, 1], bits, scales, zeros)
        _store(scales, zeros, payload, at + 2 * number * groups, apart)
        start = layer * steps[0] + steps[1] + token * steps[2]
        coded = codes[number * row : (number + 1) * row]
        _encode_values(src[start : start + row], units[layer, 1], scales, zeros, coded)
    _pack(codes, bits, payload, at + 2 * apart)


@kernel
def encode_ints(src: Any, steps: Any, shape: Any, group: Any, bits: Any, payload: Any) -> bool:
    """Fill `payload` (uint8); False when a value is not finite.

    `shape`: layers, tokens, row; `group`: channels of V that share a scale.
    """
    layers, tokens, row = shape
    whole, rest = tokens // TOKEN_GROUP, tokens % TOKEN_GROUP
    keys = np.empty((2, layers, whole + (rest > 0), row), src.dtype)  # least and greatest of each group
    values = np.empty((2, layers, tokens, row // group), src.dtype)
    units = np.empty((layers, 2), np.float32)
    for layer in range(layers):
        at = layer * steps[0]
        _key_ranges(src, at, steps[2], tokens, keys[0, layer], keys[1, layer])
        _value_ranges(src, at + steps[1], steps[2], group, values[0, layer], values[1, layer])
        for side, ranges in enumerate((keys, values)):
            top = max(_top(ranges[0, layer].reshape(-1)), _top(ranges[1, layer].reshape(-1)))
            if top >= INFINITE:
                return False
            units[layer, side] = _unit(top)
    at, kv = 8 * layers, (src, steps)
    payload[:at] = units.reshape(-1).view(np.uint8)
    if whole:
        at = _key_section(kv, (keys[0], keys[1]), units, (0, whole, TOKEN_GROUP), bits, payload, at)
    if rest:
        at = _key_section(kv, (keys[0], keys[1]), units, (whole, 1, rest), bits, payload, at)
    _value_section(kv, (values[0], values[1]), units, row, bits, payload, at)
    return True


# fp8.


_MAX = F(448.0)  # of torch.float8_e4m3fn
_LEAST_SCALE = F(2.0**-126)


@part
def _tops(src: Any, at: Any, step: Any, tokens: Any, dim: Any, tops: Any) -> None:
    """Bits of the greatest magnitude of each head of a layer's K or V."""
    tops[:] = 0
    for token in range(tokens):
        for head in range(tops.size):
            first = at + token * step + head * dim
            values, top = src[first : first + dim], tops[head]
            for c in range(dim):
                top = max(top, U(bits_of(raised(values[c])) & MAGNITUDE))
            tops[head] = top


@part
def _encode_row(values: Any, scales: Any, out: Any) -> None:
    dim = out.size // scales.size
    for head in range(scales.size):
        scale, some, coded = scales[head], values[head * dim : (head + 1) * dim], out[head * dim : (head + 1) * dim]
        for c in range(dim):
            coded[c] = fp8(min(max(raised(some[c]) / scale, -_MAX), _MAX))


@kernel
def encode_fp8(src: Any, steps: Any, shape: Any, dim: Any, payload: Any) -> bool:
    """Fill `payload` (uint8); False when a value is not finite. `shape`: layers, tokens, row."""
    layers, tokens, row = shape
    scales = np.empty((2 * layers, row // dim), np.float32)
    tops = np.empty(row // dim, np.uint32)
    codes = payload[4 * scales.size :].reshape(2 * layers * tokens, row)
    for number in range(2 * layers):
        at = number // 2 * steps[0] + number % 2 * steps[1]
        _tops(src, at, steps[2], tokens, dim, tops)
        for head in range(tops.size):
            if tops[head] >= INFINITE:
                return False
            scales[number, head] = max(float_of(tops[head]) / _MAX, _LEAST_SCALE)
        for token in range(tokens):
            first = at + token * steps[2]
            _encode_row(src[first : first + row], scales[number], codes[number * tokens + token])
    payload[: 4 * scales.size] = scales.reshape(-1).view(np.uint8)
    return True


@kernel
def decode_fp8(payload: Any, steps: Any, shape: Any, dim: Any, out: Any) -> None:
    """The inverse of `encode_fp8`: from `payload` into KV `out` with those steps."""
    layers, tokens, row = shape
    heads = row // dim
    scales = np.empty(2 * layers * heads, np.float32)
    read_floats(payload, 0, scales)
    codes = payload[4 * scales.size :].reshape(2 * layers * tokens, row)
    for number in range(2 * layers):
        for token in range(tokens):
            at = number // 2 * steps[0] + number % 2 * steps[1] + token * steps[2]
            coded, values = codes[number * tokens + token], out[at : at + row]
            for head in range(heads):
                scale = scales[number * heads + head]
                some, into = coded[head * dim : (head + 1) * dim], values[head * dim : (head + 1) * dim]
                for c in range(dim):
                    into[c] = lowered(of_fp8(some[c]) * scale, into[c])


# Decoding of int8 and int4.


@part
def _unpack(payload: Any, at: Any, size: Any, bits: Any) -> Any:
    if bits == 8:
        return payload[at : at + size]
    codes = np.empty(size, np.uint8)
    packed, low, high = payload[at : at + size // 2], codes[: size // 2], codes[size // 2 :]
    for i in range(size // 2):
        low[i], high[i] = packed[i] & np.uint8(15), packed[i] >> np.uint8(4)
    return codes


@part
def _load(payload: Any, at: Any, unit: Any, out: Any) -> None:
    """Scales, or zeros, as they are counted with."""
    for i in range(out.size):
        bits = np.uint16(np.uint16(payload[at + 2 * i]) | np.uint16(np.uint16(payload[at + 2 * i + 1]) << np.uint16(8)))
        out[i] = of_half(bits) * unit


@part
def _decode_keys(payload: Any, at: Any, units: Any, span: Any, bits: Any, row: Any, out: Any, steps: Any) -> Any:
    """Decode a section of K; where the next one begins."""
    first, tokens, group = span
    layers, groups = units.shape[0], tokens // group
    stats, size = layers * groups * row, layers * tokens * row
    codes = _unpack(payload, at + 4 * stats, size, bits).reshape(layers * tokens, row)
    scale, zero = np.empty(row, np.float32), np.empty(row, np.float32)
    for number in range(layers * tokens):
        layer, token = number // tokens, number % tokens
        if token % group == 0:
            _load(payload, at + 2 * (number // group) * row, units[layer, 0], scale)
            _load(payload, at + 2 * (stats + (number // group) * row), units[layer, 0], zero)
        start = layer * steps[0] + (first + token) * steps[2]
        coded, values = codes[number], out[start : start + row]
        for c in range(row):
            values[c] = lowered(F(coded[c]) * scale[c] + zero[c], values[c])
    return at + 4 * stats + size * bits // 8


@part
def _decode_values(
    payload: Any, at: Any, units: Any, tokens: Any, bits: Any, row: Any, groups: Any, out: Any, steps: Any
) -> None:
    layers, group = units.shape[0], row // groups
    stats = layers * tokens * groups
    codes = _unpack(payload, at + 4 * stats, layers * tokens * row, bits)
    scale, zero = np.empty(groups, np.float32), np.empty(groups, np.float32)
    for number in range(layers * tokens):
        layer, token = number // tokens, number % tokens
        _load(payload, at + 2 * number * groups, units[layer, 1], scale)
        _load(payload, at + 2 * (stats + number * groups), units[layer, 1], zero)
        start = layer * steps[0] + steps[1] + token * steps[2]
        for each in range(groups):
            coded = codes[number * row + each * group : number * row + (each + 1) * group]
            values = out[start + each * group : start + (each + 1) * group]
            a, b = scale[each], zero[each]
            for c in range(group):
                values[c] = lowered(F(coded[c]) * a + b, values[c])


@kernel
def decode_ints(payload: Any, steps: Any, shape: Any, group: Any, bits: Any, out: Any) -> None:
    """The inverse of `encode_ints`: from `payload` into KV `out` with those steps."""
    layers, tokens, row = shape
    units = np.empty((layers, 2), np.float32)
    read_floats(payload, 0, units.reshape(-1))
    at, whole = 8 * layers, tokens // TOKEN_GROUP * TOKEN_GROUP
    if whole:
        at = _decode_keys(payload, at, units, (0, whole, TOKEN_GROUP), bits, row, out, steps)
    if tokens > whole:
        rest = tokens - whole
        at = _decode_keys(payload, at, units, (whole, rest, rest), bits, row, out, steps)
    _decode_values(payload, at, units, tokens, bits, row, row // group, out, steps)
