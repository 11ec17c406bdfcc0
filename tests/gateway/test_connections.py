"""Plain streams on real connections: slow readers, readers that leave, errors that come late."""

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio
from starlette.requests import Request

from gateway.app import http_server
from gateway.edge import Edge
from gateway.job import Job
from shared.errors import EngineFailed, Overloaded
from shared.wire.messages import TokenStep
from tests.gateway.api import Api, until
from tests.gateway.scripted import parsed, text_of

LONG = 100_000  # tokens
SMALL = 4096  # bytes, of the kernel's buffers at either end


class Ticking:
    """An engine with a step each turn of the event loop. Its hook may have it wait or fail, or give tokens itself."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.ended: list[Job] = []
        self.before: Any = None

    async def run(self, job: Job) -> None:
        self.jobs.append(job)
        try:
            while not job.finished:
                known = len(job.tokens)
                if self.before is not None:
                    await self.before(job)
                await asyncio.sleep(0)
                if len(job.tokens) != known:
                    continue
                last = len(job.tokens) + 1 == job.spec.max_tokens
                job.accept(TokenStep([300 + len(job.tokens) % 90], "length" if last else ""))
        finally:
            self.ended.append(job)


class Served:
    """A front end over it, on a port whose connections buffer little."""

    def __init__(self, engine: Ticking, port: int, connections: "set[Any]") -> None:
        self.engine = engine
        self.port = port
        self.connections = connections  # the server's

    async def ask(self, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The connection of a request that was sent; nothing of its answer is read."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=SMALL)
        said = {"model": "demo", "stream": True, "prompt": [400, 401], **more}
        body = json.dumps(said).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        writer.write(head + b"content-type: application/json\r\n\r\n" + body)
        return reader, writer

    async def answer(self, reader: asyncio.StreamReader) -> list[Any]:
        """The events of an answer, read to its end."""
        head, _, rest = (await asyncio.wait_for(reader.read(-1), 20)).partition(b"\r\n\r\n")
        assert b" 200 " in head
        parts = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        assert parts.pop() == b""  # the end of a chunked body
        return parsed(parts)


@pytest_asyncio.fixture(loop_scope="session")
async def served(api: Api) -> AsyncIterator[Served]:
    from gateway.app import http_server

    server = http_server(api.edge, "127.0.0.1", 0)
    server.config.lifespan = "off"  # the application's has begun
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started, 30.0)
    listening = server.servers[0].sockets[0]
    with socket.fromfd(listening.fileno(), listening.family, listening.type) as real:
        real.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    engine = Ticking()
    with api.running_jobs(engine):
        yield Served(engine, listening.getsockname()[1], server.server_state.connections)
        server.should_exit = True
        await task


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_slow_reader_holds_up_nobody_and_gets_all_of_it(served: Served) -> None:
    reader, writer = await served.ask(max_tokens=1900)
    await until(lambda: len(served.engine.ended) == 1, 20)  # the engine waits for no reader
    other, other_writer = await served.ask(max_tokens=1900)
    quick = await served.answer(other)
    slow = await served.answer(reader)
    assert text_of(slow) == text_of(quick)
    assert len(quick) == 1900 + 1
    assert len(slow) < 800  # what did not fit into the buffers is one event
    for each in (writer, other_writer):
        each.close()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_reader_that_stops_in_a_long_stream_costs_bounded_memory_and_nobodys_time(
    served: Served, api: Api
) -> None:
    """100,000 tokens, 16 to a step, of which only the first are read until 16 others have had all of theirs."""
    engine = served.engine
    reader, writer = await served.ask(max_tokens=1900, request_id="stops")
    await until(lambda: bool(reader._buffer))  # type: ignore[attr-defined]
    writes = list[int]()
    (connection,) = (each for each in served.connections if not each.cycle.response_complete)

    async def flood(job: Job) -> None:
        if "stops" in job.spec.job_id:
            left = LONG - len(job.tokens)
            job.accept(TokenStep([300 + at % 90 for at in range(min(16, left))], "length" if left <= 16 else ""))
            writes.append(connection.transport.get_write_buffer_size())

    engine.before = flood
    others = [await served.ask(max_tokens=400) for _ in range(16)]
    answers = await asyncio.gather(*(served.answer(each) for each, _ in others))
    assert all(len(answer) == 400 + 1 for answer in answers)  # each token an event of its own
    await until(lambda: any("stops" in job.spec.job_id for job in engine.ended), 60)
    assert max(writes) < 128 << 10
    slow = await served.answer(reader)
    assert len(slow) < 2000
    (tokens,) = (job.tokens for job in engine.ended if "stops" in job.spec.job_id)
    assert len(tokens) == LONG
    assert text_of(slow) == api.app.state.openai_serving_completion.renderer.tokenizer.decode(tokens)
    for each in (writer, *(other for _, other in others)):
        each.close()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_client_that_leaves_ends_its_job(served: Served) -> None:
    reached = asyncio.Event()

    async def hang(job: Job) -> None:
        if len(job.tokens) == 5:
            reached.set()
            await asyncio.Event().wait()

    served.engine.before = hang
    reader, writer = await served.ask(max_tokens=50)
    await asyncio.wait_for(reached.wait(), 5)
    await until(lambda: bool(reader._buffer))  # type: ignore[attr-defined]
    writer.close()
    await until(lambda: len(served.engine.ended) == 1)
    assert not served.engine.ended[0].finished


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_failure_in_a_stream_is_its_last_event(served: Served) -> None:
    async def fail(job: Job) -> None:
        if len(job.tokens) == 3:
            raise EngineFailed("the instance is gone")

    served.engine.before = fail
    reader, writer = await served.ask(max_tokens=50)
    events = await served.answer(reader)
    assert len(events) == 3 + 1 + 1
    assert events[-2]["error"]["message"] == "the instance is gone"
    assert events[-1] == "[DONE]"
    writer.close()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_refusal_before_the_first_token_is_a_plain_429(served: Served) -> None:
    async def refuse(job: Job) -> None:
        raise Overloaded("full", retry_after_s=3.0)

    served.engine.before = refuse
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", timeout=10) as client:
        body = {"model": "demo", "stream": True, "prompt": [400], "max_tokens": 5}
        response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["message"] == "full"


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_answers_follow_each_other_on_one_connection(served: Served) -> None:
    """Plain or not: nothing of one answer gets into the next."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", timeout=10) as client:
        texts = []
        for stream in (True, False, True):
            body = {"model": "demo", "stream": stream, "prompt": [400], "max_tokens": 7}
            response = await client.post("/v1/completions", json=body)
            if stream:
                lines = [line.removeprefix("data: ") for line in response.text.split("\n\n")[:-1]]
                assert lines.pop() == "[DONE]"
                texts.append(text_of([json.loads(line) for line in lines]))
            else:
                texts.append(response.json()["choices"][0]["text"])
    assert texts[0]
    assert len(set(texts)) == 1


