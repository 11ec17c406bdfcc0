"""Keeps processes running: starts a few at a time, restarts those that die or hang after a growing delay, stops all.

On a host without accelerators a fork server starts the processes that import the engine; it only saves time: without it
they are started as programs. `RemoteInstances` is the interface to instances that another system runs.
"""

import asyncio
import json
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from services.launcher import child, child_process
from services.launcher.child_process import Child, Limits, Unready, spawn, stop_all, until_ended, until_healthy
from services.launcher.health import Health, HttpHealth
from services.launcher.spec import ProcessSpec
from shared.errors import NotFound, Unavailable
from shared.runtime.metrics import RESTARTS

NAME = "fork-server"
FORK_S = 10.0
Message = dict[str, Any]


class ForkServer:
    """The launcher's end of the fork server, which forks processes that share the modules of `preload`.

    The server itself is kept running like any other process, by `spec` and `start`.
    """

    def __init__(self, env: dict[str, str], preload: Sequence[str]) -> None:
        argv = (sys.executable, "-P", "-m", "services.launcher.fork_server")
        self.spec = ProcessSpec(NAME, argv, env)
        self._preload = tuple(preload)
        self._channel: asyncio.Future[_Channel] = asyncio.get_running_loop().create_future()

    async def start(self, log: Path) -> Child:
        """Start the server, which is ready some seconds later. Call on the main thread only: see `child`."""
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
        """Wait until the server can fork; False if it ended instead."""
        return await asyncio.shield((await asyncio.shield(self._channel)).ready)

    async def ask(self, deadline_s: float) -> str:
        """The fault of the server, found within `deadline_s`; empty if it answers."""
        channel = self._channel.result()
        if not channel.ready.done():
            await asyncio.wait([channel.ready], timeout=deadline_s)
        if not channel.ready.done():
            return "it is still importing modules"
        try:
            await channel.request({}, deadline_s)
        except Unavailable as error:
            return error.message
        return ""

    async def fork(self, spec: ProcessSpec, log: Path) -> Child:
        """A new process that runs `spec.module`. Raises Unavailable if the server has ended or does not reply."""
        request = {"name": spec.name, "module": spec.module, "env": spec.env, "log": str(log)}
        reply = await self._channel.result().request(request, FORK_S)
        if "pid" not in reply:
            raise Unavailable(f"the fork server did not fork: {reply['failed']}")
        return Child.adopt(reply["pid"])

    def close(self) -> None:
        """Close the channel; the process is stopped like any other."""
        if self._channel.done():
            self._channel.result().close()


class _Channel:
    """Requests to one fork server and its replies, in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._writer = writer
        self._pending: deque[asyncio.Future[Message]] = deque()
        self._reading = asyncio.create_task(self._read(reader))

    async def request(self, message: Message, deadline_s: float) -> Message:
        """The reply. Raises Unavailable if the server has ended or does not reply in time."""
        if self._reading.done():
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
        if not self.ready.done():
            self.ready.set_result(False)
        for reply in self._pending:
            if not reply.done():
                reply.set_exception(Unavailable("the fork server has ended"))

    def _receive(self, message: Message) -> None:
        if "ready" in message:
            self.ready.set_result(True)
            return
        reply = self._pending.popleft()
        if not reply.done():
            reply.set_result(message)
        else:
            _discard(message)


def _discard(reply: Message) -> None:
    """Kill the process of a reply whose request was given up."""
    if "pid" in reply:
        Child.adopt(reply["pid"]).kill()


class State(StrEnum):
    """The state of one process."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Status:
    """One process at one moment. `since_s` is on the monotonic clock; `took_s`: the duration of the last start."""

    name: str
    log: Path
    state: State = State.WAITING
    since_s: float = field(default_factory=time.monotonic)
    pid: int = 0
    took_s: float = 0.0
    restarts: int = 0
    note: str = ""
    fault: str = ""  # the reason of the last restart


Changed = Callable[[Status], None]


