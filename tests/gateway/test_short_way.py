"""The short way of plain streams: the answers of the usual way, byte for byte, and only where it is for them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio

from gateway.connection import EXTENSION, Body
from gateway.job import Job
from shared.wire.messages import TokenStep
from tests.gateway.api import Api, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


class Engine:
    """Answers with the tokens that were asked for; a hook may fail."""

    async def run(self, job: Job) -> None:
        while not job.finished:
            await asyncio.sleep(0)
            last = len(job.tokens) + 1 == job.spec.max_tokens
            job.accept(TokenStep([300 + len(job.tokens) % 90], "length" if last else ""))


class Ways:
    """One server, asked by either way."""

    def __init__(self, api: Api, port: int) -> None:
        self.api = api
        self.port = port
        self.taken = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        short = self.api.edge.fast_path
        assert short is not None

        def counting(*asked: Any) -> Any:
            found = short(*asked)
            self.taken += found is not None
            return found

        self.api.edge.fast_path = counting
        try:
            yield
        finally:
            self.api.edge.fast_path = short

    @contextmanager
    def usual(self) -> Iterator[None]:
        short, self.api.edge.fast_path = self.api.edge.fast_path, None
        try:
            yield
        finally:
            self.api.edge.fast_path = short

    async def raw(self, kind: str, said: Any, headers: str = "content-type: application/json\r\n") -> bytes:
        """All bytes of the answer, without what differs between any two."""
        body = said if isinstance(said, bytes) else json.dumps({"model": "demo", "max_tokens": 5, **said}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST {PATHS[kind]} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{headers}"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await asyncio.wait_for(reader.read(-1), 20)
        writer.close()
        for differs in (rb'"created":\d+', rb'"id":"[^"]*"', rb"date: [^\r]*", rb"\r\n[0-9a-f]+\r\n"):
            answer = re.sub(differs, b"", answer)
        return answer


@pytest_asyncio.fixture(loop_scope="session")
async def ways(api: Api) -> AsyncIterator[Ways]:
    from gateway.app import http_server

    server = http_server(api.edge, "127.0.0.1", 0)
    server.config.lifespan = "off"  # the application's has begun
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started, 30.0)
    made = Ways(api, server.servers[0].sockets[0].getsockname()[1])
    with api.running_jobs(Engine()), made.watched():
        yield made
    server.should_exit = True
    await task


async def of_both(ways: Ways, kind: str, said: Any, **how: Any) -> tuple[bytes, bytes]:
    with ways.usual():
        usual = await ways.raw(kind, said, **how)
    return usual, await ways.raw(kind, said, **how)


@pytest.mark.parametrize("more", [{}, {"stop": ["x"]}, {"stream_options": {"include_usage": True}}, {"temperature": 0}])
@pytest.mark.parametrize("kind", PATHS)
async def test_a_plain_stream_takes_it_and_looks_the_same(ways: Ways, kind: str, more: dict[str, Any]) -> None:
    said = {"stream": True, **(CHAT if kind == "chat" else {"prompt": "Hello"}), **more}
    usual, short = await of_both(ways, kind, said)
    assert ways.taken == 1
    assert short.split(b"\r\n") == usual.split(b"\r\n")
    assert b" 200 OK" in short
    assert b"data: [DONE]" in short


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("chat", {**CHAT}),
        ("chat", {**CHAT, "stream": True, "n": 2}),
        ("chat", {**CHAT, "stream": True, "logprobs": True}),
        ("chat", {**CHAT, "stream": True, "chat_template": "{{ messages }}"}),
        ("chat", {"stream": True, "messages": "nobody"}),
        ("chat", {"stream": True, "messages": [{"role": "user", "content": "a" * 20_000}]}),
        ("completion", {"stream": True}),
        ("completion", {"stream": True, "prompt": "a", "echo": True}),
        ("completion", b"{no json"),
        ("completion", b"[]"),
    ],
)
async def test_others_go_the_usual_way(ways: Ways, kind: str, said: Any) -> None:
    usual, other = await of_both(ways, kind, said)
    assert ways.taken == 0
    assert other.split(b"\r\n") == usual.split(b"\r\n")


@pytest.mark.parametrize(
    "headers", ["content-type: text/plain\r\n", "", "content-type: application/json\r\norigin: http://a\r\n"]
)
async def test_so_do_requests_whose_headers_are_others(ways: Ways, headers: str) -> None:
    usual, other = await of_both(ways, "chat", {**CHAT, "stream": True}, headers=headers)
    assert ways.taken == 0
    assert other.split(b"\r\n") == usual.split(b"\r\n")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("chat", {**CHAT, "stream": True, "model": "nobody's"}),
        ("chat", {**CHAT, "stream": True, "max_tokens": -1}),
        ("chat", {**CHAT, "stream": True, "max_tokens": 1_000_000}),
        ("completion", {"stream": True, "prompt": ["a", "b"]}),
        ("completion", {"stream": True, "prompt": "a", "request_id": "no such\u00e9 thing"}),
    ],
)
async def test_what_vllm_says_against_a_request_is_said(ways: Ways, kind: str, said: Any) -> None:
    usual, short = await of_both(ways, kind, said)
    assert ways.taken == 1
    assert sorted(short.splitlines()) == sorted(usual.splitlines())  # of two prompts the order may differ


async def test_health_is_answered_without_the_application(api: Api) -> None:
    answer = await api.client.get("/health")
    assert (answer.status_code, answer.content) == (200, b"")
    engine = api.app.state.engine_client.engine_core
    before, engine.resources = engine.resources, type("Dead", (), {"engine_dead": True})
    try:
        assert (await api.client.get("/health")).status_code == 503
    finally:
        engine.resources = before


class Cycle:
    transport = None
    disconnected = response_complete = False


async def test_a_body_tells_once_that_its_reader_has_left() -> None:
    cycle, told = Cycle(), list[str]()
    body = Body(cycle, None)
    body.on_disconnect(lambda: told.append("left"))
    body.check_disconnect()
    assert not told
    cycle.disconnected = True
    body.check_disconnect()
    body.check_disconnect()
    assert told == ["left"]
    body.on_disconnect(lambda: told.append("late"))
    assert told == ["left", "late"]
    assert EXTENSION
