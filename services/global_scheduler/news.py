"""What a scheduler reports to the monitor: outcomes of requests, demand, the gateways, the policies it follows.

All of it goes in one message, a second apart while requests come. A quiet scheduler reports its quiet seconds, and its
policies, every `QUIET_S`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from services.global_scheduler.forward import Batch, Waiting, deliver
from services.global_scheduler.placer import Placer
from shared.domain.demand import DemandSecond
from shared.domain.job import JobView
from shared.domain.route import Route
from shared.policy.demand import DemandCounter
from shared.wire.api import Outcome, SchedulerNews
from shared.wire.clients.monitor import MonitorClient

FORGET_S = 900.0  # a gateway that is silent for so long is forgotten
LEFT_S = 30.0  # for so long a gateway that stopped is reported
PERIOD_S = 1.0
QUIET_S = 3.0  # the monitor counts a scheduler as gone that reports nothing for five seconds
MAX_TROUBLE = 2_048  # characters


class Gateways:
    """When each gateway was last heard of. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._gone: dict[str, float] = {}

    def heard(self, name: str) -> None:
        """The gateway has shown that it lives."""
        if name:
            self._heard[name] = self._clock()
            self._gone.pop(name, None)

    def left(self, name: str) -> None:
        """The gateway stopped in good order."""
        if name:
            self._heard.pop(name, None)
            self._gone[name] = self._clock()

    def gone(self) -> list[str]:
        """Gateways that stopped lately."""
        since = self._clock() - LEFT_S
        self._gone = {name: at for name, at in self._gone.items() if at > since}
        return list(self._gone)

    def silent_s(self) -> dict[str, float]:
        """Seconds since each was heard of."""
        now = self._clock()
        self._heard = {name: at for name, at in self._heard.items() if now - at < FORGET_S}
        return {name: now - at for name, at in self._heard.items()}


class MonitorNews:
    """Reports to the monitor; while it is away news wait, and the oldest go first. Without a monitor none are kept."""

    def __init__(
        self,
        scheduler_id: str,
        placer: Placer,
        monitor: MonitorClient | None,
        outcomes: Waiting,
        seconds: Waiting,
        gateways: Gateways,
    ) -> None:
        self._scheduler_id = scheduler_id
        self._placer = placer
        self._demand = DemandCounter(scheduler_id, time.time())
        self._monitor = monitor
        self._outcomes = outcomes
        self._seconds = seconds
        self._gateways = gateways
        self._leaving = False
        self._sent_mono = float("-inf")
        self._busy = False  # a second with requests waits
        self._changed = asyncio.Event()
        placer.on_policies = self._changed.set

    def placed(self, job: JobView, route: Route) -> None:
        """A job has got its first route."""
        decider = self._placer.decider
        held_tokens, output_tokens = decider.expected(job, route)
        self._demand.count_request(job, held_tokens, output_tokens, decider.freedom, time.time())

    def answered(self, job_id: str, output_tokens: int) -> None:
        """A job has ended here; `output_tokens` of a complete answer, else 0."""
        self._demand.count_end(job_id, output_tokens, time.time())

    def ended(self, outcome: Outcome) -> None:
        """A request has ended."""
        if self._monitor is not None:
            self._outcomes.add(outcome)

    async def run(self) -> None:
        """Report until cancelled: at once when the policies have changed, else when it is time."""
        while True:
            changed = self._changed.is_set()
            self._changed.clear()
            await self.step(at_once=changed)
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._changed.wait()

    async def step(self, *, at_once: bool = False) -> None:
        """Report if there is news worth a message by now; at_once: in any case."""
        if self._monitor is None:
            return
        for second in self._demand.pop_finished(time.time()):
            self._seconds.add(second)
            self._busy = self._busy or not second.quiet
        lately = time.monotonic() - self._sent_mono < QUIET_S
        if lately and not (at_once or self._busy or self._outcomes):
            return
        while await deliver((self._outcomes, self._seconds), self._send):
            self._sent_mono, self._busy = time.monotonic(), False
            if not self._outcomes and not self._seconds:
                return

    async def leave(self) -> None:
        """Report everything once more, and that this scheduler stops in good order."""
        self._leaving = True
        await self.step(at_once=True)

    async def _send(self, batches: Sequence[Batch]) -> None:
        outcomes, seconds = batches
        policies, trouble = self._placer.followed
        assert self._monitor is not None
        news = SchedulerNews(
            revision=policies.revision,
            trouble=trouble[:MAX_TROUBLE],
            demand=cast(list[DemandSecond], seconds),
            outcomes=cast(list[Outcome], outcomes),
            gateways=self._gateways.silent_s(),
            left=self._gateways.gone(),
            leaving=self._leaving,
        )
        await self._monitor.scheduler_news(self._scheduler_id, news)
