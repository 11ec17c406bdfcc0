"""A real server under raw sockets: silent connections, slow heads, and more connections than it takes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from shared.runtime.connections import RESERVED, BoundedProtocol, ConnectionLimits, Connections, bounded
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
    async with asyncio.timeout(10):
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
