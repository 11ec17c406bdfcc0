"""A real server under raw sockets: silent connections, slow heads, and more connections than it takes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from shared.runtime.connections import (
    MAX_HEAD_BYTES,
    RESERVED,
    BoundedProtocol,
    ConnectionLimits,
    Connections,
    HeaderLimitProtocol,
    bounded,
)
from shared.runtime.http import service_app
from shared.runtime.server import Server

REQUEST = b"GET /work HTTP/1.1\r\nhost: test\r\n\r\n"
PROBE = REQUEST.replace(b"/work", b"/health")
PATIENT = ConnectionLimits(head_s=60.0, idle_s=60.0)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """A server whose application answers `/work` once `free` is set and everything else at once."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.connections = Connections(limits)
        self.free = asyncio.Event()
        self.working = 0
        http = bounded(BoundedProtocol, self.connections)
        config = uvicorn.Config(
            self._app, port=0, log_config=None, lifespan="off", ws="none", interface="asgi3", http=http
        )
        self.server = Server(config)
        self._open: list[Streams] = []

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/work":
            self.working += 1
            await self.free.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def connect(self, data: bytes = b"") -> Streams:
        """A connection on which `data` was sent, once the server has counted it."""
        port = self.server.servers[0].sockets[0].getsockname()[1]
        streams = await asyncio.open_connection("127.0.0.1", port)
        self._open.append(streams)
        streams[1].write(data)
        return streams

    async def opened(self, count: int) -> list[Streams]:
        made = [await self.connect() for _ in range(count)]
        await until(lambda: len(self.connections) >= count)
        return made

    def close(self) -> None:
        for _, writer in self._open:
            writer.transport.abort()


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def all_of(streams: Streams) -> bytes:
    """What comes until the server closes."""
    return await asyncio.wait_for(streams[0].read(), 10)


async def answer(streams: Streams) -> bytes:
    head = await asyncio.wait_for(streams[0].readuntil(b"\r\n\r\n"), 10)
    assert await streams[0].readexactly(2) == b"ok"
    return head


@asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[Served]:
    served = Served(limits)
    task = asyncio.create_task(served.server.serve())
    await until(lambda: served.server.started)
    try:
        yield served
    finally:
        served.close()
        served.free.set()
        served.server.should_exit = True
        await task


async def test_a_silent_connection_is_closed() -> None:
    async with serving(ConnectionLimits(head_s=0.05, idle_s=60.0)) as served:
        assert await all_of(await served.connect()) == b""
        await until(lambda: not len(served.connections))


@pytest.mark.parametrize("first", [b"", PROBE], ids=["first", "later"])
async def test_a_head_that_does_not_end_is_answered_by_408(first: bytes) -> None:
    async with serving(ConnectionLimits(head_s=0.2, idle_s=60.0)) as served:
        streams = await served.connect(first)
        if first:
            await answer(streams)
        for piece in (b"GET /health HTTP/1.1\r\n", b"x-slow: a", b"a"):  # each byte does not renew the time
            streams[1].write(piece)
            await asyncio.sleep(0)
        said = await all_of(streams)
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"head_too_slow" in said


async def test_a_kept_connection_is_closed_after_the_idle_time() -> None:
    async with serving(ConnectionLimits(head_s=60.0, idle_s=0.05)) as served:
        streams = await served.connect(PROBE)
        await answer(streams)
        assert await all_of(streams) == b""


async def test_bytes_that_are_no_head_do_not_keep_a_connection() -> None:
    async with serving(ConnectionLimits(head_s=0.1, idle_s=60.0)) as served:
        streams = await served.connect(b"POST /health HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n")
        await answer(streams)  # and the body has not come
        streams[1].write(b"x")
        assert await all_of(streams) == b""


async def test_a_request_that_takes_longer_than_both_times_is_answered() -> None:
    async with serving(ConnectionLimits(head_s=0.05, idle_s=0.05)) as served:
        slow = await served.connect(REQUEST)
        await until(lambda: served.working)
        assert await all_of(await served.connect()) == b""  # both times have passed
        served.free.set()
        assert b" 200 " in await answer(slow)


