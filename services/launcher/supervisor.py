"""Keeps processes running: starts them a few at a time, restarts what died, stops them all."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import httpx

from services.launcher.fork_client import ForkServer
from services.launcher.plan import PRELOAD, ProcessSpec
from services.launcher.process import STOP_S, Child, spawn, stop_all, tail
from shared.errors import NotFound, Unavailable


class State(StrEnum):
    """Of one process."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Status:
    """One process at one moment. `since_s` is on the monotonic clock; `took_s` is the last start's."""

    name: str
    log: Path
    state: State = State.WAITING
    since_s: float = field(default_factory=time.monotonic)
    pid: int = 0
    took_s: float = 0.0
    restarts: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient the supervisor is, in seconds."""

    start_s: float = 300.0  # the longest a process may take to become healthy
    poll_s: float = 0.1
    backoff_s: float = 0.2  # before the first restart; doubles with each further one
    backoff_max_s: float = 10.0
    stable_s: float = 30.0  # ready for so long, and the next restart is again the first
    stop_s: float = STOP_S
    at_once: int = 3  # processes that start at the same time


class StartFailed(Unavailable):
    """A process ended, or did not become healthy, at the suite's start."""

    code = "start_failed"


Result = TypeVar("Result")
Changed = Callable[[Status], None]


