"""Keeps processes running: starts them a few at a time, restarts what died, stops them all."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import httpx

from services.launcher.plan import ProcessSpec
from services.launcher.process import STOP_S, Child, start, stop_all, tail
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

    def __init__(self, specs: Sequence[ProcessSpec], logs: Path, changed: Changed, limits: Limits) -> None:
        self._http = httpx.AsyncClient(timeout=2.0, trust_env=False)
        slots = asyncio.Semaphore(limits.at_once)
        self._keepers = {spec.name: Keeper(spec, logs, changed, limits, slots, self._http) for spec in specs}
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
        await self._http.aclose()

    async def _all_ready(self) -> None:
        for keeper in self._keepers.values():
            await keeper.was_ready.wait()

    async def _keep_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for keeper in self._keepers.values():
                group.create_task(keeper.keep(), name=f"keep {keeper.status.name}")


class Keeper:
    """Keeps one process running."""

    def __init__(
        self, spec: ProcessSpec, logs: Path, changed: Changed, limits: Limits, slots: asyncio.Semaphore,
        http: httpx.AsyncClient,
    ) -> None:  # fmt: skip
        self.status = Status(spec.name, logs / f"{spec.name}.log")
        self.child: Child | None = None
        self.was_ready = asyncio.Event()
        self._spec = spec
        self._changed = changed
        self._limits = limits
        self._slots = slots
        self._http = http
        self._failures = 0
        self._on_purpose = False

    async def keep(self) -> None:
        """Start; then start again whenever it ends. Raises StartFailed if the first start fails."""
        while True:
            async with self._slots:
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
        self.child = await start(self._spec, self.status.log)
        self._set(State.STARTING, pid=self.child.pid)
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
    specs: Sequence[ProcessSpec], logs: Path, changed: Changed, limits: Limits | None = None
) -> AsyncIterator[Supervisor]:
    """Run the processes for the length of the block, and stop every one at its end, however it ends."""
    limits = limits or Limits()
    supervisor = Supervisor(specs, logs, changed, limits)
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
