"""A suite with LoRA adapters and real engines: requests for the base model and the adapters at once, while another
adapter is loaded, replaced and unloaded, and while a decode instance and a gateway are killed. No request is answered
by another model than its own.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.engine_client import Engine
from benchmarks.suite import BARE, CPU_ENGINE, DEMO_MODEL, SPLIT, counts, metric, started
from services.launcher.suite import Suite, until
from services.launcher.up import RunningSuite
from shared.domain.adapters import is_version, version_key
from shared.domain.instance import InstanceInfo, Role
from shared.model.adapters import digest_of
from shared.runtime.http import METRICS_KEPT_S
from shared.wire.api.monitor import InstanceRow
from tests.patient_clusters import patient
from tests.tiny_models import make_adapter

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]
REQUESTS = 200
TOKENS = 8
PROMPTS = 12
TOGETHER = 12  # requests under way at once
LONG, LONG_TOKENS = 6, 160  # requests that lose their decode instance
WAIT_S = 120.0
IMPORTS = ("polyphase_kv_imports_total", "outcome")  # metric and label
MODELS = ("demo", "one", "two")  # "one" is in the cluster file, "two" is loaded
SWAPPED = "org/three"  # loaded, replaced and unloaded, with the weights of "a" and "b"


def prompts() -> list[list[int]]:
    """Of several blocks each; some begin alike, so that prefix caches are used."""
    random = Random(7)
    heads = [[random.randrange(5, 4000) for _ in range(128)] for _ in range(4)]
    return [heads[at % 4] + [random.randrange(5, 4000) for _ in range(10 + 17 * at)] for at in range(PROMPTS)]


class Plain:
    """What one vLLM without the suite answers, by model and prompt; to the first prompts with LONG_TOKENS."""

    def __init__(self, folders: dict[str, str], texts: list[list[int]]) -> None:
        self.folders, self.texts = folders, texts
        self.answers: dict[str, list[list[int]]] = {}

    async def answer_all(self) -> None:
        count = len(self.folders)
        options: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "max_loras": count, "max_lora_rank": 8}
        numbered = enumerate(self.folders.items(), start=1)
        adapters = {"demo": None} | {name: (name, at, folder) for at, (name, folder) in numbered}
        engine = Engine("plain", DEMO_MODEL, connector=False, kv_cache_memory_bytes=192 << 20, **options)
        try:
            async with engine:
                for name, adapter in adapters.items():
                    counts = (self._tokens(name, at) for at in range(PROMPTS))
                    pairs = zip(self.texts, counts, strict=True)
                    answers = (engine.generate(text, count, adapter=adapter) for text, count in pairs)
                    self.answers[name] = await asyncio.gather(*answers)
        finally:
            engine.kill()

    def _tokens(self, name: str, at: int) -> int:
        long = {"one": LONG, "two": LONG, "b": 1}  # that is streamed
        return LONG_TOKENS if at < long.get(name, 0) else TOKENS


class Serving:
    """Requests to the suite, and what is wrong with their answers."""

    def __init__(self, suite: RunningSuite, client: httpx.AsyncClient, plain: Plain) -> None:
        self.suite: Suite = suite.suite
        self.plan = suite.plan
        self.client = client
        self.plain = plain
        self.wrong: list[str] = []
        self.answered = 0

    async def ask(self, model: str, at: int, weights: str = "") -> None:
        """One request, whose answer must be that of the adapter `weights`, by default of `model`."""
        response = await self.client.post("/v1/completions", json=self._body(model, at, TOKENS))
        assert response.status_code == 200, response.text
        self.answered += 1
        assert response.json()["model"] == model
        self._compare(model, at, weights, response.json()["choices"][0]["token_ids"], TOKENS)

    async def ask_all(self, wanted: list[tuple[str, int]]) -> None:
        """TOGETHER at a time."""
        gate = asyncio.Semaphore(TOGETHER)

        async def ask(model: str, at: int) -> None:
            async with gate:
                await self.ask(model, at)

        await asyncio.gather(*(ask(*pair) for pair in wanted))

    async def stream(self, model: str, at: int, weights: str = "", begun: asyncio.Event | None = None) -> None:
        """A long request; `begun` is set with its first tokens."""
        tokens: list[int] = []
        async for some in self._tokens(self._body(model, at, LONG_TOKENS)):
            tokens += some
            if begun is not None:
                begun.set()
        self.answered += 1
        self._compare(model, at, weights, tokens, LONG_TOKENS)

    async def _tokens(self, body: dict[str, Any]) -> AsyncIterator[list[int]]:
        async with self.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                event = line.removeprefix("data: ")
                if event.startswith("{"):
                    yield json.loads(event)["choices"][0]["token_ids"] or []

    def _body(self, model: str, at: int, tokens: int) -> dict[str, Any]:
        text = self.plain.texts[at]
        settings = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"model": model, "prompt": text, **settings}

    def _compare(self, model: str, at: int, weights: str, found: list[int], tokens: int) -> None:
        if found != self.plain.answers[weights or model][at][:tokens]:
            others = [name for name, answers in self.plain.answers.items() if answers[at][:tokens] == found]
            self.wrong.append(f"{model}, prompt {at}: answered as by {others or 'nothing known'}")

    async def load(self, name: str, folder: str, **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": folder, **more}
        return await self.client.post("/v1/load_lora_adapter", json=body)

    async def unload(self, name: str) -> httpx.Response:
        return await self.client.post("/v1/unload_lora_adapter", json={"lora_name": name})

    async def names(self, url: str) -> set[str]:
        """The models that one gateway process lists."""
        return {card["id"] for card in (await self.client.get(f"{url}/v1/models")).json()["data"]}

    async def instances(self, role: Role | None = None) -> list[InstanceRow]:
        return [row for row in (await self.suite.instances()).values() if role in (None, row.role)]

    async def imports(self) -> Counter[str]:
        """How the imports of all decode instances ended, from their metrics."""
        found: Counter[str] = Counter()
        for row in await self.instances(Role.DECODE):
            found += counts((await self.client.get(f"{row.info.http}/metrics")).text, *IMPORTS)
        return found

    async def resumes(self) -> float:
        pages = [(await self.client.get(f"{url}/metrics")).text for url in self.suite.state.gateway_urls]
        return sum(metric(page, "polyphase_resumes_total") for page in pages)


async def test_no_request_is_answered_by_another_adapter(tmp_path: Path) -> None:
    folders = {
        name: str(make_adapter(tmp_path / name, DEMO_MODEL, seed=at))
        for at, name in enumerate(["one", "two", "a", "b"])
    }
    plain = Plain(folders, prompts())
    await plain.answer_all()
    heads = [{tuple(answers[at][:TOKENS]) for answers in plain.answers.values()} for at in range(PROMPTS)]
    assert all(len(each) == len(folders) + 1 for each in heads)  # five models
    cluster: dict[str, Any] = {
        **BARE,
        "name": "adapters",
        # Fewer at once than are in use: requests of the others wait a step.
        "lora": {"adapters": {"one": folders["one"]}, "allow_runtime_updating": True, "max_loras": 2, "max_rank": 8},
        "policies": SPLIT,
        "monitor": {"adapter_linger_s": 0.2},
        "gateway": {"dtype": "float32", "processes": 2},
        "instance_defaults": CPU_ENGINE,
        "instances": [
            {"id": "prefill-0", "role": "prefill", "block_size": 32},
            {"id": "decode", "role": "decode", "block_size": 64, "count": 2},
        ],
    }
    async with (
        started(patient(cluster), tmp_path / "suite") as suite,
        httpx.AsyncClient(base_url=suite.plan.api_url, timeout=120) as client,
    ):
        serving = Serving(suite, client, plain)
        await refused_loads(serving, tmp_path)
        await adapters_under_load(serving)
        await a_killed_decode_instance_and_gateway(serving)


async def refused_loads(serving: Serving, folder: Path) -> None:
    """Nothing of an adapter that cannot be loaded is seen."""
    large = make_adapter(folder / "large", DEMO_MODEL, seed=9, rank=16)
    response = await serving.load("large", str(large))
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (500, "InternalServerError")
    assert "adapter large: LoRA rank 16 is greater than max_lora_rank 8" in error["message"]
    response = await serving.load("none", str(folder / "none"))
    assert (response.status_code, response.json()["error"]["type"]) == (404, "NotFoundError")
    assert f"Loading lora none failed: No adapter found for {folder / 'none'}" in response.text
    for name in ("demo", "one"):
        assert (await serving.load(name, str(large))).status_code == 400
    for url in serving.suite.state.gateway_urls:
        assert await serving.names(url) == {"demo", "one"}
    assert all(set(row.info.adapters) == {"one"} for row in await serving.instances())


async def adapters_under_load(serving: Serving) -> None:
    folders, gateways = serving.plain.folders, serving.suite.state.gateway_urls
    response = await serving.load("two", folders["two"])
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'two' added successfully.")
    assert [await serving.names(url) for url in gateways] == [set(MODELS)] * 2
    wanted = [(model, at % PROMPTS) for at in range(REQUESTS // len(MODELS) + 1) for model in MODELS][:REQUESTS]
    Random(3).shuffle(wanted)
    load = asyncio.create_task(serving.ask_all(wanted))
    under_way = []
    while True:
        for weights in ("a", "b"):  # the same prompts: nothing of the former weights is found in a prefix cache
            response = await serving.load(SWAPPED, folders[weights], load_inplace=weights == "b")
            assert response.status_code == 200, response.text
            await asyncio.gather(*(serving.ask(SWAPPED, at, weights) for at in range(LONG)))
        if not under_way:
            begun = asyncio.Event()
            under_way.append(asyncio.create_task(serving.stream(SWAPPED, 0, "b", begun)))
            await asyncio.wait_for(begun.wait(), WAIT_S)
            assert (await serving.load(SWAPPED, folders["a"], load_inplace=True)).status_code == 200
            await serving.ask(SWAPPED, 0, "a")
        assert (await serving.unload(SWAPPED)).status_code == 200
        for url in gateways:
            assert await serving.names(url) == set(MODELS)
            refused = await serving.client.post(f"{url}/v1/completions", json={"model": SWAPPED, "prompt": [5]})
            assert (refused.status_code, refused.json()["error"]["type"]) == (404, "NotFoundError")
        if load.done():
            break
    await asyncio.gather(load, *under_way)
    assert not serving.wrong, serving.wrong

    async def counted() -> bool:
        return (await serving.imports()).total() >= serving.answered  # metrics may be a second old

    await until(counted, WAIT_S, "as many imports as answers")
    assert await serving.imports() == {"pulled": serving.answered}
    two = version_key("two", digest_of("two", Path(folders["two"])))

    async def forgotten() -> bool:
        return all({key for key in row.info.adapters if is_version(key)} == {two} for row in await serving.instances())

    await until(forgotten, WAIT_S, "the instances forget what is unloaded")


async def a_killed_decode_instance_and_gateway(serving: Serving) -> None:
    for _ in range(3):  # all streams of the instance may have ended just before it was killed
        victim, pid, resumes = await kill_while_it_decodes(serving)
        assert not serving.wrong, serving.wrong
        if resumes:
            break
        await serving.suite.restarted(victim.instance_id, pid)
        await serving.suite.wait_ready()
    else:
        pytest.fail("no stream lost its instance")

    gateway = "gateway-1"
    await serving.suite.restarted(gateway, serving.suite.kill(gateway))
    for url in serving.suite.state.gateway_urls:
        assert await serving.names(url) == set(MODELS)
    await serving.suite.restarted(victim.instance_id, pid)

    async def has_both() -> bool:
        rows = {row.instance_id: row.info for row in await serving.instances(Role.DECODE)}
        again = rows[victim.instance_id]
        return again.generation != victim.generation and again.adapters == victim.adapters

    await until(has_both, WAIT_S, "the restarted instance has the adapters")
    await asyncio.gather(*(serving.ask(model, at) for at in range(LONG) for model in MODELS))
    assert not serving.wrong, serving.wrong


async def kill_while_it_decodes(serving: Serving) -> tuple[InstanceInfo, int, float]:
    """The instance, its pid, and how many answers went on elsewhere: all adapters' answers are complete by then."""
    before, decodes = await serving.resumes(), [row.info for row in await serving.instances(Role.DECODE)]
    streams = [asyncio.create_task(serving.stream(MODELS[1 + at % 2], at)) for at in range(LONG)]
    decoding: dict[str, int] = {}

    async def several_decode() -> bool:
        for info in decodes:
            load = (await serving.client.get(f"{info.http}/instance")).json()["load"]
            decoding[info.instance_id] = load["decoding"]
        return sum(decoding.values()) > 1 or all(stream.done() for stream in streams)

    await until(several_decode, WAIT_S, "streams decode", poll_s=0.01)
    victim = max(decodes, key=lambda info: decoding[info.instance_id])
    pid = serving.suite.kill(victim.instance_id)
    await asyncio.gather(*streams)
    await asyncio.sleep(METRICS_KEPT_S)  # a busy gateway repeats its metrics
    return victim, pid, await serving.resumes() - before
