"""Which layers are transferred and as which components, by vLLM's configuration, and which are refused."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from services.worker.kv.layout import LayoutError, strided_layout
from services.worker.kv.vllm import layers
from services.worker.kv.vllm.connector import checked
from services.worker.kv.vllm.layers import RankComponent, components_of, without_draft
from shared.domain.instance import KvComponent, KvKind
from shared.domain.kv import Codec
from tests.tiny_models import make_llama

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
FP8 = replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, dtype=torch.uint8)
WINDOW = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=128)
MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
# A rank of two: of 4 key heads with 2 channels and 8 value heads with 3, the convolution keeps 3 steps of 4 channels of
# q, 4 of k and 12 of v.
GDN = MambaSpec(
    block_size=32,
    shapes=((3, 20), (4, 3, 2)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=256,
    mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
)
LINEAR = {"linear_num_key_heads": 4, "linear_key_head_dim": 2, "linear_num_value_heads": 8, "linear_value_head_dim": 3}
TARGET = [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]  # as many as a tiny Llama has
DRAFT = {"method": "draft_model", "num_speculative_tokens": 2}


def caches(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((1,), float(at)) for at, name in enumerate(names)}


def config(folder: Path, draft: bool = True) -> VllmConfig:
    model = str(make_llama(folder))
    speculation = {**DRAFT, "model": model} if draft else None
    arguments: dict[str, Any] = {"model": model, "skip_tokenizer_init": True, "speculative_config": speculation}
    return EngineArgs(**arguments, max_model_len=512, enforce_eager=True).create_engine_config()


def read(
    ranks: int = 1, stages: int = 1, hidden_layers: int = 3, kv_heads: int = 2, scales: int = 1, **text: int
) -> Any:
    """The parts of a VllmConfig that are read."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8_e4m3"),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            hf_text_config=SimpleNamespace(**text),
            get_total_num_hidden_layers=lambda: hidden_layers,
            get_total_num_kv_heads=lambda: kv_heads,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=stages),
        speculative_config=None,
        compilation_config=SimpleNamespace(
            static_forward_context=defaultdict(
                lambda: SimpleNamespace(
                    _k_scale_float=0.5, _v_scale_float=2.0, _k_scale=torch.ones(scales), _v_scale=torch.ones(scales)
                )
            )
        ),
    )


def uniform(specs: dict[str, KVCacheSpec]) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)


def grouped(*groups: tuple[list[str], KVCacheSpec]) -> KVCacheConfig:
    found = [KVCacheGroupSpec(names, spec) for names, spec in groups]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=found)


def blocks_of_bytes(size: int, count: int = 2) -> torch.Tensor:
    return torch.zeros(count, size, dtype=torch.uint8)


def found_in(
    specs: dict[str, KVCacheSpec], vllm_config: Any = None, held: dict[str, torch.Tensor] | None = None
) -> tuple[RankComponent, ...]:
    """The components of layers with those specifications, each in a group of its own."""
    cache = grouped(*(([name], spec) for name, spec in specs.items()))
    return components_of(vllm_config or read(), cache, held or caches(*specs))


Rank = Callable[..., None]


@pytest.fixture(autouse=True)
def at_rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    """The rank within its pipeline and tensor-parallel groups. A stage receives what those before it have sent."""
    exchanged: dict[int, Any] = {}

    def at(stage: int = 0, rank: int = 0, stages: int = 1) -> None:
        pipeline = SimpleNamespace(rank_in_group=stage, world_size=stages, cpu_group=None)
        monkeypatch.setattr(layers, "get_pp_group", lambda: pipeline)
        monkeypatch.setattr(layers, "get_tp_group", lambda: SimpleNamespace(rank_in_group=rank))

        def gather(into: list[Any], held: Any, group: Any) -> None:
            exchanged[stage] = held
            into[:] = [exchanged.get(each, []) for each in range(stages)]

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)

    at()
    return at


