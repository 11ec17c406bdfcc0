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
async def test_each_question_opens_a_connection(answer: bytes) -> None:
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


async def test_a_process_that_takes_no_new_connections_is_not_well() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)

    async with serving(serve) as url:
        health = HttpHealth(url)
        assert await health.check(10) == ""
    assert "ConnectionRefusedError" in await health.check(10)


async def test_what_is_not_well_says_why() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 5\r\n\r\nstuck")

    async with serving(serve) as url:
        health = HttpHealth(url)
        assert await health.check(10) == "HTTP 503 stuck"


@pytest.mark.parametrize(
    "noise", [b"", b"\xff\x00garbage\r\n\r\n", b"x" * 100_000, b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
)
async def test_garbage_is_a_fault(noise: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(noise)

    async with serving(serve) as url:
        assert await HttpHealth(url).check(10)


async def test_one_that_does_not_answer_is_asked_anew_over_another_connection() -> None:
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
        assert await health.check(0.1) == "no answer within 0.1 s"
        assert await health.check(10) == ""
    assert connections == 2


async def test_nobody_there() -> None:
    assert "ConnectionRefusedError" in await HttpHealth("http://127.0.0.1:1/health").check(10)


@pytest.mark.parametrize("well", [True, False])
async def test_the_check_of_a_container(well: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK if well else OK.replace(b"200 OK", b"503 No"))

    async with serving(serve) as url:
        command = [sys.executable, "-m", "services.launcher.health"]
        process = await asyncio.create_subprocess_exec(*command, env={HEALTH_URL: url}, stderr=subprocess.PIPE)
        _, errors = await process.communicate()
    assert process.returncode == (0 if well else 1)
    assert well or b"503" in errors
