"""What a config.json says of the precision of weights, and which checkpoints are quantisations of a model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.domain.precision import quantised_to, stored_in
from shared.model.folder import fault_of_quantised

CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "vocab_size": 16, "architectures": ["L"]}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ATTENTION = {"targets": ["LlamaAttention"], "weights": None, "input_activations": KV}  # beside a scheme of KV


def compressed(kind: str, bits: int) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "type": kind}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        (None, ""),
        ({}, ""),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "fp4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq_marlin", "bits": 8}, "int8"),
        ({"quant_method": "gptq", "bits": 3}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        (compressed("int", 8), "int8"),
        (compressed("float", 8), "fp8"),
        (compressed("int", 4), "int4"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": KV}, ""),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": ATTENTION}, "kv_cache_scheme": KV}, ""),
        (compressed("int", 8) | {"kv_cache_scheme": KV}, "int8"),
        ({"quant_method": "torchao"}, "torchao"),
    ],
)
def test_precisions_of_weights(given: Any, precision: str) -> None:
    assert quantised_to({**CONFIG, "quantization_config": given}) == precision


@pytest.mark.parametrize(
    ("precision", "stored"),
    [("", ""), ("fp8", "fp8"), ("int4-1f2e3d4c", "int4"), ("int8_per_channel_weight_only", "int8"), ("torchao", "")],
)
def test_the_cost_model_knows_some_of_them(precision: str, stored: str) -> None:
    assert stored_in(precision) == stored


def folder(place: Path, embeddings: np.ndarray, **changes: Any) -> Path:
    place.mkdir()
    save_file({"model.embed_tokens.weight": embeddings, "x": np.zeros(3)}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return place


def test_a_quantised_checkpoint_has_the_models_configuration_and_embeddings(tmp_path: Path) -> None:
    rows = np.arange(128, dtype=np.float32).reshape(16, 8)
    base = folder(tmp_path / "base", rows)
    more = {"quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16", "another": 1}
    assert fault_of_quantised(folder(tmp_path / "same", rows, **more), base) == ""
    assert fault_of_quantised(folder(tmp_path / "half", rows.astype(np.float16)), base) == ""  # not comparable
    text = fault_of_quantised(folder(tmp_path / "deeper", rows, hidden_size=16), base)
    assert text.endswith("hidden_size of config.json is 16, the model's 8")
    text = fault_of_quantised(folder(tmp_path / "tuned", rows + 1.0), base)
    assert text.endswith("its token embeddings are others")
