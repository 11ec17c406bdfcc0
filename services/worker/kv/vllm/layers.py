"""What each layer of a vLLM rank keeps for a request, and whether it can be transferred.

Both are read from the engine: it may divide layers unevenly between pipeline stages, it may hold a draft model's KV
beside the target's (which is not transferred), and its attention backend chooses how the KV cache of a layer is laid
out. A slot is a part of a block that holds K or V of several heads:

    cache of one layer                               used by                                transferred as
    [block, head, token, K and V of the head]        vLLM 0.32: the CPU's, most GPU's       K and V
    [2: K and V, block, token, head, channel]        FlashAttention before 0.32             K and V
    [block, 2: K and V, token, head, channel]        FlashInfer and Triton before 0.32      K and V
    the first, K and V with unlike channels          models whose V and K differ in size    one row of both
    [block, token, latent of all heads]              MLA                                    latent
    [block, bytes of several tensors]                Mamba, gated delta net, short conv.    state
    [block, slot, token, K or V of several heads]    ROCm's backends with head slots        no
    K and V, in fp8 with one scale each              fp8 KV caches                          K and V, with their scales
    any of these, quantised otherwise                a scale for each token or head         no
    any of these, several tokens in one state        compressed attention                   no

The shape of a cache does not distinguish the first layout from the one with slots: with two heads and two slots, both
are [block, 2, token, 2 * head_dim]. Therefore `objection_to` reads vLLM's specification of each layer and refuses the
layouts marked "no"; `kv.layout` then reads the accepted ones.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from services.worker.kv.layout import LayoutError, View
from services.worker.kv.shards import RankShape, Shards
from services.worker.kv.wire.importing import WIDER, dtype_name
from services.worker.kv.wire.protocol import MAX_FRAME_BYTES
from shared.domain.instance import KvComponent, KvKind

EIGHT_BIT_NAMES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_DRAFT_PREFIX = "draft_model."  # of the names of a draft model's layers, numbered from 0 like the target's
_PLAIN = (FullAttentionSpec, SlidingWindowSpec)  # attention that is known to read what `features_of` says


@dataclass(frozen=True, slots=True)
class Features:
    """What a layer keeps, or one part of it; layers with equal features are a component. `heads`: of the model."""

    kind: KvKind
    part: str  # of a state
    sides: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    window: int = 0


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One part of what layer `number` of the model keeps on this rank. Blocks are those of the KV cache `group`."""

    number: int
    group: int
    block_size: int
    cache: torch.Tensor
    features: Features
    view: View | None = None  # of a state: its cache as [block, side, head, value]
    scales: tuple[float, ...] = ()  # of K and V in eight bits


@dataclass(frozen=True, slots=True)
class RankComponent:
    """A component's layers on this rank, in order."""

    shape: RankShape
    parts: tuple[LayerPart, ...]
    model: KvComponent  # all of the model's layers


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


def components_of(
    config: VllmConfig, cache: KVCacheConfig, caches: dict[str, torch.Tensor]
) -> tuple[RankComponent, ...]:
    """The components of the model as this rank has them; every rank of the engine has to call it. The order is that of
    their first layers, on all instances. Raises LayoutError for a layer that cannot be transferred.
    """
    parts = _parts(config, cache, caches)
    known = _of_all_stages(parts)
    tensor_parallel, stages = config.parallel_config.tensor_parallel_size, len(known)
    rank = get_pp_group().rank_in_group * tensor_parallel + get_tp_group().rank_in_group
    numbers: defaultdict[Features, list[list[int]]] = defaultdict(lambda: [[] for _ in range(stages)])
    for stage, held in enumerate(known):
        for number, features in held:
            numbers[features][stage].append(number)
    stored = {dtype_name(features.dtype) for features in numbers if features.kind is not KvKind.STATE}
    if len(stored) > 1:
        raise LayoutError(
            f"layers store KV in {' and '.join(sorted(stored))}, and a transfer has one of them: leave "
            "kv_cache_dtype_skip_layers out of engine_args"
        )
    ordered = sorted(numbers.items(), key=lambda each: (min(chain.from_iterable(each[1])), each[0].part))
    total = sum(stages_of(config)) or len({number for held in known for number, _ in held})
    return tuple(_component(features, by_stage, parts, rank, tensor_parallel, total) for features, by_stage in ordered)


