"""What cannot be served is refused by its config.json, by name and with the keys that say so; what can be is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.model.support import (
    REFUSALS,
    SUPPORTED,
    config_of,
    fault_of_division,
    fault_of_stored_kv,
    faults_of_model,
    stored_kv,
)
from tests.shared.model.configs import LLAMA, REFUSED, SERVED, STORED


@pytest.mark.parametrize("name", SERVED)
def test_models_that_can_be_served_are_not_refused(name: str) -> None:
    assert faults_of_model(SERVED[name]) == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_with_the_keys_that_say_why(name: str) -> None:
    config, kind, keys = REFUSED[name]
    (fault,) = faults_of_model(config)
    assert fault.startswith(f"the model has {kind}, which cannot be served: ")
    assert f"(config.json: {keys}); {SUPPORTED}" in fault


def test_every_refusal_has_a_model() -> None:
    assert {refusal.kind for refusal in REFUSALS} == {kind for _, kind, _ in REFUSED.values()}


def test_a_model_may_be_refused_for_two_reasons() -> None:
    config = {**LLAMA, "hidden_size": 4100, "index_topk": 2048}
    assert [fault.partition(",")[0] for fault in faults_of_model(config)] == [
        "the model has sparse attention with an index",
        "the model has heads of unequal size",
    ]


@pytest.mark.parametrize("config", [{}, {"architectures": 3, "layer_types": "x", "block_configs": [1], "head_dim": {}}])
def test_a_configuration_of_another_form_is_not_this_checks_business(config: dict[str, Any]) -> None:
    assert faults_of_model(config) == []
    assert not fault_of_division(config, 2)


@pytest.mark.parametrize("name", STORED)
def test_kv_that_a_checkpoint_stores_quantised(name: str) -> None:
    quantisation, stored = STORED[name]
    config = {**LLAMA, "quantization_config": quantisation}
    assert stored_kv(config) == stored
    fault = fault_of_stored_kv(config, "auto", "bfloat16")
    how = {"scales of each instance": " with dynamic scales", "scales of each head": " with a scale for each head"}
    refused = stored == "nvfp4" or name in how
    assert (
        f"stored in {stored}{how.get(name, '')}" in fault and "set `engine_args: {kv_cache_dtype: bfloat16}`" in fault
    ) == refused
    assert not fault_of_stored_kv(config, "bfloat16", "bfloat16")


def test_kv_stays_in_the_precision_of_the_model() -> None:
    config = {**LLAMA, "quantization_config": STORED["modelopt, nested"][0]}
    assert "kv_cache_dtype: float16" in fault_of_stored_kv(config, "auto", "float16")
    assert "`dtype: bfloat16` and `engine_args: {kv_cache_dtype: bfl" in fault_of_stored_kv(config, "auto", "float32")


@pytest.mark.parametrize("name", STORED)
def test_vllm_stores_kv_as_is_said_here(name: str) -> None:
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    quantisation, stored = STORED[name]
    if quantisation["quant_method"].startswith("modelopt"):
        assert (get_kv_cache_quant_algo_string(quantisation) or "") == stored


def test_quantisation_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert config_of(tmp_path) == LLAMA
    quantisation = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantisation))
    assert stored_kv(config_of(tmp_path)) == "fp8_e4m3"


@pytest.mark.parametrize(("degree", "said"), [(1, ""), (2, ""), (8, ""), (16, ""), (5, "32 attention heads")])
def test_heads_and_ranks(degree: int, said: str) -> None:
    assert said in fault_of_division(LLAMA, degree)
    assert bool(fault_of_division(LLAMA, degree)) == bool(said)


def test_kv_heads_are_divided_or_held_by_several() -> None:
    config = {**LLAMA, "num_attention_heads": 48, "num_key_value_heads": 8}
    assert not fault_of_division(config, 16)
    assert "8 KV heads cannot be shared by 12" in fault_of_division(config, 12)


@pytest.mark.parametrize(
    ("config_class", "architecture", "kind"),
    [
        ("DeepseekV2Config", "DeepseekV2ForCausalLM", ""),
        ("DeepseekV3Config", "DeepseekV3ForCausalLM", ""),
        ("Mamba2Config", "Mamba2ForCausalLM", ""),
        ("JambaConfig", "JambaForCausalLM", ""),
        ("Qwen3NextConfig", "Qwen3NextForCausalLM", ""),
        ("NemotronHConfig", "NemotronHForCausalLM", ""),
        ("FalconH1Config", "FalconH1ForCausalLM", ""),
        ("Zamba2Config", "Zamba2ForCausalLM", ""),
        ("WhisperConfig", "WhisperForConditionalGeneration", "an encoder"),
        ("LlamaConfig", "LlamaForCausalLM", ""),
        ("Qwen3Config", "Qwen3ForCausalLM", ""),
        ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", ""),
        ("Gemma2Config", "Gemma2ForCausalLM", ""),
        ("Gemma3TextConfig", "Gemma3ForCausalLM", ""),
        ("Gemma3nTextConfig", "Gemma3nForCausalLM", ""),
        ("GptOssConfig", "GptOssForCausalLM", ""),
        ("MistralConfig", "MistralForCausalLM", ""),
        ("MixtralConfig", "MixtralForCausalLM", ""),
        ("Phi3Config", "Phi3ForCausalLM", ""),
        ("Olmo2Config", "Olmo2ForCausalLM", ""),
        ("Glm4Config", "Glm4ForCausalLM", ""),
        ("GPT2Config", "GPT2LMHeadModel", ""),
        ("OPTConfig", "OPTForCausalLM", ""),
    ],
)
def test_configurations_that_transformers_makes(config_class: str, architecture: str, kind: str) -> None:
    import transformers

    config = json.loads(
        getattr(transformers, config_class)(architectures=[architecture]).to_json_string(use_diff=False)
    )
    faults = faults_of_model(config)
    assert [kind in fault for fault in faults] == ([True] if kind else [])
