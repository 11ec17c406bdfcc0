"""Models from their configs, and the bundled ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.cost.library import bundled_geometry, bundled_names, geometry_from_config, geometry_from_file
from shared.errors import InvalidRequest, NotFound

# Parameters of the published checkpoints, to the last weight.
PARAMETERS = {
    "OPT-125M": 125_239_296,
    "OPT-13B": 12_853_473_280,
    "LLaMA-30B": 32_528_943_616,
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Mistral-7B": 7_241_732_096,
    "Qwen2-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Gemma-2-9B": 9_241_705_984,
    "Mixtral-8x7B": 46_702_792_704,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V3": 671_026_419_200,
}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_are_those_of_the_checkpoint(name: str, count: int) -> None:
    assert bundled_geometry(name).parameters() == count


def test_a_tiny_llama_by_hand() -> None:
    g = geometry_from_config(LLAMA)
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64  # q, k and v, o
    mlp = 3 * 64 * 128
    norms = 2 * 64
    assert g.parameters() == 2 * 100 * 64 + 2 * (attention + mlp + norms) + 64
    assert g.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, width, bytes


def test_experts_that_tokens_reach() -> None:
    experts = bundled_geometry("Mixtral-8x7B").experts
    assert experts is not None
    assert [experts.expected_active(tokens) for tokens in (1, 1000)] == pytest.approx([2.0, 8.0])


def test_grouped_queries_not_hidden_size() -> None:
    # From the hidden size it would be 4 times too large for Llama-3-8B.
    g = bundled_geometry("Llama-3-8B")
    assert g.kv_bytes_per_token() == 131_072
    assert 2 * g.layers * g.hidden * 2 == 4 * 131_072


def test_latent_attention_keeps_one_latent_a_token() -> None:
    g = bundled_geometry("DeepSeek-V3")
    assert g.kv_bytes_per_token() == 61 * (512 + 64) * 2
    assert g.kv_geometry().bytes_per_token(2.0) == g.kv_bytes_per_token()


def test_sliding_windows() -> None:
    gemma = bundled_geometry("Gemma-2-9B")
    assert (gemma.window_tokens, gemma.window_layers) == (4096, 21)
    assert bundled_geometry("Mistral-7B").window_layers == 32
    assert bundled_geometry("Mixtral-8x7B").window_layers == 0
    gemma3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 12, "sliding_window": 512}
    assert geometry_from_config(gemma3).window_layers == 10


@pytest.mark.parametrize("name", ["meta-llama/Meta-Llama-3-8B", "llama-3-8b", "Qwen/Qwen3-32B", "facebook/opt-125m"])
def test_hub_ids_and_loose_names(name: str) -> None:
    assert bundled_geometry(name).name in PARAMETERS


def test_every_bundled_model_reads() -> None:
    for name in bundled_names():
        g = bundled_geometry(name)
        assert g.parameters() > g.vocab * g.hidden


def test_an_unknown_model_lists_the_bundled_ones() -> None:
    with pytest.raises(NotFound, match=r"no bundled geometry for the model 'GPT-5'; bundled: OPT-125M"):
        bundled_geometry("GPT-5")


def test_an_unknown_architecture_is_a_clear_error() -> None:
    with pytest.raises(InvalidRequest, match=r"mine: unknown architecture 'MambaForCausalLM'; known: LlamaForCausalLM"):
        geometry_from_config({**LLAMA, "architectures": ["MambaForCausalLM"]}, "mine")
    with pytest.raises(InvalidRequest, match=r"unknown architecture model_type 'rwkv'"):
        geometry_from_config({"model_type": "rwkv"})


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("opt", "OPTForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("mixtral", "MixtralForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_model_type_serves_where_architectures_are_missing(model_type: str, architecture: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    more = {"model_type": model_type, "ffn_dim": 128, "num_local_experts": 2, "num_experts_per_tok": 1}
    assert geometry_from_config(config | more).architecture == architecture


def test_text_part_of_a_multimodal_config() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "architectures"}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    assert geometry_from_config(outer).hidden == 64


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_or_bad_key_is_named(key: str) -> None:
    for bad in (None, 0, -3, "many"):
        with pytest.raises(InvalidRequest, match=f"{key} must be a whole number from 1"):
            geometry_from_config({**LLAMA, key: bad})


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "int4"),
        ({"torch_dtype": "float16"}, "fp16"),
    ],
)
def test_a_checkpoint_states_its_precision(stated: dict[str, Any], dtype: str) -> None:
    assert geometry_from_config(LLAMA | stated).dtype == dtype


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**18),
        ("num_key_value_heads", "8"),
        ("head_dim", [1]),
        ("sliding_window", {}),
        ("architectures", "LlamaForCausalLM"),
        ("quantization_config", "fp8"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_file(tmp_path: Path, key: str, value: object) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, key: value}))
    with pytest.raises(InvalidRequest, match=rf"config\.json: model config: {key} must be"):
        geometry_from_file(file)


def test_from_a_file_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA), encoding="utf-8")
    assert geometry_from_file(folder).name == geometry_from_file(file).name == "tiny"
    file.write_text("{", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"config.json:1: not JSON"):
        geometry_from_file(folder)
    with pytest.raises(InvalidRequest, match=r"nowhere\.json: cannot be read"):
        geometry_from_file(tmp_path / "nowhere.json")
