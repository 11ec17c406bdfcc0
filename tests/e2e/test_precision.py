"""A suite whose prefill instance has quantised weights: requests that forbid it are computed exactly, also after others
have brought the same prompts with KV of the other precision.
"""

from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.engine_client import Engine
from benchmarks.jobs import records
from benchmarks.model_families import int8_copy
from benchmarks.suite import BARE, CPU_ENGINE, DEMO_MODEL, SPLIT, started
from tests.patient_clusters import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TOKENS = 12
FORBID = {"X-Polyphase-Mixed-Precision": "false"}


def prompts() -> list[list[int]]:
    random = Random(5)
    return [[random.randrange(5, 4000) for _ in range(count)] for count in (70, 200, 333, 512)]


async def plain_answers(model: Path) -> list[list[int]]:
    """What one vLLM without the suite answers."""
    engine = Engine("plain", model, connector=False, dtype="float32")
    try:
        async with engine:
            return [await engine.generate(prompt, TOKENS) for prompt in prompts()]
    finally:
        engine.kill()


async def test_exact_requests_meet_no_kv_of_a_quantised_instance(tmp_path: Path) -> None:
    quantised = int8_copy(DEMO_MODEL, tmp_path / "int8")
    exact = await plain_answers(DEMO_MODEL)
    cluster: dict[str, Any] = {
        **BARE,
        "name": "precision",
        "mixed_precision": True,
        "policies": SPLIT,
        "gateway": {"slo": {"exact": {"mixed_precision": False}}},
        "instance_defaults": CPU_ENGINE,
        "instances": [
            {"id": "prefill-0", "role": "prefill", "weights": str(quantised), "dtype": "bfloat16"},
            {"id": "decode-0", "role": "decode", "block_size": 64},
        ],
    }
    async with (
        started(patient(cluster), tmp_path / "suite") as suite,
        httpx.AsyncClient(base_url=suite.plan.api_url, timeout=120) as client,
    ):

        async def answer(prompt: list[int], name: str, headers: dict[str, str]) -> list[int]:
            body = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            headers = {"X-Request-Id": name, **headers}
            response = await client.post("/v1/completions", json={**body, "return_token_ids": True}, headers=headers)
            assert response.status_code == 200, response.text
            tokens: list[int] = response.json()["choices"][0]["token_ids"]
            return tokens

        async def answers(name: str, **headers: str) -> list[list[int]]:
            return [await answer(prompt, f"{name}-{at}", headers) for at, prompt in enumerate(prompts())]

        kinds = ("mixed", "again", "header", "class")
        await answers("mixed")
        await answers("again")
        assert await answers("header", **FORBID) == exact
        assert await answers("class", **{"X-Polyphase-SLO": "exact"}) == exact
        async with suite.suite.monitor() as monitor:
            info = {each.instance_id: each.info for each in await monitor.instances()}
        precision = info["prefill-0"].precision
        assert (info["decode-0"].precision, precision[:5]) == ("", "int8-")
        assert info["prefill-0"].compatibility.fingerprint == info["decode-0"].compatibility.fingerprint
        found = await records(suite.suite, [f"{kind}-{at}" for kind in kinds for at in range(len(prompts()))])
        assert [bool(record.split) for record in found] == [True] * 8 + [False] * 8
        assert [record.outcomes for record in found[:4]] == [["pulled"]] * 4
        told = [[d.reasons[0].figures for d in record.timeline.decisions if d.kind == "precision"] for record in found]
        assert told == [[{"prompt": precision, "from here": "the model's"}]] * 8 + [[]] * 8
