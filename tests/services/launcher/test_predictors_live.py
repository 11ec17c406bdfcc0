"""A running suite with a predictor beside each instance: that of the prefill instance answers, also after flips."""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.launcher.suite import Suite, until
from tests.services.launcher.up import polyphase, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
REQUESTS = 5
CLUSTER: Mapping[str, Any] = {
    "predictor": {"beside": "prefill", "checkpoint": "models/demo-lengths", "use": "classifier", "timeout_ms": 20_000},
    "gateway": {"predict": "sequential", "predict_timeout_s": 20.0, "slo": {"default": {"ttft_s": 60.0}}},
    "policies": {"placement": "least_load", "split": "full", "dispatch": "power_of_two"},
    "instances": [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "count": 2}],
}


class Predictors:
    """What the predictor beside each instance has answered and learnt."""

    def __init__(self, suite: Suite, http: httpx.AsyncClient) -> None:
        self._suite = suite
        self._http = http

    def url(self, instance: str) -> str:
        found = self._process(instance)
        return str(found.url).removesuffix("/health")

    def kill(self, instance: str) -> None:
        os.kill(self._process(instance).pid, signal.SIGKILL)

    async def loaded(self, instance: str) -> bool:
        try:
            about = (await self._http.get(f"{self.url(instance)}/v1/model")).json()
        except httpx.HTTPError:
            return False
        return bool(about["source"] == "classifier")

    async def answered(self, instance: str) -> int:
        lines = (await self._http.get(f"{self.url(instance)}/metrics")).text.splitlines()
        counts = [line for line in lines if line.startswith("polyphase_predictor_latency_seconds_count{")]
        assert all('source="classifier"' in line for line in counts)
        return sum(int(float(line.split()[-1])) for line in counts)

    async def learnt(self, instance: str) -> int:
        return int((await self._http.get(f"{self.url(instance)}/v1/model")).json()["observed"]["observations"])

    def _process(self, instance: str) -> Any:
        return next(each for each in self._suite.state.processes if each.name == f"predictor-{instance}")


async def test_requests_are_predicted_beside_their_prefill_instance_before_and_after_a_flip(tmp_path: Path) -> None:
    async with running(tmp_path, **CLUSTER) as (_, suite), httpx.AsyncClient(timeout=180, trust_env=False) as http:
        predictors, names = Predictors(suite, http), ("p", "d-0", "d-1")

        async def send() -> None:
            body = {"model": "m", "prompt": "Tell me about rain.", "max_tokens": 8, "ignore_eos": True}
            answers = [http.post(f"{suite.state.api_url}/v1/completions", json=body) for _ in range(REQUESTS)]
            for answer in await asyncio.gather(*answers):
                assert answer.status_code == 200, answer.text

        async def answered() -> dict[str, int]:
            return {name: await predictors.answered(name) for name in names}

        async def until_answered(*counts: int) -> None:
            """Metrics may be a second old."""
            expected = dict(zip(names, counts, strict=True))

            async def are() -> bool:
                return await answered() == expected

            await until(are, 60, f"{expected} answers")

        async def all_loaded() -> bool:
            return all([await predictors.loaded(name) for name in names])

        async def all_learnt() -> bool:
            return [await predictors.learnt(name) for name in names] == [2 * REQUESTS] * len(names)

        await until(all_loaded, 120, "every predictor to have its classifier")
        await send()
        await until_answered(REQUESTS, 0, 0)
        for instance in ("d-0", "p"):  # one prefill instance stays at any time
            code, printed = await polyphase("flip", instance, "--data-dir", str(tmp_path / "data"))
            assert code == 0, printed
        await send()
        await until_answered(REQUESTS, REQUESTS, 0)
        await until(all_learnt, 60, "every predictor to know how long all answers got")
        predictors.kill("d-0")
        await send()  # a lost predictor costs a prediction, and no request
        await until(all_loaded, 120, "the launcher to have replaced it")

        async def new_one_answered() -> bool:
            await send()  # the gateway may not be connected to it yet
            return await predictors.answered("d-0") >= REQUESTS

        await until(new_one_answered, 60, "answers of the new process", poll_s=1.0)
        counts = await answered()
        assert (counts["p"], counts["d-1"]) == (REQUESTS, 0)
