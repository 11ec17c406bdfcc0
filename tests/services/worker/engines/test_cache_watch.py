"""Which of vLLM's KV events are reported, by the group of layers that they are of."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from services.worker.engines.base import BlocksCleared, BlocksKept, BlocksRemoved, BlocksStored, CacheEvent
from services.worker.engines.vllm_observers import CacheWatch

FULL = FullAttentionSpec(block_size=2, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=2, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=128)
STATE = MambaSpec(block_size=2, shapes=((4, 8),), dtypes=(torch.float32,))
ALL_FULL = UniformTypeKVCacheSpecs(block_size=2, kv_cache_specs={"a": FULL, "b": FULL})


def stored(name: int, group: int | None) -> BlockStored:
    return BlockStored(
        block_hashes=[name],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=group,
    )


def removed(name: int, group: int | None) -> BlockRemoved:
    return BlockRemoved(block_hashes=[name], medium="GPU", group_idx=group)


class Publisher:
    """Stands in for vLLM's own."""

    def __init__(self) -> None:
        self.batches: list[KVEventBatch] = []

    def publish(self, batch: KVEventBatch) -> None:
        self.batches.append(batch)


def reported(specs: list[KVCacheSpec], events: list[Any]) -> list[CacheEvent]:
    """What a watch reports of a batch of events, all of which vLLM's publisher receives too."""
    found: list[CacheEvent] = []
    inner = Publisher()
    scheduler: Any = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]),
        kv_event_publisher=inner,
    )
    loop: Any = SimpleNamespace(call_soon_threadsafe=lambda call, *given: call(*given))
    CacheWatch(found.extend).attach(scheduler, loop)
    scheduler.kv_event_publisher.publish(batch := KVEventBatch(ts=0.0, events=events))
    assert inner.batches == [batch]
    return found


@pytest.mark.parametrize(
    ("specs", "watched"),
    [
        pytest.param([FULL], 0, id="one"),
        pytest.param([WINDOW, FULL, FULL], 1, id="the first with full attention"),
        pytest.param([STATE, ALL_FULL], 1, id="with a specification for each layer"),
        pytest.param([WINDOW, STATE], 0, id="without full attention, the first"),
    ],
)
def test_events_of_one_group_are_reported(specs: list[KVCacheSpec], watched: int) -> None:
    events = [stored(group, group) for group in range(len(specs))]
    events += [removed(group, group) for group in range(len(specs))]
    assert reported(specs, [*events, AllBlocksCleared()]) == [
        BlocksStored([watched], None, [1, 2]),
        BlocksRemoved([watched]),
        BlocksCleared(),
    ]


def test_events_that_name_no_group_are_reported() -> None:
    assert reported([WINDOW, FULL], [stored(7, None), removed(7, None)]) == [
        BlocksStored([7], None, [1, 2]),
        BlocksRemoved([7]),
    ]


def test_blocks_that_come_to_host_memory_are_further_copies() -> None:
    kept = BlockStored([7], None, [], 2, None, MEDIUM_CPU, None, group_idx=0)
    gone = BlockRemoved([7], MEDIUM_CPU, group_idx=0)
    other = BlockStored([8], None, [], 2, None, MEDIUM_CPU, None, group_idx=1)
    assert reported([FULL, WINDOW], [kept, other, gone]) == [BlocksKept([7], host=True), BlocksRemoved([7], host=True)]


def test_media_items_are_reported_where_they_begin() -> None:
    """vLLM names an item in each block in which it lies, by its position relative to the block."""
    event = BlockStored(
        block_hashes=[1, 2, 3, 4],
        parent_block_hash=None,
        token_ids=[1, 2] * 4,
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[(("a", 1), "salt"), (("a", -1), ("b", 0)), (("b", -2),), None],
    )
    expected = BlocksStored([1, 2, 3, 4], None, [1, 2] * 4, "salt", begun=((1, "a"), (2, "b")))
    assert reported([FULL], [event]) == [expected]
    event.lora_name, event.extra_keys = (
        "one",
        [("one", ("a", 1), "salt"), ("one", ("a", -1), ("b", 0)), ("one", ("b", -2)), ("one",)],
    )
    assert reported([FULL], [event]) == [msgspec.structs.replace(expected, adapter="one")]
    event.extra_keys = [("one", ("a", 1)), ("one", "embeddings"), ("one",), ("one",)]
    assert reported([FULL], [event]) == []


def test_without_a_sink_the_publisher_stays() -> None:
    scheduler: Any = SimpleNamespace(kv_event_publisher=Publisher())
    inner = scheduler.kv_event_publisher
    CacheWatch(None).attach(scheduler, SimpleNamespace())  # type: ignore[arg-type]
    assert scheduler.kv_event_publisher is inner
