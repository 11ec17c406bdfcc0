"""Delivery to services that may be unreachable: items wait in a bounded queue until the service has them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.errors import InvalidRequest, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.clients.http import JsonClient

log = get_log(__name__)
CAPACITY = 10_000
BATCH = 1_000
SHOWN = 300  # characters of an item in the log
TIMEOUT_S = 2.0
SENDS = 64  # messages of one delivery; one bad item of 2,000 is found with 23
Item = object  # anything that `msgspec.to_builtins` takes
Batch = list[Item]
Owned = list[tuple["DeliveryQueue", Item]]  # items with the queue that each came from, in order


class ForwardMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.sent = Counter("polyphase_scheduler_forwarded", "Items handed on", ["to"], registry=registry)
        self.waiting = Gauge(
            "polyphase_scheduler_forward_waiting", "Items not yet handed on", ["to"], registry=registry
        )
        self.dropped = Counter(
            "polyphase_scheduler_forward_dropped", "Items never handed on", ["to", "cause"], registry=registry
        )


class DeliveryQueue:
    """Items for one service, in order. Beyond `capacity` the oldest are dropped, counted and logged.

    Call one of `delivered`, `refused` and `undelivered` with each batch of `next_batch`.
    """

    def __init__(self, name: str, metrics: ForwardMetrics, capacity: int = CAPACITY) -> None:
        self._name = name
        self._metrics = metrics
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._down = False
        self._dropped = 0  # in this outage
        metrics.waiting.labels(name).set_function(lambda: len(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Item) -> None:
        self._items.append(item)
        self._bound()

    def next_batch(self) -> Batch:
        """Remove and return the oldest items, at most BATCH."""
        return [self._items.popleft() for _ in range(min(BATCH, len(self._items)))]

    def delivered(self, batch: Batch) -> None:
        """The service received the batch."""
        if batch:
            self._metrics.sent.labels(self._name).inc(len(batch))
        if self._down and not self._items:
            log.info("delivered after an outage", to=self._name, dropped=self._dropped)
            self._down, self._dropped = False, 0

    def refused(self, batch: Batch, reason: str) -> None:
        """The service refused the batch; it is dropped."""
        if batch:
            self._drop("refused", len(batch))
            first = repr(batch[0])[:SHOWN]
            log.error("deliveries refused", to=self._name, count=len(batch), first=first, reason=reason)

    def undelivered(self, batch: Batch, reason: str = "") -> None:
        """Put the batch back before all other items. reason: why the service is unreachable; empty if it is not."""
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


async def post_all(queue: DeliveryQueue, client: JsonClient, path: str) -> None:
    """Post the waiting items as JSON lists, in order, as long as the service takes them.

    A batch whose answer was lost arrives twice: the service recognises its items.
    """

    async def post(batches: Sequence[Batch]) -> None:
        await client.call("POST", path, dict[str, int], body=batches[0], timeout_s=TIMEOUT_S)

    while queue and await deliver((queue,), post):
        pass


async def deliver(queues: Sequence[DeliveryQueue], send: Callable[[Sequence[Batch]], Awaitable[None]]) -> bool:
    """Send a batch of each queue in one message. Returns whether the receiver was reachable.

    A message that is refused, or cannot be encoded, is halved until the items at fault are alone, and those are
    dropped. After SENDS messages a refused message is not halved but dropped whole.
    """
    pieces: list[Owned] = [[(queue, item) for queue in queues for item in queue.next_batch()]]
    sends = 0
    try:
        while pieces:
            piece, sends = pieces[-1], sends + 1
            try:
                await send([_items_of(queue, piece) for queue in queues])
            except InvalidRequest as error:
                pieces.pop()
                if len(piece) > 1 and sends < SENDS:
                    half = len(piece) // 2
                    pieces += [piece[half:], piece[:half]]
                    continue
                for queue in queues:
                    queue.refused(_items_of(queue, piece), error.message)
            else:
                pieces.pop()
                for queue in queues:
                    queue.delivered(_items_of(queue, piece))
    except asyncio.CancelledError:
        _put_back(queues, pieces)
        raise
    except PolyphaseError as error:
        _put_back(queues, pieces, error.message)
        return False
    return True


def _items_of(queue: DeliveryQueue, piece: Owned) -> Batch:
    return [item for owner, item in piece if owner is queue]


def _put_back(queues: Sequence[DeliveryQueue], pieces: Sequence[Owned], reason: str = "") -> None:
    left = [pair for piece in reversed(pieces) for pair in piece]
    for queue in queues:
        queue.undelivered(_items_of(queue, left), reason)
