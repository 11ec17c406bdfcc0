"""The layouts of engines' KV caches: what is written is read back, and lies where attention looks for it."""

import pytest
import torch
from torch import Tensor

from services.worker.kv.layout import (
    CpuLayout,
    Kernel,
    LayoutError,
    StateLayout,
    find_interior,
    row_layout,
    slots_of,
    strided_layout,
)

BLOCKS = 12


def kv_of(tokens: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, tokens, heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


def python_kernel(order: str) -> Kernel:
    """A writer that stands in for the engine's kernel, with K channel-major or in AMX-like pairs."""

    def write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        size, dim = keys.shape[2], keys.shape[3]
        for at, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, size)
            for head in range(k.shape[1]):
                flat_k = keys[block, head].view(-1)
                if order == "channel-major":
                    flat_k.view(dim, size)[:, offset] = k[at, head]
                else:
                    flat_k.view(size // 16, dim // 2, 16, 2)[offset // 16, :, offset % 16] = k[at, head].view(-1, 2)
                values[block, head].view(size, dim)[offset] = v[at, head]

    return write


def vllms_kernel(dtype: torch.dtype, block_size: int, dim: int) -> Kernel:
    """With the instruction set of the machine that runs the test, whichever it is."""
    ops = pytest.importorskip("vllm._custom_ops")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, block_size, dim, "auto")

    def write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa, 1.0, 1.0, "auto")

    return write


@pytest.mark.parametrize("order", ["channel-major", "pairs", "vllm"])
@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_interior_of_blocks_on_a_cpu_is_found_and_read_back(
    order: str, block_size: int, dtype: torch.dtype
) -> None:
    heads, dim = 4, 64
    kernel = vllms_kernel(dtype, block_size, dim) if order == "vllm" else python_kernel(order)
    cache = torch.randn(BLOCKS, heads, block_size, 2 * dim).to(dtype)
    layout = CpuLayout(kernel, cache, dim, block_size)
    blocks = torch.randperm(BLOCKS)[:5]
    start, end = 3, 4 * block_size + 1
    kv, part = kv_of(end - start, heads, dim, dtype), kv_of(end - start, 2, dim, dtype) + 1
    slots = slots_of(blocks, block_size, start, end)
    layout.scatter(cache, slots, 0, kv)
    layout.scatter(cache, slots, 1, part)
    kv[:, :, 1:3] = part
    out = torch.empty_like(kv)
    layout.gather(cache, blocks, start, end, out)
    assert torch.equal(out, kv), layout.describe()


@pytest.mark.parametrize(("block", "value", "reason"), [(1, 1.0, "permutation"), (0, 1.0, "outside")])
def test_a_kernel_that_writes_otherwise_is_refused(block: int, value: float, reason: str) -> None:
    def broken(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        keys[block] = value

    with pytest.raises(LayoutError, match=reason):
        CpuLayout(broken, torch.zeros(4, 2, 32, 64), 32, 32)


def test_an_interior_without_structure_is_refused() -> None:
    order = torch.arange(32 * 8)
    order[[5, 77]] = order[[77, 5]]
    with pytest.raises(LayoutError, match="loops"):
        find_interior(order, 8)


HEADS, SIZE, DIM = 3, 16, 8


@pytest.mark.parametrize(
    ("cache", "keys"),
    [
        pytest.param(torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM), lambda c: c[5, :, 7, :DIM], id="HND"),
        pytest.param(
            torch.zeros(BLOCKS, SIZE, HEADS, 2 * DIM).transpose(1, 2), lambda c: c[5, :, 7, :DIM], id="NHD strides"
        ),
        pytest.param(torch.zeros(2, BLOCKS, SIZE, HEADS, DIM), lambda c: c[0, 5, 7], id="FlashAttention"),
        pytest.param(torch.zeros(BLOCKS, 2, SIZE, HEADS, DIM), lambda c: c[5, 0, 7], id="FlashInfer"),
    ],
)
def test_layouts_of_gpus_read_what_they_write_where_attention_looks(cache: Tensor, keys: object) -> None:
    layout = strided_layout(cache, DIM, SIZE)
    assert (layout.kv_heads, layout.head_dim, layout.block_size) == (HEADS, DIM, SIZE)
    blocks, kv = torch.tensor([5, 0, 11]), kv_of(37, HEADS, DIM)
    layout.scatter(cache, slots_of(blocks, SIZE, 2, 39), 0, kv)
    out = torch.empty_like(kv)
    layout.gather(cache, blocks, 2, 39, out)
    assert torch.equal(out, kv)
    assert torch.equal(keys(cache), kv[0, 5])  # type: ignore[operator]  # token 7 is the sixth that was written