@pytest.mark.parametrize(
    "draft",
    ["model.layers.3.self_attn.attn", "model.layers.4.self_attn.attn", "draft_model.model.layers.0.self_attn.attn"],
    ids=["eagle", "mtp", "draft model"],
)
def test_a_drafts_layers_stay_out_of_transfers(tmp_path: Path, draft: str) -> None:
    vllm_config, names = config(tmp_path), [draft, *reversed(TARGET)]
    assert list(without_draft(vllm_config, caches(*names))) == [*reversed(TARGET)]
    (component,) = components_of(vllm_config, grouped((names, SPEC)), caches(*names))
    assert [(part.number, int(part.cache)) for part in component.parts] == [(0, 3), (1, 2), (2, 1)]


def test_a_layer_that_vllm_marks_as_a_drafts_stays_out_whatever_its_name(tmp_path: Path) -> None:
    vllm_config, names = config(tmp_path), [*TARGET, "draft.without.a.number"]
    modules = {name: SimpleNamespace(is_draft_layer=name not in TARGET) for name in names}
    vllm_config.compilation_config.static_forward_context.update(modules)
    assert list(without_draft(vllm_config, caches(*names))) == TARGET


def test_without_speculation_every_layer_is_transferred(tmp_path: Path) -> None:
    names = ["model.layers.7.self_attn.attn", "odd.name"]
    assert list(without_draft(config(tmp_path, draft=False), caches(*names))) == names


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        pytest.param(SPEC, "", id="full"),
        pytest.param(replace(SPEC, sliding_window=128), "", id="window promoted"),
        pytest.param(WINDOW, "", id="window"),
        pytest.param(MLA, "", id="MLA"),
        pytest.param(uniform(dict.fromkeys(TARGET, SPEC)), "", id="uniform"),
        pytest.param(replace(SPEC, head_size=192, head_size_v=128), "", id="unlike K and V"),
        pytest.param(replace(SPEC, num_head_slots=4), "4 head slots", id="packed"),
        pytest.param(
            RocmAttentionBackend.customize_spec(SPEC),
            r"model.layers.0.*2 head slots.*attention_backend: TRITON_ATTN",
            id="slots of K and V",
        ),
        pytest.param(replace(SPEC, tokens_per_state=4), "4 tokens.*use another model", id="compressed"),
        pytest.param(replace(MLA, tokens_per_state=4), "4 tokens.*use another model", id="a compressed latent"),
        pytest.param(replace(SPEC, tokens_per_state=Fraction(1, 4)), "1/4 tokens", id="several states"),
        pytest.param(FP8, "", id="fp8"),
        pytest.param(
            replace(FP8, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD),
            "stored in fp8_e4m3, as the checkpoint or `kv_cache_dtype` selects, in a form without one scale for K and "
            "one for V of a layer; set engine_args: {kv_cache_dtype: bfloat16}",
            id="a scale for each token",
        ),
        pytest.param(replace(FP8, head_size=192, head_size_v=128), "stored in fp8_e4m3", id="fp8, unlike K and V"),
        pytest.param(replace(MLA, dtype=torch.uint8), "set engine_args: {kv_cache_dtype: bfloat16}", id="fp8 latent"),
        pytest.param(
            ChunkedLocalAttentionSpec(
                block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, attention_chunk_size=128
            ),
            "unset VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
            id="chunks",
        ),
        pytest.param(
            CrossAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16),
            "a CrossAttentionSpec, which is not known here; use another model",
            id="cross attention",
        ),
        pytest.param(
            SlidingWindowMLASpec(
                block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, sliding_window=128
            ),
            "a SlidingWindowMLASpec, which is not known here; use another model",
            id="a latent within a window",
        ),
        pytest.param(replace(GDN, num_speculative_blocks=2), "drafted tokens; unset speculative_config", id="drafts"),
        pytest.param(
            replace(GDN, dtypes=(torch.float8_e4m3fn, torch.float32)),
            "its state is stored in torch.float8_e4m3fn; use another model",
            id="fp8 state",
        ),
        pytest.param(
            uniform(dict.fromkeys(TARGET, SPEC) | {TARGET[2]: replace(SPEC, tokens_per_state=2)}),
            "model.layers.2",
            id="one of several",
        ),
    ],
)
def test_other_layouts_are_refused_by_name_with_what_to_do(spec: KVCacheSpec, reason: str) -> None:
    cache = grouped((TARGET, spec))
    if reason:
        with pytest.raises(LayoutError, match=reason):
            components_of(read(), cache, caches(*TARGET))
    else:
        (component,) = components_of(read(), cache, caches(*TARGET))
        assert component.model.layers == (0, 1, 2)


