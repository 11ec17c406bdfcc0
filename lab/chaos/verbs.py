"""What can be done to a running suite; every verb can be undone, and `restore` undoes what is left."""

import os
import resource
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from lab.chaos.inject.sitecustomize import LOOP_TIME, LOST, READ_ONLY, SWITCHES
from services.launcher.keeper import State, Status
from services.launcher.process import Child, spawn, stop_all
from services.launcher.suite import Suite, until
from services.launcher.supervisor import Supervisor
from shared.domain.instance import InstanceState, Role
from shared.errors import PolyphaseError

BACK_S = 30.0  # the longest that a scenario waits for something to come back


class Processes:
    """Signals to the processes of a suite, by their names in the plan."""

    def __init__(self, suite: Suite, supervisor: Supervisor) -> None:
        self._suite = suite
        self._supervisor = supervisor
        self._frozen: dict[str, int] = {}
        self.touched: set[str] = set()  # who got a signal since this was last cleared

    @property
    def statuses(self) -> dict[str, Status]:
        """As the launcher sees them."""
        return {status.name: status for status in self._supervisor.statuses}

    def kill(self, *names: str) -> dict[str, int]:
        """SIGKILL; the pids they had. Those that are not running are left out."""
        return self._signal(signal.SIGKILL, names)

    def stop(self, *names: str) -> dict[str, int]:
        """SIGTERM: they end in their own time, and the launcher starts them again."""
        return self._signal(signal.SIGTERM, names)

    def freeze(self, *names: str) -> None:
        """SIGSTOP: alive, and not a sign of it."""
        self._frozen |= self._signal(signal.SIGSTOP, names)

    def thaw(self, *names: str) -> None:
        """SIGCONT to those that are frozen; all of them when none is named. Of two freezes the first thaw ends both."""
        for name in names or tuple(self._frozen):
            if pid := self._frozen.pop(name, 0):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def back(self, old: dict[str, int], timeout_s: float = BACK_S) -> None:
        """Wait until the launcher calls each ready under another pid. Raises DeadlineExceeded."""

        def again() -> bool:
            now = self.statuses
            return all(now[name].state is State.READY and now[name].pid not in (0, old[name]) for name in old)

        await until(again, timeout_s, f"{', '.join(old)} to be back")

    def _signal(self, number: signal.Signals, names: Sequence[str]) -> dict[str, int]:
        sent = {}
        self.touched |= set(names)
        for name in names:
            pid = self.statuses[name].pid
            with suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, number)
                    sent[name] = pid
        return sent


class Roles:
    """Drains, resumes and flips, by way of the monitor; and the roles that instances began with."""

    def __init__(self, suite: Suite, first: dict[str, Role]) -> None:
        self._suite = suite
        self.first = first

    def of(self, role: Role) -> tuple[str, ...]:
        """The instances that began in that role."""
        return tuple(name for name, first in self.first.items() if first is role)

    async def drain(self, instance: str, timeout_s: float = 10.0, **more: Any) -> None:
        """Raises what the monitor answers."""
        async with self._suite.monitor() as monitor:
            await monitor.drain(instance, timeout_s=timeout_s, who="chaos", **more)

    async def resume(self, instance: str) -> None:
        """Raises what the monitor answers."""
        async with self._suite.monitor() as monitor:
            await monitor.resume(instance, who="chaos")

    async def flip(self, instance: str, *, force: bool = False, timeout_s: float = 10.0) -> None:
        """Raises what the monitor answers."""
        async with self._suite.monitor() as monitor:
            await monitor.flip(instance, force=force, drain_timeout_s=timeout_s, who="chaos")

    async def ready(self, *names: str, timeout_s: float = BACK_S) -> None:
        """Wait until the monitor calls these ready. Raises DeadlineExceeded."""

        async def all_ready() -> bool:
            found = await self._suite.instances()
            return all(found.get(name, {}).get("state") == InstanceState.READY.value for name in names)

        await until(all_ready, timeout_s, f"{', '.join(names)} to be ready")

    async def as_first(self, timeout_s: float = BACK_S) -> None:
        """Ask until every instance is ready in its first role; whoever was drained or flipped goes back."""

        async def back() -> bool:
            found = await self._suite.instances()
            wrong = [name for name in self.first if not self._settled(found.get(name))]
            for name in wrong:
                with suppress(PolyphaseError):
                    await self._put_back(name, found.get(name))
            return not wrong

        await until(back, timeout_s, "every instance in its first role", poll_s=0.2)

    def _settled(self, entry: dict[str, Any] | None) -> bool:
        if entry is None:
            return False
        first = self.first[entry["instance_id"]].value
        return bool(entry["state"] == InstanceState.READY.value and entry["role"] == first)

    async def _put_back(self, name: str, entry: dict[str, Any] | None) -> None:
        if entry is None or entry["operation"] or entry["state"] in (InstanceState.DEAD, InstanceState.UNRESPONSIVE):
            return
        if entry["role"] != self.first[name].value:
            await self.flip(name, force=True)
        elif entry["state"] == InstanceState.DRAINING.value:
            await self.resume(name)


