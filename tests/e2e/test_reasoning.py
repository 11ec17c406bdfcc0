"""Reasoning, structured output, tools and thinking budgets of a suite with real engines: the answers are those of
vLLM's own server, also where the decode instance is killed in the middle of one.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest
import pytest_asyncio

from benchmarks.chaos.handles import Processes
from benchmarks.jobs import find_row
from benchmarks.measuring import plain_vllm
from benchmarks.suite import BARE, CPU_ENGINE, DEMO_MODEL, SPLIT, metric, started, until_found
from services.launcher.suite import READY_S, Suite
from services.launcher.up import RunningSuite
from tests.patient_clusters import patient
from tests.tiny_models import make_reasoning

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]
CHAT = "/v1/chat/completions"
TOKENS = 60
TRIES = 5
OPTIONS = ("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}}
    for name in ("weather", "time")
]
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}
FORMATS: dict[str, dict[str, Any]] = {
    "text": {},
    "json": {"response_format": {"type": "json_object"}},
    "schema": JSON,
    "auto": {"tools": TOOLS},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}},
}
THINKING: dict[str, dict[str, Any]] = {
    "free": {},
    "off": {"chat_template_kwargs": {"enable_thinking": False}},
    "none": {"thinking_token_budget": 0},
    "short": {"thinking_token_budget": 7},
}


def body(*parts: dict[str, Any], tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the sun? Write a short text about it."}]
    asked: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": tokens, "temperature": 0}
    for part in parts:
        asked |= part
    return asked | {"return_token_ids": True} | more


BODIES = {
    **{f"{form} {think}": body(FORMATS[form], THINKING[think]) for form in FORMATS for think in THINKING},
    "penalties": body(JSON, THINKING["short"], presence_penalty=0.5, min_tokens=20),
    "several": body(JSON, THINKING["short"], n=2),
}
STREAMED = [name for name in BODIES if name.endswith(("short", "off"))]
LONG = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "it",
            "schema": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 120, "maxItems": 120},
        },
    }
}


@dataclass
class Both:
    """vLLM's server, and a suite with prefill and decode instances of the same model."""

    plain: httpx.AsyncClient
    ours: httpx.AsyncClient
    suite: RunningSuite


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Both]:
    folder = tmp_path_factory.mktemp("reasoning")
    habits = {"</think>": ".", "<tool_call>": "?", "</tool_call>": "}"}
    model = make_reasoning(folder / "model", DEMO_MODEL, habits=habits)
    cluster: dict[str, Any] = {
        **BARE,
        "name": "reasoning",
        "model": str(model),
        "policies": SPLIT,
        "gateway": {
            "dtype": "float32",
            "vllm_args": {"reasoning_parser": "qwen3", "enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
        },
        "instance_defaults": CPU_ENGINE,
        "instances": [
            {"id": "prefill-0", "role": "prefill", "block_size": 32},
            {"id": "decode", "role": "decode", "block_size": 64, "count": 2},
        ],
    }
    async with AsyncExitStack() as entered:
        port = await entered.enter_async_context(plain_vllm(128 << 20, *OPTIONS, model=model))
        suite = await entered.enter_async_context(started(patient(cluster), folder / "suite"))
        clients = [
            httpx.AsyncClient(base_url=url, timeout=120) for url in (f"http://127.0.0.1:{port}", suite.plan.api_url)
        ]
        plain, ours = [await entered.enter_async_context(client) for client in clients]
        yield Both(plain, ours, suite)


async def answer(client: httpx.AsyncClient, asked: dict[str, Any]) -> Any:
    """The choices of an answer without ids; of an error, its status and message."""
    response = await client.post(CHAT, json=asked)
    if response.status_code != 200:
        return response.status_code, response.json()["error"]["message"]
    return [without_ids(choice) for choice in response.json()["choices"]]


async def streamed(
    client: httpx.AsyncClient, asked: dict[str, Any], after: int = 0, then: Any = None, request_id: str = ""
) -> dict[str, Any]:
    """The joined events of a stream. After so many tokens it calls `then`, once."""
    whole: dict[str, Any] = {}
    tokens = 0
    headers = {"X-Request-Id": request_id} if request_id else {}
    async with client.stream("POST", CHAT, json=asked | {"stream": True}, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                join(whole, {str(choice["index"]): without_ids(choice) for choice in event["choices"]})
                tokens += sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
                if then is not None and tokens >= after:
                    await then()
                    then = None
    return whole


def join(whole: dict[str, Any], more: dict[str, Any]) -> None:
    """Add an event's parts to what has come: text to text, and the tool calls by their index.

    An event of several tokens may hold several parts of one call: its name, and the first of its arguments.
    """
    for key, value in more.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for each in value:
                join(whole.setdefault(key, {}), {str(each["index"]): each})
        elif isinstance(value, dict):
            join(whole.setdefault(key, {}), value)
        elif key in whole and isinstance(value, str | list) and key not in ("role", "type", "finish_reason"):
            whole[key] += value
        elif value is not None:
            whole[key] = value


def without_ids(value: Any) -> Any:
    """What an event says, without ids and without markers of reasoning in its texts.

    If a model repeats `</think>` in its answer, vLLM's parsers drop the second one where it comes in one output with
    the first, and keep it where it comes later: the text depends on how busy the server is.
    """
    if isinstance(value, str):
        return value.replace("</think>", "")
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key != "id"}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", BODIES)
async def test_answers_are_those_of_plain_vllm(both: Both, name: str) -> None:
    asked = BODIES[name]
    ours, plain = await asyncio.gather(answer(both.ours, asked), answer(both.plain, asked))
    assert ours == plain


@pytest.mark.parametrize("name", STREAMED)
async def test_streams_are_those_of_plain_vllm(both: Both, name: str) -> None:
    asked = BODIES[name]
    ours, plain = await asyncio.gather(streamed(both.ours, asked), streamed(both.plain, asked))
    assert ours == plain


@pytest.mark.parametrize("after", [5, 80], ids=["in its reasoning", "in its json"])
async def test_an_answer_goes_on_after_its_decode_instance_is_killed(both: Both, after: int) -> None:
    """The other instance begins with its reasoning again: budget and grammar are where they were."""
    processes = Processes(both.suite.supervisor)
    asked = body(LONG, thinking_token_budget=40, tokens=600)
    before, plain = await resumes(both.ours), await streamed(both.plain, asked)
    for number in range(TRIES):
        killed: dict[str, int] = {}
        request_id = f"loses-its-instance-{after}-{number}"
        kill = partial(kill_decoding, both.suite.suite, processes, killed, request_id)
        ours = await streamed(both.ours, asked, after, kill, request_id)
        assert killed
        assert ours == plain
        await processes.back(killed, timeout_s=READY_S)
        if await resumes(both.ours) > before:
            return
    pytest.fail("each answer had ended before its instance was killed")


async def kill_decoding(suite: Suite, processes: Processes, killed: dict[str, int], request_id: str) -> None:
    """SIGKILL to the instance that decodes the request, or did if the answer has ended meanwhile."""

    async def decode_instance() -> str | None:
        return (await find_row(suite, request_id)).decode_instance or None

    killed |= processes.kill(await until_found(decode_instance, READY_S, f"the instance that decodes {request_id}"))


async def resumes(client: httpx.AsyncClient) -> float:
    return metric((await client.get("/metrics")).text, "polyphase_resumes_total")
