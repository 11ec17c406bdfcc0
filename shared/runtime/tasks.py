"""Background work with an owner: a task that fails ends its process, with a clear message. And alarms."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from shared.runtime.logs import get_log

log = get_log(__name__)
FAILURES = 5  # consecutive failures of a step that end the process
_ORIGIN = random.uniform(0.0, 60.0)  # of this process's periods, so that two processes do not wake at the same time
_EARLY = 0.1  # of a period: timers may fire a moment before their time


class Background:
    """Owns the long-lived tasks of a process. Use as `async with background() as tasks`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the owner closes. If it fails, the process gets SIGTERM and exits."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def every(self, name: str, period_s: float, step: Callable[[], Awaitable[None] | None]) -> None:
        """Call `step` every `period_s` seconds; see `until_next`.

        A step that raises is called again after a period; after `FAILURES` in a row the process ends.
        """
        self.start(name, _repeat(name, period_s, step))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("background task died; stopping the process", task=task.get_name(), exc_info=error)
            os.kill(os.getpid(), signal.SIGTERM)

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def background() -> AsyncIterator[Background]:
    """A `Background` that is closed at the end of the block."""
    tasks = Background()
    try:
        yield tasks
    finally:
        await tasks.close()


async def _repeat(name: str, period_s: float, step: Callable[[], Awaitable[None] | None]) -> None:
    failures = 0
    while True:
        try:
            result = step()
            if result is not None:
                await result
            failures = 0
        except Exception as error:  # a boundary: the cause is often gone by the next step
            failures += 1
            if failures == FAILURES:
                raise
            log.error("a background step failed; it is retried", task=name, failures=failures, exc_info=error)
        await asyncio.sleep(until_next(period_s))
        awake()


def until_next(period_s: float) -> float:
    """Seconds until the next multiple of a period, from an origin that all periods of the process share.

    Timers that are set with it share wake-ups, also those of unlike periods, where one is a multiple of the other.
    """
    left_s = period_s - (asyncio.get_running_loop().time() - _ORIGIN) % period_s
    return left_s if left_s > _EARLY * period_s else left_s + period_s


class _Sleeper(NamedTuple):
    earliest_mono: float  # on the clock of the loop
    woken: asyncio.Future[None]


_sleepers: list[_Sleeper] = []


async def sleep_until_awake(least_s: float, most_s: float) -> None:
    """Sleep for `most_s`, or from `least_s` on until something else wakes the process, which calls `awake`."""
    loop = asyncio.get_running_loop()
    sleeper = _Sleeper(loop.time() + least_s, loop.create_future())
    _sleepers.append(sleeper)
    try:
        await asyncio.wait((sleeper.woken,), timeout=most_s)
    finally:
        _sleepers.remove(sleeper)


def awake() -> None:
    """Something has woken this process: let work that waits for that share the wake-up."""
    for sleeper in _sleepers:
        if not sleeper.woken.done() and sleeper.woken.get_loop().time() >= sleeper.earliest_mono:
            sleeper.woken.set_result(None)


class Alarm:
    """Calls back once, at the earliest of the times that it was set to since its last call."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._timer: asyncio.Handle | None = None  # of uvloop, which does not tell the time of one that is due
        self._when_mono = 0.0

    def by(self, when_mono: float) -> None:
        """Call back at that time of the running loop's clock, or earlier if it was set so."""
        if self._timer is not None:
            if self._when_mono <= when_mono:
                return
            self._timer.cancel()
        self._when_mono = when_mono
        self._timer = asyncio.get_running_loop().call_at(when_mono, self._ring)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._callback()
