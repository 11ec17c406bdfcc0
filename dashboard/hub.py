"""One event loop in a thread of its own, through which all sessions read: each thing once a period, not once each."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from dashboard.dashboard_settings import DashboardSettings
from dashboard.reads import KEPT, Read, Reader
from dashboard.service_clients import Clients

T = TypeVar("T")
STOP_S = 2.0
AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class _Asked:
    future: "Future[Read[Any]]"
    begun_s: float  # monotonic

    def serves(self, now_s: float, fresh_s: float) -> bool:
        """Whether it is good enough. What failed is tried again soon."""
        if not self.future.done():
            return True
        return now_s - self.begun_s < (min(fresh_s, AGAIN_S) if self.future.result().error else fresh_s)


class Hub:
    """For callers in threads. What was read less than its time ago, or is being read, is not asked for again."""

    def __init__(self, settings: DashboardSettings, timeout_s: float) -> None:
        self._reader = Reader(timeout_s)
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reads", daemon=True)
        self._thread.start()
        self.clients = self.run(self._made(settings)).result()

    def ask(
        self, name: str, call: Callable[[], Awaitable[Any]], kind: type[T] | Any, fresh_s: float
    ) -> "Future[Read[T]]":
        """A read that is on its way, or was made at most `fresh_s` ago; it never fails. `name` says what is read."""
        with self._lock:
            known, now_s = self._asked.get(name), time.monotonic()
            if known is not None and known.serves(now_s, fresh_s):
                return known.future
            future: Future[Read[Any]] = self.run(self._reader.read(name, call, kind))
            self._asked[name] = _Asked(future, now_s)
            self._asked.move_to_end(name)
            if len(self._asked) > KEPT:
                self._asked.popitem(last=False)
            return future

    def forget(self) -> None:
        """Something was changed: whatever is asked for next is read anew."""
        with self._lock:
            self._asked.clear()

    def run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Have it done in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Close all connections and end the thread."""
        self.run(self.clients.close()).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    async def _made(self, settings: DashboardSettings) -> Clients:
        return Clients(settings)
