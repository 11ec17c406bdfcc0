"""Handing things on to services that may be away: what has gathered is sent until all is taken or something fails."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from services.global_scheduler.waiting import Waiting
from shared.errors import InvalidRequest, PolyphaseError
from shared.wire.clients.http import JsonClient

TIMEOUT_S = 2.0
Batch = list[dict[str, Any]]


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
    """Send a batch of each queue in one message. Whether the receiver was there; what it refuses is dropped."""
    batches = [queue.take() for queue in queues]
    each = list(zip(queues, batches, strict=True))
    try:
        await send(batches)
    except InvalidRequest as error:
        for queue, batch in each:
            queue.refused(batch, error.message)
    except asyncio.CancelledError:
        for queue, batch in each:
            queue.undelivered(batch)
        raise
    except PolyphaseError as error:
        for queue, batch in each:
            queue.undelivered(batch, error.message)
        return False
    else:
        for queue, batch in each:
            queue.delivered(batch)
    return True
