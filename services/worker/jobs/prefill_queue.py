"""The prefill instance's queue: who goes to the engine next, and when; it keeps the engine's batch small enough to
reorder.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shared.domain.job import JobView
from shared.policy.prefill_order import OrderedQueue, PrefillOrder

_Turn = tuple["asyncio.Future[None]", Callable[[], bool]]


class PrefillQueue:
    """Lets `batch` jobs into the engine at once and takes the next by the policy."""

    def __init__(self, order: PrefillOrder, batch: int) -> None:
        self._waiting: OrderedQueue[_Turn] = OrderedQueue(order)
        self._free = batch
        self._admitted = 0
        self._admitted_tokens = 0

    @property
    def waiting(self) -> int:
        """Jobs that have not got their turn."""
        return len(self._waiting)

    @property
    def queued(self) -> int:
        """Jobs whose prefill is not done, in the engine or not yet."""
        return self._admitted + len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of those."""
        return self._admitted_tokens + self._waiting.tokens

    @asynccontextmanager
    async def turn(self, job: JobView, has_room: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
        """Wait for a place in the engine and hold it. `has_room` says, and sees to it, that the job may go on."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(job, (turn, has_room))
        self.admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                self._admitted -= 1
                self._admitted_tokens -= job.prompt_tokens
            else:
                self._waiting.remove(job.job_id)
            self.admit()

    def admit(self) -> None:
        """Let in whom there is room for. Nobody overtakes a job that waits for room: it would never get any."""
        while self._free > 0 and len(self._waiting):
            job, (turn, has_room) = self._waiting.peek(time.time())
            if not turn.done() and not has_room():
                return
            self._waiting.pop(time.time())
            if not turn.done():
                self._free -= 1
                self._admitted += 1
                self._admitted_tokens += job.prompt_tokens
                turn.set_result(None)
