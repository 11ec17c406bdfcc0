"""Asking for health over new connections, of servers that answer, are slow, close, or are gone."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from services.launcher.health import HEALTH_URL, HttpHealth

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    """A server that does `serve` with each connection; its URL."""

    async def each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (EOFError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(each, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/health"
    finally:
        server.close()


@pytest.mark.parametrize("answer", [OK, OK.replace(b"1.1", b"1.0"), b"HTTP/1.0 200 OK\r\n\r\nok"])
async def test_each_check_opens_a_connection(answer: bytes) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while request := await reader.readuntil(b"\r\n\r\n"):  # it would answer more on one connection
            assert request.startswith(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:")
            writer.write(answer)

    async with serving(serve) as url:
        health = HttpHealth(url)
        assert [await health.check(10) for _ in range(3)] == [""] * 3
    assert connections == 3
    assert "ConnectionRefusedError" in await health.check(10)


def answering(answer: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)

    return serve


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 5\r\n\r\nstuck", "HTTP 503 stuck"),
        (b"", "IncompleteReadError"),
        (b"\xff\x00garbage\r\n\r\n", "ValueError"),
        (b"x" * 100_000, "LimitOverrunError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "ValueError"),
    ],
)
async def test_any_other_answer_is_a_fault(answer: bytes, fault: str) -> None:
    async with serving(answering(answer)) as url:
        assert (await HttpHealth(url).check(10)).startswith(fault)


async def test_a_check_without_an_answer_ends_and_the_next_one_uses_another_connection() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        if connections == 1:
            await reader.read()  # until the other side gives up
        writer.write(OK)

    async with serving(serve) as url:
        health = HttpHealth(url)
        assert await health.check(0.5) == "no answer within 0.5 s"
        assert await health.check(10) == ""
    assert connections == 2


@pytest.mark.parametrize("healthy", [True, False])
async def test_the_check_of_a_container(healthy: bool) -> None:
    async with serving(answering(OK if healthy else OK.replace(b"200 OK", b"503 No"))) as url:
        command = [sys.executable, "-m", "services.launcher.health"]
        process = await asyncio.create_subprocess_exec(*command, env={HEALTH_URL: url}, stderr=subprocess.PIPE)
        _, errors = await process.communicate()
    assert process.returncode == (0 if healthy else 1)
    assert healthy or b"503" in errors
