"""Models of the hub: what prevents their use, in words, and the download of their weights with its progress."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InvalidRequest, Unavailable
from shared.model.source import IGNORED, Download, ModelSource, fetch_weights, read_config, source_of
from shared.model.support import config_of
from tests.hub import Hub, Repository, hub
from tests.shared.model.safetensors import safetensors

MIB = 1 << 20
CONFIG = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}).encode()
WEIGHTS = safetensors(24 * MIB)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, and an empty cache."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with hub() as found:
        found.repositories["org/tiny"] = Repository({"config.json": CONFIG, "model.safetensors": WEIGHTS})
        yield found


def source(served: Hub, model: str = "org/tiny", **changes: Any) -> ModelSource:
    return ModelSource(model, endpoint=served.url, **changes)


def fetch(served: Hub, **changes: Any) -> list[Download]:
    seen: list[Download] = []
    fetch_weights(source(served, **changes), "auto", IGNORED, seen.append, sample_s=0.01)
    return seen


def weights_in(cache: Path) -> list[bytes]:
    return [each.read_bytes() for each in sorted(cache.rglob("snapshots/*/*.safetensors"))]


def read(served: Hub, **changes: Any) -> dict[str, Any]:
    return read_config(source(served, **changes), trust_remote_code=False)


def test_the_configuration_is_read_from_the_hub(served: Hub) -> None:
    assert read(served)["model_type"] == "llama"


@pytest.mark.parametrize(
    ("token", "why"), [("", "HF_TOKEN is not set"), ("hf_other", "the account of HF_TOKEN has no")]
)
def test_a_gated_model_is_explained(served: Hub, token: str, why: str) -> None:
    served.repositories["org/tiny"].token = "hf_good"
    with pytest.raises(InvalidRequest) as refused:
        read(served, token=token)
    said = refused.value.message
    assert "org/tiny is a gated model" in said
    assert f"{served.url}/org/tiny" in said
    assert why in said
    assert "hf_other" not in said
    assert read(served, token="hf_good")
    with pytest.raises(InvalidRequest, match="org/tiny is a gated model"):
        fetch(served, token=token)


def test_a_token_of_the_environment_is_sent(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served.repositories["org/tiny"].token = "hf_good"
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert read(served)
    assert served.tokens == {"hf_good"}


def test_a_private_or_missing_model_is_explained(served: Hub) -> None:
    served.repositories["org/tiny"].token, served.repositories["org/tiny"].private = "hf_good", True
    for model in ("org/tiny", "org/other"):
        with pytest.raises(
            InvalidRequest, match=f"{model} is neither a folder here nor a model of {served.url}, unless"
        ):
            read(served, model=model)


def test_a_hub_that_cannot_be_reached_is_named_without_its_password(served: Hub, tmp_path: Path) -> None:
    away = ModelSource("org/other", endpoint="http://user:word@127.0.0.1:9")
    with pytest.raises(Unavailable) as failed:
        read_config(away, trust_remote_code=False)
    said = failed.value.message
    assert f"org/other is neither a folder here nor in {tmp_path / 'cache'}, and http://127.0.0.1:9 cannot be" in said
    assert "internet connection" in said
    assert "word" not in said


def test_offline_a_name_must_be_in_the_cache(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InvalidRequest, match=r"org/tiny is not in .*, and HF_HUB_OFFLINE is set"):
        read(served)
    assert not served.requests


def test_weights_are_downloaded_with_progress_and_once(served: Hub, tmp_path: Path) -> None:
    served.allowed_bytes = 11 * MIB  # huggingface_hub writes 10 MiB at a time
    paused: list[Download] = []

    def progress(download: Download) -> None:
        if 10 * MIB <= download.done_bytes < download.total_bytes:
            paused.append(download)
            served.release.set()

    fetch_weights(source(served), "auto", IGNORED, progress, sample_s=0.01)
    assert paused[0] == Download(10 * MIB, len(WEIGHTS))
    assert weights_in(tmp_path / "cache") == [WEIGHTS]
    assert not fetch(served)


def test_a_download_of_another_process_is_progress_of_this_one(served: Hub) -> None:
    """Both wait for one file, which one of them downloads."""
    served.allowed_bytes = 11 * MIB
    both = threading.Barrier(2, action=served.release.set)
    seen: list[list[Download]] = [[], []]

    def progress(mine: list[Download], download: Download) -> None:
        mine.append(download)
        if download.done_bytes == 10 * MIB:
            both.wait(60)

    threads = [
        threading.Thread(
            target=fetch_weights,
            args=(source(served), "auto", IGNORED, lambda download, mine=mine: progress(mine, download), 0.01),
        )
        for mine in seen
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    assert [mine[-1] for mine in seen] == [Download(len(WEIGHTS), len(WEIGHTS))] * 2
    assert len([each for each in served.requests if each[0] == "GET" and each[1].endswith(".safetensors")]) == 1


def test_a_download_that_breaks_off_continues(served: Hub, tmp_path: Path) -> None:
    served.break_after = [11 * MIB]
    assert fetch(served)[-1] == Download(len(WEIGHTS), len(WEIGHTS))
    assert weights_in(tmp_path / "cache") == [WEIGHTS]
    assert [each[2] for each in served.requests if each[2]] == [f"bytes={10 * MIB}-"]


def test_a_download_that_breaks_off_for_good_is_explained(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    served.break_after = [11 * MIB, *[0] * 20]
    with pytest.raises(Unavailable, match=f"the download of org/tiny from {served.url} broke off after"):
        fetch(served)


def test_shards_of_the_index_are_downloaded_and_nothing_else(served: Hub, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {
        "config.json": CONFIG,
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": safetensors(MIB, "a"),
        "model-2.safetensors": safetensors(2 * MIB, "b"),
        "pytorch_model.bin": b"x" * MIB,
        "other.safetensors": WEIGHTS,
    }
    served.repositories["org/tiny"] = Repository(files)
    total = sum(len(files[name]) for name in ("model.safetensors.index.json", *index["weight_map"].values()))
    assert fetch(served)[-1] == Download(total, total)
    assert weights_in(tmp_path / "cache") == [files["model-1.safetensors"], files["model-2.safetensors"]]


def test_a_repository_without_its_shards_or_any_weights_is_named(served: Hub) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode()
    served.repositories["org/tiny"] = Repository({"config.json": CONFIG, "model.safetensors.index.json": index})
    with pytest.raises(InvalidRequest, match=r"org/tiny: the repository lacks model-1\.safetensors"):
        fetch(served)
    served.repositories["org/tiny"] = Repository({"config.json": CONFIG})
    with pytest.raises(InvalidRequest, match="org/tiny: the repository has no weights"):
        fetch(served)


def test_a_whole_model_in_the_cache_needs_no_hub(served: Hub) -> None:
    served.repositories["org/tiny"].files = {**served.repositories["org/tiny"].files, "pytorch_model.bin": b"x"}
    fetch(served)
    read(served)
    away = ModelSource("org/tiny", endpoint="http://127.0.0.1:9")
    fetch_weights(away, "auto", IGNORED, lambda _: None)
    assert read_config(away, trust_remote_code=False)["model_type"] == "llama"


def test_a_part_of_a_model_in_the_cache_needs_the_hub(served: Hub) -> None:
    read(served)
    with pytest.raises(Unavailable, match="cannot be reached"):
        fetch_weights(ModelSource("org/tiny", endpoint="http://127.0.0.1:9"), "auto", IGNORED, lambda _: None)


def test_a_model_with_code_of_its_own_needs_consent(served: Hub) -> None:
    own = json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}).encode()
    served.repositories["org/tiny"] = Repository({"config.json": own})
    with pytest.raises(InvalidRequest, match=r"org/tiny: the model needs Python code .*`trust_remote_code: true`"):
        read(served)
    assert read_config(source(served), trust_remote_code=True)["model_type"] == "own"


def test_a_folder_is_not_looked_up(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.json is missing"):
        read_config(ModelSource(str(tmp_path)), trust_remote_code=False)
    (tmp_path / "config.json").write_bytes(CONFIG)
    assert read_config(ModelSource(str(tmp_path)), trust_remote_code=False) == config_of(tmp_path)


def test_options_of_vllm_that_name_the_source() -> None:
    found = source_of("org/tiny", {"hf-token": "hf_x", "revision": "v2", "download_dir": "/d", "seed": 1})
    assert found == ModelSource("org/tiny", "v2", "hf_x", weights_cache="/d")
    assert "hf_x" not in repr(found)


def test_progress_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "download"
    assert Download.read(file) is None
    Download(3, 4).write(file)
    assert Download.read(file) == Download(3, 4)
    file.write_text("half")
    assert Download.read(file) is None
    assert str(Download(1_234_000_000, 15_300_000_000)) == "1.2 of 15.3 GB"
