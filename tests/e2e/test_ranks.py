"""A suite whose decode instance has two data-parallel ranks, which may divide the experts of a model among them: the
tokens are those of one plain engine, also while the instance is flipped and after one of its ranks was killed.
"""

import asyncio
import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.engine_client import Engine
from benchmarks.jobs import records
from benchmarks.model_families import FAMILIES, VOCABULARY, make_model
from benchmarks.suite import BARE, CPU_ENGINE, DEMO_MODEL, started
from shared.domain.instance import Role
from tests.patient_clusters import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LENGTHS = (40, 200, 333, 512, 90, 150, 260, 77)
TOKENS = 12
LONG = 400


async def plain_answers(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of one vLLM without the suite, the last prompt's many."""
    engine = Engine("plain", model, connector=False, dtype="float32")
    try:
        async with engine:
            numbers = [TOKENS] * (len(prompts) - 1) + [LONG]
            return [await engine.generate(text, count) for text, count in zip(prompts, numbers, strict=True)]
    finally:
        engine.kill()


def mixture_of_experts(folder: Path) -> Path:
    """A model without a tokenizer of its own: prompts are tokens."""
    model = make_model(FAMILIES["Qwen3-MoE"], folder)
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, model)
    return model


@pytest.mark.parametrize("experts", [False, True], ids=["independent ranks", "divided experts"])
async def test_ranks_are_one_instance_and_get_requests_one_by_one(tmp_path: Path, experts: bool) -> None:
    model = mixture_of_experts(tmp_path / "model") if experts else DEMO_MODEL
    random = Random(7)
    prompts = [[random.randrange(5, VOCABULARY) for _ in range(count)] for count in (*LENGTHS, 100)]
    *expected, long = await plain_answers(model, prompts)
    ranks: dict[str, Any] = {"id": "d", "role": "decode", "data_parallel": 2, "block_size": 64}
    cluster: dict[str, Any] = {
        **BARE,
        "name": "ranks",
        "model": str(model),
        "max_model_len": 1024,
        "policies": {"placement": "round_robin", "split": "full", "dispatch": "spread"},
        "instance_defaults": CPU_ENGINE,
        "instances": [
            {"id": "p", "role": "prefill"},
            ranks | ({"engine_args": {"enable_expert_parallel": True}} if experts else {}),
            {"id": "e", "role": "decode"},
        ],
    }
    async with (
        started(patient(cluster), tmp_path / "suite") as running,
        httpx.AsyncClient(base_url=running.plan.api_url, timeout=180) as client,
        running.suite.monitor() as monitor,
    ):
        body = {"model": "demo", "temperature": 0, "ignore_eos": True, "return_token_ids": True}

        async def answer(at: int, name: str) -> list[int]:
            asked = {**body, "prompt": prompts[at], "max_tokens": TOKENS}
            response = await client.post("/v1/completions", json=asked, headers={"X-Request-Id": name})
            assert response.status_code == 200, response.text
            tokens: list[int] = response.json()["choices"][0]["token_ids"]
            return tokens

        async def answers(name: str) -> list[list[int]]:
            return await asyncio.gather(*(answer(at, f"{name}-{at}") for at in range(len(expected))))

        async def places(name: str) -> set[str]:
            found = await records(running.suite, [f"{name}-{at}" for at in range(len(expected))])
            return {span.instance_id for record in found for span in record.timeline.spans}

        assert {each.info.whole for each in await monitor.instances()} == {"p", "d", "e"}
        await monitor.drain("e", timeout_s=10, who="test")
        assert await answers("first") == expected
        assert {"d.0", "d.1"} <= await places("first")

        tokens: list[int] = []
        pids, killed = {name: running.suite.state.pid(name) for name in ("d.0", "d.1")}, 0
        streamed = {**body, "prompt": prompts[-1], "max_tokens": LONG, "stream": True}
        async with client.stream("POST", "/v1/completions", json=streamed) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        tokens += choice.get("token_ids") or []
                if len(tokens) > 1 and not killed:
                    await monitor.resume("e", who="test")
                    killed = running.suite.kill("d.1", signal.SIGSTOP)
                    with suppress(ProcessLookupError):  # the launcher kills processes that do not answer
                        os.kill(killed, signal.SIGKILL)
        assert killed
        assert tokens == long
        for name in ("d.0", "d.1") if experts else ("d.1",):  # without one of them, the experts are not complete
            await running.suite.restarted(name, pids[name])
        await running.suite.wait_ready(["d.0", "d.1"])

        before, flipped, after = await asyncio.gather(
            answers("before"), monitor.flip("d", who="test"), answers("again")
        )
        assert (flipped.instance_id, flipped.to_role) == ("d", "prefill")
        assert before == after == expected
        assert set(await running.suite.ready(Role.PREFILL)) == {"p", "d.0", "d.1"}
        assert await answers("after") == expected
        assert await places("after") & {"d.0", "d.1"}
