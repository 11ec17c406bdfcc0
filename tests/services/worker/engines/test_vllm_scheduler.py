"""KV memory in blocks of tokens, whatever the groups in which vLLM keeps layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from services.worker.engines.vllm_scheduler import blocks_of, rest_of_item, whole_item_tokens
from shared.policy.decode_admission import Blocks


def full(block_size: int = 32) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def window(block_size: int = 32) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=128
    )


def state(block_size: int = 32) -> KVCacheSpec:
    return MambaSpec(block_size=block_size, shapes=((4, 8),), dtypes=(torch.float32,))


def scheduler(block_size: int, specs: list[KVCacheSpec]) -> Any:
    """With 121 blocks, of which one is vLLM's null block, and 50 free ones."""
    pool = SimpleNamespace(get_num_free_blocks=lambda: 50, num_gpu_blocks=121)
    return SimpleNamespace(
        block_size=block_size,
        kv_cache_manager=SimpleNamespace(block_pool=pool),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]),
    )


@pytest.mark.parametrize(
    ("size", "specs", "found"),
    [
        pytest.param(32, [full()], Blocks(50, 120, 32), id="one group"),
        pytest.param(32, [full(), window(), window()], Blocks(16, 40, 32), id="each group takes a block"),
        pytest.param(32, [full(), state(), state(4096)], Blocks(50, 120, 32), id="states take none for tokens"),
        pytest.param(64, [full(64), window(32)], Blocks(16, 40, 64), id="two blocks of 32 tokens for 64"),
        pytest.param(32, [state()], Blocks(50, 120, 32), id="states alone"),
        pytest.param(16, [full(64)], Blocks(50, 120, 16), id="at most as many as there are"),
    ],
)
def test_blocks_hold_the_tokens_of_all_layers(size: int, specs: list[KVCacheSpec], found: Blocks) -> None:
    assert blocks_of(scheduler(size, specs)) == found


@pytest.mark.parametrize(("position", "left"), [(0, 0), (3, 4), (5, 2), (6, 1), (7, 0), (9, 0), (10, 2), (12, 0)])
def test_the_rest_of_an_item_is_known(position: int, left: int) -> None:
    places = PlaceholderRange(offset=3, length=4), PlaceholderRange(offset=10, length=2)
    features = [MultiModalFeatureSpec(None, "image", "x", place) for place in places]
    assert rest_of_item(features, position) == left


def test_items_of_most_models_may_be_divided() -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(disable_chunked_mm_input=False))
    assert whole_item_tokens(SimpleNamespace(vllm_config=config)) == 0
