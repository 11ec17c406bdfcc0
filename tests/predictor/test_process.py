"""The real process: what it costs without a checkpoint, and that it serves over loopback."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "POLYPHASE_PREDICTOR_PORT": "0", "POLYPHASE_PREDICTOR_BUCKET_TOKENS": "100"}
    child = subprocess.Popen([sys.executable, "-m", "predictor"], env=environment, stderr=subprocess.PIPE, text=True)
    with child:
        yield child
        child.kill()


def test_the_process_starts_small_serves_and_stops(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    address = next(found[1] for line in process.stderr if (found := re.search(r"running on (http\S+)", line)))
    with httpx.Client(base_url=address, timeout=60) as client:
        assert client.get("/health").json()["status"] == "ok"
        # 1.6 s and 63 MB on quiet cores; the bounds leave room for a machine under load.
        started = psutil.Process(process.pid)
        assert sum(started.cpu_times()[:2]) < 10
        assert started.memory_info().rss < 150 << 20
        client.post("/v1/observations", json=[{"prompt_tokens": 5, "output_tokens": 250}] * 20)
        found = client.post("/v1/predict", json={"prompt": "hello"}).json()
        assert (found["bucket"], found["source"]) == (2, "observed")
    process.terminate()
    process.wait(60)


def test_the_service_does_not_import_torch() -> None:
    code = "import sys, predictor.app; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_setting_is_named() -> None:
    environment = {**os.environ, "POLYPHASE_PREDICTOR_COLOUR": "red"}
    done = subprocess.run(
        [sys.executable, "-m", "predictor"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "POLYPHASE_PREDICTOR_COLOUR" in done.stderr
