import pytest
import torch
from torch import Tensor

from services.worker.kv.layout import CpuLayout, Kernel, LayoutError, find_interior, slots_of, strided_layout

BLOCKS = 12


def python_kernel(order: str) -> Kernel:
    """A writer that stands in for the engine's kernel, with K channel-major or in AMX-like pairs."""

    def write(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
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


def kv_of(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, tokens, heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("order", ["channel-major", "pairs"])
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cpu_interior_is_found_and_read_back(order: str, block_size: int, dtype: torch.dtype) -> None:
    cache = torch.zeros(BLOCKS, 2, block_size, 2 * 32, dtype=dtype)
    layout = CpuLayout(python_kernel(order), cache, 32, block_size)
    blocks = torch.tensor([7, 2, 9, 4])
    start, end = 5, 3 * block_size + 9
    kv = kv_of(end - start, 2, 32, dtype)
    layout.scatter(cache, slots_of(blocks, block_size, start, end), 0, kv)
    out = torch.empty_like(kv)
    layout.gather(cache, blocks, start, end, out)
    assert torch.equal(out, kv)


def test_vllms_kernel_is_understood_here() -> None:
    """With the instruction set of the machine that runs the test, whichever it is."""
    ops = pytest.importorskip("vllm._custom_ops")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for block_size in (32, 128):
            isa = _get_attn_isa(dtype, block_size, 64, "auto")

            def write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, isa: str = isa) -> None:
                ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa, 1.0, 1.0, "auto")

            cache = torch.randn(BLOCKS, 4, block_size, 128).to(dtype)
            layout = CpuLayout(write, cache, 64, block_size)
            blocks = torch.randperm(BLOCKS)[:5]
            start, end = 3, 4 * block_size + 1
            kv = kv_of(end - start, 4, 64, dtype)
            layout.scatter(cache, slots_of(blocks, block_size, start, end), 0, kv)
            part = kv_of(end - start, 2, 64, dtype) + 1
            layout.scatter(cache, slots_of(blocks, block_size, start, end), 1, part)
            kv[:, :, 1:3] = part
            out = torch.empty_like(kv)
            layout.gather(cache, blocks, start, end, out)
            assert torch.equal(out, kv), (dtype, block_size, layout.describe())


@pytest.mark.parametrize(("block_size", "kernel_block"), [(128, 64), (64, 16), (128, 128)])
@pytest.mark.parametrize("nhd", [False, True])
def test_blocks_that_the_attention_backend_divides_are_read_and_written(
    block_size: int, kernel_block: int, nhd: bool
) -> None:
    """As vLLM divides them: a manager's block is so many kernel blocks that follow each other."""
    heads, dim, parts = 3, 8, block_size // kernel_block
    raw = torch.zeros(BLOCKS * block_size * heads * 2 * dim)
    if nhd:
        cache = raw.view(BLOCKS * parts, kernel_block, heads, 2 * dim).transpose(1, 2)
    else:
        cache = raw.view(BLOCKS * parts, heads, kernel_block, 2 * dim)
    layout = strided_layout(cache, dim, block_size)
    blocks = torch.tensor([7, 2, 9])
    start, end = kernel_block + 5, 2 * block_size + 9
    kv, slots = kv_of(end - start, heads, dim, torch.float32), slots_of(blocks, block_size, start, end)
    layout.scatter(cache, slots, 0, kv)
    for at, position in enumerate(range(start, end)):  # where vLLM's kernels look for it
        place = int(blocks[position // block_size]) * parts + position % block_size // kernel_block
        found = cache[place, :, position % kernel_block]
        assert torch.equal(torch.stack([found[:, :dim], found[:, dim:]]), kv[:, at])
    out = torch.empty_like(kv)
    layout.gather(cache, blocks, start, end, out)
    assert torch.equal(out, kv)


def test_an_interior_that_is_no_permutation_is_refused() -> None:
    def broken(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        keys[1] = 1.0

    with pytest.raises(LayoutError, match="permutation"):
        CpuLayout(broken, torch.zeros(4, 2, 32, 64), 32, 32)


def test_an_interior_without_structure_is_refused() -> None:
    order = torch.arange(32 * 8)
    order[[5, 77]] = order[[77, 5]]
    with pytest.raises(LayoutError, match="loops"):
        find_interior(order, 8)


def test_a_kernel_that_writes_elsewhere_is_refused() -> None:
    def stray(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        keys[0] = 1.0

    with pytest.raises(LayoutError, match="outside"):
        CpuLayout(stray, torch.zeros(4, 2, 32, 64), 32, 32)


def gpu_caches(heads: int, size: int, dim: int) -> dict[str, torch.Tensor]:
    nhd = torch.zeros(BLOCKS, size, heads, 2 * dim).transpose(1, 2)  # logical [B, H, N, C], NHD strides
    return {
        "HND": torch.zeros(BLOCKS, heads, size, 2 * dim),
        "NHD": nhd,
        "FlashAttention": torch.zeros(2, BLOCKS, size, heads, dim),
        "FlashInfer": torch.zeros(BLOCKS, 2, size, heads, dim),
    }


@pytest.mark.parametrize("name", ["HND", "NHD", "FlashAttention", "FlashInfer"])
def test_gpu_layouts_read_what_they_write(name: str) -> None:
    cache = gpu_caches(3, 16, 8)[name]
    layout = strided_layout(cache, 8, 16)
    assert (layout.kv_heads, layout.head_dim, layout.block_size) == (3, 8, 16)
    blocks = torch.tensor([5, 0, 11])
    kv = kv_of(37, 3, 8, torch.float32)
    layout.scatter(cache, slots_of(blocks, 16, 2, 39), 0, kv)
    out = torch.empty_like(kv)
    layout.gather(cache, blocks, 2, 39, out)
    assert torch.equal(out, kv)


def test_gpu_layouts_put_tokens_where_attention_looks() -> None:
    caches = gpu_caches(3, 16, 8)
    kv = kv_of(1, 3, 8, torch.float32)
    for cache in caches.values():
        strided_layout(cache, 8, 16).scatter(cache, torch.tensor([5 * 16 + 7]), 0, kv)
    assert torch.equal(caches["HND"][5, :, 7], torch.cat([kv[0, 0], kv[1, 0]], dim=-1))
    assert torch.equal(caches["NHD"][5, :, 7], torch.cat([kv[0, 0], kv[1, 0]], dim=-1))
    assert torch.equal(caches["FlashAttention"][:, 5, 7], kv[:, 0])
    assert torch.equal(caches["FlashInfer"][5, :, 7], kv[:, 0])


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(LayoutError):
        strided_layout(torch.zeros(4, 16, 576), 576, 16)  # MLA
    with pytest.raises(LayoutError):
        strided_layout(torch.zeros(2, 2, 16, 3, 8), 8, 16)  # which axis is K and V?