def _component(
    features: Features, by_stage: list[list[int]], parts: list[LayerPart], rank: int, tensor_parallel: int, total: int
) -> RankComponent:
    numbers = tuple(sorted(chain.from_iterable(by_stage)))
    everywhere = numbers == tuple(range(total))
    shards = Shards(tuple(map(len, by_stage)), features.heads, tensor_parallel, () if everywhere else numbers)
    held = tuple(sorted((part for part in parts if part.features == features), key=lambda part: part.number))
    scales = tuple(part.scales for part in held if part.scales)
    shape = RankShape(
        shards, features.head_dim, features.dtype, rank, features.sides, features.kind, features.window, scales
    )
    if shape.token_bytes > MAX_FRAME_BYTES:
        raise LayoutError(
            f"{features.part or 'KV'} of a layer takes {shape.token_bytes} bytes on a rank, and a frame holds "
            f"{MAX_FRAME_BYTES}: raise tensor_parallel"
        )
    dtype = dtype_name(features.dtype) if features.kind is KvKind.STATE else ""
    model = KvComponent(
        features.kind, numbers, features.sides, features.heads, features.head_dim, features.window, features.part, dtype
    )
    return RankComponent(shape, held, model)


def _of_all_stages(parts: list[LayerPart]) -> list[list[tuple[int, Features]]]:
    """Number and features of the layers of each pipeline stage: a rank has the caches of its own stage only."""
    held = [(part.number, part.features) for part in parts]
    group = get_pp_group()
    if group.world_size == 1:
        return [held]
    gathered: list[list[tuple[int, Features]]] = [[] for _ in range(group.world_size)]
    torch.distributed.all_gather_object(gathered, held, group=group.cpu_group)
    return gathered


def _parts(config: VllmConfig, cache: KVCacheConfig, caches: dict[str, torch.Tensor]) -> list[LayerPart]:
    caches = without_draft(config, caches)
    specs = {name: (spec, group) for group, name, spec in _specs(cache)}
    described = {caches[name].data_ptr() for name in caches if name in specs}
    found: list[LayerPart] = []
    for number, (name, each) in _numbered(config, caches):
        if name in specs:
            spec, group = specs[name]
            found += _parts_of_layer(config, name, number, group, spec, each)
        elif each.data_ptr() not in described:  # it shares the cache of another layer otherwise
            raise LayoutError(f"KV of layer {name} cannot be transferred: vLLM does not describe it; use another model")
    return found


def _parts_of_layer(
    config: VllmConfig, name: str, number: int, group: int, spec: KVCacheSpec, cache: torch.Tensor
) -> list[LayerPart]:
    objection = objection_to(config, spec)
    if objection is not None:
        raise LayoutError(f"KV of layer {name} cannot be transferred: {objection}")
    if isinstance(spec, MambaSpec):
        return [
            LayerPart(number, group, spec.block_size, state, features, view)
            for state, cuts in zip(_states_in(cache, spec), _states(config, spec), strict=True)
            for features, view in cuts
        ]
    assert isinstance(spec, AttentionSpec)
    features = features_of(config, spec)
    scales: tuple[float, ...] = ()
    if features.dtype.itemsize == 1:
        layer = config.compilation_config.static_forward_context[name]
        if layer._k_scale.numel() > 1 or layer._v_scale.numel() > 1:
            raise LayoutError(f"KV of layer {name} cannot be transferred: {_stored_otherwise(config)}")
        scales = (float(layer._k_scale_float), float(layer._v_scale_float))
    return [LayerPart(number, group, spec.block_size, cache, features, scales=scales)]


