"""The layouts of an engine's paged KV cache, read and written as rows [token, head, head_dim]: K and V of an attention
layer, the latent of one with multi-head latent attention, the state of a recurrent layer.

A cache here is the tensor of one layer on one rank. Slots number its token places: block * block_size + offset.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class LayoutError(Exception):
    """The engine's KV cache has an unknown layout: transferring from it would corrupt answers."""


class KvLayout(Protocol):
    """Reads and writes the KV cache of one layer."""

    block_size: int
    kv_heads: int
    head_dim: int
    sides: int  # rows of a head and token: K and V, or one

    def gather(self, cache: torch.Tensor, blocks: torch.Tensor, start: int, end: int, out: torch.Tensor) -> None:
        """Copy tokens [start, end) of a sequence with those `blocks` (int64) into `out` [sides, tokens, heads,
        dim].
        """

    def scatter(self, cache: torch.Tensor, slots: torch.Tensor, head: int, kv: torch.Tensor) -> None:
        """Write `kv` [sides, tokens, heads, dim] of the cache's dtype to `slots` [tokens], from local head `head`
        on.
        """


def slots_of(blocks: torch.Tensor, block_size: int, start: int, end: int) -> torch.Tensor:
    """Slots (int64) of tokens [start, end) of a sequence with those blocks."""
    positions = torch.arange(start, end)
    return blocks[positions // block_size] * block_size + positions % block_size


View = Callable[[torch.Tensor], torch.Tensor]


class StridedLayout:
    """Layouts that plain indexing can address: those of GPU backends, and of latents.

    `sides` give views [kernel block, offset, head, dim] of a cache, whatever the strides: of K and of V, or of the
    latent. An attention backend may divide each block of `block_size` tokens into kernel blocks, which follow each
    other in memory, so that a slot has the same number in both.
    """

    def __init__(
        self, sides: tuple[View, ...], block_size: int, kv_heads: int, head_dim: int, kernel_block: int = 0
    ) -> None:
        """`kernel_block`: tokens of a kernel block, which divide `block_size`; 0: blocks are not divided."""
        self.block_size = block_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.sides = len(sides)
        self._kernel_block = kernel_block or block_size
        self._sides = sides

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The sides of a cache as [kernel block, offset, head, dim]."""
        return tuple(view(cache) for view in self._sides)

    def gather(self, cache: torch.Tensor, blocks: torch.Tensor, start: int, end: int, out: torch.Tensor) -> None:
        size, parts = self._kernel_block, self.block_size // self._kernel_block
        first = start // size
        if parts > 1:
            blocks = (blocks.unsqueeze(1) * parts + torch.arange(parts, device=blocks.device)).flatten()
        wanted = blocks[first : -(-end // size)].to(cache.device)
        skip = start - first * size
        for side, view in enumerate(self._sides):
            tokens = view(cache).index_select(0, wanted).flatten(0, 1)
            out[side].copy_(tokens[skip : skip + end - start])

    def scatter(self, cache: torch.Tensor, slots: torch.Tensor, head: int, kv: torch.Tensor) -> None:
        slots = slots.to(cache.device)
        blocks, offsets = slots // self._kernel_block, slots % self._kernel_block
        kv = kv.to(cache.device)
        heads = slice(head, head + kv.shape[2])
        for side, view in enumerate(self._sides):
            view(cache)[:, :, heads][blocks, offsets] = kv[side]


def strided_layout(cache: torch.Tensor, head_dim: int, block_size: int) -> StridedLayout:
    """The layout of a GPU backend's cache, from its shape, which does not tell heads from slots of K and V: see
    `vllm.layers.objection_to`. Raises LayoutError where the shape is ambiguous or unknown.

    vLLM 0.32: [kernel block, head, offset, K then V], any strides (NHD and HND differ in strides only). Before it:
    [2, block, offset, head, dim] (FlashAttention) and [block, 2, offset, head, dim] (FlashInfer, Triton).
    """
    shape = tuple(cache.shape)
    if len(shape) == 4 and shape[3] == 2 * head_dim and shape[2] and block_size % shape[2] == 0:
        sides = (lambda c: c[..., :head_dim].transpose(1, 2), lambda c: c[..., head_dim:].transpose(1, 2))
        return StridedLayout(sides, block_size, shape[1], head_dim, shape[2])
    if len(shape) == 5 and shape[2] == block_size and shape[4] == head_dim and (shape[0] == 2) != (shape[1] == 2):
        axis = 0 if shape[0] == 2 else 1
        both = (lambda c: c.select(axis, 0), lambda c: c.select(axis, 1))
        return StridedLayout(both, block_size, shape[3], head_dim)
    raise LayoutError(f"unknown KV cache shape {shape} for block size {block_size} and head_dim {head_dim}")


def row_layout(cache: torch.Tensor, row: int, block_size: int) -> StridedLayout:
    """The layout of a cache with one row of `row` values for each token and head: a latent, [kernel block, offset, row]
    or with a head of its own, or K and V that differ in channels. Raises LayoutError.
    """
    shape = tuple(cache.shape)
    if len(shape) == 3 and shape[2] == row and shape[1] and block_size % shape[1] == 0:
        return StridedLayout((lambda c: c.unsqueeze(2),), block_size, 1, row, shape[1])
    if len(shape) == 4 and shape[3] == row and shape[2] and block_size % shape[2] == 0:
        return StridedLayout((lambda c: c.transpose(1, 2),), block_size, shape[1], row, shape[2])
    raise LayoutError(f"unknown KV cache shape {shape} for block size {block_size} and rows of {row}")


class StateLayout:
    """The state of a recurrent layer, of which a block holds one: that after the last token that is computed of it.

    `view` gives [block, side, head, value] of a cache.
    """

    def __init__(self, view: View, cache: torch.Tensor, block_size: int) -> None:
        self.block_size = block_size
        _, self.sides, self.kv_heads, self.head_dim = view(cache).shape
        self._view = view

    def gather(self, cache: torch.Tensor, blocks: torch.Tensor, start: int, end: int, out: torch.Tensor) -> None:
        block = blocks[(end - 1) // self.block_size]
        out[:, 0].copy_(self._view(cache)[block])

    def scatter(self, cache: torch.Tensor, slots: torch.Tensor, head: int, kv: torch.Tensor) -> None:
        block = slots[0] // self.block_size
        self._view(cache)[block, :, head : head + kv.shape[2]] = kv[:, 0].to(cache.device)


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Interior:
    """Where K, or V, of one block and head lies: nested loops over its places in memory.

    `sizes` of the loops, outermost first; `steps` is by how much each raises token * head_dim + channel. No
    loop crosses from channels into tokens.
    """

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    head_dim: int

    def tokens(self, blocks: torch.Tensor) -> torch.Tensor:
        """From [blocks, heads, block_size * head_dim] in memory order to [tokens, heads, head_dim]."""
        loops = sorted(range(len(self.sizes)), key=lambda loop: -self.steps[loop])
        over_tokens = [2 + loop for loop in loops if self.steps[loop] >= self.head_dim]
        over_channels = [2 + loop for loop in loops if self.steps[loop] < self.head_dim]
        count, heads, _ = blocks.shape
        nested = blocks.view(count, heads, *self.sizes)
        return nested.permute(0, *over_tokens, 1, *over_channels).reshape(-1, heads, self.head_dim)

    def describe(self) -> str:
        names = {1: "channel", self.head_dim: "token"}
        return " x ".join(
            f"{size} {names.get(step, f'step {step}')}" for size, step in zip(self.sizes, self.steps, strict=True)
        )


def find_interior(order: torch.Tensor, head_dim: int) -> Interior:
    """The loops behind `order` [places], the index token * head_dim + channel of each place. Raises
    LayoutError.
    """
    numbers = order.tolist()
    if numbers[:1] != [0] or sorted(numbers) != list(range(len(numbers))):
        raise LayoutError("the interior of a KV block is not a permutation of its tokens and channels")
    loops: list[tuple[int, int]] = []  # innermost first
    covered = 1
    while covered < len(numbers):
        step = numbers[covered]
        size = 2
        while size * covered < len(numbers) and numbers[size * covered] == size * step:
            size += 1
        if step < head_dim < size * step and head_dim % step == 0:
            size = head_dim // step  # this loop would cross from channels into tokens: the rest is another one
        loops.insert(0, (size, step))
        covered *= size
    interior = Interior(tuple(size for size, _ in loops), tuple(step for _, step in loops), head_dim)
    if covered != len(numbers) or not _matches(interior, order):
        raise LayoutError("the interior of a KV block is not made of nested loops")
    return interior


def _matches(interior: Interior, order: torch.Tensor) -> bool:
    restored = interior.tokens(order.view(1, 1, -1)).flatten()
    return torch.equal(restored, torch.arange(order.numel()))


class CpuLayout:
    """vLLM's CPU backend: [block, head, offset, 2 * dim], whose interior depends on the instruction set.

    The engine's own kernel writes; what it does to a block is found out once, by writing numbers through it.
    """

    sides = 2

    def __init__(
        self, kernel: Kernel, cache: torch.Tensor, head_dim: int, block_size: int, eight_bit: torch.dtype | None = None
    ) -> None:
        """`kernel(k, v, k_cache, v_cache, slots)` writes [tokens, heads, dim], as `eight_bit` into a cache of bytes.
        Raises LayoutError.
        """
        if cache.dim() != 4 or tuple(cache.shape[2:]) != (block_size, 2 * head_dim):
            raise LayoutError(f"unknown KV cache shape {tuple(cache.shape)} on CPU")
        self.block_size = block_size
        self.kv_heads = cache.shape[1]
        self.head_dim = head_dim
        self._kernel = kernel
        self._eight_bit = eight_bit
        self._sides = self._probe(cache.dtype)

    def describe(self) -> str:
        return "; ".join(f"{name}: {side.describe()}" for name, side in zip("KV", self._sides, strict=True))

    def gather(self, cache: torch.Tensor, blocks: torch.Tensor, start: int, end: int, out: torch.Tensor) -> None:
        first = start // self.block_size
        wanted = blocks[first : -(-end // self.block_size)]
        skip = start - first * self.block_size
        halves = cache.view(cache.shape[0], self.kv_heads, 2, self.block_size * self.head_dim)
        for index, side in enumerate(self._sides):
            inner = halves[:, :, index].index_select(0, wanted)
            out[index].copy_(side.tokens(inner)[skip : skip + end - start])

    def scatter(self, cache: torch.Tensor, slots: torch.Tensor, head: int, kv: torch.Tensor) -> None:
        heads = kv.shape[2]
        part = cache[:, head : head + heads]
        two_tables = part.view(part.shape[0], heads, 2 * self.block_size, self.head_dim)
        keys, values = two_tables.chunk(2, dim=2)
        self._kernel(kv[0].contiguous(), kv[1].contiguous(), keys, values, slots)

    def _probe(self, dtype: torch.dtype) -> tuple[Interior, Interior]:
        count = self.block_size * self.head_dim
        found = torch.zeros(2, count, dtype=torch.int64)
        weight, base = 1, 128 if self._eight_bit is None else 8  # the dtype holds such digits exactly
        while weight < count:
            found += weight * self._write_digits(dtype, weight, base)
            weight *= base
        return find_interior(found[0], self.head_dim), find_interior(found[1], self.head_dim)

    def _write_digits(self, dtype: torch.dtype, weight: int, base: int) -> torch.Tensor:
        """What lies at each place of block 1 after one digit of 0, 1, 2, … was written into it: [2, places]."""
        heads = self.kv_heads
        cache = torch.zeros(2, heads, self.block_size, 2 * self.head_dim, dtype=dtype)
        numbers = torch.arange(self.block_size * self.head_dim).view(self.block_size, 1, self.head_dim)
        given = dtype if self._eight_bit is None else torch.bfloat16
        digits = (numbers // weight % base).to(given).expand(-1, heads, -1).contiguous()
        slots = torch.arange(self.block_size, 2 * self.block_size)
        self.scatter(cache, slots, 0, torch.stack([digits, digits]))
        if cache[0].any():
            raise LayoutError("the engine's kernel wrote outside of the block")
        written = cache[1] if self._eight_bit is None else cache[1].view(self._eight_bit).float()
        halves = written.view(heads, 2, -1)
        if not (halves == halves[:1]).all():
            raise LayoutError("the interior of a block differs between heads")
        return halves[0].float().round().to(torch.int64)
