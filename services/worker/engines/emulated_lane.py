"""A lane of an emulated engine: a batch in flight, its scheduler, and its steps in real time.

An engine has as many as it has pipeline stages, each with its share of the memory; a step of one takes as long as the
pipeline needs from a batch of it to its next. The simulator counts so, too.
"""

import asyncio
import time
from collections.abc import Callable

from services.worker.engines.base import deliver
from services.worker.engines.emulated_scheduler import EmulatedScheduler, Entry
from services.worker.engines.step_log import StepLog
from shared.cost.step import Batch
from shared.wire.messages import TokenStep

_LATE_S = 0.005  # a timer that fires late makes the next step so much shorter, at most: the mean keeps to the model


class EmulatedLane:
    """Steps what its scheduler plans; `duration` says how long a batch takes."""

    def __init__(self, scheduler: EmulatedScheduler, duration: Callable[[Batch], float], steps: StepLog) -> None:
        self.scheduler = scheduler
        self._duration = duration
        self._steps = steps
        self._work = asyncio.Event()

    def wake(self) -> None:
        """Look again who may enter."""
        self._work.set()

    async def run(self) -> None:
        """Step for ever."""
        due = 0.0
        while True:
            began = time.monotonic()  # the loop's own clock may tick in milliseconds
            chunks, decodes = self.scheduler.plan(began)
            if not chunks and not decodes:
                await self._wait(began)
                due = time.monotonic()
                continue
            batch = _batch_of(chunks, decodes)
            due = max(due, began - _LATE_S) + self._duration(batch)
            await asyncio.sleep(due - began)
            self._finish_step(chunks, decodes)
            seconds = time.monotonic() - began
            self._steps.add(seconds, 0.0, batch.prefill, batch.decode_count, batch.decode_context_tokens)

    async def _wait(self, now: float) -> None:
        """Until there is new work or the next import is complete."""
        self._work.clear()
        ready_s = min((entry.ready_s for entry in self.scheduler.coming), default=None)
        try:
            async with asyncio.timeout(None if ready_s is None else ready_s - now):
                await self._work.wait()
        except TimeoutError:
            pass

    def _finish_step(self, chunks: list[tuple[Entry, int]], decodes: list[Entry]) -> None:
        for entry, tokens in (*((entry, 1) for entry in decodes), *chunks):
            if entry not in self.scheduler.running:
                continue  # aborted during the step
            entry.computed += tokens
            if entry.use is not None:
                entry.use.computed(entry.computed)
            if entry.missing:
                continue  # not done with its prompt
            token = entry.token_at(entry.tokens)
            entry.tokens += 1
            entry.left -= 1
            if not entry.left:
                self.scheduler.remove(entry.request.request_id)
            reused, entry.reused = entry.reused, None
            deliver(entry.sink, TokenStep([token], "" if entry.left else entry.ends, reused=reused))


def _batch_of(chunks: list[tuple[Entry, int]], decodes: list[Entry]) -> Batch:
    prefill = tuple((tokens, entry.computed) for entry, tokens in chunks)
    return Batch(prefill, len(decodes), sum(entry.computed for entry in decodes))
