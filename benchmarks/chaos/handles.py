"""Handles by which faults reach the processes of a suite: signals, switches of the injected file, and the database."""

import os
import resource
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path

from benchmarks.chaos.inject.sitecustomize import LOOP_TIME, READ_ONLY, SWITCHES
from services.launcher.suite import until
from services.launcher.supervisor import State, Status, Supervisor

BACK_S = 90.0  # the longest time that a scenario waits for a process or an instance to come back, within its bound


class Processes:
    """Signals to the processes of a suite, by their names in the plan."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._frozen: dict[str, int] = {}
        self.touched: set[str] = set()  # processes that got a signal since this was last cleared

    @property
    def statuses(self) -> dict[str, Status]:
        return {status.name: status for status in self._supervisor.statuses}

    def kill(self, *names: str) -> dict[str, int]:
        """SIGKILL to those that run; returns their process ids."""
        return self._signal(signal.SIGKILL, names)

    def stop(self, *names: str) -> dict[str, int]:
        """SIGTERM to those that run; returns their process ids. The launcher restarts them when they have ended."""
        return self._signal(signal.SIGTERM, names)

    def freeze(self, *names: str) -> None:
        self._frozen |= self._signal(signal.SIGSTOP, names)

    def thaw(self, *names: str) -> None:
        """SIGCONT to these, or to all frozen processes. A process that was frozen twice runs after one thaw."""
        for name in names or tuple(self._frozen):
            if pid := self._frozen.pop(name, 0):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def back(self, old: Mapping[str, int], timeout_s: float = BACK_S) -> None:
        """Wait until all are ready under another process id than the old one. Raises DeadlineExceeded."""

        def restarted() -> bool:
            now = self.statuses
            return all(now[name].state is State.READY and now[name].pid not in (0, old[name]) for name in old)

        await until(restarted, timeout_s, f"{', '.join(old)} to be back")

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


class Switches:
    """The clock and the database of each process, as `inject/sitecustomize.py` changes them."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.files = {name: folder / name for name in names}  # the value of CHAOS_SWITCHES for each process
        self._clocks_s: dict[str, float] = {}
        self._databases: dict[str, int] = {}
        self.restore()

    def clock(self, offset_s: float, *names: str) -> None:
        """The wall clocks jump to this offset from the real time."""
        self._clocks_s |= dict.fromkeys(names, offset_s)
        self._write(names)

    def database(self, mode: int, *names: str) -> None:
        """mode: READ_ONLY, SQLite refuses these processes' writes; LOST, it writes changes of leases and answers with
        an error; 0, it works.
        """
        self._databases |= dict.fromkeys(names, mode)
        self._write(names)

    def restore(self) -> None:
        self._clocks_s.clear()
        self._databases.clear()
        self._write(self.files)

    def _write(self, names: Iterable[str]) -> None:
        for name in names:
            _overwrite(self.files[name], SWITCHES.pack(self._clocks_s.get(name, 0.0), self._databases.get(name, 0)))


class LoopTimes:
    """The longest time that the gateway's event loop was held, as `inject/sitecustomize.py` measures it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.reset()

    def reset(self) -> None:
        _overwrite(self.file, LOOP_TIME.pack(0.0))

    @property
    def longest_s(self) -> float:
        """CPU seconds since the last reset; at most LOOP_BEAT_S too much."""
        longest_s: float = LOOP_TIME.unpack(self.file.read_bytes())[0]
        return longest_s


def _overwrite(file: Path, data: bytes) -> None:
    """Write in place: processes have the file mapped."""
    with file.open("r+b" if file.exists() else "wb") as stream:
        stream.write(data)


class Database:
    """Faults of the suite's SQLite file. `writers` are the processes that write to it."""

    KINDS = ("locked", "read-only", "disk-full", "gone")

    def __init__(self, file: Path, writers: tuple[str, ...], processes: Processes, switches: Switches) -> None:
        self.file, self.writers = file, writers
        self._processes, self._switches = processes, switches
        self._limits: dict[int, tuple[int, int]] = {}  # former limits on file sizes, by process id

    @asynccontextmanager
    async def broken(self, kind: str) -> AsyncIterator[None]:
        """A fault of the database for the block's length. kind: one of KINDS."""
        with closing(sqlite3.connect(self.file, isolation_level=None, timeout=0.0)) as other:
            match kind:
                case "locked":
                    await until(partial(_locked, other), 10.0, "the lock of the database", poll_s=0.01)
                case "gone":
                    self.remove()
                case "disk-full":
                    self._fill_disk()
                case _:
                    self._switches.database(READ_ONLY, *self.writers)
            try:
                yield
            finally:
                self.restore()
                self._switches.database(0, *self.writers)

    def remove(self) -> None:
        """Remove the file and its journals. Processes that have it open write to the removed file."""
        for file in self.file.parent.glob(f"{self.file.name}*"):
            file.unlink(missing_ok=True)

    def restore(self) -> None:
        for pid, limits in self._limits.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        self._limits.clear()

    def _fill_disk(self) -> None:
        """No file of the writers can grow: the kernel refuses writes to the database and to their logs."""
        for name in self.writers:
            if pid := self._processes.statuses[name].pid:
                self._limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, self._limits[pid][1]))


def _locked(connection: sqlite3.Connection) -> bool:
    """Take the write lock; False while another connection writes."""
    try:
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError:
        return False
    return True
