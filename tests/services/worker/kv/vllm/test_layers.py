"""Which layers are transferred, by vLLM's configuration, and which layouts are refused, by its specifications."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from benchmarks.engine_client import NEW_TOKENS, Engine, emptied, handed_over, identical, prompts
from services.worker.kv.layout import LayoutError, strided_layout
from services.worker.kv.vllm.connector import device_layout
from services.worker.kv.vllm.layers import check_specs, in_order, without_draft
from tests.tiny_models import make_llama

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
FP8 = replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, dtype=torch.uint8)
TARGET = [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]  # as many as a tiny Llama has
DRAFT = {"method": "draft_model", "num_speculative_tokens": 2}


def caches(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((1,), float(at)) for at, name in enumerate(names)}


def config(folder: Path, draft: bool = True) -> VllmConfig:
    model = str(make_llama(folder))
    speculation = {**DRAFT, "model": model} if draft else None
    arguments: dict[str, Any] = {"model": model, "skip_tokenizer_init": True, "speculative_config": speculation}
    return EngineArgs(**arguments, max_model_len=512, enforce_eager=True).create_engine_config()


def uniform(specs: dict[str, KVCacheSpec]) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)


def check(spec: KVCacheSpec, **found: Any) -> None:
    group = KVCacheGroupSpec(TARGET, spec)
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group])
    read = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8_e4m3"), model_config=SimpleNamespace(dtype=torch.bfloat16)
    )
    check_specs(read, cache, found or caches(*TARGET))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "draft",
    ["model.layers.3.self_attn.attn", "model.layers.4.self_attn.attn", "draft_model.model.layers.0.self_attn.attn"],
    ids=["eagle", "mtp", "draft model"],
)
def test_a_drafts_layers_stay_out_of_transfers(tmp_path: Path, draft: str) -> None:
    found = without_draft(config(tmp_path), caches(draft, *TARGET))
    assert list(found) == TARGET
    assert [int(cache) for cache in in_order(found)] == [1, 2, 3]


def test_a_layer_that_vllm_marks_as_a_drafts_stays_out_whatever_its_name(tmp_path: Path) -> None:
    vllm_config, names = config(tmp_path), [*TARGET, "draft.without.a.number"]
    modules = {name: SimpleNamespace(is_draft_layer=name not in TARGET) for name in names}
    vllm_config.compilation_config.static_forward_context.update(modules)
    assert list(without_draft(vllm_config, caches(*names))) == TARGET


def test_without_speculation_every_layer_is_transferred(tmp_path: Path) -> None:
    names = ["model.layers.7.self_attn.attn", "odd.name"]
    assert list(without_draft(config(tmp_path, draft=False), caches(*names))) == names


WINDOW = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=128)
MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        pytest.param(SPEC, "", id="full"),
        pytest.param(replace(SPEC, sliding_window=128), "", id="window promoted"),
        pytest.param(WINDOW, "", id="window"),
        pytest.param(uniform(dict.fromkeys(TARGET, SPEC)), "", id="uniform"),
        pytest.param(replace(SPEC, num_head_slots=4), "4 head slots", id="packed"),
        pytest.param(
            RocmAttentionBackend.customize_spec(SPEC),
            r"model.layers.0.*2 head slots.*attention_backend: TRITON_ATTN",
            id="slots of K and V",
        ),
        pytest.param(replace(SPEC, tokens_per_state=4), "4 tokens", id="compressed"),
        pytest.param(replace(SPEC, tokens_per_state=Fraction(1, 4)), "1/4 tokens", id="several states"),
        pytest.param(
            replace(SPEC, head_size=192, head_size_v=128), "K has 192 channels and V 128", id="unlike K and V"
        ),
        pytest.param(
            FP8,
            "stored in fp8_e4m3, as the checkpoint or `kv_cache_dtype` selects; "
            "set engine_args: {kv_cache_dtype: bfloat16}",
            id="fp8",
        ),
        pytest.param(MLA, "MLAAttentionSpec", id="MLA"),
        pytest.param(
            uniform(dict.fromkeys(TARGET, SPEC) | {TARGET[2]: replace(SPEC, head_size_v=32)}),
            "model.layers.2",
            id="one of several",
        ),
    ],
)
def test_other_layouts_are_refused_by_name_with_what_to_do(spec: KVCacheSpec, reason: str) -> None:
    if reason:
        with pytest.raises(LayoutError, match=reason):
            check(spec)
    else:
        check(spec)


def test_slots_of_k_and_v_have_the_shape_of_two_heads() -> None:
    slots = RocmAttentionBackend.customize_spec(SPEC)
    assert (slots.num_heads, slots.state_content_size_bytes) == (SPEC.num_heads, SPEC.state_content_size_bytes)
    strided_layout(torch.zeros(1, slots.num_heads, 32, slots.state_content_size_bytes // 2), 64, 32)


def test_a_layer_that_shares_anothers_cache_is_as_good_as_that_one() -> None:
    found = caches(*TARGET)
    check(SPEC, **found, shared=found[TARGET[0]])
    with pytest.raises(LayoutError, match="layer alone cannot be transferred: vLLM does not describe it"):
        check(SPEC, **found, alone=torch.zeros(1))


@pytest.mark.parametrize(
    ("blocks", "kernel_block", "fits"), [(4, 64, True), (4, 128, True), (3, 64, False), (8, 64, False)]
)
def test_kernel_blocks_are_vllms_blocks_divided(blocks: int, kernel_block: int, fits: bool) -> None:
    cache = torch.empty(4 * 128 // kernel_block, 2, kernel_block, 128, device="meta")
    if fits:
        assert device_layout(cache, 64, 128, blocks).block_size == 128
    else:
        with pytest.raises(LayoutError, match=f"512 tokens, and vLLM counts {blocks} blocks of 128"):
            device_layout(cache, 64, 128, blocks)


@pytest.mark.slow
async def test_a_draft_model_on_one_side_only_leaves_transfers_as_they_are(tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    draft: dict[str, Any] = {"speculative_config": {**DRAFT, "model": str(model)}}
    p, d = Engine("p", model, dtype="float32", **draft), Engine("d", model, dtype="float32")
    async with p, d:
        texts = prompts()[:4]
        references = [await d.generate(text, NEW_TOKENS) for text in texts]
        for source, target in ((p, d), (d, p)):
            for engine in (p, d):
                await engine.ask("reset")
            outputs = [await handed_over(source, target, text) for text in texts]
            assert identical(outputs, references) == len(texts)
            assert await target.pulls(len(texts)) == {"ok": len(texts)}
            await emptied(target)
