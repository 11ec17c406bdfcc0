"""Keeps processes running: starts a few at a time, restarts those that die or hang after a growing delay, stops all.

`SupervisedProcess.keep` is the life of one process; a `Supervisor` keeps all processes of a host. On a host without
accelerators a fork server, which is supervised like any other process, starts those that import the engine.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from services.launcher import child, log_cause
from services.launcher.child_process import Child, Limits, Unready, stop_all, until_ended, until_healthy
from services.launcher.fork_client import ForkServer, ForkStarter, ProgramStarter, Starter
from services.launcher.health import Health, HttpHealth
from services.launcher.spec import ProcessSpec
from shared.errors import NotFound, Unavailable
from shared.model.source import DOWNLOAD_FILE, Download
from shared.runtime.metrics import RESTARTS


class State(StrEnum):
    """The state of one process, as the state file and the terminal show it.

    WAITING ────▶ STARTING          its turn came
    STARTING ───▶ READY             it became healthy
    READY ──────▶ RESTARTING        it ended, or was killed because it hung
    STARTING ───▶ RESTARTING        a later start failed; or the first took too long, and the process `may_be_late`; or
                                    a restart was requested
    RESTARTING ─▶ STARTING          after a delay; immediately if the restart was requested
    STARTING ───▶ FAILED            the first start failed otherwise, which ends the supervision
    all but FAILED ─▶ STOPPED       the supervision ends
    """

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Status:
    name: str
    log: Path
    state: State = State.WAITING
    since_mono: float = field(default_factory=time.monotonic)  # when it entered the state, on the monotonic clock
    pid: int = 0  # 0: no process runs
    took_s: float = 0.0  # the duration of the last start that succeeded
    restarts: int = 0
    note: str = ""
    fault: str = ""  # the reason of the last restart
    download: Download | None = None  # of the weights that it downloads while it starts


Changed = Callable[[Status], None]


class StartFailed(Unavailable):
    """A process ended, or did not become healthy, during the start of the suite."""

    code = "start_failed"


class SupervisedProcess:
    def __init__(
        self, spec: ProcessSpec, logs: Path, changed: Changed, limits: Limits, starter: Starter, health: Health | None
    ) -> None:
        self.status = Status(spec.name, logs / f"{spec.name}.log")
        self.was_ready = False  # after at least one start
        self.given_up_waiting = False  # its first start took too long: the suite serves without it, until it is ready
        self.first_start_over = asyncio.Event()  # set with the first of the two above: the suite stops waiting for it
        self.child: Child | None = None  # of the last start
        self.spec = spec
        self._changed = changed
        self._limits = replace(limits, start_s=spec.start_s) if spec.start_s else limits
        self._starter = starter
        self._health = health
        self._quick_restarts = 0  # in a row, without a run of `stable_s` between them; each doubles the delay
        self._restart_requested = asyncio.Event()  # until the start that carries the request out
        self._log_from = 0  # the size of the log at the last start
        self._download_file = logs / f"{spec.name}.download"

    @property
    def late(self) -> bool:
        """Whether the suite serves without it: it was given up waiting for, and has not been ready yet."""
        return self.given_up_waiting and not self.was_ready

    async def keep(self, slots: asyncio.Semaphore) -> None:
        """Start the process, and restart it whenever it ends. Raises StartFailed if its first start fails.

        slots: of all processes, for those that start at the same time.
        """
        if self._starter.waits_for:
            self._enter(State.WAITING, note=self._starter.waits_for)
        while True:
            await self._starter.prepare()
            async with slots:
                unready = await self._start()
            if unready is None:
                fault = await self._until_ended()
            elif self._restart_requested.is_set():  # which killed it: this is not a failed start
                fault = unready.text
            elif self._tries_again_after(unready):
                fault = unready.text
                self._give_up_waiting()
            else:
                self._enter(State.FAILED, pid=0, note=unready.text)
                raise self.start_failure(unready.text)
            await self._pause(fault)

    async def restart(self, env: dict[str, str]) -> None:
        """Kill the process; the next start follows immediately and adds `env`.

        If the process waits for its next start, the request ends the wait.
        """
        self.spec = replace(self.spec, env={**self.spec.env, **env})
        self._restart_requested.set()
        if self.child is not None and self.child.running:
            self.child.kill()
            await self.child.wait()

    def stopped(self) -> None:
        if self.status.state is not State.FAILED:
            self._enter(State.STOPPED, pid=0)

    def start_failure(self, fault: str) -> StartFailed:
        """The error of a failed start: the process, the fault, its cause and the log."""
        cause = log_cause.cause_of(self.status.log, self._log_from)
        return StartFailed(f"{self.spec.name} did not start: {fault}: {cause}\nIts log: {self.status.log}")

    def _tries_again_after(self, unready: Unready) -> bool:
        """Whether another start follows one that failed. If not, the failure ends the supervision.

        The first start must succeed: a process that ends by itself during it is misconfigured. Only a process that
        `may_be_late` is started again when its first start exceeds the start limit; the suite no longer waits for it.
        After the process has been ready once, or the suite no longer waits for it, each failed start is followed by
        another.
        """
        if self.was_ready or self.given_up_waiting:
            return True
        exceeded_limit = unready.late
        return exceeded_limit and self.spec.may_be_late

    def _give_up_waiting(self) -> None:
        if not self.was_ready:
            self.given_up_waiting = True
            self.first_start_over.set()

    async def _start(self) -> Unready | None:
        """Start it once. Returns why it did not become healthy, or None."""
        began, self._log_from = time.monotonic(), log_cause.size_of(self.status.log)
        self._restart_requested.clear()
        self._download_file.unlink(missing_ok=True)
        variables = {RESTARTS: str(self.status.restarts), DOWNLOAD_FILE: str(self._download_file)}
        spec = replace(self.spec, env={**self.spec.env, **variables})
        self.child = await self._starter.start(spec, self.status.log)
        self._enter(State.STARTING, pid=self.child.pid, note="", download=None)
        if self._restart_requested.is_set():  # while the process was created, without the variables of the request
            self.child.kill()
        unready = await until_healthy(self.child, self._health, self._limits, self._download_went_on)
        if unready is None:
            self._enter(State.READY, took_s=time.monotonic() - began, note="", download=None)
            self.was_ready = True
            self.first_start_over.set()
        return unready

    def _download_went_on(self) -> bool:
        """Whether its download has more bytes than its status shows, which then shows them."""
        download = Download.read(self._download_file)
        if download is None or download == self.status.download:
            return False
        self.status = replace(self.status, download=download, note=f"downloads weights: {download}")
        self._changed(self.status)
        return True

    async def _until_ended(self) -> str:
        """Wait until the process, which was ready, ends. Returns how it ended."""
        assert self.child is not None
        fault = await until_ended(self.child, self._health, self._limits, self._write_log)
        if time.monotonic() - self.status.since_mono > self._limits.stable_s:
            self._quick_restarts = 0
        return fault

    async def _pause(self, fault: str) -> None:
        """Wait before the next start, at most until a restart is requested."""
        if self._restart_requested.is_set():
            delay_s, note = 0.0, f"{fault}; restarting"
        else:
            delay_s = min(self._limits.backoff_max_s, self._limits.backoff_s * 2**self._quick_restarts)
            note = f"{fault}; restarting in {delay_s:g} s"
            self._quick_restarts = min(self._quick_restarts + 1, 20)
        self._enter(State.RESTARTING, pid=0, restarts=self.status.restarts + 1, note=note, fault=fault)
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._restart_requested.wait()

    def _write_log(self, line: str) -> None:
        with self.status.log.open("a") as log:
            print(line, file=log)

    def _enter(self, state: State, **changes: object) -> None:
        self.status = replace(self.status, state=state, since_mono=time.monotonic(), **changes)  # type: ignore[arg-type]
        self._changed(self.status)


Result = TypeVar("Result")


class Supervisor:
    """All processes of this host, which it keeps running from its creation to `close`. Created by `supervising`."""

    def __init__(
        self, suite: Sequence[SupervisedProcess], optional: Sequence[SupervisedProcess], limits: Limits
    ) -> None:
        """optional: processes without which the suite starts, too."""
        self._suite = suite
        self._optional = optional
        self._limits = limits
        self._keeping = asyncio.create_task(self._keep_all())

    @property
    def statuses(self) -> tuple[Status, ...]:
        """All processes in the order of the plan, then the fork server."""
        return tuple(process.status for process in self._all)

    @property
    def late(self) -> tuple[str, ...]:
        """Processes whose start exceeded the time limit while the suite serves without them."""
        return tuple(process.status.name for process in self._suite if process.late)

    async def started(self) -> None:
        """Wait until each process was healthy once, or is late while others serve. Raises StartFailed."""
        await self.during(self._first_starts())

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
        processes = {process.status.name: process for process in self._all}
        if name not in processes:
            raise NotFound(f"no process {name!r}; known: {', '.join(processes)}")
        await processes[name].restart(env or {})

    async def close(self) -> None:
        """Stop all processes. Raises Unavailable that names those which survive SIGKILL."""
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        remaining = await stop_all([each.child for each in self._all if each.child is not None], self._limits.stop_s)
        for process in self._all:
            process.stopped()
        if remaining:
            raise Unavailable(f"processes {', '.join(map(str, remaining))} hang in the kernel and survive SIGKILL")

    @property
    def _all(self) -> tuple[SupervisedProcess, ...]:
        return (*self._suite, *self._optional)

    async def _first_starts(self) -> None:
        """Wait for the first start of each process. Raises StartFailed if all processes of a role are late."""
        for process in self._suite:
            await process.first_start_over.wait()
        for process in self._suite:
            alike = [each for each in self._suite if each.spec.role == process.spec.role]
            if process.spec.role and all(each.late for each in alike):
                raise process.start_failure(process.status.fault)

    async def _keep_all(self) -> None:
        slots = asyncio.Semaphore(self._limits.at_once)
        async with asyncio.TaskGroup() as group:
            for process in self._optional:  # first, since others wait for the fork server
                group.create_task(_keep_optional(process, slots), name=f"keep {process.status.name}")
            for process in self._suite:
                group.create_task(process.keep(slots), name=f"keep {process.status.name}")


async def _keep_optional(process: SupervisedProcess, slots: asyncio.Semaphore) -> None:
    """Keep a process running until its first start fails, which its status then shows."""
    with suppress(StartFailed):
        await process.keep(slots)


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
    limits = limits or Limits()
    program_starter = ProgramStarter()
    module_starter: Starter = program_starter
    optional: list[SupervisedProcess] = []
    if fork_env is not None:
        server = ForkServer(fork_env, preload)
        module_starter = ForkStarter(server)
        optional.append(SupervisedProcess(server.spec, logs, changed, limits, starter=server, health=server))
    suite: list[SupervisedProcess] = []
    for spec in specs:
        starter = module_starter if spec.module else program_starter
        health = HttpHealth(spec.health_url) if spec.health_url else None
        suite.append(SupervisedProcess(spec, logs, changed, limits, starter, health))
    supervisor = Supervisor(suite, optional, limits)
    try:
        yield supervisor
    finally:
        await supervisor.close()


def _raise_first(task: asyncio.Task[None]) -> NoReturn:
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error or RuntimeError("the supervisor ended unexpectedly")
