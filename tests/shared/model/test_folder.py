"""What a model's folder lacks is named: files, shards, and files that are not whole."""

import json
from pathlib import Path

import pytest

from shared.model.folder import fault_of_folder
from shared.model.weights import fault_of_weights
from tests.shared.model.safetensors import safetensors

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
WHOLE = safetensors(64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def fault(folder: Path) -> str:
    return fault_of_folder(folder, tokenizer=True, weights=True)


def test_a_whole_folder(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(WHOLE)
    assert not fault(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    assert fault(folder).startswith(f"{folder} has no weights (*.safetensors, *.bin")


def test_all_missing_shards_are_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-2.safetensors").write_bytes(WHOLE)
    assert "lacks model-1.safetensors, model-3.safetensors, which its index names" in fault(folder)


def test_shards_of_an_index_of_pytorch_files_are_named(folder: Path) -> None:
    index = {"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model-1.bin").write_bytes(b"x")
    assert "lacks pytorch_model-2.bin, which its index names" in fault(folder)


@pytest.mark.parametrize("size", [0, 5, 20, len(WHOLE) - 1])
def test_a_truncated_file_is_named_with_its_size(folder: Path, size: int) -> None:
    (folder / "model.safetensors").write_bytes(WHOLE[:size])
    found = fault(folder)
    assert "model.safetensors is truncated" in found
    assert f"{size:,}" in found


def test_pointers_of_lfs_are_not_taken_for_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(POINTER)
    assert "model.safetensors: pointers of Git LFS instead of weights: run `git lfs pull`" in fault(folder)
    (folder / "tokenizer.json").write_bytes(POINTER)
    assert "tokenizer.json: a pointer of Git LFS" in fault(folder)


def test_a_file_that_cannot_be_read_is_a_fault(folder: Path) -> None:
    (folder / "model.safetensors").mkdir()
    assert fault_of_weights(folder)
