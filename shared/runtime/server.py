"""uvicorn's server, woken once a second instead of ten times; and the garbage collection of long-lived processes."""

import asyncio
import ctypes
import gc
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress

import uvicorn

from shared.runtime.tasks import until_next

_FORCED_S = 0.2  # after a second signal
TICK_S = 1.0  # the header `date` has a resolution of seconds
YOUNG = 5_000  # containers that a collection of the youngest generation scans at most: about a millisecond
TRIM_S = 60.0


class Server(uvicorn.Server):
    """Use as uvicorn's. It ends as soon as `should_exit` is set, by a signal or by other code.

    on_started: called once it serves. gets_signals: whether signals end it; of one server of a process. holds_signals:
    a signal that ended the server is raised again by `raise_signals`; without it `serve` raises it, which ends the
    process before the clean-up around `serve`. drain: awaited before the end, while the server still listens; a second
    SIGINT ends the wait.
    """

    on_started: Callable[[], None] | None = None
    drain: Callable[[], Awaitable[None]] | None = None
    gets_signals = True
    holds_signals = False
    _held: tuple[int, ...] = ()
    _loop: asyncio.AbstractEventLoop | None = None
    _exits = False

    @property
    def should_exit(self) -> bool:
        return self._exits

    @should_exit.setter
    def should_exit(self, exits: bool) -> None:
        self._exits = exits
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._woken.set)  # a signal may interrupt any code

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if not self.gets_signals:
            yield
            return
        with super().capture_signals():
            yield
            if self.holds_signals:
                self._held = tuple(self._captured_signals)
                self._captured_signals.clear()

    def raise_signals(self) -> None:
        """Raise the held signals, after the clean-up."""
        for each in reversed(self._held):
            signal.raise_signal(each)

    async def main_loop(self) -> None:
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self.on_started is not None:
            self.on_started()
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(until_next(TICK_S)):
                    await self._woken.wait()
        if self.drain is not None:
            draining = asyncio.ensure_future(self.drain())
            while not draining.done() and not self.force_exit:
                await asyncio.wait([draining], timeout=_FORCED_S)
            draining.cancel()


def settle() -> None:
    """Call this once a process has started: objects that exist by then are excluded from garbage collection.

    A collection over all objects of vLLM takes a quarter of a second, in which no stream gets a token. From then on, a
    thread returns unused memory to the system once a minute.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
    threading.Thread(target=_trim_repeatedly, name="trim", daemon=True).start()


def trim() -> bool:
    """Return free memory of the C library to the system; returns whether there was any.

    Without it glibc keeps the memory of large request bodies. A C library without `malloc_trim` is left alone.
    """
    library = ctypes.CDLL(None)
    return hasattr(library, "malloc_trim") and bool(library.malloc_trim(0))


def _trim_repeatedly() -> None:
    while True:
        time.sleep(TRIM_S)
        trim()
