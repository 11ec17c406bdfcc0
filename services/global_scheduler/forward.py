"""Handing things on to services that may be away: what has gathered is sent until all is taken or something fails."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.errors import InvalidRequest, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.clients.http import JsonClient

# MERGED waiting.py
# Items that wait for a service to take them, which may be away.


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


TIMEOUT_S = 2.0
SENDS = 64  # one bad item of 2,000 is found by 23
Batch = list[dict[str, Any]]
Piece = list[tuple[Waiting, dict[str, Any]]]  # items with the queue that each came from, in order


class Forwarder:
    """Posts what waits as JSON lists, in order; what cannot be delivered waits until it can.

    One delivery may arrive twice (its answer was lost): the receiver tells items apart.
    """

    def __init__(self, waiting: Waiting, client: JsonClient, path: str) -> None:
        self._waiting = waiting
        self._client = client
        self._path = path

    def add(self, item: dict[str, Any]) -> None:
        """Queue one; never waits."""
        self._waiting.add(item)

    async def step(self) -> None:
        """Post what has gathered."""
        while self._waiting and await deliver((self._waiting,), self._post):
            pass

    async def _post(self, batches: Sequence[Batch]) -> None:
        await self._client.call("POST", self._path, body=batches[0], timeout_s=TIMEOUT_S)


async def deliver(queues: Sequence[Waiting], send: Callable[[Sequence[Batch]], Awaitable[None]]) -> bool:
    """Send a batch of each queue in one message. Whether the receiver was there.

    What it refuses, or what cannot be encoded, is halved until the items at fault stand alone, and those are dropped.
    After SENDS messages nothing is halved any more: what is refused then is dropped whole.
    """
    pieces = [[(queue, item) for queue in queues for item in queue.take()]]
    sends = 0
    try:
        while pieces:
            piece, sends = pieces[-1], sends + 1
            try:
                await send([_of(queue, piece) for queue in queues])
            except InvalidRequest as error:
                pieces.pop()
                if len(piece) > 1 and sends < SENDS:
                    half = len(piece) // 2
                    pieces += [piece[half:], piece[:half]]
                    continue
                for queue in queues:
                    queue.refused(_of(queue, piece), error.message)
            else:
                pieces.pop()
                for queue in queues:
                    queue.delivered(_of(queue, piece))
    except asyncio.CancelledError:
        _put_back(queues, pieces)
        raise
    except PolyphaseError as error:
        _put_back(queues, pieces, error.message)
        return False
    return True


def _of(queue: Waiting, piece: Piece) -> Batch:
    return [item for owner, item in piece if owner is queue]


def _put_back(queues: Sequence[Waiting], pieces: Sequence[Piece], reason: str = "") -> None:
    left = [pair for piece in reversed(pieces) for pair in piece]
    for queue in queues:
        queue.undelivered(_of(queue, left), reason)