class Switches:
    """The clock and the database of each process, as `inject/sitecustomize.py` bends them."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: folder / name for name in names}
        self._now = dict.fromkeys(self._files, (0.0, 0))
        self.restore()

    def file(self, name: str) -> Path:
        """The value of CHAOS_SWITCHES of that process."""
        return self._files[name]

    def clock(self, offset_s: float, *names: str) -> None:
        """Their clocks jump to so much off the real time."""
        for name in names:
            self._set(name, offset_s, self._now[name][1])

    def read_only(self, *names: str) -> None:
        """SQLite refuses their writes."""
        for name in names:
            self._set(name, self._now[name][0], READ_ONLY)

    def lose_answers(self, *names: str) -> None:
        """SQLite carries out what they change of leases, and they do not learn of it."""
        for name in names:
            self._set(name, self._now[name][0], LOST)

    def writable(self, *names: str) -> None:
        """SQLite takes their writes again, and answers."""
        for name in names:
            self._set(name, self._now[name][0], 0)

    def restore(self) -> None:
        """All clocks right, all databases writable."""
        for name in self._files:
            self._set(name, 0.0, 0)

    def _set(self, name: str, offset_s: float, read_only: int) -> None:
        self._now[name] = (offset_s, read_only)
        with self._files[name].open("r+b" if self._files[name].exists() else "wb") as file:
            file.write(SWITCHES.pack(offset_s, read_only))


class LoopTimes:
    """The longest turn of the gateway's event loop, as `inject/sitecustomize.py` times it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.reset()

    def reset(self) -> None:
        """Forget what was."""
        with self.file.open("r+b" if self.file.exists() else "wb") as file:
            file.write(LOOP_TIME.pack(0.0))

    @property
    def longest_s(self) -> float:
        """CPU seconds since the last reset; at most LOOP_BEAT_S too much."""
        longest_s: float = LOOP_TIME.unpack(self.file.read_bytes())[0]
        return longest_s


class Database:
    """Faults of the suite's SQLite file."""

    def __init__(self, file: Path, processes: Processes, users: tuple[str, ...]) -> None:
        self.file = file
        self.users = users
        self._processes = processes
        self._limited: dict[int, tuple[int, int]] = {}

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Somebody else holds the write lock for the block's length."""
        other = sqlite3.connect(self.file, isolation_level=None, timeout=0.0)
        try:
            await until(lambda: _lock(other), 10.0, "the lock of the database", poll_s=0.01)
            yield
        finally:
            other.close()

    def remove(self) -> None:
        """The file and what belongs to it are gone; who has it open keeps what nobody else sees."""
        for file in self.file.parent.glob(f"{self.file.name}*"):
            file.unlink(missing_ok=True)

    def fill_disk(self) -> None:
        """No file of its users grows any more: not the database, not their logs. The kernel refuses the writes."""
        for name in self.users:
            pid = self._processes.statuses[name].pid
            if pid:
                self._limited[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, self._limited[pid][1]))

    def restore(self) -> None:
        """The disk has room again."""
        for pid, limits in self._limited.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        self._limited.clear()


def _lock(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError:  # somebody writes just now
        return False
    return True


class Strangers:
    """Processes that are not of the plan: instances that want to join."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    async def start(self, name: str, program: tuple[str, ...], env: dict[str, str]) -> Child:
        """One more process; it ends with the scenario."""
        child = await spawn(program, env, self._logs / f"{name}.log")
        self._children.append(child)
        return child

    async def end(self) -> None:
        """All of them."""
        children, self._children = self._children, []
        await stop_all(children, 2.0)
