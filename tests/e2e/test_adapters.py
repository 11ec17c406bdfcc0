"""A suite with LoRA adapters and real engines: requests for the base model and two adapters at once, none of which is
answered by another model than its own.
"""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.engine_client import Engine
from benchmarks.suite import BARE, CPU_ENGINE, DEMO_MODEL, SPLIT, started
from tests.tiny_models import make_adapter

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]
TOKENS = 16
PROMPTS = 20
TOGETHER = 12  # requests under way at once


def prompts() -> list[list[int]]:
    """Of several blocks each; some begin alike, so that prefix caches are used."""
    random = Random(7)
    heads = [[random.randrange(5, 4000) for _ in range(128)] for _ in range(4)]
    return [heads[at % 4] + [random.randrange(5, 4000) for _ in range(10 + 17 * at)] for at in range(PROMPTS)]


async def plain_answers(folders: dict[str, str], texts: list[list[int]]) -> dict[str, list[list[int]]]:
    """By model, what one vLLM without the suite answers."""
    options: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    adapters = {"demo": None} | {name: (name, at, folder) for at, (name, folder) in enumerate(folders.items(), start=1)}
    engine = Engine("plain", DEMO_MODEL, connector=False, kv_cache_memory_bytes=192 << 20, **options)
    try:
        async with engine:
            return {
                name: [await engine.generate(text, TOKENS, adapter=adapter) for text in texts]
                for name, adapter in adapters.items()
            }
    finally:
        engine.kill()


async def test_no_request_is_answered_by_another_adapter(tmp_path: Path) -> None:
    folders = {name: str(make_adapter(tmp_path / name, DEMO_MODEL, seed=at)) for at, name in enumerate(("one", "two"))}
    texts = prompts()
    by_name = await plain_answers(folders, texts)
    assert all(len({tuple(answers[at]) for answers in by_name.values()}) == 3 for at in range(PROMPTS))
    cluster: dict[str, Any] = {
        **BARE,
        "name": "adapters",
        "lora": {"adapters": folders, "max_loras": 1},  # fewer than are in use: requests of the other one wait a step
        "policies": SPLIT,
        "gateway": {"dtype": "float32"},
        "instance_defaults": CPU_ENGINE,
        "instances": [
            {"id": "prefill-0", "role": "prefill", "block_size": 32},
            {"id": "decode-0", "role": "decode", "block_size": 64},
        ],
    }
    requests = [(model, at) for at in range(PROMPTS) for model in by_name]
    Random(3).shuffle(requests)
    gate = asyncio.Semaphore(TOGETHER)
    async with (
        started(cluster, tmp_path / "suite") as suite,
        httpx.AsyncClient(base_url=suite.plan.api_url, timeout=120) as client,
    ):

        async def answer(model: str, at: int) -> list[int]:
            body = {"model": model, "prompt": texts[at], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            async with gate:
                response = await client.post("/v1/completions", json={**body, "return_token_ids": True})
            assert response.status_code == 200, response.text
            assert response.json()["model"] == model
            tokens: list[int] = response.json()["choices"][0]["token_ids"]
            return tokens

        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("demo", None), ("one", "demo"), ("two", "demo")]
        answers = await asyncio.gather(*(answer(*request) for request in requests))
        wrong = [(name, at) for (name, at), found in zip(requests, answers, strict=True) if found != by_name[name][at]]
        assert not wrong, f"{len(wrong)} of {len(requests)}: {wrong}"
        instances = (await client.get(f"{suite.plan.monitor_url}/instances")).json()
        assert all(set(each["info"]["adapters"]) == set(folders) for each in instances)
        (decode,) = (each["info"]["http"] for each in instances if each["role"] == "decode")
        assert imports((await client.get(f"{decode}/metrics")).text) == {"pulled": len(requests)}


def imports(text: str) -> dict[str, int]:
    """How the imports of an instance ended, from its metrics."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith("polyphase_kv_imports_total{"):
            labels, value = line.rsplit(" ", 1)
            outcome = labels.partition('outcome="')[2].partition('"')[0]
            if float(value):
                found[outcome] = found.get(outcome, 0) + int(float(value))
    return found
