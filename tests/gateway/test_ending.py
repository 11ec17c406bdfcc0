"""What a gateway does when it is told to end: a signal ends its process only after that."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.settings import GatewaySettings
from tests.ports import free_port


class Application:
    """Answers nothing; behind it is an application with a state, as vLLM's has."""

    app = SimpleNamespace(state=SimpleNamespace())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()


async def test_it_takes_leave_before_the_signal_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import gateway.app as gateway

    told: list[str] = []

    @asynccontextmanager
    async def running(*_: Any) -> AsyncIterator[Any]:
        yield Application()
        told.append("leave")

    monkeypatch.setattr(gateway, "running", running)
    monkeypatch.setattr(gateway, "settle", lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: told.append("signal"))
    try:
        settings = GatewaySettings(
            schedulers=("tcp://127.0.0.1:1",), model="demo", port=free_port(), lean_streams=False
        )
        await asyncio.wait_for(gateway.serve(settings), 20)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == ["leave", "signal"]
