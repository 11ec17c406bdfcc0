"""Which layers of a rank of vLLM are transferred, and whether their KV can be: read from the engine, which may divide
layers unevenly, has a draft model's KV beside the target's, and lays KV out as its attention backend wants it.
"""

import torch
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, KVQuantMode, MLAAttentionSpec

from services.worker.kv.layout import LayoutError
from services.worker.kv.shards import Shards


def stages_of(config: VllmConfig) -> tuple[int, ...]:
    """Layers of each pipeline stage, in order; empty where there is one."""
    layers, stages = config.model_config.get_total_num_hidden_layers(), config.parallel_config.pipeline_parallel_size
    ranges = (get_pp_indices(layers, stage, stages) for stage in range(stages))
    return tuple(end - start for start, end in ranges) if stages > 1 else ()


_DRAFT_PREFIX = "draft_model."  # of a draft model's layers, whose numbers are the target's again


def without_draft(config: VllmConfig, caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The caches of the target model's layers, without those of a draft (EAGLE, MTP, a draft model): peers may have
    another draft or none, and drafts are verified, so that no answer depends on them.

    vLLM's V2 model runner marks draft layers. With its V1 runner their numbers follow those of the target's layers,
    or their names begin with `draft_model.`.
    """
    if config.speculative_config is None:
        return caches
    modules = config.compilation_config.static_forward_context
    layers = config.model_config.get_total_num_hidden_layers()

    def drafts(name: str) -> bool:
        if getattr(modules.get(name), "is_draft_layer", False) or name.startswith(_DRAFT_PREFIX):
            return True
        numbers = _numbers([name])
        return numbers is not None and numbers[0] >= layers

    return {name: cache for name, cache in caches.items() if not drafts(name)}


def check_specs(config: VllmConfig, cache: KVCacheConfig, caches: dict[str, torch.Tensor]) -> None:
    """Raise LayoutError unless vLLM's specification of each of these layers says that K and V of a head and token lie
    beside each other, unquantised. The shape of a cache does not tell: [block, 2, token, 2 * head_dim] is K and V of
    two heads, or a slot of K and one of V with both heads in each.
    """
    specs = _specs(cache)
    described = {caches[name].data_ptr() for name in caches if name in specs}
    for name, each in caches.items():
        if name in specs:
            objection = _objection(config, specs[name])
        elif each.data_ptr() not in described:  # else it is another layer's cache, which two layers share
            objection = "vLLM does not describe it; use another model"
        else:
            objection = None
        if objection is not None:
            raise LayoutError(f"KV of layer {name} cannot be transferred: {objection}")


def _specs(cache: KVCacheConfig) -> dict[str, KVCacheSpec]:
    found: dict[str, KVCacheSpec] = {}
    for group in cache.kv_cache_groups:
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # of layers that are alike in part
        found.update(each if each is not None else dict.fromkeys(group.layer_names, group.kv_cache_spec))
    return found


def _objection(config: VllmConfig, spec: KVCacheSpec) -> str | None:
    """Why that KV cannot be transferred, and what to do."""
    if not isinstance(spec, AttentionSpec) or isinstance(spec, MLAAttentionSpec):
        return f"vLLM describes it by a {type(spec).__name__}, and only K and V of each head can be; use another model"
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        stored, dtype = config.cache_config.cache_dtype, str(config.model_config.dtype).removeprefix("torch.")
        return (
            f"it is stored in {stored}, which the checkpoint asks for unless `kv_cache_dtype` does; "
            f"set engine_args: {{kv_cache_dtype: {dtype if dtype == 'float16' else 'bfloat16'}}}"
        )
    if spec.num_head_slots is not None or spec.state_content_bytes is not None:
        return (
            f"the attention backend packs it into {spec.num_heads} head slots of {spec.state_content_size_bytes} bytes"
            ", and K and V of each head have to lie beside each other; choose another backend, as in engine_args: "
            "{attention_backend: TRITON_ATTN}, and leave VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT unset"
        )
    if spec.tokens_per_state != 1:
        return f"a state holds {spec.tokens_per_state} tokens, and only one can be; use another model"
    if spec.head_size_v != spec.head_size:
        return f"K has {spec.head_size} channels and V {spec.head_size_v}, which have to be as many; use another model"
    return None


def in_order(caches: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The caches by layer; as they come where their names do not tell."""
    numbers = _numbers(list(caches))
    if numbers is None:
        return list(caches.values())
    return [cache for _, cache in sorted(zip(numbers, caches.values(), strict=True), key=lambda each: each[0])]


def shards_of(config: VllmConfig, rank: int, caches: dict[str, torch.Tensor]) -> Shards:
    """How the instance's ranks share its KV. Raises LayoutError unless the caches of `rank` are those of its layers."""
    stages, kv_heads = stages_of(config), config.model_config.get_total_num_kv_heads()
    shards = Shards(stages or (len(caches),), kv_heads, config.parallel_config.tensor_parallel_size)
    held = _numbers(list(caches))
    if stages and (held is None or sorted(held) != list(range(*shards.layers_of(rank)))):
        start, end = shards.layers_of(rank)
        raise LayoutError(
            f"rank {rank} has KV caches named {', '.join(caches)}: not one a layer from {start} to {end - 1}"
        )
    return shards


def _numbers(names: list[str]) -> list[int] | None:
    """The layer of each cache; None where names do not tell, or tell the same of two."""
    try:
        numbers = [extract_layer_index(name) for name in names]
    except (AssertionError, IndexError):  # none, or more than one number in a name
        return None
    return numbers if len(set(numbers)) == len(numbers) else None