@pytest.mark.parametrize(("block_size", "kernel_block"), [(128, 64), (64, 16), (128, 128)])
@pytest.mark.parametrize("nhd", [False, True])
def test_blocks_that_the_attention_backend_divides_are_read_and_written(
    block_size: int, kernel_block: int, nhd: bool
) -> None:
    """As vLLM divides them: a manager's block is so many kernel blocks that follow each other."""
    parts = block_size // kernel_block
    raw = torch.zeros(BLOCKS * block_size * HEADS * 2 * DIM)
    if nhd:
        cache = raw.view(BLOCKS * parts, kernel_block, HEADS, 2 * DIM).transpose(1, 2)
    else:
        cache = raw.view(BLOCKS * parts, HEADS, kernel_block, 2 * DIM)
    layout, blocks = strided_layout(cache, DIM, block_size), torch.tensor([7, 2, 9])
    start, end = kernel_block + 5, 2 * block_size + 9
    kv = kv_of(end - start, HEADS, DIM)
    layout.scatter(cache, slots_of(blocks, block_size, start, end), 0, kv)
    for at, position in enumerate(range(start, end)):  # where vLLM's kernels look for it
        place = int(blocks[position // block_size]) * parts + position % block_size // kernel_block
        found = cache[place, :, position % kernel_block]
        assert torch.equal(torch.stack([found[:, :DIM], found[:, DIM:]]), kv[:, at])
    out = torch.empty_like(kv)
    layout.gather(cache, blocks, start, end, out)
    assert torch.equal(out, kv)


@pytest.mark.parametrize(("shape", "dim"), [((4, 16, 576), 576), ((2, 2, 16, 3, 8), 8)], ids=["MLA", "ambiguous"])
def test_unknown_shapes_are_refused(shape: tuple[int, ...], dim: int) -> None:
    with pytest.raises(LayoutError):
        strided_layout(torch.zeros(shape), dim, 16)


@pytest.mark.parametrize("kernel_block", [SIZE, SIZE // 2])
@pytest.mark.parametrize("heads", [None, HEADS], ids=["latent", "a row for each head"])
def test_rows_are_read_and_written_where_attention_looks(heads: int | None, kernel_block: int) -> None:
    parts, row = SIZE // kernel_block, 9
    shape = (BLOCKS * parts, kernel_block, row) if heads is None else (BLOCKS * parts, heads, kernel_block, row)
    cache = torch.zeros(shape)
    layout = row_layout(cache, row, SIZE)
    assert (layout.sides, layout.kv_heads, layout.head_dim, layout.block_size) == (1, heads or 1, row, SIZE)
    blocks, kv = torch.tensor([5, 0, 11]), kv_of(37, heads or 1, row)[:1]
    layout.scatter(cache, slots_of(blocks, SIZE, 2, 39), 0, kv)
    out = torch.empty_like(kv)
    layout.gather(cache, blocks, 2, 39, out)
    assert torch.equal(out, kv)
    for at, position in enumerate(range(2, 39)):
        place = int(blocks[position // SIZE]) * parts + position % SIZE // kernel_block
        assert torch.equal(cache[place, ..., position % kernel_block, :].view(-1, row), kv[0, at])


@pytest.mark.parametrize(
    "shape",
    [(4, 16, 8), (4, 16), (4, 24, 9), (4, 0, 9), (4, 3, 16, 8), (4, 3, 24, 9), (4, 3, 0, 9), (2, 4, 16, 3, 9)],
    ids=str,
)
def test_shapes_that_hold_no_such_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"unknown KV cache shape .* for block size 16 and rows of 9"):
        row_layout(torch.zeros(shape), 9, 16)


def state_layout() -> tuple[StateLayout, Tensor]:
    """A convolution's last 3 inputs of 4 channels, as vLLM keeps them beside something else: [block, step, channel]."""
    cache = torch.zeros(BLOCKS, 3, 7)
    return StateLayout(lambda held: held[:, :, 2:6].unsqueeze(3), cache, SIZE), cache


@pytest.mark.parametrize("end", [1, 2 * SIZE, 2 * SIZE + 1])
def test_a_state_is_that_of_the_block_of_the_last_token(end: int) -> None:
    layout, cache = state_layout()
    assert (layout.sides, layout.kv_heads, layout.head_dim) == (3, 4, 1)
    state = torch.arange(1.0, 13.0).view(3, 1, 4, 1)
    blocks = torch.tensor([5, 0, 11])
    layout.scatter(cache, slots_of(blocks, SIZE, end - 1, end), 0, state)
    here = int(blocks[(end - 1) // SIZE])
    assert torch.equal(cache[here, :, 2:6], state.view(3, 4))
    assert not cache[[block for block in range(BLOCKS) if block != here]].any()
    assert not cache[here, :, [0, 1, 6]].any()
    out = torch.empty_like(state)
    layout.gather(cache, blocks, end - 1, end, out)
    assert torch.equal(out, state)


def test_some_heads_of_a_state_are_written_beside_the_others() -> None:
    layout, cache = state_layout()
    blocks, whole = torch.tensor([5, 0, 11]), torch.zeros(3, 1, 4, 1)
    slots = slots_of(blocks, SIZE, 20, 21)
    for head, count, value in ((0, 1, 1.0), (1, 2, 2.0), (3, 1, 3.0)):
        part = torch.full((3, 1, count, 1), value, dtype=torch.float64)  # as it comes; kept in the cache's dtype
        layout.scatter(cache, slots, head, part)
        whole[:, :, head : head + count] = value
    out = torch.empty_like(whole)
    layout.gather(cache, blocks, 20, 21, out)
    assert torch.equal(out, whole)
