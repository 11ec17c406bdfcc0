"""What the monitor hears of a scheduler: outcomes of requests, what clients ask for, which policies it follows.

All of it goes in one message, a second apart while there is news of requests; a quiet scheduler tells of its quiet
seconds, and of its policies, once in a while.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from services.global_scheduler.forward import Batch, Waiting, deliver
from services.global_scheduler.placer import Placer
from shared.domain.demand import DemandSecond
from shared.domain.job import JobView
from shared.domain.route import Route
from shared.policy.demand import DemandCounter
from shared.wire.clients.monitor import MonitorClient

# MERGED gateways.py
# Which gateways are there, as their reports show; the monitor is told.


FORGET_S = 900.0  # one that is silent for so long is no more
TOLD_S = 30.0  # for so long it is told that one left


class Gateways:
    """By name, when each was last heard of. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._gone: dict[str, float] = {}

    def heard(self, name: str) -> None:
        """It shows that it lives."""
        if name:
            self._heard[name] = self._clock()
            self._gone.pop(name, None)

    def left(self, name: str) -> None:
        """It stopped in good order: nobody misses it."""
        if name:
            self._heard.pop(name, None)
            self._gone[name] = self._clock()

    def gone(self) -> list[str]:
        """Those that left lately."""
        since = self._clock() - TOLD_S
        self._gone = {name: at for name, at in self._gone.items() if at > since}
        return list(self._gone)

    def silent_s(self) -> dict[str, float]:
        """Seconds since each was heard of."""
        now = self._clock()
        self._heard = {name: at for name, at in self._heard.items() if now - at < FORGET_S}
        return {name: now - at for name, at in self._heard.items()}


# MERGED demand.py
# What clients ask for, second by second: the monitor decides on roles by it.


class DemandTeller:
    """Counts the jobs that get their first route here, and how long their answers turn out."""

    def __init__(self, scheduler_id: str, placer: Placer) -> None:
        self._placer = placer
        self._counter = DemandCounter(scheduler_id, time.time())

    def placed(self, job: JobView, route: Route) -> None:
        """A job has its first route."""
        held_tokens, output_tokens = self._placer.expected(job, route)
        self._counter.add(job, held_tokens, output_tokens, self._placer.freedom, time.time())

    def ended(self, job_id: str, output_tokens: int) -> None:
        """A job is over here; `output_tokens` of a whole answer, else 0."""
        self._counter.ended(job_id, output_tokens, time.time())

    def take(self) -> list[DemandSecond]:
        """The seconds that are over and were not taken yet."""
        return self._counter.take(time.time())


PERIOD_S = 1.0
QUIET_S = 3.0  # the monitor takes a scheduler for gone that tells nothing for five
MOST = 2_048  # characters of a trouble


class MonitorNews:
    """Tells the monitor; what it cannot be told now it hears later, oldest first. Without one nothing is kept."""

    def __init__(
        self,
        scheduler_id: str,
        placer: Placer,
        demand: DemandTeller,
        monitor: MonitorClient | None,
        outcomes: Waiting,
        seconds: Waiting,
        gateways: Gateways,
    ) -> None:
        self._scheduler_id = scheduler_id
        self._placer = placer
        self._demand = demand
        self._monitor = monitor
        self._outcomes = outcomes
        self._seconds = seconds
        self._gateways = gateways
        self._leaving = False
        self._told_mono = float("-inf")
        self._busy = False  # a second waits in which clients asked for something
        self._changed = asyncio.Event()
        placer.on_policies = self._changed.set

    def ended(self, outcome: dict[str, Any]) -> None:
        """A request is over."""
        if self._monitor is not None:
            self._outcomes.add(outcome)

    async def run(self) -> None:
        """Until cancelled: at once when the policies have changed, else when it is time."""
        while True:
            changed = self._changed.is_set()
            self._changed.clear()
            await self.step(at_once=changed)
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._changed.wait()

    async def step(self, *, at_once: bool = False) -> None:
        """Tell what is worth it by now, or all there is."""
        if self._monitor is None:
            return
        for second in self._demand.take():
            self._seconds.add(msgspec.to_builtins(second))
            self._busy = self._busy or not second.quiet
        lately = time.monotonic() - self._told_mono < QUIET_S
        if lately and not (at_once or self._busy or self._outcomes):
            return
        while await deliver((self._outcomes, self._seconds), self._send):
            self._told_mono, self._busy = time.monotonic(), False
            if not self._outcomes and not self._seconds:
                return

    async def leave(self) -> None:
        """Tell all there is once more, and that this scheduler stops in good order."""
        self._leaving = True
        await self.step(at_once=True)

    async def _send(self, batches: Sequence[Batch]) -> None:
        outcomes, seconds = batches
        policies, trouble = self._placer.followed
        assert self._monitor is not None
        await self._monitor.scheduler_news(
            self._scheduler_id,
            policies.revision,
            trouble[:MOST],
            demand=seconds,
            outcomes=outcomes,
            gateways=self._gateways.silent_s(),
            left=self._gateways.gone(),
            leaving=self._leaving,
        )
