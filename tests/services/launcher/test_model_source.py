"""A model is a folder or a name of a hub; a text that looks like a path is not looked up there."""

import json
from pathlib import Path

import pytest

from services.launcher.model_source import PROJECT, fault_of, resolve_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole model, in models/whole of the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    model = tmp_path / "models" / "whole"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"num_attention_heads": 4}')
    for name in ("tokenizer.json", "model.safetensors"):
        (model / name).write_text("x")
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


def test_offline_a_name_must_be_in_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fault = fault_of("org/never-downloaded", weights=True)
    assert "org/never-downloaded is not in" in fault
    assert "HF_HUB_OFFLINE" in fault


def test_text_that_is_neither_a_folder_nor_a_name(folder: Path) -> None:
    assert "neither a folder nor" in fault_of("what is this", weights=True)
