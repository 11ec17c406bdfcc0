"""Which layers of a vLLM rank are transferred, and whether their KV can be transferred.

Both are read from the engine: it may divide layers unevenly between pipeline stages, it may hold a draft model's KV
beside the target's (which is not transferred), and its attention backend chooses how the KV cache of a layer is laid
out. A slot is a part of a block that holds K or V of several heads:

    cache of one layer                               used by                                accepted
    [block, head, token, K and V of the head]        vLLM 0.32: the CPU's, most GPU's       yes
    [2: K and V, block, token, head, channel]        FlashAttention before 0.32             yes
    [block, 2: K and V, token, head, channel]        FlashInfer and Triton before 0.32      yes
    [block, slot, token, K or V of several heads]    ROCm's backends with head slots        no
    one latent of all heads, or a recurrent state    MLA, Mamba                             no
    any of these, quantised                          fp8 KV caches                          no
    any of these, several tokens in one state        compressed attention                   no
    any of these, K and V with unlike channels       models whose V and K differ in size    no

The shape of a cache does not distinguish the first layout from the one with slots: with two heads and two slots, both
are [block, 2, token, 2 * head_dim]. Therefore `check_specs` reads vLLM's specification of each layer and refuses the
layouts marked "no"; `kv.layout` then reads the accepted ones.
"""

import torch
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, KVQuantMode, MLAAttentionSpec

from services.worker.kv.layout import LayoutError
from services.worker.kv.shards import Shards

_DRAFT_PREFIX = "draft_model."  # of the names of a draft model's layers, numbered from 0 like the target's


def stages_of(config: VllmConfig) -> tuple[int, ...]:
    """The number of layers of each pipeline stage, in order; empty for an engine with a single stage."""
    layers, stages = config.model_config.get_total_num_hidden_layers(), config.parallel_config.pipeline_parallel_size
    ranges = (get_pp_indices(layers, stage, stages) for stage in range(stages))
    return tuple(end - start for start, end in ranges) if stages > 1 else ()


def without_draft(config: VllmConfig, caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The caches of the target model's layers, without the caches of a draft (EAGLE, MTP, a draft model).

    Drafts stay out of transfers: a peer may have another draft or none, and the target model verifies every drafted
    token, so that no answer depends on a draft's KV. vLLM's V2 model runner marks draft layers. With its V1 runner, the
    numbers of draft layers follow the target's, or their names begin with `draft_model.`.
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
    """Raise LayoutError unless vLLM specifies an accepted layout for each of these layers (see the module's table)."""
    specs = _specs(cache)
    described = {caches[name].data_ptr() for name in caches if name in specs}
    for name, each in caches.items():
        if name in specs:
            objection = _objection(config, specs[name])
        elif each.data_ptr() in described:
            objection = None  # this layer shares the cache of another layer, which is checked itself
        else:
            objection = "vLLM does not describe it; use another model"
        if objection is not None:
            raise LayoutError(f"KV of layer {name} cannot be transferred: {objection}")


def _specs(cache: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """vLLM's specification of each layer by name: a group has one for all of its layers, or one for each layer."""
    found: dict[str, KVCacheSpec] = {}
    for group in cache.kv_cache_groups:
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        if by_layer is None:
            by_layer = dict.fromkeys(group.layer_names, group.kv_cache_spec)
        found.update(by_layer)
    return found


def _objection(config: VllmConfig, spec: KVCacheSpec) -> str | None:
    """Why KV of that specification cannot be transferred, and what to do; None where it can."""
    if not isinstance(spec, AttentionSpec) or isinstance(spec, MLAAttentionSpec):
        return f"vLLM describes it by a {type(spec).__name__}, and only K and V of each head can be; use another model"
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        stored = config.cache_config.cache_dtype
        unquantised = "float16" if config.model_config.dtype is torch.float16 else "bfloat16"
        return (
            f"it is stored in {stored}, as the checkpoint or `kv_cache_dtype` selects; "
            f"set engine_args: {{kv_cache_dtype: {unquantised}}}"
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
    """The caches sorted by layer number; in the given order where their names do not have one number each."""
    numbers = _numbers(list(caches))
    if numbers is None:
        return list(caches.values())
    return [cache for _, cache in sorted(zip(numbers, caches.values(), strict=True), key=lambda each: each[0])]


def shards_of(config: VllmConfig, rank: int, caches: dict[str, torch.Tensor]) -> Shards:
    """How the ranks of the instance share its KV. Raises LayoutError unless `rank`, in an engine with several pipeline
    stages, holds one cache for each layer of its stage.
    """
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
    """The layer number in each name; None if a name has none or several, or two names have the same."""
    try:
        numbers = [extract_layer_index(name) for name in names]
    except (AssertionError, IndexError):  # a name without a number, or with several
        return None
    if len(set(numbers)) < len(numbers):
        return None
    return numbers