def test_k_and_v_in_eight_bits_have_the_scales_of_their_layer() -> None:
    (component,) = components_of(read(), grouped((TARGET, FP8)), caches(*TARGET))
    assert component.shape.dtype is torch.float8_e4m3fn
    assert component.shape.scales == ((0.5, 2.0),) * 3
    assert component.shape.codec(Codec.INT8) is Codec.RAW


def test_scales_of_each_head_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"model.layers.0.*without one scale for K and one for V of a layer"):
        components_of(read(scales=2), grouped((TARGET, FP8)), caches(*TARGET))


def test_layers_that_store_kv_in_unlike_types_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"bfloat16 and float8_e4m3fn.*leave kv_cache_dtype_skip_layers out"):
        found_in({TARGET[0]: FP8, TARGET[1]: SPEC})


def test_amds_own_eight_bits_have_their_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "current_platform", SimpleNamespace(is_fp8_fnuz=lambda: True))
    (component,) = components_of(read(), grouped((TARGET, FP8)), caches(*TARGET))
    assert component.shape.dtype is torch.float8_e4m3fnuz


def test_slots_of_k_and_v_have_the_shape_of_two_heads() -> None:
    slots = RocmAttentionBackend.customize_spec(SPEC)
    assert (slots.num_heads, slots.state_content_size_bytes) == (SPEC.num_heads, SPEC.state_content_size_bytes)
    strided_layout(torch.zeros(1, slots.num_heads, 32, slots.state_content_size_bytes // 2), 64, 32)


def test_a_layer_that_shares_anothers_cache_is_as_good_as_that_one() -> None:
    found, cache = caches(*TARGET), grouped((TARGET, SPEC))
    shared = {"model.layers.3.self_attn.attn": found[TARGET[0]]}
    (component,) = components_of(read(hidden_layers=4), cache, found | shared)
    assert component.model.layers == (0, 1, 2)
    with pytest.raises(LayoutError, match="layer alone cannot be transferred: vLLM does not describe it"):
        components_of(read(), cache, found | {"alone": torch.zeros(1)})


def test_layers_that_keep_the_same_are_one_component_with_the_numbers_of_the_model() -> None:
    (component,) = found_in(dict.fromkeys(reversed(TARGET), SPEC))
    assert component.model == KvComponent(KvKind.HEADS, (0, 1, 2), sides=2, heads=2, head_dim=64)
    parts = component.parts
    assert [(part.number, part.group, part.block_size) for part in parts] == [(0, 2, 32), (1, 1, 32), (2, 0, 32)]
    assert component.shape.shards.numbers == ()  # all layers
    assert component.shape.token_bytes == 2 * 2 * 64 * 2


def test_names_without_a_number_are_counted_unless_stages_have_to_agree() -> None:
    names = ["odd", "names"]
    (component,) = found_in(dict.fromkeys(names, SPEC))
    assert component.model.layers == (0, 1)
    with pytest.raises(LayoutError, match="the KV caches named odd, names are not one a layer"):
        found_in(dict.fromkeys(names, SPEC), read(stages=2))


def test_windows_are_a_component_of_their_own_and_promoted_windows_are_not() -> None:
    windows, full = found_in({TARGET[0]: WINDOW, TARGET[1]: SPEC, TARGET[2]: WINDOW})
    assert (windows.model.layers, windows.model.window) == ((0, 2), 127)  # vLLM counts the token that is computed
    assert (full.model.layers, full.model.window) == ((1,), 0)
    assert windows.shape.shards.numbers == (0, 2)
    assert windows.shape.read(0, 512) == (385, 512)
    (all_of_them,) = found_in({TARGET[0]: replace(SPEC, sliding_window=128), TARGET[1]: SPEC, TARGET[2]: SPEC})
    assert (all_of_them.model.layers, all_of_them.model.window) == ((0, 1, 2), 0)


def test_a_latent_has_one_head_which_every_rank_holds(at_rank: Rank) -> None:
    at_rank(rank=1)
    (latent,) = found_in(dict.fromkeys(TARGET, MLA), read(ranks=2, kv_heads=8))
    assert latent.model == KvComponent(KvKind.LATENT, (0, 1, 2), sides=1, heads=1, head_dim=576)
    assert (latent.shape.rank, latent.shape.heads) == (1, (0, 1))


def test_k_and_v_that_differ_in_channels_are_one_row() -> None:
    (component,) = found_in(dict.fromkeys(TARGET, replace(SPEC, head_size=192, head_size_v=128)))
    assert component.model == KvComponent(KvKind.HEADS, (0, 1, 2), sides=1, heads=2, head_dim=320)


def test_unlike_heads_are_components_in_the_order_of_their_first_layers() -> None:
    few = replace(SPEC, num_kv_heads=1, head_size=128, head_size_v=128)
    found = found_in({TARGET[2]: SPEC, TARGET[1]: SPEC, TARGET[0]: few}, read(ranks=2, kv_heads=4))
    assert [(each.model.layers, each.model.heads, each.model.head_dim) for each in found] == [
        ((0,), 2, 128),  # of which vLLM knows the heads of a rank only
        ((1, 2), 4, 64),
    ]


def test_one_head_that_several_ranks_hold_is_counted_once(at_rank: Rank) -> None:
    at_rank(rank=3)
    (component,) = found_in(dict.fromkeys(TARGET, replace(SPEC, num_kv_heads=1)), read(ranks=4, kv_heads=2))
    assert (component.model.heads, component.shape.heads) == (2, (1, 2))


def test_the_stages_agree_on_the_components(at_rank: Rank) -> None:
    """Each holds the caches of its own layers; the second has a kind of layer that the first does not have."""
    names = [f"model.layers.{number}.self_attn.attn" for number in range(4)]
    vllm_config, found = read(stages=2, hidden_layers=4), ()
    for stage in (0, 1, 0):  # the first knows all once both have sent what they hold
        at_rank(stage, stages=2)
        kinds: dict[str, KVCacheSpec] = {names[0]: SPEC, names[1]: SPEC} if not stage else {}
        found = found_in(kinds or {names[2]: WINDOW, names[3]: SPEC}, vllm_config)
        if stage:
            full, windows = found
            assert [part.number for part in full.parts] == [3]
            assert (full.shape.rank, full.shape.layers) == (1, (2, 3))
    full, windows = found
    assert (full.model.layers, windows.model.layers) == ((0, 1, 3), (2,))
    assert (full.shape.shards.stages, windows.shape.shards.stages) == ((2, 1), (0, 1))
    assert [part.number for part in full.parts] == [0, 1]
    assert windows.parts == ()


def test_a_gated_delta_net_is_divided_into_the_channels_of_q_k_and_v_and_a_matrix_for_each_head(at_rank: Rank) -> None:
    at_rank(rank=1)
    cache = blocks_of_bytes(256)
    found = found_in({TARGET[0]: GDN}, read(ranks=2, **LINEAR), {TARGET[0]: cache})
    assert [each.model for each in found] == [
        KvComponent(KvKind.STATE, (0,), 3, 8, 1, 1, "state 0.0", "bfloat16"),
        KvComponent(KvKind.STATE, (0,), 3, 8, 1, 1, "state 0.1", "bfloat16"),
        KvComponent(KvKind.STATE, (0,), 3, 24, 1, 1, "state 0.2", "bfloat16"),
        KvComponent(KvKind.STATE, (0,), 1, 8, 6, 1, "state 1", "float32"),
    ]
    assert [each.shape.heads for each in found] == [(4, 8), (4, 8), (12, 24), (4, 8)]
    for at, each in enumerate(found):
        (part,) = each.parts
        assert part.view is not None
        values = part.view(part.cache)  # [block, side, head, value]
        assert tuple(values.shape[1:]) == each.shape.chunk_shape(1)[1:2] + each.shape.chunk_shape(1)[3:]
        values[1].copy_(torch.arange(values[1].numel()).view(values[1].shape) + 100 * at)  # bfloat16 holds them to 256
    assert not cache[0].any()
    convolution = cache[1, :120].view(torch.bfloat16).view(3, 20).float()
    assert torch.equal(convolution[:, :4], torch.arange(12.0).view(3, 4))
    assert torch.equal(convolution[:, 4:8], torch.arange(12.0).view(3, 4) + 100)
    assert torch.equal(convolution[:, 8:], torch.arange(36.0).view(3, 12) + 200)
    assert torch.equal(cache[1, 120:216].view(torch.float32), torch.arange(24.0) + 300)
    assert not cache[1, 216:].any()  # padding


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        pytest.param(replace(GDN, mamba_type=MambaAttentionBackendEnum.MAMBA2), LINEAR, id="Mamba-2"),
        pytest.param(GDN, {}, id="sizes unknown"),
        pytest.param(replace(GDN, shapes=((20, 3), (4, 3, 2))), LINEAR, id="channels first"),
    ],
)
def test_other_states_go_whole_to_a_rank_of_as_many(spec: MambaSpec, text: dict[str, int]) -> None:
    cache = blocks_of_bytes(256)
    whole, matrix = found_in({TARGET[0]: spec}, read(ranks=2, **text), {TARGET[0]: cache})
    assert whole.model == KvComponent(KvKind.STATE, (0,), 1, 2, 60, 1, "state 0 of 2", "bfloat16")
    assert matrix.model == KvComponent(KvKind.STATE, (0,), 1, 8, 6, 1, "state 1", "float32")
    (part,) = whole.parts
    assert part.view is not None
    part.view(part.cache)[1] = torch.arange(60.0)
    assert torch.equal(cache[1, :120].view(torch.bfloat16).float(), torch.arange(60.0))


