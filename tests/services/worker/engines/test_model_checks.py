"""What an instance checks of its model before vLLM has it: config.json, whole weights, and code of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.launcher.ports import free_range
from services.worker.engines.vllm_start import DownloadReport, check_model_file, engine_config, obtain_model
from services.worker.identity import fingerprint
from shared.errors import InvalidRequest
from shared.model.source import DOWNLOAD_FILE, Download
from tests.hub import Repository, hub
from tests.services.worker.test_settings import settings
from tests.shared.model.safetensors import safetensors

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
ENCODER = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}
OWN = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}


def until_sync(condition: Callable[[], bool], within_s: float = 240.0) -> None:
    give_up_mono = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_mono
        time.sleep(0.1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_config_from_the_hub_is_read_like_a_local_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub() as served:
        served.repositories["org/encoder"] = Repository({"config.json": json.dumps(ENCODER).encode()})
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        with pytest.raises(InvalidRequest, match="model org/encoder: the model has an encoder beside its decoder"):
            check_model_file(settings(model="org/encoder", engine_args={"revision": "v2"}))
    assert ("HEAD", "/org/encoder/resolve/v2/config.json", "") in served.requests


@pytest.mark.parametrize(
    ("config", "said"), [(LLAMA, "has no weights"), (OWN, "trust_remote_code: true"), (None, "config.json is missing")]
)
def test_a_folder_is_refused_before_vllm_has_it(tmp_path: Path, config: dict[str, Any] | None, said: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match=said):
        engine_config(settings(model=str(tmp_path)), {}, None)


def test_weights_that_are_not_read_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    check_model_file(settings(model=str(tmp_path), engine_args={"load_format": "dummy"}))


def test_weights_are_there_before_the_fingerprint_is_taken(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples of the weights are those that the engine will load, and the progress is in the starter's file."""
    files = {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": safetensors(1 << 20)}
    monkeypatch.setenv(DOWNLOAD_FILE, str(tmp_path / "progress"))
    with hub() as served:
        served.repositories["org/tiny"] = Repository(files)
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        obtain_model(settings(model="org/tiny"))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert fingerprint("org/tiny") == fingerprint(str(tmp_path))
    assert Download.read(tmp_path / "progress") == Download(
        len(files["model.safetensors"]), len(files["model.safetensors"])
    )


def test_a_worker_ends_at_sigterm_while_it_downloads(tmp_path: Path) -> None:
    ports = dict(zip(("rpc_port", "http_port", "kv_port"), range(first := free_range(size=3), first + 3), strict=True))
    variables = {
        **os.environ,
        **settings(model="org/tiny", **ports).to_environment(),
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hub"),
        DOWNLOAD_FILE: str(tmp_path / "progress"),
    }
    with hub() as served:
        served.repositories["org/tiny"] = Repository(
            {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": safetensors(1 << 20)}
        )
        served.allowed_bytes = 0
        with subprocess.Popen(
            [sys.executable, "-m", "services.worker"], env={**variables, "HF_ENDPOINT": served.url}
        ) as worker:
            try:
                until_sync(lambda: (tmp_path / "progress").exists() or worker.poll() is not None)
                worker.terminate()
                assert worker.wait(60) == -signal.SIGTERM
            finally:
                worker.kill()


def test_the_log_has_the_progress_at_a_low_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, lines = 0.0, []
    monkeypatch.setattr("services.worker.engines.vllm_start.time.monotonic", lambda: now_s)
    monkeypatch.setattr(
        "services.worker.engines.vllm_start.log.info", lambda _, **values: lines.append(values["downloaded_bytes"])
    )
    report = DownloadReport(period_s=10.0)
    for step in range(34):
        now_s = float(step)
        report(Download(step, 33))
    assert lines == [0, 10, 20, 30, 33]
