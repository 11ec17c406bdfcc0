"""Clocks for tests that stop while the machine gives the process no turn.

A busy machine may pause a process for seconds. On usual clocks all timers of that time are then due at once, before the
sockets that would have been read meanwhile: deadlines pass, peers seem silent, and heartbeats late, although no process
did anything wrong. On these a timer takes as long as the process could have worked.
"""

import asyncio
import selectors
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

PAUSE_S = 0.1  # what a usual turn never takes beyond the work that it does, and what the clocks count of a longer one
_LOOK_S = 0.02


class _Selector(selectors.DefaultSelector):
    """Measures how much later than it was to be the loop had its turns."""

    def __init__(self) -> None:
        super().__init__()
        self.lost_s = 0.0
        self._thread = threading.get_ident()
        self._since_mono, self._worked_s = time.monotonic(), time.thread_time()

    def look(self) -> float:
        """The time, without that for which this turn was paused, or blocked, beyond what it computed."""
        now_mono = time.monotonic()
        if threading.get_ident() == self._thread:
            late_s = now_mono - self._since_mono - (time.thread_time() - self._worked_s) - PAUSE_S
            if late_s > 0.0:
                self.lost_s += late_s
                self._since_mono += late_s
        return now_mono - self.lost_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits as usual."""
        self._thread = threading.get_ident()
        self.look()
        began_mono = time.monotonic()
        events = super().select(timeout)
        self._since_mono, self._worked_s = time.monotonic(), time.thread_time()
        if timeout is not None:
            self.lost_s += max(0.0, self._since_mono - began_mono - max(0.0, timeout) - PAUSE_S)
        return events


class PatientLoop(asyncio.SelectorEventLoop):
    """The usual loop, with such a clock."""

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        self._turns = _Selector()
        super().__init__(selector or self._turns)

    def time(self) -> float:
        return self._turns.look()

    @property
    def lost_s(self) -> float:
        """How long it was paused until now."""
        return self._turns.lost_s


class PatientLoops(asyncio.DefaultEventLoopPolicy):
    """Makes every new loop a patient one."""

    _loop_factory = PatientLoop


def paused_s() -> float:
    """How long the running loop was paused until now: what a bound on times by other clocks has to allow for."""
    loop: Any = asyncio.get_running_loop()
    return float(loop.lost_s)


class PatientClock:
    """Monotonic seconds for threads. While it is `kept`, a thread reads it all the time: a gap is a pause."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_mono, self._lost_s = time.monotonic(), 0.0

    def __call__(self) -> float:
        with self._lock:
            now_mono = time.monotonic()
            gap_s, self._read_mono = now_mono - self._read_mono, now_mono
            self._lost_s += max(0.0, gap_s - PAUSE_S)
            return now_mono - self._lost_s

    @contextmanager
    def kept(self) -> Iterator[None]:
        end = threading.Event()

        def read() -> None:
            while not end.wait(_LOOK_S):
                self()

        self()
        reader = threading.Thread(target=read, name="patient-clock", daemon=True)
        reader.start()
        try:
            yield
        finally:
            end.set()
            reader.join()

    def becomes_that_of(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        """These modules read it as `time.monotonic`."""
        own = SimpleNamespace(**{**vars(time), "monotonic": self})
        for module in modules:
            monkeypatch.setattr(f"{module}.time", own)
