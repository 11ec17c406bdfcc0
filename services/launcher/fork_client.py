"""Starts processes: as programs, or by a fork of a server that has imported the engine (see `fork_server`).

The fork server only saves time: a process that it cannot fork is started as a program.
"""

import asyncio
import json
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from services.launcher import child
from services.launcher.child_process import Child, spawn
from services.launcher.spec import ProcessSpec
from shared.errors import Unavailable

NAME = "fork-server"
FORK_S = 10.0
Message = dict[str, Any]


class Starter(Protocol):
    """One way to start processes."""

    waits_for: str  # the reason, besides other starts, for which `turn` may wait; empty: none

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Wait until a process may start. The block lasts until the process is healthy."""
        ...

    async def start(self, spec: ProcessSpec, log: Path) -> Child:
        """A new process."""
        ...


class ProgramStarter:
    """Starts processes as programs, as many at the same time as there are slots."""

    waits_for = ""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots

    def turn(self) -> AbstractAsyncContextManager[None]:
        return self._slots

    async def start(self, spec: ProcessSpec, log: Path) -> Child:
        return await spawn(spec.argv, spec.env, log)


class ForkStarter:
    """Forks processes; starts them as programs while the fork server cannot fork."""

    waits_for = "for the import of the engine"

    def __init__(self, server: "ForkServer", slots: asyncio.Semaphore) -> None:
        self._server = server
        self._slots = slots

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        await self._server.ready()  # before the slot, which other processes use meanwhile
        async with self._slots:
            yield

    async def start(self, spec: ProcessSpec, log: Path) -> Child:
        if await self._server.ready():
            with suppress(Unavailable):
                return await self._server.fork(spec, log)
        return await spawn(spec.argv, spec.env, log)


class ForkServer:
    """The launcher's end of the fork server, which forks processes that share the modules of `preload`.

    The server is kept running like any other process: `spec` describes it, this object starts it and checks its health.
    """

    waits_for = ""

    def __init__(self, env: dict[str, str], preload: Sequence[str]) -> None:
        argv = (sys.executable, "-P", "-m", "services.launcher.fork_server")
        self.spec = ProcessSpec(NAME, argv, env)
        self._preload = tuple(preload)
        self._started = asyncio.Event()
        self._channel: _Channel | None = None  # to the server of the last start; None before the first start

    def turn(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()  # no slot, since forked processes wait for the server

    async def start(self, spec: ProcessSpec, log: Path) -> Child:
        """Start the server, which is ready some seconds later. Call on the main thread only: see `child`."""
        child.adopt_orphans()
        ours, theirs = socket.socketpair()
        with theirs:
            program = (*spec.argv, str(theirs.fileno()), *self._preload)
            server = await spawn(program, spec.env, log, pass_fds=(theirs.fileno(),))
        channel = _Channel(*await asyncio.open_connection(sock=ours))
        self.close()
        self._channel = channel
        self._started.set()
        return server

    async def ready(self) -> bool:
        """Wait until the server can fork; False if it ended instead."""
        await self._started.wait()
        return await self._last_channel().imported() is ServerState.READY

    async def ask(self, deadline_s: float) -> str:
        """The fault of the server, found within `deadline_s`; empty if it answers."""
        channel = self._last_channel()
        try:
            async with asyncio.timeout(deadline_s):
                await channel.imported()
        except TimeoutError:
            return "it is still importing modules"
        try:
            await channel.request({}, deadline_s)
        except Unavailable as error:
            return error.message
        return ""

    async def fork(self, spec: ProcessSpec, log: Path) -> Child:
        """A new process that runs `spec.module`. Raises Unavailable if the server has ended or does not reply."""
        request = {"name": spec.name, "module": spec.module, "env": spec.env, "log": str(log)}
        reply = await self._last_channel().request(request, FORK_S)
        if "pid" not in reply:
            raise Unavailable(f"the fork server did not fork: {reply['failed']}")
        return Child.adopt(reply["pid"])

    def close(self) -> None:
        """Close the channel; the process is stopped like any other."""
        if self._channel is not None:
            self._channel.close()

    def _last_channel(self) -> "_Channel":
        if self._channel is None:
            raise Unavailable("the fork server has not been started")
        return self._channel


class ServerState(Enum):
    """What the launcher knows of one start of the fork server.

    IMPORTING → READY → ENDED; IMPORTING → ENDED if a module cannot be imported.
    """

    IMPORTING = "importing"
    READY = "ready"
    ENDED = "ended"


class _Channel:
    """Requests to the server of one start and its replies, in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._state = ServerState.IMPORTING
        self._imported = asyncio.Event()  # set when the state is no longer IMPORTING
        self._writer = writer
        self._pending: deque[asyncio.Future[Message]] = deque()  # in the order of the replies
        self._reading = asyncio.create_task(self._read(reader))

    async def imported(self) -> ServerState:
        """Wait until the server has imported its modules or has ended; returns its state."""
        await self._imported.wait()
        return self._state

    async def request(self, message: Message, deadline_s: float) -> Message:
        """The reply. Raises Unavailable if the server has ended or does not reply in time."""
        if self._state is ServerState.ENDED:
            raise Unavailable("the fork server has ended")
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending.append(reply)
        self._writer.write(json.dumps(message).encode() + b"\n")
        try:
            async with asyncio.timeout(deadline_s):
                return await reply  # the timeout cancels the future, so that a later reply is discarded
        except TimeoutError:
            raise Unavailable(f"the fork server did not reply within {deadline_s:g} s") from None
        except asyncio.CancelledError:
            if reply.done() and not reply.cancelled():
                _discard(reply.result())
            raise

    def close(self) -> None:
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._receive(json.loads(line))
        except ConnectionError:
            pass
        finally:
            self._end()

    def _end(self) -> None:
        self._enter(ServerState.ENDED)
        for reply in self._pending:
            if not reply.done():
                reply.set_exception(Unavailable("the fork server has ended"))

    def _receive(self, message: Message) -> None:
        if "ready" in message:
            self._enter(ServerState.READY)
            return
        reply = self._pending.popleft()
        if not reply.done():
            reply.set_result(message)
        else:
            _discard(message)

    def _enter(self, state: ServerState) -> None:
        self._state = state
        self._imported.set()


def _discard(reply: Message) -> None:
    """Kill the process of a reply whose request was given up."""
    if "pid" in reply:
        Child.adopt(reply["pid"]).kill()
