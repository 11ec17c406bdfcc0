"""Reads from the services' HTTP APIs, and calls that change something, for pages that run in Streamlit's threads.

One event loop in a thread of its own serves all sessions, so that sessions share reads. A read does not raise: it has a
value, fresh or stale, or the error that prevented one.
"""

import asyncio
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import httpx

from dashboard.answers import ClassLoad, Endpoint, class_loads
from dashboard.dashboard_settings import DashboardSettings
from dashboard.login import Account, KeyFile
from shared.errors import PolyphaseError
from shared.wire.api.planner import WhatIf
from shared.wire.clients.http import JsonClient
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.planner import PlannerClient

T = TypeVar("T")
FRESH_SHARE = 0.9  # of the refresh period; a younger read is reused
RETRY_S = 0.5  # a failed read is repeated after this time at the latest
LATE_S = 0.3  # a page waits so long for a new value where an old one is known
LATE_VALUE_S = 30.0  # the age of that old value, at most
READS_KEPT = 512
STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class Service:
    """A service that pages read. absence: what its outage means for users."""

    name: str
    url: str
    absence: str


@dataclass(frozen=True, slots=True)
class Read(Generic[T]):
    """The result of one read. With an error, `value` is the last good answer, if there is one; `read_s` is its time
    (unix seconds). late: the value is the last good answer, because the new one is still on its way.
    """

    service: Service
    value: T | None = None
    error: str = ""
    read_s: float = 0.0
    late: bool = False

    @property
    def stale(self) -> bool:
        """Whether the value is an old one."""
        return bool(self.error) and self.value is not None


@dataclass(slots=True)
class _Entry:
    """A read that runs or has ended. future: what pages wait for, which may be a late value; answer: the read itself.
    before: the result of the previous one. started_mono: monotonic.
    """

    future: "Future[Read[Any]]"
    answer: "Future[Read[Any]]"
    started_mono: float
    before: Read[Any]

    def reusable(self, now_mono: float, fresh_s: float) -> bool:
        if not self.answer.done():
            return not self.forgotten
        return now_mono - self.started_mono < (min(fresh_s, RETRY_S) if self.answer.result().error else fresh_s)

    def newest(self) -> "Future[Read[Any]]":
        return self.answer if self.answer.done() else self.future

    def latest(self) -> Read[Any]:
        return self.answer.result() if self.answer.done() else self.before

    @property
    def forgotten(self) -> bool:
        return self.started_mono == -float("inf")


def _services(settings: DashboardSettings) -> dict[str, Service]:
    """The services by the names that endpoints use."""
    continues = "Serving continues without it."
    return {
        "monitor": Service(
            "cluster monitor",
            settings.monitor_url,
            f"Instances, the verdict, policies and actions are unavailable. {continues}",
        ),
        "scheduler": Service(
            "global scheduler", settings.scheduler_url, "New requests wait until a scheduler answers."
        ),
        "gateway": Service("gateway", settings.gateway_url, "It accepts no requests."),
        "predictor": Service(
            "predictor", settings.predictor_url, "Requests are served without a predicted output length."
        ),
        "planner": Service(
            "planner", settings.planner_url, f"Proposals, searches and what-if questions are unavailable. {continues}"
        ),
    }


