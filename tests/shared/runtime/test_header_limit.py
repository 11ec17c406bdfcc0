"""A real server under raw sockets: heads without end are refused, everything else passes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from shared.runtime.connections import MAX_HEAD_BYTES, HeaderLimitProtocol
from shared.runtime.http import service_app


@asynccontextmanager
async def _nothing(_: FastAPI) -> AsyncIterator[None]:
    yield


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = service_app("test", _nothing, token="open")

    async def size(request: Request) -> Response:  # no route of FastAPI's: those take no body that they do not declare
        return JSONResponse({"size": len(await request.body())})

    app.add_route("/size", size, methods=["POST"])
    config = uvicorn.Config(app, port=0, log_config=None, http=HeaderLimitProtocol, ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    async with asyncio.timeout(10):
        while not server.started:
            await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def _flood(port: int, head: bytes, piece: bytes, most: int) -> tuple[bytes, int]:
    """Send `head`, then `piece` on and on. What was answered, and how much was taken before the server hung up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.ensure_future(reader.read())
    sent = 0
    try:
        writer.write(head)
        while sent < most and not answer.done():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
            sent += len(piece)
        return await asyncio.wait_for(answer, 5), sent
    except ConnectionError:
        return b"", sent
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        writer.close()


START = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"POST /size HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (START + b"x-endless: ", b"a" * 4096),
        (START, b"x-many: " + b"a" * 500 + b"\r\n"),
        (b"GET /", b"a" * 4096),
        (CHUNKED + b"x-trailer: ", b"a" * 4096),
        (b"", b"\r\n" * 2048),
    ],
    ids=["one header", "many headers", "the path", "a trailer", "empty lines"],
)
async def test_a_head_without_end_is_cut_off(port: int, head: bytes, piece: bytes) -> None:
    answer, sent = await _flood(port, head, piece, 64 << 20)
    assert sent < 16 << 20, "the server read on and on"  # what fits the sockets' buffers may still have left
    assert not answer or answer.startswith(b"HTTP/1.1 431 "), answer[:200]


async def test_a_head_over_the_limit_is_told_so(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(START + b"x-big: " + b"a" * MAX_HEAD_BYTES)
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b'"code": "headers_too_large"' in answer
    writer.close()


async def test_large_bodies_long_connections_and_heads_within_the_limit_pass(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def answer() -> bytes:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        size = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        return head.split(b"\r\n")[0] + b" " + await reader.readexactly(size)

    for _ in range(5):  # far more than the limit in all, on one connection
        writer.write(START + b"x-big: " + b"a" * (MAX_HEAD_BYTES - 1000) + b"\r\n\r\n")
        assert b"200 OK" in await answer()
    size = 4 << 20
    writer.write(b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"b" * size)
    assert await answer() == b'HTTP/1.1 200 OK {"size":%d}' % size
    piece = b"1000\r\n" + b"c" * 4096 + b"\r\n"
    writer.write(b"POST /size HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + piece * 256 + b"0\r\n\r\n")
    assert await answer() == b'HTTP/1.1 200 OK {"size":%d}' % (256 * 4096)
    writer.close()
