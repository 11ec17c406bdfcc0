"""The loops of the fp8 codec, compiled; see `codec_quantise` for how KV is passed."""

from typing import Any

import numpy as np

from services.worker.kv.codec_bits import (
    INFINITE,
    MAGNITUDE,
    F,
    U,
    bits_of,
    float_of,
    fp8,
    kernel,
    lowered,
    of_fp8,
    part,
    raised,
    read_floats,
)

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
