"""Handing finished requests on, once a second, to services that may be away."""

from collections import Counter
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter

from shared.errors import PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.clients.http import JsonClient

log = get_log(__name__)
CAPACITY = 10_000
TIMEOUT_S = 2.0


class ForwardMetrics:
    """What was handed on and what was not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sent = PrometheusCounter("polyphase_scheduler_forwarded", "Outcomes handed on", ["to"], registry=registry)
        self.dropped = PrometheusCounter(
            "polyphase_scheduler_forward_dropped", "Outcomes that nobody took", ["to"], registry=registry
        )


class Forwarder:
    """Gathers items and posts them as one JSON list. What cannot be delivered is dropped and counted."""

    def __init__(self, name: str, client: JsonClient | None, path: str, metrics: ForwardMetrics) -> None:
        self._name = name
        self._client = client
        self._path = path
        self._metrics = metrics
        self._items: list[dict[str, Any]] = []
        self._down = False
        self.dropped: Counter[str] = Counter()

    def add(self, item: dict[str, Any]) -> None:
        """Queue one; never waits."""
        if self._client is None:
            return
        if len(self._items) >= CAPACITY:
            self._drop("full", 1)
            return
        self._items.append(item)

    async def step(self) -> None:
        """Post what has gathered."""
        if self._client is None or not self._items:
            return
        items, self._items = self._items, []
        try:
            await self._client.call("POST", self._path, body=items, timeout_s=TIMEOUT_S)
        except PolyphaseError as error:
            if not self._down:
                log.warning("outcomes dropped", to=self._name, count=len(items), reason=error.message)
            self._down = True
            self._drop("undelivered", len(items))
        else:
            self._down = False
            self._metrics.sent.labels(self._name).inc(len(items))

    def _drop(self, cause: str, count: int) -> None:
        self.dropped[cause] += count
        self._metrics.dropped.labels(self._name).inc(count)
