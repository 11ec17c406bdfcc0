"""Keeps one process running: starts it, restarts it when it died or hung, slower the more often."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from services.launcher import process_log
from services.launcher.fork_client import ForkServer
from services.launcher.health import Health
from services.launcher.process import Child, spawn
from services.launcher.spec import ProcessSpec
from services.launcher.watch import Limits, Unready, until_ended, until_healthy
from shared.errors import Unavailable
from shared.runtime.metrics import RESTARTS


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
    fault: str = ""  # why it was started again the last time


Changed = Callable[[Status], None]


class StartFailed(Unavailable):
    """A process ended, or did not become healthy, at the suite's start."""

    code = "start_failed"


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts processes, a few at a time; forked where that is possible."""

    slots: asyncio.Semaphore
    forks: ForkServer | None

    @asynccontextmanager
    async def turn(self, spec: ProcessSpec) -> AsyncIterator[None]:
        """Hold one of the slots, which nobody holds while the fork server still imports."""
        if self.forks is not None and spec is self.forks.spec:
            yield
            return
        if spec.module and self.forks is not None:
            await self.forks.ready()
        async with self.slots:
            yield

    async def start(self, spec: ProcessSpec, log: Path, restarts: int) -> Child:
        """A new process, which is told how many there were before it."""
        if self.forks is not None and spec is self.forks.spec:
            return await self.forks.start(log)
        spec = replace(spec, env={**spec.env, RESTARTS: str(restarts)})
        if spec.module and self.forks is not None and await self.forks.ready():
            with suppress(Unavailable):
                return await self.forks.fork(spec, log)
        return await spawn(spec.argv, spec.env, log)


class Keeper:
    """Keeps one process running. Without one that is not `vital` the suite starts as well."""

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
        self.settled = asyncio.Event()  # ready once, or known to be late
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
        """Whether its start took longer than it may, and it has not been ready yet."""
        return self.settled.is_set() and not self.was_ready.is_set()

    @property
    def role(self) -> str:
        """Of which one process has to be ready; empty for none."""
        return self._spec.role

    async def keep(self) -> None:
        """Start; then start again whenever it ends.

        Raises StartFailed if the first start of a vital one fails, but for one that the suite serves without and that
        only takes too long.
        """
        if self._spec.module and self._starter.forks is not None:
            self._set(State.WAITING, note="for the engine's import")
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

    async def _start(self) -> Unready | None:
        """Why it did not become healthy, if it did not."""
        began, self._log_from = time.monotonic(), process_log.size(self.status.log)
        self.child = await self._starter.start(self._spec, self.status.log, self.status.restarts)
        self._set(State.STARTING, pid=self.child.pid, note="")
        unready = await until_healthy(self.child, self._health, self._limits)
        if unready is None:
            self._set(State.READY, took_s=time.monotonic() - began, note="")
        return unready

    async def _run(self) -> str:
        """How it ended, some time after it was ready."""
        assert self.child is not None
        fault = await until_ended(self.child, self._health, self._limits, self._say)
        if time.monotonic() - self.status.since_s > self._limits.stable_s:
            self._failures = 0
        return fault

    async def _pause(self, fault: str) -> None:
        pause = min(self._limits.backoff_max_s, self._limits.backoff_s * 2**self._failures)
        if self._on_purpose:
            self._on_purpose, pause = False, 0.0
        else:
            self._failures = min(self._failures + 1, 20)
        note = f"{fault}; starting again" + (f" in {pause:g} s" if pause else "")
        self._set(State.RESTARTING, pid=0, restarts=self.status.restarts + 1, note=note, fault=fault)
        await asyncio.sleep(pause)

    def failure(self, fault: str) -> str:
        """Of a start, for the person who starts the suite: what, why, and where to read more."""
        log = self.status.log
        cause = process_log.cause_of(log, self._log_from)
        return f"{self._spec.name} did not start: {fault}: {cause}\nIts log: {log}"

    def _say(self, line: str) -> None:
        with self.status.log.open("a") as log:
            print(line, file=log)

    def _set(self, state: State, **changes: object) -> None:
        self.status = replace(self.status, state=state, since_s=time.monotonic(), **changes)  # type: ignore[arg-type]
        self._changed(self.status)
