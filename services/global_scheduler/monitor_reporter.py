"""The scheduler's reports to the monitor: outcomes of requests, demand, gateways, and the policies in use.

One message contains all of it: once per second while many requests arrive or end, every `FEW_S` with few of them, and
every `QUIET_S` with none.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from services.global_scheduler.forward import Batch, DeliveryQueue, deliver
from services.global_scheduler.placer import Placer
from shared.domain.demand import DemandSecond
from shared.domain.job import JobView
from shared.domain.route import Route
from shared.policy.demand import DemandCounter
from shared.runtime.tasks import until_next
from shared.wire.api import Outcome, SchedulerNews
from shared.wire.clients.monitor import MonitorClient

FORGET_S = 900.0  # after which a silent gateway is forgotten
STOPPED_S = 30.0  # for which a gateway that stopped is reported
PERIOD_S = 1.0
MANY = 20  # requests that were placed or have ended, which are reported at the next period
FEW_S = 2.0  # a report costs two processes as much as a hundred tokens
QUIET_S = 3.0  # the monitor counts a scheduler as gone that reports nothing for five seconds
MAX_PROBLEM = 2_048  # characters


class GatewayLiveness:
    """When each gateway last sent a message. `clock` is monotonic, in seconds. An empty name is ignored."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_message: dict[str, float] = {}
        self._stopped: dict[str, float] = {}

    def received(self, name: str) -> None:
        if name:
            self._last_message[name] = self._clock()
            self._stopped.pop(name, None)

    def stopped(self, name: str) -> None:
        """Record that the gateway has shut down in good order."""
        if name:
            self._last_message.pop(name, None)
            self._stopped[name] = self._clock()

    def recently_stopped(self) -> list[str]:
        since = self._clock() - STOPPED_S
        self._stopped = {name: at for name, at in self._stopped.items() if at > since}
        return list(self._stopped)

    def silent_s(self) -> dict[str, float]:
        """Seconds since the last message of each gateway."""
        now = self._clock()
        self._last_message = {name: at for name, at in self._last_message.items() if now - at < FORGET_S}
        return {name: now - at for name, at in self._last_message.items()}


class MonitorReporter:
    """Sends reports to the monitor. While the monitor is unreachable they wait, and the oldest are sent first. Without
    a monitor nothing is kept.
    """

    def __init__(
        self,
        scheduler_id: str,
        placer: Placer,
        monitor: MonitorClient | None,
        outcomes: DeliveryQueue,
        seconds: DeliveryQueue,
        gateways: GatewayLiveness,
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
        self._placed = 0  # requests of the seconds that wait to be sent
        self._changed = asyncio.Event()  # the policies in use
        placer.on_policies = self._changed.set

    def placed(self, job: JobView, route: Route) -> None:
        """Count the demand of a job that has its first route."""
        decider = self._placer.decider
        held_tokens, output_tokens = decider.expected(job, route)
        self._demand.count_request(job, held_tokens, output_tokens, decider.freedom, time.time())

    def job_ended(self, job_id: str, output_tokens: int) -> None:
        """Complete the job's demand. output_tokens: of a complete answer, else 0."""
        self._demand.count_end(job_id, output_tokens, time.time())

    def request_ended(self, outcome: Outcome) -> None:
        if self._monitor is not None:
            self._outcomes.add(outcome)

    async def run(self) -> None:
        """Report until cancelled: immediately after a change of the policies, otherwise once per period."""
        while True:
            changed = self._changed.is_set()
            self._changed.clear()
            await self.report(force=changed)
            with suppress(TimeoutError):
                async with asyncio.timeout(until_next(PERIOD_S)):
                    await self._changed.wait()

    async def report(self, *, force: bool = False) -> None:
        """Report if it is time (`_period_s`). force: in any case."""
        if self._monitor is None:
            return
        for second in self._demand.pop_finished(time.time()):
            self._seconds.add(second)
            self._placed += round(second.requests)
        since_s = time.monotonic() - self._sent_mono
        if not force and since_s < self._period_s() - PERIOD_S / 2:  # timers are not exact
            return
        while await deliver((self._outcomes, self._seconds), self._send):
            self._sent_mono, self._placed = time.monotonic(), 0
            if not self._outcomes and not self._seconds:
                return

    def _period_s(self) -> float:
        """Between two reports, by the requests that wait to be reported."""
        requests = self._placed + len(self._outcomes)
        if requests >= MANY:
            return PERIOD_S
        return FEW_S if requests else QUIET_S

    async def leave(self) -> None:
        """Report everything, and that this scheduler shuts down in good order."""
        self._leaving = True
        await self.report(force=True)

    async def _send(self, batches: Sequence[Batch]) -> None:
        outcomes, seconds = batches
        policies, problem = self._placer.followed
        assert self._monitor is not None
        report = SchedulerNews(
            revision=policies.revision,
            trouble=problem[:MAX_PROBLEM],
            demand=cast(list[DemandSecond], seconds),
            outcomes=cast(list[Outcome], outcomes),
            gateways=self._gateways.silent_s(),
            left=self._gateways.recently_stopped(),
            leaving=self._leaving,
        )
        await self._monitor.scheduler_news(self._scheduler_id, report)