class StartFailed(Unavailable):
    """A process ended, or did not become healthy, during the start of the suite."""

    code = "start_failed"


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts processes a few at a time, by a fork where that is possible."""

    slots: asyncio.Semaphore
    forks: ForkServer | None

    @asynccontextmanager
    async def turn(self, spec: ProcessSpec) -> AsyncIterator[None]:
        """Hold a slot; a process that is to be forked takes one only when the fork server is ready."""
        if self.forks is not None and spec is self.forks.spec:
            yield
            return
        if spec.module and self.forks is not None:
            await self.forks.ready()
        async with self.slots:
            yield

    async def start(self, spec: ProcessSpec, log: Path, restarts: int) -> Child:
        """A new process; its environment has the number of its restarts."""
        if self.forks is not None and spec is self.forks.spec:
            return await self.forks.start(log)
        spec = replace(spec, env={**spec.env, RESTARTS: str(restarts)})
        if spec.module and self.forks is not None and await self.forks.ready():
            with suppress(Unavailable):
                return await self.forks.fork(spec, log)
        return await spawn(spec.argv, spec.env, log)


class SupervisedProcess:
    """Keeps one process running. The suite also starts without a process that is not `vital`."""

    def __init__(
        self,
        spec: ProcessSpec,
        logs: Path,
        changed: Changed,
        limits: Limits,
        starter: Starter,
        health: Health | None,
        *,
        vital: bool = True,
    ) -> None:
        self.status = Status(spec.name, logs / f"{spec.name}.log")
        self.child: Child | None = None
        self.was_ready = asyncio.Event()
        self.settled = asyncio.Event()  # it was ready once, or its first start took too long
        self.vital = vital
        self._spec = spec
        self._changed = changed
        self._limits = replace(limits, start_s=spec.start_s) if spec.start_s else limits
        self._starter = starter
        self._health = health
        self._failures = 0
        self._on_purpose = False
        self._log_from = 0

    @property
    def late(self) -> bool:
        """Whether its start exceeded the time limit, and it has not been ready yet."""
        return self.settled.is_set() and not self.was_ready.is_set()

    @property
    def role(self) -> str:
        """The role of which at least one process must be ready; empty for none."""
        return self._spec.role

    async def keep(self) -> None:
        """Start the process, and restart it whenever it ends.

        Raises StartFailed if the first start of a vital process fails, unless it may be late and only takes too long.
        """
        if self._spec.module and self._starter.forks is not None:
            self._set(State.WAITING, note="for the import of the engine")
        while True:
            async with self._starter.turn(self._spec):
                unready = await self._start()
            if unready is None:
                self.was_ready.set()
                self.settled.set()
                fault = await self._run()
            elif self.settled.is_set() or (unready.late and self._spec.may_be_late):
                self.settled.set()
                fault = unready.text
            else:
                self._set(State.FAILED, pid=0, note=unready.text)
                if not self.vital:
                    return
                raise StartFailed(self.failure(unready.text))
            await self._pause(fault)

    async def restart(self, env: dict[str, str]) -> None:
        """Kill the process; the next start follows immediately and adds `env`."""
        self._spec = replace(self._spec, env={**self._spec.env, **env})
        self._on_purpose = True
        if self.child is not None and self.child.running:
            self.child.kill()
            await self.child.wait()

    def stopped(self) -> None:
        """Record that the supervisor has stopped the process."""
        if self.status.state is not State.FAILED:
            self._set(State.STOPPED, pid=0)

    async def _start(self) -> Unready | None:
        """Start it once. Returns why it did not become healthy, or None."""
        began, self._log_from = time.monotonic(), child_process.log_size(self.status.log)
        self.child = await self._starter.start(self._spec, self.status.log, self.status.restarts)
        self._set(State.STARTING, pid=self.child.pid, note="")
        unready = await until_healthy(self.child, self._health, self._limits)
        if unready is None:
            self._set(State.READY, took_s=time.monotonic() - began, note="")
        return unready

    async def _run(self) -> str:
        """Wait until the process, which was ready, ends. Returns how it ended."""
        assert self.child is not None
        fault = await until_ended(self.child, self._health, self._limits, self._write_log)
        if time.monotonic() - self.status.since_s > self._limits.stable_s:
            self._failures = 0
        return fault

    async def _pause(self, fault: str) -> None:
        pause = min(self._limits.backoff_max_s, self._limits.backoff_s * 2**self._failures)
        if self._on_purpose:
            self._on_purpose, pause = False, 0.0
        else:
            self._failures = min(self._failures + 1, 20)
        note = f"{fault}; restarting" + (f" in {pause:g} s" if pause else "")
        self._set(State.RESTARTING, pid=0, restarts=self.status.restarts + 1, note=note, fault=fault)
        await asyncio.sleep(pause)

    def failure(self, fault: str) -> str:
        """The message about a failed start: the process, the fault, its cause and the log."""
        log = self.status.log
        cause = child_process.cause_of(log, self._log_from)
        return f"{self._spec.name} did not start: {fault}: {cause}\nIts log: {log}"

    def _write_log(self, line: str) -> None:
        with self.status.log.open("a") as log:
            print(line, file=log)

    def _set(self, state: State, **changes: object) -> None:
        self.status = replace(self.status, state=state, since_s=time.monotonic(), **changes)  # type: ignore[arg-type]
        self._changed(self.status)


Result = TypeVar("Result")


class Supervisor:
    """All processes of this host. Created by `supervising`."""

    def __init__(
        self, specs: Sequence[ProcessSpec], logs: Path, changed: Changed, limits: Limits, forks: ForkServer | None
    ) -> None:
        self._forks = forks
        self._stop_s = limits.stop_s
        starter = Starter(asyncio.Semaphore(limits.at_once), forks)
        self._processes: dict[str, SupervisedProcess] = {}
        for spec in specs:
            health = HttpHealth(spec.health_url) if spec.health_url else None
            self._processes[spec.name] = SupervisedProcess(spec, logs, changed, limits, starter, health)
        if forks is not None:
            process = SupervisedProcess(forks.spec, logs, changed, limits, starter, forks, vital=False)
            self._processes[forks.spec.name] = process
        self._keeping = asyncio.create_task(self._keep_all())

    @property
    def statuses(self) -> tuple[Status, ...]:
        """All processes in the order of the plan, then the fork server."""
        return tuple(process.status for process in self._processes.values())

    @property
    def late(self) -> tuple[str, ...]:
        """Processes whose start exceeded the time limit while the suite serves without them."""
        return tuple(each.status.name for each in self._processes.values() if each.late)

    async def started(self) -> None:
        """Wait until each process was healthy once, or is late while others serve. Raises StartFailed."""
        await self.during(self._all_ready())

    async def during(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work` while the processes are kept running; if that fails, cancel `work` and raise the cause."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self._keeping], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                _raise_first(self._keeping)
            return await task
        finally:
            task.cancel()

    async def restart(self, name: str, env: dict[str, str] | None = None) -> None:
        """Kill a process and restart it immediately with additional variables. Raises NotFound."""
        process = self._processes.get(name)
        if process is None:
            raise NotFound(f"no process {name!r}; known: {', '.join(self._processes)}")
        await process.restart(env or {})

    async def close(self) -> None:
        """Stop all processes. Raises Unavailable that names those which survive SIGKILL."""
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        left = await stop_all([k.child for k in self._processes.values() if k.child is not None], self._stop_s)
        for process in self._processes.values():
            process.stopped()
        if left:
            raise Unavailable(f"processes {', '.join(map(str, left))} hang in the kernel and survive SIGKILL")

    async def _all_ready(self) -> None:
        for process in self._processes.values():
            if process.vital:
                await process.settled.wait()
        for role in {process.role for process in self._processes.values()} - {""}:
            alike = [process for process in self._processes.values() if process.role == role]
            if all(process.late for process in alike):
                raise StartFailed(alike[0].failure(alike[0].status.fault))

    async def _keep_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for process in self._processes.values():
                group.create_task(process.keep(), name=f"keep {process.status.name}")


@asynccontextmanager
async def supervising(
    specs: Sequence[ProcessSpec],
    logs: Path,
    changed: Changed,
    limits: Limits | None = None,
    fork_env: dict[str, str] | None = None,
    preload: Sequence[str] = (),
) -> AsyncIterator[Supervisor]:
    """Run the processes within the block and stop them all at its end.

    With `fork_env`, processes that have a module are forked from a server that has imported `preload`.
    """
    child.adopt_orphans()  # descendants of a dead child become ours, and are killed with it
    forks = ForkServer(fork_env, preload) if fork_env is not None else None
    supervisor = Supervisor(specs, logs, changed, limits or Limits(), forks)
    try:
        yield supervisor
    finally:
        await supervisor.close()


def _raise_first(task: asyncio.Task[None]) -> NoReturn:
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error or RuntimeError("the supervisor ended unexpectedly")


class RemoteInstances(Protocol):
    """Instances that another system runs for the launcher."""

    @property
    def statuses(self) -> tuple[Status, ...]: ...

    async def started(self, within_s: float) -> tuple[str, ...]:
        """Wait until they run; the names of the instances that the suite waits for. Raises Unavailable."""
        ...

    async def kept(self) -> None:
        """Run until an error ends the supervision of the instances."""
        ...

    def node_of(self, name: str) -> str:
        """The node of an instance, as that system names it. Raises NotFound."""
        ...


Running = Callable[[Changed], AbstractAsyncContextManager[RemoteInstances]]


class LocalInstances:
    """For a suite whose instances are all processes of this launcher."""

    statuses: tuple[Status, ...] = ()

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    async def started(self, within_s: float) -> tuple[str, ...]:
        return self._names

    async def kept(self) -> None:
        await asyncio.Event().wait()

    def node_of(self, name: str) -> str:
        raise NotFound(f"{name!r} runs on this host")


def local_instances(names: tuple[str, ...]) -> Running:
    return lambda _: nullcontext(LocalInstances(names))
