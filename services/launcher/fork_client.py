"""The launcher's end of the fork server. An accelerator only: without it every process is started the plain way."""

import asyncio
import json
import socket
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.launcher import child
from services.launcher.process import Child, spawn
from services.launcher.spec import ProcessSpec
from shared.errors import Unavailable

NAME = "fork-server"
FORK_S = 10.0
Message = dict[str, Any]


class ForkServer:
    """Forks processes that share what `preload` imports. Kept running like any other process, by `spec` and `start`."""

    def __init__(self, env: dict[str, str], preload: Sequence[str]) -> None:
        argv = (sys.executable, "-P", "-m", "services.launcher.fork_server")
        self.spec = ProcessSpec(NAME, argv, env)
        self._preload = tuple(preload)
        self._channel: asyncio.Future[_Channel] = asyncio.get_running_loop().create_future()

    async def start(self, log: Path) -> Child:
        """Start it; it is ready some seconds later. Call on the main thread only: see `child`."""
        child.adopt_orphans()
        ours, theirs = socket.socketpair()
        with theirs:
            program = (*self.spec.argv, str(theirs.fileno()), *self._preload)
            server = await spawn(program, self.spec.env, log, pass_fds=(theirs.fileno(),))
        channel = _Channel(*await asyncio.open_connection(sock=ours))
        if self._channel.done():
            self._channel.result().close()
            self._channel = asyncio.get_running_loop().create_future()
        self._channel.set_result(channel)
        return server

    async def ready(self) -> bool:
        """Wait until it can fork; False when it has ended instead."""
        return await asyncio.shield((await asyncio.shield(self._channel)).ready)

    async def ask(self, deadline_s: float) -> str:
        """What is wrong with it, within `deadline_s`; empty if nothing is."""
        channel = self._channel.result()
        if not channel.ready.done():
            await asyncio.wait([channel.ready], timeout=deadline_s)
        if not channel.ready.done():
            return "it still imports"
        try:
            await channel.ask({}, deadline_s)
        except Unavailable as error:
            return error.message
        return ""

    async def fork(self, spec: ProcessSpec, log: Path) -> Child:
        """A new process that runs `spec.module`. Raises Unavailable when the server is gone or does not answer."""
        request = {"name": spec.name, "module": spec.module, "env": spec.env, "log": str(log)}
        reply = await self._channel.result().ask(request, FORK_S)
        if "pid" not in reply:
            raise Unavailable(f"the fork server did not fork: {reply['failed']}")
        return Child.adopt(reply["pid"])

    def close(self) -> None:
        """Let go of the channel; the process is stopped like any other."""
        if self._channel.done():
            self._channel.result().close()


class _Channel:
    """Questions to one fork server and its answers, in turn."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._writer = writer
        self._asked: deque[asyncio.Future[Message]] = deque()
        self._reading = asyncio.create_task(self._read(reader))

    async def ask(self, question: Message, deadline_s: float) -> Message:
        """The answer. Raises Unavailable when the server is gone or does not answer in time."""
        if self._reading.done():
            raise Unavailable("the fork server has ended")
        asked: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._writer.write(json.dumps(question).encode() + b"\n")
        try:
            async with asyncio.timeout(deadline_s):
                return await asked  # cancelled by the timeout: what comes later is not wanted
        except TimeoutError:
            raise Unavailable(f"the fork server gave no answer within {deadline_s:g} s") from None
        except asyncio.CancelledError:
            if asked.done() and not asked.cancelled():
                _refuse(asked.result())
            raise

    def close(self) -> None:
        """No more questions."""
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
        except ConnectionError:
            pass
        if not self.ready.done():
            self.ready.set_result(False)
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(Unavailable("the fork server has ended"))

    def _take(self, message: Message) -> None:
        if "ready" in message:
            self.ready.set_result(True)
            return
        asked = self._asked.popleft()
        if not asked.done():
            asked.set_result(message)
        else:
            _refuse(message)


def _refuse(answer: Message) -> None:
    """Nobody waits for this answer any more."""
    if "pid" in answer:
        Child.adopt(answer["pid"]).kill()
