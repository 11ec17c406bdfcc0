"""What the Triton kernels of all codecs share: where a value lies, numbers by their bits, and the greatest magnitudes.

`like` is any of the caches, for its dtype; `pointers` to `step_head` are of `codec_triton.Places`. Kernels that code
write one payload or several, each of `sides` K and V, `spaced` bytes apart.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# Whole numbers that change from call to call: a kernel is not compiled again for those that are 1 or a multiple of 16.
_VARYING = ("tokens", "values", "first", "group", "at", "apart", "codes", "count", "sides", "spaced")
jit: Callable[[Any], Any] = triton.jit(do_not_specialize=_VARYING)


@jit
def address_of(
    like: "Any",
    pointers: "Any",
    which: "Any",
    slot: "Any",
    head: "Any",
    channel: "Any",
    block: "Any",
    step_block: "Any",
    step_offset: "Any",
    step_head: "Any",
) -> "Any":
    """Where a value lies; `which` is layer * 2 + side."""
    base = tl.load(pointers + which).to(tl.pointer_type(like.dtype.element_ty))
    step = slot // block * step_block + slot % block * step_offset
    return base + step + head * step_head + channel


@jit
def bits_of(value: "Any") -> "Any":
    """Of a float32."""
    return value.to(tl.uint32, bitcast=True)


@jit
def float_of(number: "Any") -> "Any":
    """Of those bits."""
    return number.to(tl.uint32).to(tl.float32, bitcast=True)


@jit
def lowered(value: "Any", like: "Any") -> "Any":
    """A float32 as the cache has it, rounded half to even: Triton's interpreter cuts bfloat16 off."""
    if like.dtype.element_ty == tl.bfloat16:
        bits = bits_of(value)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505  # Triton needs both ways to end alike
        return value.to(like.dtype.element_ty)


@jit
def tops(
    like: "Any",
    pointers: "Any",
    slots: "Any",
    block: "Any",
    step_block: "Any",
    step_offset: "Any",
    step_head: "Any",
    tokens: "Any",
    heads: "Any",
    dim: "Any",
    tops: "Any",
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
) -> "Any":
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