class Supervisor:
    """All processes of this host. Made by `supervising`."""

    def __init__(
        self, specs: Sequence[ProcessSpec], logs: Path, changed: Changed, limits: Limits, forks: ForkServer | None
    ) -> None:
        self._http = httpx.AsyncClient(timeout=2.0, trust_env=False)
        self._forks = forks
        starter = Starter(asyncio.Semaphore(limits.at_once), forks)
        self._keepers = {spec.name: Keeper(spec, logs, changed, limits, starter, self._http) for spec in specs}
        self._keeping = asyncio.create_task(self._keep_all())

    @property
    def statuses(self) -> tuple[Status, ...]:
        """Every process, in the order of the plan."""
        return tuple(keeper.status for keeper in self._keepers.values())

    async def started(self) -> None:
        """Wait until every process has become healthy once. Raises StartFailed."""
        await self.during(self._all_ready())

    async def during(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do `work` while the processes are kept running; should that fail, `work` ends, the cause is raised."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self._keeping], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                _raise_first(self._keeping)
            return await task
        finally:
            task.cancel()

    async def restart(self, name: str, env: dict[str, str] | None = None) -> None:
        """Kill one and start it at once, with these further variables. Raises NotFound."""
        keeper = self._keepers.get(name)
        if keeper is None:
            raise NotFound(f"no process {name!r}; known: {', '.join(self._keepers)}")
        await keeper.restart(env or {})

    async def close(self, stop_s: float) -> None:
        """Stop every process."""
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        await stop_all([k.child for k in self._keepers.values() if k.child is not None], stop_s)
        for keeper in self._keepers.values():
            keeper.stopped()
        if self._forks is not None:
            await self._forks.close()
        await self._http.aclose()

    async def _all_ready(self) -> None:
        for keeper in self._keepers.values():
            await keeper.was_ready.wait()

    async def _keep_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for keeper in self._keepers.values():
                group.create_task(keeper.keep(), name=f"keep {keeper.status.name}")


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts processes, a few at a time; forked where that is possible."""

    slots: asyncio.Semaphore
    forks: ForkServer | None

    @asynccontextmanager
    async def turn(self, spec: ProcessSpec) -> AsyncIterator[None]:
        """Hold one of the slots, which nobody holds while the fork server still imports."""
        if spec.module and self.forks is not None:
            await self.forks.ready()
        async with self.slots:
            yield

    async def start(self, spec: ProcessSpec, log: Path) -> Child:
        """A new process."""
        if spec.module and self.forks is not None and await self.forks.ready():
            with suppress(Unavailable):
                return await self.forks.fork(spec, log)
        return await spawn(spec.argv, spec.env, log)


class Keeper:
    """Keeps one process running."""

    def __init__(
        self, spec: ProcessSpec, logs: Path, changed: Changed, limits: Limits, starter: Starter, http: httpx.AsyncClient
    ) -> None:
        self.status = Status(spec.name, logs / f"{spec.name}.log")
        self.child: Child | None = None
        self.was_ready = asyncio.Event()
        self._spec = spec
        self._changed = changed
        self._limits = limits
        self._starter = starter
        self._http = http
        self._failures = 0
        self._on_purpose = False

    async def keep(self) -> None:
        """Start; then start again whenever it ends. Raises StartFailed if the first start fails."""
        if self._spec.module and self._starter.forks is not None:
            self._set(State.WAITING, note="for the engine's import")
        while True:
            async with self._starter.turn(self._spec):
                fault = await self._start()
            if fault and not self.was_ready.is_set():
                self._set(State.FAILED, note=fault)
                raise StartFailed(f"{self._spec.name} did not start: {fault}\n{tail(self.status.log)}")
            if not fault:
                self.was_ready.set()
                fault = await self._run()
            await self._pause(fault)

    async def restart(self, env: dict[str, str]) -> None:
        """Kill it; the next start has `env` too, and follows at once."""
        self._spec = replace(self._spec, env={**self._spec.env, **env})
        self._on_purpose = True
        if self.child is not None and self.child.running:
            self.child.kill()
            await self.child.wait()

    def stopped(self) -> None:
        """Note that the supervisor has stopped it."""
        if self.status.state is not State.FAILED:
            self._set(State.STOPPED, pid=0)

    async def _start(self) -> str:
        """Why it did not become healthy, or nothing."""
        began = time.monotonic()
        self.child = await self._starter.start(self._spec, self.status.log)
        self._set(State.STARTING, pid=self.child.pid, note="")
        ended = asyncio.ensure_future(self.child.wait())
        try:
            async with asyncio.timeout(self._limits.start_s):
                while not await self._healthy():
                    done, _ = await asyncio.wait([ended], timeout=self._limits.poll_s)
                    if done:
                        return _ending(ended.result())
        except TimeoutError:
            self.child.kill()
            return f"not healthy after {self._limits.start_s:.0f} s"
        finally:
            ended.cancel()
        self._set(State.READY, took_s=time.monotonic() - began, note="")
        return ""

    async def _healthy(self) -> bool:
        if not self._spec.health_url:
            return True
        try:
            return (await self._http.get(self._spec.health_url)).is_success
        except httpx.HTTPError:
            return False

    async def _run(self) -> str:
        """How it ended, some time after it was ready."""
        assert self.child is not None
        code = await self.child.wait()
        if time.monotonic() - self.status.since_s > self._limits.stable_s:
            self._failures = 0
        return _ending(code)

    async def _pause(self, fault: str) -> None:
        pause = min(self._limits.backoff_max_s, self._limits.backoff_s * 2**self._failures)
        if self._on_purpose:
            self._on_purpose, pause = False, 0.0
        else:
            self._failures = min(self._failures + 1, 20)
        note = f"{fault}; starting again" + (f" in {pause:g} s" if pause else "")
        self._set(State.RESTARTING, pid=0, restarts=self.status.restarts + 1, note=note)
        await asyncio.sleep(pause)

    def _set(self, state: State, **changes: object) -> None:
        self.status = replace(self.status, state=state, since_s=time.monotonic(), **changes)  # type: ignore[arg-type]
        self._changed(self.status)


@asynccontextmanager
async def supervising(
    specs: Sequence[ProcessSpec], logs: Path, changed: Changed, limits: Limits | None = None,
    fork_env: dict[str, str] | None = None, preload: Sequence[str] = PRELOAD,
) -> AsyncIterator[Supervisor]:  # fmt: skip
    """Run the processes for the length of the block, and stop every one at its end, however it ends.

    With `fork_env`, those that have a module are forked from a process that has imported `preload`.
    """
    limits = limits or Limits()
    forks = await ForkServer.start(fork_env, preload, logs / "fork-server.log") if fork_env is not None else None
    supervisor = Supervisor(specs, logs, changed, limits, forks)
    try:
        yield supervisor
    finally:
        await supervisor.close(limits.stop_s)


def _raise_first(task: asyncio.Task[None]) -> NoReturn:
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error or RuntimeError("the supervisor ended by itself")


def _ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
