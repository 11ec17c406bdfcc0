"""Items that wait for a service to take them, which may be away."""

from collections import deque
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.runtime.logs import get_log

log = get_log(__name__)
CAPACITY = 10_000
BATCH = 1_000
SHOWN = 300  # characters of an item in the log


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


class Waiting:
    """A queue in order of arrival. Of more than `capacity` the oldest are dropped, counted and logged.

    A batch that is taken ends as `delivered`, `refused` or put back as `undelivered`.
    """

    def __init__(self, name: str, metrics: ForwardMetrics, capacity: int = CAPACITY) -> None:
        self._name = name
        self._metrics = metrics
        self._capacity = capacity
        self._items: deque[dict[str, Any]] = deque()
        self._down = False
        self._dropped = 0  # in this outage
        metrics.waiting.labels(name).set_function(lambda: len(self._items))

    def __len__(self) -> int:
        """Items that nobody has taken."""
        return len(self._items)

    def add(self, item: dict[str, Any]) -> None:
        """Queue one; never waits."""
        self._items.append(item)
        self._bound()

    def take(self) -> list[dict[str, Any]]:
        """The oldest, BATCH at most."""
        return [self._items.popleft() for _ in range(min(BATCH, len(self._items)))]

    def delivered(self, batch: list[dict[str, Any]]) -> None:
        """It has been taken."""
        if batch:
            self._metrics.sent.labels(self._name).inc(len(batch))
        if self._down and not self._items:
            log.info("delivered after an outage", to=self._name, dropped=self._dropped)
            self._down, self._dropped = False, 0

    def refused(self, batch: list[dict[str, Any]], reason: str) -> None:
        """It will never be taken."""
        if batch:
            self._drop("refused", len(batch))
            first = repr(batch[0])[:SHOWN]
            log.error("deliveries refused", to=self._name, count=len(batch), first=first, reason=reason)

    def undelivered(self, batch: list[dict[str, Any]], reason: str = "") -> None:
        """It waits again, for its turn before all others; `reason` of the receiver's outage, if it has one."""
        self._items.extendleft(reversed(batch))
        self._bound()
        if reason and batch:
            if not self._down:
                log.warning("deliveries wait", to=self._name, count=len(self._items), reason=reason)
            self._down = True

    def _bound(self) -> None:
        while len(self._items) > self._capacity:
            self._items.popleft()
            self._drop("full", 1)
            if self._dropped % self._capacity == 1:
                log.error("deliveries dropped: too many wait", to=self._name, waiting=self._capacity)

    def _drop(self, cause: str, count: int) -> None:
        self._dropped += count
        self._metrics.dropped.labels(self._name, cause).inc(count)
