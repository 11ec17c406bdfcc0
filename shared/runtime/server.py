"""uvicorn's server, woken once a second: by itself it looks ten times a second whether it is to end."""

import asyncio
import ctypes
import gc
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress

import uvicorn

_FORCED_S = 0.2  # after a second signal
TICK_S = 1.0  # the header `date` tells seconds


class Server(uvicorn.Server):
    """Use like uvicorn's. Ends as soon as `should_exit` is set, by whomever: a signal does so, too.

    on_started: called once it serves. holds_signals: one that has told it to end, and ends the process by its usual
    effect, is raised again by `raise_signals`; else by `serve`, and what stands around that never ends. drain: awaited
    when it is to end, while it still listens; a second SIGINT ends the wait.
    """

    on_started: Callable[[], None] | None = None
    drain: Callable[[], Awaitable[None]] | None = None
    holds_signals = False
    _held: tuple[int, ...] = ()
    _loop: asyncio.AbstractEventLoop | None = None
    _exits = False

    @property
    def should_exit(self) -> bool:
        """Whether it is to end."""
        return self._exits

    @should_exit.setter
    def should_exit(self, exits: bool) -> None:
        self._exits = exits
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._told.set)  # signals come in the middle of anything

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn's."""
        with super().capture_signals():
            yield
            if self.holds_signals:
                self._held = tuple(self._captured_signals)
                self._captured_signals.clear()

    def raise_signals(self) -> None:
        """All that was to end in good order has ended."""
        for each in reversed(self._held):
            signal.raise_signal(each)

    async def main_loop(self) -> None:
        """Until it is to end."""
        self._told = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self.on_started is not None:
            self.on_started()
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._told.wait()
        if self.drain is not None:
            draining = asyncio.ensure_future(self.drain())
            while not draining.done() and not self.force_exit:
                await asyncio.wait([draining], timeout=_FORCED_S)
            draining.cancel()


# MERGED collecting.py
# Python's search for cycles of garbage, and memory that nothing uses, in processes that live long.


YOUNG = 5_000  # containers, of which each search of the youngest has to look through at most as many: a millisecond
TRIM_S = 60.0


def settle() -> None:
    """To be called when a process has started: what there is by now stays, and is never looked through again.

    A search through all that vLLM has loaded takes a quarter of a second, in which no stream gets a token. From now on
    a thread gives memory that nothing uses back to the system once a minute.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
    threading.Thread(target=_trim_now_and_then, name="trim", daemon=True).start()


def trim() -> bool:
    """Give memory back that the C library keeps free between what is in use; whether there was any.

    Without it glibc keeps what large bodies once took. Where the C library has no `malloc_trim` nothing is done.
    """
    library = ctypes.CDLL(None)
    return hasattr(library, "malloc_trim") and bool(library.malloc_trim(0))


def _trim_now_and_then() -> None:
    while True:
        time.sleep(TRIM_S)
        trim()
