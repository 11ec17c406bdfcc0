"""What clients ask for, told to the monitor once a second: it decides on roles by it."""

import time

import msgspec

from services.global_scheduler.forward import Forwarder
from services.global_scheduler.placer import Placer
from shared.domain.job import JobView
from shared.domain.route import Route
from shared.policy.demand import DemandCounter


class DemandTeller:
    """Counts the jobs that get their first route here, and how long their answers turn out."""

    def __init__(self, scheduler_id: str, placer: Placer, monitor: Forwarder) -> None:
        self._placer = placer
        self._monitor = monitor
        self._counter = DemandCounter(scheduler_id, time.time())

    def placed(self, job: JobView, route: Route) -> None:
        """A job has its first route."""
        held_tokens, output_tokens = self._placer.expected(job, route)
        self._counter.add(job, held_tokens, output_tokens, self._placer.freedom, time.time())

    def ended(self, job_id: str, output_tokens: int) -> None:
        """A job is over here; `output_tokens` of a whole answer, else 0."""
        self._counter.ended(job_id, output_tokens, time.time())

    async def step(self) -> None:
        """Tell of the seconds that are over; what cannot be told now is told later."""
        for second in self._counter.take(time.time()):
            self._monitor.add(msgspec.to_builtins(second))
        await self._monitor.step()
