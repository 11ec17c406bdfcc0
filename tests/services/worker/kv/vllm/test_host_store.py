"""Blocks of caches of all shapes, in host memory and back."""

import pytest
import torch

from services.worker.kv.layout import LayoutError
from services.worker.kv.vllm.host_store import HostStore

BLOCKS = 6


def packed(layers: int, width: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Layers whose parts of a block lie side by side."""
    memory = torch.randn(BLOCKS, layers * width).to(dtype)
    return [memory[:, at * width : (at + 1) * width].unflatten(1, (2, -1)) for at in range(layers)]


def kernel_blocks() -> list[torch.Tensor]:
    """Two kernel blocks make one of vLLM's."""
    return [torch.randn(2 * BLOCKS, 2, 4, 8)]


def shared() -> list[torch.Tensor]:
    """Two layers of unlike groups in one memory, the second of which uses less of each block."""
    memory = torch.randn(BLOCKS, 64)
    return [memory.view(BLOCKS, 8, 8), memory[:, :48].unflatten(1, (8, 6))]


@pytest.mark.parametrize(
    ("caches", "slot_bytes"),
    [
        ([torch.randn(BLOCKS, 2, 4, 8) for _ in range(3)], 3 * 256),
        (packed(3, 16), 3 * 64),
        (packed(2, 6, torch.uint8), 12),  # no multiple of larger values
        (kernel_blocks(), 512),
        (shared(), 256),
        ([torch.randn(BLOCKS, 8, 4, 4).transpose(1, 2)], 512),
    ],
    ids=["a layer each", "packed", "bytes", "kernel blocks", "shared", "other strides"],
)
def test_blocks_come_back_as_they_were(
    caches: list[torch.Tensor], slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.kv.vllm.host_store._SCRATCH_BYTES", 2 * slot_bytes)  # two at once
    store = HostStore(caches, BLOCKS)
    assert store.slot_bytes == slot_bytes
    store.allocate(4)
    grouped = [cache.unflatten(0, (BLOCKS, -1)) for cache in caches]
    before = [cache.clone() for cache in grouped]
    store.save({3: 1, 0: 2, 2: 5})
    for cache in grouped:
        cache[1], cache[2], cache[5] = 0, 0, 0
    store.load({1: 3, 4: 2, 2: 0})
    for cache, was in zip(grouped, before, strict=True):
        assert torch.equal(cache[[1, 4, 2, 0, 3]], was[[1, 5, 2, 0, 3]])
        assert not cache[5].any()
    assert 0.0 < store.timer.block_s < 1.0
    store.zero = True
    store.load({0: 3})
    assert not any(cache[0].any() for cache in grouped)


@pytest.mark.parametrize(
    "caches", [packed(3, 16), kernel_blocks(), shared()], ids=["packed", "kernel blocks", "shared"]
)
def test_blocks_and_slots_are_a_cache_of_their_own(caches: list[torch.Tensor]) -> None:
    store = HostStore(caches, BLOCKS)
    store.allocate(4)
    store.save({3: 1, 0: 2})
    for cache in caches:
        made, parts = store.as_cache(cache, [5, 4], [0, 3]), cache.shape[0] // BLOCKS
        assert made.shape == (4 * parts, *cache.shape[1:])
        assert torch.equal(made.unflatten(0, (4, parts)), cache.unflatten(0, (BLOCKS, parts))[[5, 4, 2, 1]])


@pytest.mark.parametrize(
    ("cache", "fault"),
    [
        (torch.zeros(2, BLOCKS + 1, 4, 8), "does not begin with vLLM's 6 blocks"),
        (torch.zeros(2, BLOCKS, 4, 8).transpose(0, 1), "overlap"),
    ],
    ids=["K and V first", "K and V apart"],
)
def test_caches_that_have_no_blocks_one_behind_the_other_are_refused(cache: torch.Tensor, fault: str) -> None:
    with pytest.raises(LayoutError, match=fault):
        HostStore([cache], BLOCKS)
