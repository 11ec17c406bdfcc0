"""Which layers a rank of vLLM holds: read from the engine, which may divide them unevenly."""

import torch
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index

from services.worker.kv.layout import LayoutError
from services.worker.kv.shards import Shards


def stages_of(config: VllmConfig) -> tuple[int, ...]:
    """Layers of each pipeline stage, in order; empty where there is one."""
    layers, stages = config.model_config.get_total_num_hidden_layers(), config.parallel_config.pipeline_parallel_size
    ranges = (get_pp_indices(layers, stage, stages) for stage in range(stages))
    return tuple(end - start for start, end in ranges) if stages > 1 else ()


def in_order(caches: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The caches by layer; as they come where their names do not tell."""
    numbers = _numbers(caches)
    if numbers is None:
        return list(caches.values())
    return [cache for _, cache in sorted(zip(numbers, caches.values(), strict=True), key=lambda each: each[0])]


def shards_of(config: VllmConfig, rank: int, caches: dict[str, torch.Tensor]) -> Shards:
    """How the instance's ranks share its KV. Raises LayoutError unless the caches of `rank` are those of its layers."""
    stages, kv_heads = stages_of(config), config.model_config.get_total_num_kv_heads()
    shards = Shards(stages or (len(caches),), kv_heads, config.parallel_config.tensor_parallel_size)
    held = _numbers(caches)
    if stages and (held is None or sorted(held) != list(range(*shards.layers_of(rank)))):
        start, end = shards.layers_of(rank)
        raise LayoutError(
            f"rank {rank} has KV caches named {', '.join(caches)}: not one a layer from {start} to {end - 1}"
        )
    return shards


def _numbers(caches: dict[str, torch.Tensor]) -> list[int] | None:
    """The layer of each cache; None where names do not tell, or tell the same of two."""
    try:
        numbers = [extract_layer_index(name) for name in caches]
    except (AssertionError, IndexError):  # none, or more than one number in a name
        return None
    return numbers if len(set(numbers)) == len(numbers) else None