class Api:
    """The services' APIs; one per process. Start all reads that a page needs, then wait for their futures."""

    def __init__(self, settings: DashboardSettings) -> None:
        self.settings = settings
        self.keys = KeyFile(settings.api_keys_file) if settings.api_keys_file is not None else None
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._tls = ssl.create_default_context()
        self._services = _services(settings)
        urls = {*settings.gateway_urls, *(service.url for service in self._services.values() if service.url)}
        self._clients = {url: JsonClient(url, transport=self._transport()) for url in urls}
        token = settings.token()
        self.monitor = MonitorClient(settings.monitor_url, token=token, transport=self._transport())
        self.planner = PlannerClient(settings.planner_url, token=token, transport=self._transport())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api", daemon=True)
        self._thread.start()

    def read(
        self, endpoint: Endpoint[T], identifier: str = "", *, fresh_s: float | None = None, **params: str | int | float
    ) -> "Future[Read[T]]":
        """A read that runs, that ended at most `fresh_s` ago (default: a refresh period), or that starts now.

        identifier: for the `{id}` of the path. Empty parameters are left out.
        """
        path = endpoint.path.format(id=identifier)
        params = {name: value for name, value in params.items() if value != ""}
        call = partial(
            self._clients[self._services[endpoint.service].url].call, "GET", path, endpoint.answer, params=params
        )
        return self.shared_read(endpoint.service, f"{endpoint.service} {path} {params}", call, fresh_s)

    def read_optional(self, endpoint: Endpoint[T]) -> "Future[Read[T]] | None":
        """As `read`; None where the service has no URL."""
        return self.read(endpoint) if self._services[endpoint.service].url else None

    def classes(self) -> "Future[Read[list[ClassLoad]]] | None":
        """Delayed and refused requests of each SLO class, summed over the gateway's processes."""
        if not self.settings.gateway_url:
            return None
        urls = self.settings.gateway_urls or (self.settings.gateway_url,)

        async def counted() -> list[ClassLoad]:
            return class_loads(*await asyncio.gather(*(self._clients[url].text("/metrics") for url in urls)))

        return self.shared_read("gateway", "classes", counted)

    def what_if(self, change: Mapping[str, Any]) -> WhatIf:
        """The planner's answer to a what-if question. Blocks; raises the planner's errors."""
        return self.run(self.planner.what_if(change)).result()

    def authorize(self, account: Account) -> None:
        """Raises NotAllowed for a read-only account, Unauthorized when its key is no longer in the file."""
        (self.keys.account(account.secret) if self.keys is not None else account).require_operate()

    def change(self, account: Account, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a call that changes something, and have later reads read anew. Blocks; raises as `authorize` does, and
        the errors of the service.
        """
        self.authorize(account)
        try:
            return self.run(call()).result()
        finally:
            self.forget()

    def streaming_client(self) -> httpx.AsyncClient:
        """A client of the gateway for one streamed answer, in an event loop of the caller's, who closes it."""
        return httpx.AsyncClient(
            base_url=self.settings.gateway_url, transport=self._transport(), timeout=httpx.Timeout(60.0)
        )

    def forget(self) -> None:
        """Have the next read of each name read anew, even where one is running; last good values stay known."""
        with self._lock:
            for entry in self._entries.values():
                entry.started_mono = -float("inf")

    def run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Close all connections and end the thread."""
        self.run(self._close_clients()).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    def shared_read(
        self, service: str, name: str, call: Callable[[], Awaitable[T]], fresh_s: float | None = None
    ) -> "Future[Read[T]]":
        """The read of that name, shared by all sessions."""
        fresh_s = FRESH_SHARE * self.settings.refresh_s if fresh_s is None else fresh_s
        with self._lock:
            known, now_mono = self._entries.get(name), time.monotonic()
            if known is not None and known.reusable(now_mono, fresh_s):
                return known.newest()
            before = known.latest() if known is not None else Read(self._services[service])
            answer: Future[Read[Any]] = self.run(self._fetch(before, call))
            future = answer
            if known is not None and not known.forgotten and time.time() - before.read_s < LATE_VALUE_S:
                future = self.run(_at_most_late(answer, before))
            self._entries[name] = _Entry(future, answer, now_mono, before)
            self._entries.move_to_end(name)
            if len(self._entries) > READS_KEPT:
                self._entries.popitem(last=False)
            return future

    async def _fetch(self, before: Read[Any], call: Callable[[], Awaitable[Any]]) -> Read[Any]:
        timeout_s = self.settings.read_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return Read(before.service, await call(), read_s=time.time())
        except TimeoutError:
            return replace(before, error=f"no answer within {timeout_s:g} s")
        except PolyphaseError as error:
            return replace(before, error=error.message)

    def _transport(self) -> httpx.AsyncHTTPTransport:
        # An explicit transport: a proxy of the environment must not come between the dashboard and the cluster.
        return httpx.AsyncHTTPTransport(verify=self._tls)

    async def _close_clients(self) -> None:
        async with AsyncExitStack() as stack:
            for client in (self.monitor, self.planner, *self._clients.values()):
                stack.push_async_callback(client.close)


async def _at_most_late(answer: "Future[Read[Any]]", before: Read[Any]) -> Read[Any]:
    """The answer, or after LATE_S the previous value."""
    done, _ = await asyncio.wait({asyncio.wrap_future(answer)}, timeout=LATE_S)
    return answer.result() if done else replace(before, late=True)
