"""The real services inside a test: lifespans on this loop, HTTP in memory, ZeroMQ on loopback."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from shared.domain.cluster import ClusterDelta, ClusterState
from shared.domain.instance import ClusterView
from shared.wire.broadcast import CHANGES, ClusterFeed, ClusterPublisher
from shared.wire.sockets import Sockets


def sqlite(folder: Path) -> str:
    return f"sqlite:///{folder}/polyphase.db"


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Poll until `condition` (which may be async) holds; fails with `what` after the timeout."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if loop.time() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(0.005)


def follow(sockets: Sockets, address: str, on_view: Callable[[ClusterView], None]) -> ClusterFeed:
    """Hear of the cluster after each change."""
    state = ClusterState()

    def heard(delta: ClusterDelta) -> bool:
        if applied := state.apply(delta):
            on_view(state.view())
        return applied

    return ClusterFeed(sockets, address, heard)


class Announcer:
    """In a monitor's place: says all of a cluster each time."""

    def __init__(self, sockets: Sockets, address: str) -> None:
        self._publisher = ClusterPublisher(sockets, address, lambda topic: None)

    def publish(self, view: ClusterView) -> None:
        self._publisher.change(ClusterDelta.from_view(view))

    def say(self, value: object) -> None:
        """Anything at all."""
        self._publisher._send(CHANGES, value)

    def close(self) -> None:
        self._publisher.close()


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[httpx.ASGITransport]:
    """The app with its lifespan entered; gives a transport for clients."""
    async with app.router.lifespan_context(app):
        yield httpx.ASGITransport(app=app, client=("127.0.0.1", 1))


async def text(transport: httpx.ASGITransport, path: str) -> str:
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return (await client.get(path)).text


async def request(transport: httpx.ASGITransport, method: str, path: str, body: Any = None) -> httpx.Response:
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, json=body)
