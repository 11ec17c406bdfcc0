"""The clients of the services: the one place where they are made."""

import ssl
from contextlib import AsyncExitStack

import httpx

from dashboard.dashboard_settings import DashboardSettings
from shared.wire.clients.http import JsonClient
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.planner import PlannerClient
from shared.wire.clients.scheduler import SchedulerAdmin


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
