"""Starts processes: as programs, or by a fork of a server that has imported the engine (see `fork_server`).

The fork server only saves time: a process that it cannot fork is started as a program.
"""

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from services.launcher import child
from services.launcher.child_process import Child, spawn
from services.launcher.spec import ProcessSpec
from shared.errors import Unavailable

NAME = "fork-server"
FORK_S = 10.0


class Starter(Protocol):
    """One way to start processes."""

    waits_for: str  # the reason for which `prepare` may wait; empty: it does not wait

    async def prepare(self) -> None:
        """Wait for what a start needs. The wait does not count as one of the simultaneous starts."""
        ...

    async def start(self, spec: ProcessSpec, log: Path) -> Child:
        """A new process. Call on the main thread only: see `child`."""
        ...


class ProgramStarter:
    waits_for = ""

    async def prepare(self) -> None:
        return

    async def start(self, spec: ProcessSpec, log: Path) -> Child:
        return await spawn(spec.argv, spec.env, log)


class ForkStarter:
    """Forks processes; starts them as programs while the fork server cannot fork."""

    waits_for = "for the import of the engine"

    def __init__(self, server: "ForkServer") -> None:
        self._server = server

    async def prepare(self) -> None:
        await self._server.imported()

    async def start(self, spec: ProcessSpec, log: Path) -> Child:
        with suppress(Unavailable):
            return await self._server.fork(spec, log)
        return await spawn(spec.argv, spec.env, log)


class ForkServer(ProgramStarter):
    """The launcher's end of the fork server, which forks processes that share the modules of `preload`.

    The server is kept running like any other process, of which `spec` is the description, this object the starter and
    the health check.
    """

    def __init__(self, env: dict[str, str], preload: Sequence[str]) -> None:
        argv = (sys.executable, "-P", "-m", "services.launcher.fork_server")
        self.spec = ProcessSpec(NAME, argv, env)
        self._preload = tuple(preload)
        self._started = asyncio.Event()
        self._connection: _Connection | None = None  # to the server of the last start; None before the first start

    async def start(self, spec: ProcessSpec, log: Path) -> Child:
        child.adopt_orphans()
        ours, theirs = socket.socketpair()
        with theirs:
            program = (*spec.argv, str(theirs.fileno()), *self._preload)
            server = await spawn(program, spec.env, log, pass_fds=(theirs.fileno(),))
        if self._connection is not None:
            self._connection.close()
        self._connection = _Connection(server, *await asyncio.open_connection(sock=ours))
        self._started.set()
        return server

    async def imported(self) -> bool:
        """Wait until the server can fork; False if it ended instead."""
        await self._started.wait()
        assert self._connection is not None
        return await self._connection.imported()

    async def check(self, deadline_s: float) -> str:
        """The server is healthy once it has imported its modules. A later hang is found by the next fork."""
        try:
            async with asyncio.timeout(deadline_s):
                return "" if await self.imported() else "it has ended"
        except TimeoutError:
            return "it is still importing modules"

    async def fork(self, spec: ProcessSpec, log: Path) -> Child:
        """A new process that runs `spec.module`. Raises Unavailable if the server has ended or does not reply."""
        if self._connection is None:
            raise Unavailable("the fork server has not been started")
        log.parent.mkdir(parents=True, exist_ok=True)
        return await self._connection.fork({"name": spec.name, "module": spec.module, "env": spec.env, "log": str(log)})


class _Connection:
    """The connection to the server of one start. It carries one request at a time.

    A request that is not answered in time, or is cancelled, ends the server: the supervisor starts another.
    """

    def __init__(self, server: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()
        self._importing = asyncio.create_task(self._until_imported())

    async def imported(self) -> bool:
        """Wait until the server can fork; False if it ended instead."""
        return await asyncio.shield(self._importing)

    async def fork(self, request: dict[str, Any]) -> Child:
        async with self._turn:
            if not await self.imported() or not self._server.running:
                raise Unavailable("the fork server has ended")
            reply: dict[str, Any] | None = None
            try:
                async with asyncio.timeout(FORK_S):
                    reply = await self._reply_to(request)
            except (TimeoutError, OSError, EOFError) as error:
                raise Unavailable(f"the fork server did not reply within {FORK_S:g} s") from error
            finally:
                if reply is None:
                    self.close()
            if "pid" not in reply:
                raise Unavailable(f"the fork server did not fork: {reply['failed']}")
            forked = Child.adopt(reply["pid"])
            self._writer.write(b"\n")  # the process waits until its pid is known here
            return forked

    async def _until_imported(self) -> bool:
        try:
            return await self._reader.readline() != b""
        except OSError:
            return False

    async def _reply_to(self, request: dict[str, Any]) -> dict[str, Any]:
        self._writer.write(json.dumps(request).encode() + b"\n")
        reply: dict[str, Any] = json.loads(await self._reader.readuntil(b"\n"))
        return reply

    def close(self) -> None:
        self._writer.close()
        self._server.kill()
