"""What clients ask for, second by second: the monitor decides on roles by it."""

import time

from services.global_scheduler.placer import Placer
from shared.domain.demand import DemandSecond
from shared.domain.job import JobView
from shared.domain.route import Route
from shared.policy.demand import DemandCounter


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
