"""What cannot be served is refused by its config.json, by name and with the keys that say so; what can be is not."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shared.model.support import (
    LATENT_TYPES,
    REFUSALS,
    STATEFUL,
    SUPPORTED,
    config_of,
    fault_of_division,
    fault_of_stored_kv,
    faults_of_model,
    stored_kv,
)
from tests.shared.model.configs import LLAMA, REFUSED, SERVED, STORED

VLLM = Path(str(find_spec("vllm").origin)).parent  # type: ignore[union-attr]
STATES = ("IsHybrid", "IsAttentionFree", "HasInnerState")


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
    config = {**REFUSED["Kimi-Linear"][0], "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert [fault.split(",")[0] for fault in faults_of_model(config)] == [
        "the model has multi-head latent attention (MLA)",
        "the model has state-space",
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
    assert (f"stored in {stored}" in fault and "set `engine_args: {kv_cache_dtype: bfloat16}`" in fault) == bool(stored)
    assert not fault_of_stored_kv(config, "bfloat16", "bfloat16")


def test_kv_stays_in_the_precision_of_the_model() -> None:
    config = {**LLAMA, "quantization_config": STORED["modelopt"][0]}
    assert "kv_cache_dtype: float16" in fault_of_stored_kv(config, "auto", "float16")


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
        ("DeepseekV2Config", "DeepseekV2ForCausalLM", "latent"),
        ("DeepseekV3Config", "DeepseekV3ForCausalLM", "latent"),
        ("Mamba2Config", "Mamba2ForCausalLM", "state-space"),
        ("JambaConfig", "JambaForCausalLM", "state-space"),
        ("Qwen3NextConfig", "Qwen3NextForCausalLM", "state-space"),
        ("NemotronHConfig", "NemotronHForCausalLM", "state-space"),
        ("FalconH1Config", "FalconH1ForCausalLM", "state-space"),
        ("Zamba2Config", "Zamba2ForCausalLM", "state-space"),
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


def test_the_architectures_with_a_state_are_those_of_the_vllm_that_is_installed() -> None:
    bases: dict[str, set[str]] = {}
    for folder in ("model_executor/models", "models"):
        for file in (VLLM / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases.setdefault(node.name, set()).update(
                        each.id for each in node.bases if isinstance(each, ast.Name)
                    )

    def keeps_state(name: str, seen: frozenset[str] = frozenset()) -> bool:
        inner = bases.get(name, set()) - seen
        return name in STATES or any(keeps_state(each, seen | {name}) for each in inner)

    assert {name for name, kind in registered().items() if keeps_state(kind)} == STATEFUL


def test_the_types_with_latent_attention_are_those_of_the_vllm_that_is_installed() -> None:
    source = VLLM / "transformers_utils" / "model_arch_config_convertor.py"
    function = next(
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "is_deepseek_mla"
    )
    first = next(node for node in ast.walk(function) if isinstance(node, ast.Tuple))
    drafts = {"k3_dspark"}  # of other models' drafts, as those that end in `mtp`
    named = {str(each.value) for each in first.elts if isinstance(each, ast.Constant)}
    assert {name for name in named if not name.endswith("mtp")} - drafts == LATENT_TYPES


def registered() -> dict[str, str]:
    """vLLM's architectures, each with the name of its class."""
    found = {}
    for node in ast.walk(ast.parse((VLLM / "model_executor/models/registry.py").read_text())):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and len(value.elts) == 2:
                    kind = value.elts[1]
                    found[str(key.value)] = str(kind.value) if isinstance(kind, ast.Constant) else ""
    return found
