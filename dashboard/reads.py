"""Reads over HTTP. A read never raises: it returns a value, fresh or stale, or a reason. All sessions share one
event loop in its own thread and the clients of the services.
"""

import asyncio
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import httpx
import msgspec

from dashboard.dashboard_settings import DashboardSettings
from shared.errors import PolyphaseError
from shared.wire.clients.http import JsonClient
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.planner import PlannerClient
from shared.wire.clients.scheduler import SchedulerAdmin

T = TypeVar("T")
KEPT = 512  # reads that are remembered


@dataclass(frozen=True, slots=True)
class Read(Generic[T]):
    """What came of one read. With an error, the value is the last one that was read, at `read_s` (unix seconds)."""

    value: T | None
    error: str = ""
    read_s: float = 0.0

    @property
    def stale(self) -> bool:
        """Whether there is a value, but an old one."""
        return bool(self.error) and self.value is not None


class Reader:
    """Reads what services answer, and remembers what each read brought last. `timeout_s` is of one read."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: OrderedDict[str, Read[Any]] = OrderedDict()

    async def read(self, name: str, call: Callable[[], Awaitable[Any]], kind: Any) -> Read[Any]:
        """What was asked for; when that fails, what was read last under this name. Without a name nothing is kept."""
        try:
            async with asyncio.timeout(self._timeout_s):
                read = Read(msgspec.convert(await call(), kind), read_s=time.time())
        except TimeoutError:
            return self._known(name, f"no answer within {self._timeout_s:g} s")
        except PolyphaseError as error:
            return self._known(name, error.message)
        except ValueError as error:  # not JSON, or not of the kind: msgspec.ValidationError is one too
            return self._known(name, f"its answer was not understood: {error}")
        if name:
            self._last[name] = read
            self._last.move_to_end(name)
            if len(self._last) > KEPT:
                self._last.popitem(last=False)
        return read

    def _known(self, name: str, error: str) -> Read[Any]:
        return replace(self._last.get(name) or Read(None), error=error)


class Clients:
    """One of each service, kept open; of one event loop. Raises KeyError for a URL that is not configured."""

    def __init__(self, settings: DashboardSettings) -> None:
        self._settings = settings
        token = settings.token()
        self._tls = ssl.create_default_context()
        self._others: dict[str, JsonClient] = {}
        self.monitor = MonitorClient(settings.monitor_url, token=token, transport=self._transport())
        self.scheduler = SchedulerAdmin(settings.scheduler_url, transport=self._transport())
        self.planner = PlannerClient(settings.planner_url, token=token, transport=self._transport())

    def at(self, url: str) -> JsonClient:
        """A service by its URL."""
        if url not in self._others:
            self._others[url] = JsonClient(url, transport=self._transport())
        return self._others[url]

    def streaming(self, url: str) -> httpx.AsyncClient:
        """For an answer that comes piece by piece, in an event loop of its own; to be closed by the caller."""
        return httpx.AsyncClient(base_url=url, transport=self._transport(), timeout=httpx.Timeout(60.0))

    async def close(self) -> None:
        """Close all connections."""
        async with AsyncExitStack() as stack:
            for client in (self.monitor, self.scheduler, self.planner, *self._others.values()):
                stack.push_async_callback(client.close)

    def _transport(self) -> httpx.AsyncHTTPTransport:
        # Of our own, so that no proxy of the environment comes between us and the cluster.
        return httpx.AsyncHTTPTransport(verify=self._tls)


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
