"""The Triton kernels that move KV as it is between paged caches and what lies together: one launch for all layers.

`like` to `step_head` are as in `triton_bits`; `flat` holds [layers, 2, tokens, heads, head_dim] in the caches' dtype.
"""

from typing import Any

import triton.language as tl

from services.worker.kv.triton_bits import address_of, jit


@jit
def gather_raw(
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
    flat: "Any",
    TILE: tl.constexpr,
) -> "Any":
    """Out of the caches; `values` of each K or V."""
    which, index = tl.program_id(0), tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < values
    channel, head, token = index % dim, index // dim % heads, index // (dim * heads)
    slot = tl.load(slots + token, mask=mask, other=0)
    place = address_of(like, pointers, which, slot, head, channel, block, step_block, step_offset, step_head)
    tl.store(flat + which.to(tl.int64) * values + index, tl.load(place, mask=mask), mask=mask)


@jit
def scatter_raw(
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
    flat: "Any",
    TILE: tl.constexpr,
) -> "Any":
    """Into the caches."""
    which, index = tl.program_id(0), tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < values
    channel, head, token = index % dim, index // dim % heads, index // (dim * heads)
    slot = tl.load(slots + token, mask=mask, other=0)
    place = address_of(like, pointers, which, slot, head, channel, block, step_block, step_offset, step_head)
    tl.store(place, tl.load(flat + which.to(tl.int64) * values + index, mask=mask), mask=mask)
