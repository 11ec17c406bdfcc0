"""The inverse of `codec_quantise`, compiled; KV is passed in the same way."""

from typing import Any

import numpy as np

from services.worker.kv.codec_bits import F, kernel, lowered, of_half, part, read_floats
from shared.domain.kv import TOKEN_GROUP


@part
def _unpack(payload: Any, at: Any, size: Any, bits: Any) -> Any:
    """The coded values of a section, one a byte."""
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
