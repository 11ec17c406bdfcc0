"""The launcher's end of the fork server. An accelerator only: without it every process is started the plain way."""

import asyncio
import json
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.launcher.plan import ProcessSpec
from services.launcher.process import Child, spawn
from shared.errors import Unavailable

FORK_S = 10.0


class ForkServer:
    """Forks processes that share what `preload` imports. Made by `start`, ended by `close`."""

    def __init__(self, server: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._writer = writer
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked: deque[asyncio.Future[Child]] = deque()
        self._children: dict[int, asyncio.Future[int]] = {}
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def start(cls, env: dict[str, str], preload: Sequence[str], log: Path) -> "ForkServer":
        """Start it; it is ready some seconds later. Call on the main thread only: see `child`."""
        ours, theirs = socket.socketpair()
        program = (sys.executable, "-P", "-m", "services.launcher.fork_server", str(theirs.fileno()), *preload)
        with theirs:
            server = await spawn(program, env, log, pass_fds=(theirs.fileno(),))
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(server, reader, writer)

    async def ready(self) -> bool:
        """Wait until it can fork; False when it has ended instead."""
        return await asyncio.shield(self._ready)

    async def fork(self, spec: ProcessSpec, log: Path) -> Child:
        """A new process that runs `spec.module`. Raises Unavailable when the server is gone or does not answer."""
        if self._reading.done():
            raise Unavailable("the fork server has ended")
        asked: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        request = {"name": spec.name, "module": spec.module, "env": spec.env, "log": str(log)}
        self._writer.write(json.dumps(request).encode() + b"\n")
        try:
            async with asyncio.timeout(FORK_S):
                return await asked  # cancelled by the timeout: a process that comes later is not wanted
        except TimeoutError:
            raise Unavailable(f"the fork server did not fork within {FORK_S:.0f} s") from None

    async def close(self) -> None:
        """End it, and with it whatever it forked and is still there."""
        self._server.kill()
        await self._server.wait()
        await self._reading
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
        except ConnectionError:
            pass
        if not self._ready.done():
            self._ready.set_result(False)
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(Unavailable("the fork server has ended"))
        for ended in self._children.values():  # the kernel kills what it forked
            ended.set_result(-signal.SIGKILL)

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready.set_result(True)
        elif "pid" in message:
            ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._children[message["pid"]] = ended
            child, asked = Child(message["pid"], ended), self._asked.popleft()
            if asked.done():
                child.kill()
            else:
                asked.set_result(child)
        else:
            self._children.pop(message["exited"]).set_result(message["code"])
