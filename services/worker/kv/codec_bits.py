"""Numbers by their bits, for compiled loops: float32, bfloat16, float16 and fp8 (e4m3fn), rounded half to even as torch
does.

Each operation is cast, as whole numbers would become 64 bits wide and half as many fit a vector. Both sides of a choice
are computed first: then it takes no branch.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Loop = TypeVar("Loop", bound=Callable[..., Any])

F, U = np.float32, np.uint32
_I32 = ir.IntType(32)
INFINITE = U(0x7F800000)  # magnitudes from here on are not finite
MAGNITUDE = U(0x7FFFFFFF)
_SIGN = U(0x80000000)


def kernel(loop: Loop) -> Loop:
    """Compile; it runs without the GIL. What is compiled is kept for later processes until the date of the loop's own
    file changes: whoever changes a part of it that lies elsewhere, touches that file.
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
