"""Handing things on to services that may be away: what has gathered is sent until all is taken or something fails."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from services.global_scheduler.waiting import Waiting
from shared.errors import InvalidRequest, PolyphaseError
from shared.wire.clients.http import JsonClient

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
