"""One worker thread with a bounded queue: an answer by the deadline or an error, never a late answer."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any, TypeVar

from shared.errors import Busy, DeadlineExceeded

T = TypeVar("T")
# Weight of the newest call in the running mean of how long calls take.
NEWEST = 0.2


class Lane:
    """Runs calls one by one in a thread of its own; at most `depth` wait behind the one that runs."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._pending = 0
        self._mean_s = 0.0  # of the calls that ran lately; 0 before the first
        self._lock = threading.Lock()  # a call ends in the worker, or here when it is cancelled in the queue
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="length-classifier")

    async def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """The result of `work`.

        Raises Busy when the queue is full or too long for the deadline, DeadlineExceeded after `timeout_s`. A
        call that still waits then is never run; one that runs cannot be stopped, and holds its place until
        it ends. An idle lane takes every call, however slow calls were: else it would never learn better.
        """
        deadline_s = monotonic() + timeout_s
        future = self._submit(work, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                result = await asyncio.wrap_future(future)
        except TimeoutError:
            raise self._late(timeout_s) from None
        if monotonic() > deadline_s:  # the loop was held up: the answer came in time, but its reader did not
            raise self._late(timeout_s)
        return result

    @property
    def pending(self) -> int:
        """Calls that wait or run."""
        return self._pending

    async def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    def _submit(self, work: Callable[[], T], timeout_s: float) -> "Future[T]":
        with self._lock:
            needed_s = (self._pending + 1) * self._mean_s
            if self._pending > self._depth or (self._pending and needed_s > timeout_s):
                raise Busy(f"{self._pending} predictions are before this one", retry_after_s=needed_s)
            self._pending += 1
        future = self._pool.submit(self._timed, work)
        future.add_done_callback(self._ended)
        return future

    def _timed(self, work: Callable[[], T]) -> T:
        started_s = monotonic()
        try:
            return work()
        finally:
            took_s = monotonic() - started_s
            with self._lock:
                self._mean_s += (NEWEST if self._mean_s else 1.0) * (took_s - self._mean_s)

    def _ended(self, _: "Future[Any]") -> None:
        with self._lock:
            self._pending -= 1

    @staticmethod
    def _late(timeout_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"no prediction within {timeout_s * 1000:.0f} ms")
