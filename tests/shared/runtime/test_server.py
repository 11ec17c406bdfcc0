"""A server that is woken seldom, and ends at once all the same."""

import asyncio
import gc
import os
import signal
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

from shared.runtime.server import Server, trim


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


def server() -> Server:
    return Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off"))


async def started(made: Server) -> "asyncio.Task[None]":
    task = asyncio.create_task(made.serve())
    async with asyncio.timeout(5):
        while not made.started:
            await asyncio.sleep(0.005)
    return task


async def test_it_answers_with_a_date() -> None:
    made = server()
    task = await started(made)
    port = made.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/")
    assert answer.text == "here"
    assert "date" in answer.headers
    made.should_exit = True
    await task


async def test_it_ends_when_told_to_and_not_a_tick_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.runtime.server.TICK_S", 60.0)
    made = server()
    task = await started(made)
    await asyncio.sleep(0)
    made.should_exit = True
    await asyncio.wait_for(task, 20)


async def test_a_signal_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.runtime.server.TICK_S", 60.0)
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it is through
    try:
        made = server()
        task = await started(made)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 20)
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_signal_waits_for_what_stands_around_the_server() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        made = server()
        made.holds_signals = True
        task = await started(made)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 5)
        assert heard == []
        made.raise_signals()
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


# Memory that nothing uses goes back to the system
BLOCKS, SIZE = 4_000, 32_000  # below the size from which glibc maps each block by itself


def test_memory_between_what_is_in_use_is_given_back() -> None:
    if not psutil.LINUX:
        pytest.skip("the C library of this system gives memory back by itself, or not at all")
    process = psutil.Process()
    blocks = [bytearray(SIZE) for _ in range(BLOCKS)]
    held = process.memory_info().rss
    kept = blocks[::50]  # spread over the heap, so that its end does not become free
    del blocks
    gc.collect()
    trim()
    assert held - process.memory_info().rss > BLOCKS * SIZE / 2
    assert len(kept) == BLOCKS // 50