__all__ = ["served"]  # a fixture
PART = b"x" * 65_536


class Endless:
    """Answers with as much as the connection takes, up to `parts`."""

    def __init__(self, parts: int) -> None:
        self.parts, self.began, self.ended = parts, 0, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.began += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(self.parts):
            await send({"type": "http.response.body", "body": PART, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self.ended += 1


async def connected(port: int) -> socket.socket:
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", port))
    await loop.sock_sendall(raw, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    return raw


@pytest.mark.parametrize("parts", [10_000, 1])  # an answer in the midst, and one that waits to be sent
async def test_an_answer_that_nobody_reads_is_ended(parts: int) -> None:
    app = Endless(parts)
    server = http_server(cast(Edge, app), "127.0.0.1", 0, write_timeout_s=0.2)
    server.config.lifespan = "off"
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    listening = server.servers[0].sockets[0]
    with socket.fromfd(listening.fileno(), listening.family, listening.type) as real:
        real.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with await connected(listening.getsockname()[1]):
        await until(lambda: app.began == 1)
        await until(lambda: not server.server_state.connections, 10)
        await until(lambda: not server.server_state.tasks, 10)
    server.should_exit = True
    await task


async def test_a_slow_reader_is_not_hung_up_on() -> None:
    app = Endless(6)
    server = http_server(cast(Edge, app), "127.0.0.1", 0, write_timeout_s=0.5)
    server.config.lifespan = "off"
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    with await connected(server.servers[0].sockets[0].getsockname()[1]) as raw:
        size, loop = 0, asyncio.get_running_loop()
        while size < 6 * len(PART):
            size += len(await loop.sock_recv(raw, 16_384))
            await asyncio.sleep(0.02)
    server.should_exit = True
    await task
    assert app.ended == 1


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [400, 401]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
async def test_a_stream_keeps_nothing_of_its_bodys_bytes(
    served: Served, api: Api, path: str, body: dict[str, Any]
) -> None:
    go = asyncio.Event()

    async def wait(_: Any) -> None:
        await go.wait()

    served.engine.before = wait
    full = {"model": "demo", "stream": True, "max_tokens": 3, "logprobs": 1 if "prompt" in body else True, **body}
    padded = json.dumps(full | {"padding": "p" * 100_000})
    posts = [asyncio.create_task(api.client.post(path, content=padded, headers={"content-type": "application/json"}))]
    await until(lambda: len(served.engine.jobs) == 1)
    kept = [each for each in gc.get_objects() if type(each) is Request and getattr(each, "_body", None)]
    parsed = [each for each in gc.get_objects() if type(each) is Request and getattr(each, "_json", None)]
    assert kept == parsed == []
    assert api.admission.held_bytes.total == len(padded)
    go.set()
    assert (await posts[0]).status_code == 200
    assert api.admission.held_bytes.total == 0
