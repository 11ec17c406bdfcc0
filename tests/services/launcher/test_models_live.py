"""Models as users have them, by the real command: of a hub, which a small server stands in for, and in folders."""

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.launcher.model_source import PROJECT
from services.launcher.suite import POLL_S
from tests.hub import Hub, hub
from tests.services.launcher.up import START_S, cluster, polyphase, running
from tests.shared.model.safetensors import safetensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
DEMO = PROJECT / "models" / "demo"
TOKEN = "hf_Xyzzy-good"
CPU = {"engine": "vllm", "accelerator": "cpu", "kv_cache_bytes": 32 << 20, "staging_bytes": 16 << 20}
TWO = [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode"}]
# A kind of configuration that neither transformers nor vLLM knows.
OWN_CODE = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "polyphase-own"
"""


@pytest.fixture
def served() -> Iterator[Hub]:
    with hub() as found:
        found.add("org/open", DEMO)
        found.add("org/gated", DEMO, token=TOKEN)
        yield found


def environment(tmp_path: Path, url: str, **more: str) -> dict[str, str]:
    return {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0", "COLUMNS": "300", **more}


async def refusal(tmp_path: Path, model: str, variables: dict[str, str], **changes: Any) -> str:
    """What `polyphase up` prints of a model that it does not start."""
    file = cluster(tmp_path, model=model, **changes)
    code, text = await polyphase("up", "--cluster", str(file), "--data-dir", str(tmp_path / "data"), **variables)
    assert code == 1, text
    assert not (tmp_path / "data" / "logs").exists()  # nothing was started
    return text


async def test_a_gated_model_names_its_page_and_the_token(tmp_path: Path, served: Hub) -> None:
    without = await refusal(tmp_path, "org/gated", environment(tmp_path, served.url, HF_TOKEN=""))
    assert "model: org/gated is a gated model, and HF_TOKEN is not set" in without
    assert f"request access at {served.url}/org/gated, and set HF_TOKEN" in without
    wrong = await refusal(tmp_path, "org/gated", environment(tmp_path, served.url, HF_TOKEN="hf_Xyzzy-other"))
    assert "org/gated is a gated model, and the account of HF_TOKEN has no access" in wrong
    assert "Xyzzy" not in wrong


async def test_an_instance_with_a_token_of_its_own_is_checked_with_it(tmp_path: Path, served: Hub) -> None:
    """The gateway loads the tokenizer, and needs a token, too."""
    vllm = {"instance_defaults": {**CPU, "env": {"HF_TOKEN": TOKEN}}, "instances": TWO}
    variables = environment(tmp_path, served.url, HF_TOKEN="")
    assert "HF_TOKEN is not set" in await refusal(tmp_path, "org/gated", variables, **vllm)
    assert TOKEN in served.tokens


async def test_an_unknown_model_and_a_hub_out_of_reach_are_named(tmp_path: Path, served: Hub) -> None:
    unknown = await refusal(tmp_path, "org/nothing", environment(tmp_path, served.url, HF_TOKEN=""))
    assert f"model: org/nothing is neither a folder here nor a model of {served.url}, unless it is private" in unknown
    away = await refusal(tmp_path, "org/open", environment(tmp_path, "http://127.0.0.1:9", HF_TOKEN=""))
    assert "model: org/open is neither a folder here nor in" in away
    assert "http://127.0.0.1:9 cannot be reached" in away
    assert "check the internet connection, or give the folder of a model" in away
    offline = {**environment(tmp_path, served.url), "HF_HUB_OFFLINE": "1"}
    assert "org/open is not in" in await refusal(tmp_path, "org/open", offline)


async def test_weights_of_a_gated_model_are_downloaded_with_progress(tmp_path: Path, served: Hub) -> None:
    """The token is in the environment of `polyphase up`; the download pauses until its progress was printed, and the
    connection breaks once. Then the model answers, and the token is in no log, file or output.
    """
    served.allowed_bytes = (10 << 20) + 1  # huggingface_hub writes 10 MiB at a time
    output, data = tmp_path / "up.out", tmp_path / "data"
    variables = environment(tmp_path, served.url, HF_TOKEN=TOKEN)
    changes = {"model": "org/gated", "instance_defaults": CPU, "instances": TWO}

    async def release() -> None:
        async with asyncio.timeout(START_S):
            while not (output.exists() and re.search(rb"p: downloads weights: [\d.]+ of 11.0 MB", output.read_bytes())):
                await asyncio.sleep(POLL_S)
        assert b"Ctrl-C" not in output.read_bytes()
        served.release.set()

    releasing = asyncio.create_task(release())
    async with running(tmp_path, environment=variables, output=output, **changes) as (_, suite):
        await releasing
        body = {"model": "m", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
        async with httpx.AsyncClient(timeout=180, trust_env=False) as http:
            answer = await http.post(f"{suite.state.api_url}/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
    records = [json.loads(line) for line in (data / "logs" / "p.log").read_text().splitlines() if line[:1] == "{"]
    reported = [each for each in records if each.get("event") == "downloading weights"]
    assert (
        reported[-1]["downloaded_bytes"] == reported[-1]["total_bytes"] == (DEMO / "model.safetensors").stat().st_size
    )
    kept = [each for each in data.rglob("*") if each.is_file()]
    assert not [each for each in (output, *kept) if TOKEN.encode() in each.read_bytes()]


async def test_code_of_a_model_runs_only_with_the_setting(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "polyphase-own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text(OWN_CODE)
    variables = {"HF_HOME": str(tmp_path / "hub"), "COLUMNS": "300"}  # where transformers copies the code to
    text = await refusal(tmp_path, str(folder), variables)
    assert f"model: {folder}: the model needs Python code of its own repository (config.json: auto_map" in text
    assert "`trust_remote_code: true`" in text
    assert not (tmp_path / "hub").exists()
    changes = {"model": str(folder), "trust_remote_code": True, "instance_defaults": CPU, "instances": TWO}
    async with running(tmp_path, environment=variables, **changes) as (_, suite):
        async with httpx.AsyncClient(timeout=180, trust_env=False) as http:
            body = {"model": "m", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
            answer = await http.post(f"{suite.state.api_url}/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 4, answer.text


async def test_a_partial_folder_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    vllm: dict[str, Any] = {"instance_defaults": CPU, "instances": TWO}
    folder = tmp_path / "partial"
    folder.mkdir()
    said = await refusal(tmp_path, str(folder), {"COLUMNS": "300"}, **vllm)
    assert f"model: {folder / 'config.json'} is missing" in said
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, folder)
    assert f"{folder} has no weights" in await refusal(tmp_path, str(folder), {"COLUMNS": "300"}, **vllm)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(safetensors(64))
    said = await refusal(tmp_path, str(folder), {"COLUMNS": "300"}, **vllm)
    assert f"{folder} lacks model-2.safetensors, model-3.safetensors, which its index names" in said
    (folder / "model-2.safetensors").write_bytes(safetensors(1024)[:500])
    (folder / "model-3.safetensors").write_bytes(safetensors(64))
    said = await refusal(tmp_path, str(folder), {"COLUMNS": "300"}, **vllm)
    assert "model-2.safetensors is truncated (500 of" in said
    (folder / "model-3.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    said = await refusal(tmp_path, str(folder), {"COLUMNS": "300"}, **vllm)
    assert "model-3.safetensors: pointers of Git LFS instead of weights: run `git lfs pull`" in said


async def test_an_installed_package_names_the_model_that_it_lacks(tmp_path: Path) -> None:
    """A wheel has the packages and not the folder `models`: neither has this tree."""
    site, work = tmp_path / "site", tmp_path / "work"
    site.mkdir()
    work.mkdir()
    for name in ("services", "gateway", "predictor", "dashboard", "shared", "tools", "benchmarks"):
        (site / name).symlink_to(PROJECT / name)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.launcher.cli", "up"),
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(site), "COLUMNS": "300"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    text = printed.decode()
    assert process.returncode == 1, text
    assert f"model: there is no folder {site}/models/demo: the demo model models/demo is part of a source" in text
    assert "`--model`: a folder on this machine, or a Hugging Face name, which needs an internet connection" in text
