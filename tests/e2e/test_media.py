"""Images, a video and sounds from the request of a client to the tokens of real engines. Small random models answer as
plain vLLM does, in float32, however the prompt is divided over instances.
"""

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.engine_client import NEW_TOKENS, Engine, exporting, handed_over
from benchmarks.media_models import GEMMA, MODELS, QWEN, QWEN_AUDIO, MediaModel, chat, film, picture, sound
from benchmarks.suite import BARE, CPU_ENGINE, SPLIT, counts, started
from gateway.job import Job
from shared.domain.job import Generation
from shared.domain.prompt import whole_items
from shared.wire.messages import TokenStep
from tests.patient_clusters import patient

pytest.importorskip("torchvision", reason="vLLM's code for these models needs torchvision")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SENT = 5  # tokens that a client has when its decode engine is killed
LIMITS = {"limit_mm_per_prompt": {"image": 4, "video": 1, "audio": 4}}


def chats_of(*, sounds: bool = False) -> dict[str, tuple[str, ...]]:
    """By name; three of them have the same tokens."""

    def item(seed: int, *size: int) -> str:
        return sound(seed, size[0] // 10) if sounds else picture(seed, *size)

    other, second, end = item(3, 120, 90), item(2, 200, 60), " Compare both of them."
    return {
        "two": ("What is this? ", item(1, 120, 90), " And what is that? ", second, end),
        "other first": ("What is this? ", other, " And what is that? ", second, end),
        "other last": ("What is this? ", item(1, 120, 90), " And what is that? ", item(4, 200, 60), end),
        "at once": (item(5, 64, 64), item(6, 90, 160), item(5, 64, 64), "?"),
        "text": ("No picture and no sound, but many words. " * 6,),
    }


FILM = ("A picture: ", picture(1), " And a film: ", film(2), " Which is longer?")


@dataclass(frozen=True, slots=True)
class Rendered:
    """What instances receive of a chat."""

    tokens: list[int]
    generation: Generation


@asynccontextmanager
async def rendering(model: Path) -> AsyncIterator[Callable[..., Awaitable[Rendered]]]:
    """Renders chats as a gateway does, whose jobs go nowhere."""
    from gateway.app import prepare_environment, running
    from gateway.auth import KeyRing
    from gateway.settings import GatewaySettings

    jobs: list[Job] = []

    class Nowhere:
        async def run(self, job: Job) -> None:
            jobs.append(job)
            job.accept(TokenStep([100], "length"))

    prepare_environment()
    settings = GatewaySettings(
        schedulers=("tcp://127.0.0.1:1",), model=str(model), served_model_name="demo", dtype="float32", vllm_args=LIMITS
    )
    async with running(settings, KeyRing(()), Nowhere()) as edge:
        transport = httpx.ASGITransport(app=edge)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

            async def render(*parts: str) -> Rendered:
                body = {"model": "demo", "messages": chat(*parts), "max_tokens": 1}
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                spec = jobs.pop().spec
                return Rendered(spec.prompt_token_ids, spec.generation)

            yield render


class Engines:
    """A plain engine, and a prefill and a decode engine with unlike blocks; the chats, and the plain answers."""

    def __init__(self, model: Path, chats: dict[str, Rendered]) -> None:
        options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": False, **LIMITS}
        self.chats = chats
        self.plain = Engine("plain", model, block_size=64, connector=False, **options)
        self.p = Engine("p", model, block_size=32, **options)
        self.d = Engine("d", model, block_size=64, **options)
        self.answers: dict[str, list[int]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Engines":
        engines = (self.plain, self.p, self.d)
        for engine in engines:
            self._stack.callback(engine.kill)  # also where another one does not start
        for engine in engines:
            await self._stack.enter_async_context(engine)
        self.answers = {name: await self.at(self.plain, name) for name in self.chats}
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def at(self, engine: Engine, name: str) -> list[int]:
        text = self.chats[name]
        return await engine.generate(text.tokens, NEW_TOKENS, media=text.generation)

    async def handed_over(self, name: str, split: int = 0) -> list[int]:
        text = self.chats[name]
        return await handed_over(self.p, self.d, text.tokens, split=split, media=text.generation)

    async def forget(self) -> None:
        """Nothing is cached, and the events so far are gone."""
        for engine in (self.p, self.d):
            await engine.ask("reset")
            engine.events.clear()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
async def test_answers_are_those_of_plain_vllm(model: MediaModel, tmp_path: Path) -> None:
    sounds = model is QWEN_AUDIO
    if sounds:
        pytest.importorskip("soundfile", reason="vLLM reads sounds with it")
    folder = model.make(tmp_path / "model")
    async with rendering(folder) as render:
        chats = {name: await render(*parts) for name, parts in chats_of(sounds=sounds).items()}
        if model is QWEN:
            chats["film"] = await render(*FILM)
            assert [item.modality for item in chats["film"].generation.items] == ["image", "video"]
    same = ("two", "other first", "other last")
    assert len({tuple(chats[name].tokens) for name in same}) == 1
    async with Engines(folder, chats) as engines:
        assert len({tuple(engines.answers[name]) for name in same}) == 3, "other content changes no token"
        await _is_shared_by_no_other_image(engines)
        await _may_be_split_anywhere(engines)
        await _pulled_kv_decides(engines)
        await _is_computed_again(engines)
        await _outlives_a_decode_engine(engines)


async def _is_shared_by_no_other_image(engines: Engines) -> None:
    """With warm prefix caches, twice: the second time the prefill engine finds whole prompts."""
    for _ in range(2):
        assert {name: await engines.handed_over(name) for name in engines.chats} == engines.answers
    pulls = await engines.d.pulls(2 * len(engines.chats))
    assert set(pulls) <= {"ok", "cached"}
    assert (await engines.d.ask("levels"))["encoded"] == 0, "the decode engine computed an image"


async def _may_be_split_anywhere(engines: Engines) -> None:
    text = engines.chats["two"]
    first, second = text.generation.items
    splits = {1, first.start, first.start + 1, first.end, second.start - 1, second.start, second.end - 1, second.end}
    splits |= {len(text.tokens) // 3, len(text.tokens) - 1}
    for split in sorted({whole_items(split, text.generation.items) for split in splits}):
        await engines.forget()
        assert await engines.handed_over("two", split) == engines.answers["two"], f"split at {split}"
        assert await engines.d.pulls() == {"ok": 1}


async def _pulled_kv_decides(engines: Engines) -> None:
    """A control: zeros in place of the pulled KV change the tokens."""
    await engines.forget()
    await engines.d.ask("fault", zero=True, corrupt=False)
    assert await engines.handed_over("two") != engines.answers["two"]
    assert await engines.d.pulls() == {"ok": 1}
    await engines.d.ask("fault", zero=False, corrupt=False)


async def _is_computed_again(engines: Engines) -> None:
    """Where KV arrives corrupt, the decode engine computes the images itself."""
    await engines.forget()
    await engines.p.ask("fault", zero=False, corrupt=True)
    assert await engines.handed_over("two") == engines.answers["two"]
    assert set(await engines.d.pulls()) == {"checksum"}
    assert (await engines.d.ask("levels"))["encoded"] == 2
    await engines.p.ask("fault", zero=False, corrupt=False)


async def _outlives_a_decode_engine(engines: Engines) -> None:
    """It is killed while it decodes; another one continues from the tokens that the client has."""
    await engines.forget()
    text, answer = engines.chats["two"], engines.answers["two"]
    assert (await engines.handed_over("two"))[:SENT] == answer[:SENT]
    engines.d.kill()
    transfer_id = uuid.uuid4().hex
    known = text.tokens + answer[:SENT]
    await engines.plain.ask("reset")
    await engines.p.generate(known, 1, exporting(transfer_id), media=text.generation)
    rest = await engines.p.generate(known, NEW_TOKENS - SENT, media=text.generation)
    assert rest == answer[SENT:]
    assert await engines.plain.generate(known, NEW_TOKENS - SENT, media=text.generation) == rest


@pytest.mark.alone
async def test_a_suite_answers_chats_with_images(tmp_path: Path) -> None:
    """Also when the decode instance is lost: the job, with its images, continues on the restarted one."""
    folder = GEMMA.make(tmp_path / "model")
    names = ("two", "other first", "at once", "text")
    chats = [chat(*chats_of()[name]) for name in names]
    plain = asyncio.create_task(plain_answers(folder, chats, NEW_TOKENS))
    cluster: dict[str, Any] = {
        **BARE,
        "name": "media",
        "model": str(folder),
        "max_model_len": 1280,
        "policies": SPLIT,
        "gateway": {"dtype": "float32", "patience_s": 120},
        "instance_defaults": CPU_ENGINE | {"engine_args": LIMITS},
        "instances": [
            {"id": "p0", "role": "prefill", "block_size": 32},
            {"id": "d0", "role": "decode", "block_size": 64},
        ],
    }
    async with (
        started(patient(cluster), tmp_path / "suite") as running,
        httpx.AsyncClient(base_url=running.plan.api_url, timeout=180) as client,
    ):
        body = {"model": "demo", "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}

        async def answer(at: int) -> list[list[int]]:
            whole = {**body, "messages": chats[at], "return_token_ids": True}
            response = await client.post("/v1/chat/completions", json=whole)
            assert response.status_code == 200, response.text
            found = response.json()
            return [found["prompt_token_ids"], found["choices"][0]["token_ids"]]

        answers = await asyncio.gather(*(answer(at) for at in range(len(names))))
        expected = await plain
        assert answers == expected
        instances = (await client.get(f"{running.plan.monitor_url}/instances")).json()
        assert all(each["info"]["media"] == ["image"] for each in instances)
        (decode,) = (each["info"]["http"] for each in instances if each["role"] == "decode")
        page = (await client.get(f"{decode}/metrics")).text  # the first one: none older is repeated
        assert counts(page, "polyphase_kv_imports_total", "outcome") == {"pulled": len(names)}

        pid = running.suite.kill("d0", signal.SIGSTOP)  # else it may have answered when it is killed
        streamed = {**body, "messages": chats[0], "stream": True, "return_token_ids": True}
        tokens: list[int] = []
        async with client.stream("POST", "/v1/chat/completions", json=streamed) as response:
            lines = (line async for line in response.aiter_lines() if line.startswith("data: {"))
            async for line in lines:
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens += choice.get("token_ids") or []
                if len(tokens) == 1 and pid:  # by the prefill instance
                    with suppress(ProcessLookupError):  # the launcher kills processes that do not answer
                        os.kill(pid, signal.SIGKILL)
                    pid = 0
        assert not pid
        assert tokens == expected[0][1]


async def plain_answers(model: Path, chats: list[Any], tokens: int) -> list[list[list[int]]]:
    """Prompts and answers of plain vLLM, which runs in a process of its own."""
    file = model.parent / "chats.json"
    file.write_text(json.dumps(chats))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.e2e.plain_chat", str(model), str(file), str(tokens)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    found: list[list[list[int]]] = json.loads(output.decode().splitlines()[-1])
    return found
