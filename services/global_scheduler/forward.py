"""Handing finished requests and demand on, once a second, to services that may be away."""

import asyncio
from collections import deque
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.errors import InvalidRequest, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.clients.http import JsonClient

log = get_log(__name__)
CAPACITY = 10_000
BATCH = 1_000
TIMEOUT_S = 2.0


class ForwardMetrics:
    """What was handed on, what waits and what was not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sent = Counter("polyphase_scheduler_forwarded", "Items handed on", ["to"], registry=registry)
        self.waiting = Gauge(
            "polyphase_scheduler_forward_waiting", "Items not yet handed on", ["to"], registry=registry
        )
        self.dropped = Counter(
            "polyphase_scheduler_forward_dropped", "Items never handed on", ["to", "cause"], registry=registry
        )


class Forwarder:
    """Gathers items and posts them as JSON lists, in order; what cannot be delivered waits until it can.

    Of more than `capacity` the oldest are dropped, counted and logged. One delivery may arrive twice (its answer was
    lost): the receiver tells items apart.
    """

    def __init__(
        self, name: str, client: JsonClient | None, path: str, metrics: ForwardMetrics, capacity: int = CAPACITY
    ) -> None:
        self._name = name
        self._client = client
        self._path = path
        self._metrics = metrics
        self._capacity = capacity
        self._items: deque[dict[str, Any]] = deque()
        self._down = False
        self._dropped = 0  # in this outage
        metrics.waiting.labels(name).set_function(lambda: len(self._items))

    def add(self, item: dict[str, Any]) -> None:
        """Queue one; never waits."""
        if self._client is not None:
            self._items.append(item)
            self._bound()

    async def step(self) -> None:
        """Post what has gathered, until all is delivered or something fails."""
        while self._client is not None and self._items:
            batch = [self._items.popleft() for _ in range(min(BATCH, len(self._items)))]
            try:
                await self._client.call("POST", self._path, body=batch, timeout_s=TIMEOUT_S)
            except InvalidRequest as error:  # it will never be taken
                self._drop("refused", len(batch))
                log.error("deliveries refused", to=self._name, count=len(batch), reason=error.message)
            except asyncio.CancelledError:
                self._put_back(batch)
                raise
            except PolyphaseError as error:
                self._put_back(batch)
                if not self._down:
                    log.warning("deliveries wait", to=self._name, count=len(self._items), reason=error.message)
                self._down = True
                return
            else:
                self._delivered(len(batch))

    def _delivered(self, count: int) -> None:
        self._metrics.sent.labels(self._name).inc(count)
        if self._down and not self._items:
            log.info("delivered after an outage", to=self._name, dropped=self._dropped)
            self._down, self._dropped = False, 0

    def _put_back(self, batch: list[dict[str, Any]]) -> None:
        self._items.extendleft(reversed(batch))
        self._bound()

    def _bound(self) -> None:
        while len(self._items) > self._capacity:
            self._items.popleft()
            self._drop("full", 1)
            if self._dropped % self._capacity == 1:
                log.error("deliveries dropped: too many wait", to=self._name, waiting=self._capacity)

    def _drop(self, cause: str, count: int) -> None:
        self._dropped += count
        self._metrics.dropped.labels(self._name, cause).inc(count)