def features_of(config: VllmConfig, spec: AttentionSpec) -> Features:
    """What an attention layer keeps. `spec.sliding_window` counts the token that is computed."""
    window = max(1, spec.sliding_window - 1) if isinstance(spec, SlidingWindowSpec) else 0
    if isinstance(spec, MLAAttentionSpec):
        return Features(KvKind.LATENT, "", 1, 1, spec.head_size, spec.dtype, window)
    heads, dtype = _total_heads(config, spec.num_kv_heads), eight_bit_of(config, spec)
    if spec.head_size_v != spec.head_size:
        return Features(KvKind.HEADS, "", 1, heads, spec.head_size + spec.head_size_v, spec.dtype, window)
    return Features(KvKind.HEADS, "", 2, heads, spec.head_size, dtype or spec.dtype, window)


def eight_bit_of(config: VllmConfig, spec: AttentionSpec) -> torch.dtype | None:
    """The type of KV that is stored in eight bits, with a scale for each layer's K and V; None for other KV."""
    eight_bit = spec.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR
    named = EIGHT_BIT_NAMES.get(config.cache_config.cache_dtype) if eight_bit else None
    return torch.float8_e4m3fnuz if named is torch.float8_e4m3fn and current_platform.is_fp8_fnuz() else named


def _total_heads(config: VllmConfig, on_a_rank: int) -> int:
    """KV heads of the model, of a layer that has so many on each rank: vLLM knows the total of most layers."""
    ranks, usual = config.parallel_config.tensor_parallel_size, config.model_config.get_total_num_kv_heads()
    return int(usual) if max(1, usual // ranks) == on_a_rank else on_a_rank * ranks


def _states_in(cache: torch.Tensor, spec: MambaSpec) -> list[torch.Tensor]:
    """The tensors [block, …] of a recurrent layer, which lie one behind the other in the bytes of each block."""
    content = cache.view(torch.uint8).flatten(1)
    found, at = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size = prod(shape) * dtype.itemsize
        found.append(content[:, at : at + size].view(dtype).view(-1, *shape))
        at += size
    return found


def _states(config: VllmConfig, spec: MambaSpec) -> list[list[tuple[Features, View]]]:
    """How the tensors of a recurrent layer are divided among ranks: a matrix by its heads, and what a convolution
    remembers by channels. A tensor whose division is not known goes as it is to a rank of as many.
    """
    ranks, cuts = config.parallel_config.tensor_parallel_size, []
    for index, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        widths = _convolved(config, spec, shape) if len(shape) == 2 else []
        if widths:
            steps, at, here = shape[0], 0, []
            for part, width in enumerate(widths):
                features = Features(KvKind.STATE, f"state {index}.{part}", steps, width * ranks, 1, dtype, 1)
                here.append((features, _channels(at, at + width)))
                at += width
            cuts.append(here)
        elif len(shape) == 3:
            features = Features(KvKind.STATE, f"state {index}", 1, shape[0] * ranks, prod(shape[1:]), dtype, 1)
            cuts.append([(features, lambda cache: cache.flatten(2).unsqueeze(1))])
        else:
            features = Features(KvKind.STATE, f"state {index} of {ranks}", 1, ranks, prod(shape), dtype, 1)
            cuts.append([(features, lambda cache: cache.flatten(1).unsqueeze(1).unsqueeze(1))])
    return cuts


def _channels(start: int, end: int) -> View:
    return lambda cache: cache[:, :, start:end].unsqueeze(3)


def _convolved(config: VllmConfig, spec: MambaSpec, shape: tuple[int, ...]) -> list[int]:
    """How many channels on a rank come from q, from k and from v, each of which is divided among the ranks; empty where
    that is not known.
    """
    text = config.model_config.hf_text_config
    if spec.mamba_type is not MambaAttentionBackendEnum.GDN_ATTN:
        return []
    try:
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
    except AttributeError:
        return []
    ranks = config.parallel_config.tensor_parallel_size
    widths = [keys // ranks, keys // ranks, values // ranks]
    return widths if shape[1] == sum(widths) else []


def _specs(cache: KVCacheConfig) -> list[tuple[int, str, KVCacheSpec]]:
    """Group, name, and vLLM's specification of each layer: a group has one for all of its layers, or one for each."""
    found: list[tuple[int, str, KVCacheSpec]] = []
    for index, group in enumerate(cache.kv_cache_groups):
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        if by_layer is None:
            by_layer = dict.fromkeys(group.layer_names, group.kv_cache_spec)
        found += [(index, name, spec) for name, spec in by_layer.items()]
    return found


def objection_to(config: VllmConfig, spec: KVCacheSpec) -> str | None:
    """Why what a layer of that specification keeps cannot be transferred, and what to do; None where it can."""
    if isinstance(spec, MambaSpec):
        if spec.num_speculative_blocks:
            return "its state has room for drafted tokens; unset speculative_config"
        unknown = [str(dtype) for dtype in spec.dtypes if dtype not in WIDER.values()]
        return f"its state is stored in {', '.join(unknown)}; use another model" if unknown else None
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "vLLM frees blocks by chunks; unset VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"
    if not isinstance(spec, _PLAIN) or isinstance(spec, SlidingWindowMLASpec):
        return f"vLLM describes it by a {type(spec).__name__}, which is not known here; use another model"
    if not _has_known_precision(config, spec):
        return _stored_otherwise(config)
    if spec.tokens_per_state != 1:
        return f"a state holds {spec.tokens_per_state} tokens, and only one can be; use another model"
    if isinstance(spec, MLAAttentionSpec):
        return None
    if spec.num_head_slots is not None or spec.state_content_bytes is not None:
        return (
            f"the attention backend packs it into {spec.num_heads} head slots of {spec.state_content_size_bytes} bytes"
            ", and K and V of each head have to lie beside each other; choose another backend, as in engine_args: "
            "{attention_backend: TRITON_ATTN}, and leave VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT unset"
        )
    return None


def _stored_otherwise(config: VllmConfig) -> str:
    unquantised = "float16" if config.model_config.dtype is torch.float16 else "bfloat16"
    return (
        f"it is stored in {config.cache_config.cache_dtype}, as the checkpoint or `kv_cache_dtype` selects, in a form "
        f"without one scale for K and one for V of a layer; set engine_args: {{kv_cache_dtype: {unquantised}}}"
    )


def _has_known_precision(config: VllmConfig, spec: AttentionSpec) -> bool:
    if spec.kv_quant_mode is KVQuantMode.NONE:
        return spec.dtype in WIDER.values()
    k_and_v = not isinstance(spec, MLAAttentionSpec) and spec.head_size_v == spec.head_size
    return k_and_v and eight_bit_of(config, spec) is not None


def _numbered(config: VllmConfig, caches: dict[str, torch.Tensor]) -> list[tuple[int, tuple[str, torch.Tensor]]]:
    """Names and caches with the number of their layer, in order; counted where their names do not have one number
    each. Raises LayoutError where that is so in an engine with several pipeline stages.
    """
    numbers = _numbers(list(caches))
    if numbers is None and config.parallel_config.pipeline_parallel_size > 1:
        raise LayoutError(f"the KV caches named {', '.join(caches)} are not one a layer")
    return sorted(zip(numbers or range(len(caches)), caches.items(), strict=True), key=lambda each: each[0])


def _numbers(names: list[str]) -> list[int] | None:
    """The layer number in each name; None if a name has none or several, or two names have the same."""
    try:
        numbers = [extract_layer_index(name) for name in names]
    except (AssertionError, IndexError):  # a name without a number, or with several
        return None
    if len(set(numbers)) < len(numbers):
        return None
    return numbers
