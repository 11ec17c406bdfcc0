"""What a gateway tells of its jobs: gathered, so that a short job costs one message and no request waits for it."""

from collections import deque

from gateway.job import Job
from gateway.metrics import GatewayMetrics
from shared.errors import PolyphaseError
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import JobReport

PERIOD_S = 0.1
_KEPT = 10_000  # final reports kept while no scheduler is there
_BATCH = 200
_REPORT_S = 2.0


class Reporter:
    """Keeps the newest report of each job until the next `flush`."""

    def __init__(self, schedulers: SchedulerClient, metrics: GatewayMetrics) -> None:
        self._schedulers = schedulers
        self._metrics = metrics
        self._open: dict[str, Job] = {}
        self._final: deque[JobReport] = deque(maxlen=_KEPT)

    def report(self, job: Job, outcome: str = "") -> None:
        """Note that a job changed; at its end, with its outcome."""
        if job.phase.final:
            self._open.pop(job.spec.job_id, None)
            self._final.append(job.report(outcome))
            self._metrics.ended(job, outcome)
        else:
            self._open[job.spec.job_id] = job

    async def flush(self) -> None:
        """Send what has gathered, in messages of bounded size; final reports wait for a scheduler if need be."""
        changed, self._open = self._open, {}
        waiting = [job.report() for job in changed.values()]
        while self._final or waiting:
            batch = [self._final.popleft() for _ in range(min(_BATCH, len(self._final)))]
            batch += [waiting.pop() for _ in range(min(_BATCH - len(batch), len(waiting)))]
            try:
                await self._schedulers.report(batch, timeout_s=_REPORT_S)
            except PolyphaseError:  # none is there: the jobs go on, and what they were is told later
                self._final.extendleft(report for report in reversed(batch) if report.phase.final)
                return