def test_a_state_lies_beside_the_k_and_v_of_other_layers() -> None:
    specs: dict[str, KVCacheSpec] = {TARGET[0]: GDN, TARGET[1]: GDN, TARGET[2]: SPEC}
    held = {TARGET[0]: blocks_of_bytes(256), TARGET[1]: blocks_of_bytes(256), TARGET[2]: torch.zeros(1)}
    found = found_in(specs, read(ranks=2, kv_heads=4, **LINEAR), held)
    assert [(each.model.part or each.model.kind.value, each.model.layers) for each in found] == [
        *((f"state {name}", (0, 1)) for name in ("0.0", "0.1", "0.2", "1")),
        ("heads", (2,)),
    ]


def test_what_a_layer_keeps_for_a_token_has_to_fit_a_frame() -> None:
    spec = replace(GDN, shapes=((9, 1024, 256),), dtypes=(torch.float32,), page_size_padded=None)
    held = {TARGET[0]: blocks_of_bytes(9 << 20, 1)}
    with pytest.raises(LayoutError, match=f"state 0 of a layer takes {9 << 20} bytes.*raise tensor_parallel"):
        found_in({TARGET[0]: spec}, read(), held)
    wide = replace(SPEC, num_kv_heads=1 << 16)
    with pytest.raises(LayoutError, match=f"KV of a layer takes {16 << 20} bytes"):
        found_in({TARGET[0]: wide}, read(kv_heads=1 << 16))


@pytest.mark.parametrize(
    ("blocks", "kernel_block", "fits"), [(4, 64, True), (4, 128, True), (3, 64, False), (8, 64, False)]
)
def test_kernel_blocks_are_vllms_blocks_divided(blocks: int, kernel_block: int, fits: bool) -> None:
    cache = torch.empty(4 * 128 // kernel_block, 2, kernel_block, 128, device="meta")
    if fits:
        assert checked(strided_layout(cache, 64, 128), cache, blocks).block_size == 128
    else:
        with pytest.raises(LayoutError, match=f"512 tokens, and vLLM counts {blocks} blocks of 128"):
            checked(strided_layout(cache, 64, 128), cache, blocks)
