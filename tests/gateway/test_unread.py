"""What answers keep of memory: bodies are let go once they are parsed, and answers that nobody reads are ended."""

import asyncio
import gc
import json
import socket
from typing import Any, cast

import pytest
from starlette.requests import Request

from gateway.app import http_server
from gateway.edge import Edge
from tests.gateway.api import Api, until
from tests.gateway.test_stream_connections import Served, served

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
