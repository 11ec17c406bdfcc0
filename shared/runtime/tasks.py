"""Background work with an owner: a loop that dies takes its process down, with a clear message."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from shared.runtime.logs import get_log

log = get_log(__name__)
FAILURES = 5  # of a step in a row, and the process ends
_PHASE = random.random()
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
        """Call `step` every `period_s` seconds. Those of one period have their turn together: a wake-up costs, too.

        A step that raises is called again after a period; after FAILURES in a row the task fails, and the process ends.
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
    loop = asyncio.get_running_loop()
    failures = 0
    while True:
        try:
            result = step()
            if result is not None:
                await result
            failures = 0
        except Exception as error:  # the boundary: what one step met is often gone by the next
            failures += 1
            if failures == FAILURES:
                raise
            log.error("a background step failed; it is tried again", task=name, failures=failures, exc_info=error)
        left_s = period_s - (loop.time() - _PHASE * period_s) % period_s  # no two processes at the same time
        await asyncio.sleep(left_s if left_s > _EARLY * period_s else left_s + period_s)


# MERGED alarm.py
# A call that is due by some time, and perhaps by an earlier one.


class Alarm:
    """Calls back once, at the earliest of the times that it was set to since it did last."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._timer: asyncio.Handle | None = None  # uvloop's, for what is due already, does not say when
        self._when_mono = 0.0

    def by(self, when_mono: float) -> None:
        """Call back then, by the running loop's clock, unless it is to be earlier."""
        if self._timer is not None:
            if self._when_mono <= when_mono:
                return
            self._timer.cancel()
        self._when_mono = when_mono
        self._timer = asyncio.get_running_loop().call_at(when_mono, self._ring)

    def cancel(self) -> None:
        """Do not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._callback()
