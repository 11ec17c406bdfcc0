"""A model is a folder or a name of a hub; a text that looks like a path is not looked up there."""

import json
from pathlib import Path

import pytest

from services.launcher.model_source import PROJECT, fault_of, resolve_model
from tests.shared.model.safetensors import safetensors


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole model, in models/whole of the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    model = tmp_path / "models" / "whole"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"num_attention_heads": 4}')
    (model / "tokenizer.json").write_text("x")
    (model / "model.safetensors").write_bytes(safetensors(64))
    return model


def test_a_folder_is_found_here_beside_the_file_and_in_the_project(tmp_path: Path, folder: Path) -> None:
    beside = tmp_path / "elsewhere"
    (beside / "mine").mkdir(parents=True)
    (beside / "mine" / "config.json").write_text("{}")
    assert resolve_model("models/whole") == str(folder)
    assert resolve_model("mine", beside) == str(beside / "mine")
    assert resolve_model("models/demo") == str(PROJECT / "models" / "demo")


@pytest.mark.parametrize("model", ["org/name", "gpt2", "Qwen/Qwen3-0.6B"])
def test_a_name_stays_a_name(folder: Path, model: str) -> None:
    assert resolve_model(model) == model
    assert not fault_of(model, weights=True)


@pytest.mark.parametrize("model", ["models/hole", "/nowhere/at/all", "./gpt2", "~/gpt2", "a/b/c", "gpt2/"])
def test_a_text_that_looks_like_a_path_is_one(folder: Path, model: str) -> None:
    resolved = resolve_model(model)
    assert Path(resolved).is_absolute()
    assert "there is no folder" in fault_of(resolved, weights=True)


def test_the_neighbours_of_a_missing_folder_are_named(folder: Path) -> None:
    assert "(beside it: whole)" in fault_of(resolve_model("models/hole"), weights=True)


INDEX = json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})


@pytest.mark.parametrize(
    ("file", "content", "weights", "fault"),
    [
        ("config.json", '{"num_attention_heads": 4}', True, ""),
        ("config.json", None, True, "config.json is missing"),
        ("config.json", "{", True, "not a JSON object"),
        ("tokenizer.json", None, True, "no tokenizer"),
        ("model.safetensors", None, True, "no weights"),
        ("model.safetensors", None, False, ""),  # as an emulated engine needs it
        ("model.safetensors.index.json", INDEX, True, "lacks model-2.safetensors"),
    ],
)
def test_missing_and_broken_parts_of_a_folder_are_named(
    folder: Path, file: str, content: str | None, weights: bool, fault: str
) -> None:
    (folder / file).write_text(content or "")
    if content is None:
        (folder / file).unlink()
    found = fault_of(str(folder), weights=weights)
    assert fault in found if fault else not found


def test_the_model_of_shipped_files_without_a_source_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("services.launcher.model_source.PROJECT", tmp_path)
    monkeypatch.chdir(tmp_path)
    fault = fault_of(resolve_model("models/demo"), weights=True)
    assert f"there is no folder {tmp_path}/models/demo: the demo model models/demo is part of a source" in fault
    assert "--model" in fault


def test_text_that_is_neither_a_folder_nor_a_name(folder: Path) -> None:
    assert "neither a folder nor" in fault_of("what is this", weights=True)
