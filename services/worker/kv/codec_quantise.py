"""The loops that code int8 and int4, compiled for this machine's vector units; `codec` says what they compute.

Values are the bits of bfloat16 (int16) or float32 (int32). KV [layers, 2, tokens, heads, head_dim] is a flat array and
`steps`, by how many values layers, K and V, and tokens are apart; what a token has of all heads lies together: a row.

Importing this takes 0.7 s and 65 MB. A first call compiles, or reads what an earlier process compiled.
"""

from typing import Any

import numpy as np

from services.worker.kv.codec_bits import (
    INFINITE,
    MAGNITUDE,
    F,
    U,
    bits_of,
    float_of,
    half,
    kernel,
    of_half,
    ordered,
    part,
    raised,
)
from shared.domain.kv import TOKEN_GROUP

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
    """Code a row of V."""
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