async def test_at_the_limit_waiting_connections_make_room_for_new_ones() -> None:
    async with serving(ConnectionLimits(60.0, 60.0, most=4)) as served:
        kept = await served.connect(PROBE)
        await answer(kept)
        silent = await served.opened(3)
        new = await served.connect(PROBE)
        assert b" 200 " in await answer(new)
        assert await all_of(silent[0]) == b""
        assert len(served.connections) == 4
        kept[1].write(PROBE)  # those without a request go first
        assert b" 200 " in await answer(kept)


async def test_busy_connections_are_never_closed_and_health_is_still_answered() -> None:
    async with serving(ConnectionLimits(60.0, 60.0, most=3)) as served:
        busy = [await served.connect(REQUEST) for _ in range(3)]
        await until(lambda: served.working == 3)
        refused = await all_of(await served.connect(REQUEST))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: " in refused
        assert b"all of the 3 connections" in refused
        assert b" 200 " in await answer(await served.connect(PROBE))
        served.free.set()
        assert [b" 200 " in await answer(each) for each in busy] == [True] * 3
        assert b" 200 " in await answer(await served.connect(REQUEST))


async def test_beyond_the_reserve_nothing_is_read() -> None:
    async with serving(ConnectionLimits(60.0, 60.0, most=1)) as served:
        await served.connect(REQUEST)
        await until(lambda: served.working == 1)
        crowd = [await served.connect() for _ in range(3 * RESERVED)]
        await until(lambda: len(served.connections) <= 1 + RESERVED)
        assert b" 200 " in await answer(await served.connect(PROBE))
        assert crowd[0][0].at_eof() or await all_of(crowd[0]) == b""


@pytest.mark.parametrize(("proxies", "refused"), [((), True), (("127.0.0.1",), False)])
async def test_the_limit_of_an_address(proxies: tuple[str, ...], refused: bool) -> None:
    async with serving(ConnectionLimits(60.0, 60.0, most_an_address=2, proxies=frozenset(proxies))) as served:
        busy = [await served.connect(REQUEST) for _ in range(2)]
        await until(lambda: served.working == 2)
        third = await served.connect(REQUEST)
        if refused:
            assert b"the limit for one address is 2" in await all_of(third)
        else:
            await until(lambda: served.working == 3)
        served.free.set()
        assert [b" 200 " in await answer(each) for each in busy] == [True] * 2


async def test_a_server_that_drains_refuses_new_requests_and_ends_the_open_ones() -> None:
    async with serving(PATIENT) as served:
        served.server.drain = lambda: served.connections.drain(60.0)
        running, kept = await served.connect(REQUEST), await served.connect(PROBE)
        await answer(kept)
        await until(lambda: served.working == 1)
        served.server.should_exit = True
        await until(lambda: served.connections.draining)
        for streams in (kept, await served.connect()):
            streams[1].write(REQUEST)
            refused = await all_of(streams)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: " in refused
        assert b" 200 " in await answer(await served.connect(PROBE))  # a launcher shall not take it for dead
        served.free.set()
        assert b" 200 " in await answer(running)
        await until(lambda: not served.server.servers[0].sockets)


async def test_a_drain_ends_when_its_time_is_over() -> None:
    async with serving(PATIENT) as served:
        served.server.config.timeout_graceful_shutdown = 1
        served.server.drain = lambda: served.connections.drain(0.05)
        running = await served.connect(REQUEST)
        await until(lambda: served.working == 1)
        served.server.should_exit = True
        await until(lambda: not served.server.servers[0].sockets)
        assert not served.free.is_set()
        running[1].transport.abort()


def test_fewer_connections_than_set_where_files_are_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (400, 400))
    assert Connections(ConnectionLimits(most=5000)).most == 400 - 200 - RESERVED
    assert Connections(ConnectionLimits(most=10)).most == 10


# A real server under raw sockets: heads without end are refused, everything else passes


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
    async with asyncio.timeout(60):
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
