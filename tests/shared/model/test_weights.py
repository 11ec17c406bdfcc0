"""The size of weights, from their headers."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from services.launcher.model_source import PROJECT
from shared.model.weights import Weights, weights_of


def write(file: Path, tensors: dict[str, Any]) -> int:
    """A safetensors file without any data behind its header; its size."""
    head = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head)
    return file.stat().st_size


def tensor(dtype: str, shape: list[int], size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}


def test_floats_are_counted_as_they_are_loaded_and_the_rest_as_it_is_stored(tmp_path: Path) -> None:
    stored = write(
        tmp_path / "model.safetensors",
        {
            "embed": tensor("F32", [10, 4], 160),
            "norm": tensor("BF16", [4], 8),
            "scalar": tensor("F32", [], 4),
            "packed": tensor("U8", [100], 100),
            "fp8": tensor("F8_E4M3", [10, 10], 100),
        },
    )
    assert weights_of(tmp_path, "bfloat16") == Weights(stored, 2 * 45 + 200)
    assert weights_of(tmp_path, "float32") == Weights(stored, 4 * 45 + 200)


def test_only_files_of_the_index_count(tmp_path: Path) -> None:
    parts = [f"model-{n}-of-2.safetensors" for n in (1, 2)]
    stored = sum(write(tmp_path / name, {"w": tensor("BF16", [8], 16)}) for name in parts)
    write(tmp_path / "consolidated.safetensors", {"w": tensor("BF16", [16], 32)})
    index = {"weight_map": {"a": parts[0], "b": parts[1], "c": parts[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_of(tmp_path) == Weights(stored, 32)


def test_other_formats_count_as_files(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 77)
    assert weights_of(tmp_path) == Weights(77, 77)


def test_the_demo_models_weights_are_what_torch_loads() -> None:
    found = weights_of(PROJECT / "models" / "demo")
    assert found is not None
    assert 0.9 * found.stored < found.loaded <= found.stored


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 40, struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"]
)
def test_a_file_that_is_no_safetensors_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weights_of(tmp_path) is None


def test_what_is_no_folder_says_nothing(tmp_path: Path) -> None:
    assert weights_of("org/model") is None
    assert weights_of(tmp_path) is None
