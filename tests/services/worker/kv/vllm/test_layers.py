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

from services.worker.kv.layout import LayoutError, strided_layout
from services.worker.kv.vllm.connector import device_layout
from services.worker.kv.vllm.layers import check_specs, in_order, without_draft
from tests.services.worker.kv.vllm.engine_client import NEW_TOKENS, Engine, emptied, handed_over, identical, prompts
from tests.tiny_models import make_llama

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
TARGET = [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]  # as many as a tiny Llama has
DRAFT = {"method": "draft_model", "num_speculative_tokens": 2}


def caches(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((1,), float(at)) for at, name in enumerate(names)}


def config(folder: Path, draft: bool = True) -> VllmConfig:
    model = str(make_llama(folder))
    speculation = {**DRAFT, "model": model} if draft else None
    arguments: dict[str, Any] = {"model": model, "skip_tokenizer_init": True, "speculative_config": speculation}
    return EngineArgs(**arguments, max_model_len=512, enforce_eager=True).create_engine_config()


def checked(spec: KVCacheSpec, **found: Any) -> None:
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
    vllm_config = config(tmp_path)
    names = [*TARGET, "draft.without.a.number"]
    modules = {name: SimpleNamespace(is_draft_layer=name not in TARGET) for name in names}
    vllm_config.compilation_config.static_forward_context.update(modules)
    assert list(without_draft(vllm_config, caches(*names))) == TARGET


def test_without_speculation_every_layer_is_transferred(tmp_path: Path) -> None:
    names = ["model.layers.7.self_attn.attn", "odd.name"]
    assert list(without_draft(config(tmp_path, draft=False), caches(*names))) == names


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, sliding_window=128),
        SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=128),
        UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=dict.fromkeys(TARGET, SPEC)),
    ],
    ids=["full", "window promoted", "window", "uniform"],
)
def test_k_and_v_beside_each_other_are_accepted(spec: KVCacheSpec) -> None:
    checked(spec)


def test_two_slots_for_k_and_v_are_refused_though_their_shape_is_that_of_two_heads() -> None:
    two_slots = RocmAttentionBackend.customize_spec(SPEC)
    assert (two_slots.num_heads, two_slots.state_content_size_bytes) == (SPEC.num_heads, SPEC.state_content_size_bytes)
    strided_layout(torch.zeros(1, two_slots.num_heads, 32, two_slots.state_content_size_bytes // 2), 64, 32)
    with pytest.raises(LayoutError, match=r"model.layers.0.*2 head slots.*attention_backend: TRITON_ATTN"):
        checked(two_slots)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (replace(SPEC, num_head_slots=4), "4 head slots"),
        (replace(SPEC, tokens_per_state=4), "4 tokens"),
        (replace(SPEC, tokens_per_state=Fraction(1, 4)), "1/4 tokens"),
        (replace(SPEC, head_size=192, head_size_v=128), "K has 192 channels and V 128"),
        (replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, dtype=torch.uint8), "kv_cache_dtype: bfloat16"),
        (MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16), "MLAAttentionSpec"),
        (
            UniformTypeKVCacheSpecs(
                block_size=32, kv_cache_specs=dict.fromkeys(TARGET, SPEC) | {TARGET[2]: replace(SPEC, head_size_v=32)}
            ),
            "model.layers.2",
        ),
    ],
    ids=["packed", "compressed", "several states", "unlike K and V", "fp8", "MLA", "one of several"],
)
def test_another_layout_is_refused_by_name_with_what_to_do(spec: KVCacheSpec, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        checked(spec)


def test_fp8_names_what_asks_for_it_and_the_setting_that_turns_it_off() -> None:
    with pytest.raises(LayoutError) as raised:
        checked(replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, dtype=torch.uint8))
    assert "stored in fp8_e4m3, which the checkpoint asks for unless `kv_cache_dtype` does" in str(raised.value)
    assert "set engine_args: {kv_cache_dtype: bfloat16}" in str(raised.value)


def test_a_layer_that_shares_anothers_cache_is_as_good_as_that_one() -> None:
    found = caches(*TARGET)
    checked(SPEC, **found, shared=found[TARGET[0]])
    with pytest.raises(LayoutError, match="layer alone cannot be transferred: vLLM does not describe it"):
        checked(SPEC, **found, alone=torch.zeros(1))


@pytest.mark.parametrize(
    ("blocks", "kernel_block", "fits"), [(4, 64, True), (4, 128, True), (3, 64, False), (8, 64, False)]
)
def test_kernel_blocks_are_taken_as_long_as_they_are_vllms_blocks_divided(
    blocks: int, kernel_block: int, fits: bool
) -> None:
    cache = torch.empty(4 * 128 // kernel_block, 2, kernel_block, 128, device="meta")
    if fits:
        assert device_layout(cache, 64, 128, blocks).block_size == 128
    else:
        with pytest.raises(LayoutError, match=f"512 tokens, and vLLM counts {blocks} blocks of 128"):
            device_layout(cache, 64, 128, blocks)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_draft_model_on_one_side_only_leaves_transfers_as_they_are(tmp_path: Path, side: str) -> None:
    model = make_llama(tmp_path)
    draft: dict[str, Any] = {"speculative_config": {**DRAFT, "model": str(model)}}
    p = Engine("p", model, dtype="float32", **(draft if side == "prefill" else {}))
    d = Engine("d", model, dtype="float32", **(draft if side == "decode" else {}))
    async with p, d:
        texts = prompts()[:4]
        references = [await p.generate(text, NEW_TOKENS) for text in texts]
        await p.ask("reset")
        outputs = [await handed_over(p, d, text) for text in texts]
        assert identical(outputs, references) == len(texts)
        assert await d.pulls(len(texts)) == {"ok": len(texts)}
        await emptied(d)
