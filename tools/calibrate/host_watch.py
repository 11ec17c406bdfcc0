"""Disturbances of a measurement by the machine: cores that foreign processes use, and late timers."""

import asyncio
import os
import time
from types import TracebackType
from typing import Self

import psutil

_PERIOD_S = 2.0
_TICK_S = 0.01


class _Watch:
    """An async context manager that watches while its block runs."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        raise NotImplementedError


class HostWatch(_Watch):
    """Measures the cores that foreign processes use: all but this process, the launcher and its descendants.

    launcher_pid: 0 for a suite elsewhere, of which nothing is measured.
    """

    def __init__(self, launcher_pid: int) -> None:
        self._launcher_pid = launcher_pid
        self._ours: dict[int, psutil.Process] = {}
        self._used_s = self._watched_s = 0.0

    @property
    def mean_cores(self) -> float:
        """The mean so far; 0 before the first sample."""
        return self._used_s / self._watched_s if self._watched_s else 0.0

    async def _watch(self) -> None:
        if not self._launcher_pid:
            return
        while True:
            self._ours = self._own_processes()
            began_mono, before = time.monotonic(), self._foreign_s()
            await asyncio.sleep(_PERIOD_S)
            self._used_s += max(0.0, self._foreign_s() - before)
            self._watched_s += time.monotonic() - began_mono

    def _own_processes(self) -> dict[int, psutil.Process]:
        try:
            launcher = psutil.Process(self._launcher_pid)
            found = [psutil.Process(os.getpid()), launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = [psutil.Process(os.getpid())]
        return {process.pid: process for process in found}

    def _foreign_s(self) -> float:
        """CPU seconds so far that other processes used; time that a hypervisor takes away counts, too."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
        return float(sum(times) - idle - sum(_cpu_s(process) for process in self._ours.values()))


def _cpu_s(process: psutil.Process) -> float:
    try:
        used = process.cpu_times()
    except psutil.Error:
        return 0.0
    return used.user + used.system


class TimerWatch(_Watch):
    """Measures the longest delay of a timer of this event loop; other processes may have had less."""

    def __init__(self) -> None:
        self.late_s = 0.0

    async def _watch(self) -> None:
        while True:
            began_mono = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self.late_s = max(self.late_s, time.monotonic() - began_mono - _TICK_S)
