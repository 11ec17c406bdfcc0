"""What a gateway tells of its jobs: gathered, so that a short job costs one message and no request waits for it."""

import asyncio
import uuid
from collections import Counter, deque
from contextlib import suppress

from gateway.job import Job
from gateway.metrics import GatewayMetrics
from gateway.recording import Recorder
from shared.runtime.logs import get_log
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import JobReport, Refused

log = get_log(__name__)
PERIOD_S = 0.1
REFRESH_S = 3.0  # between two words of every open job; schedulers drop those that they hear nothing of
_KEPT = 10_000  # final reports kept while no scheduler is there
_BATCH = 200
_REPORT_S = 2.0


class Reporter:
    """Keeps the newest report of each job until the next `flush`."""

    def __init__(self, schedulers: SchedulerClient, metrics: GatewayMetrics, recorder: Recorder | None = None) -> None:
        self._schedulers = schedulers
        self._metrics = metrics
        self._recorder = recorder
        self._open: dict[str, Job] = {}
        metrics.requests.open = self._open.values
        self._changed: dict[str, Job] = {}
        self._final: deque[JobReport] = deque()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._untold: list[Refused] = []
        self._refreshed_mono = 0.0
        self._news = asyncio.Event()

    def report(self, job: Job, outcome: str = "") -> None:
        """Note that a job changed; at its end, with its outcome."""
        job_id = job.spec.job_id
        self._news.set()
        if job.phase.final:
            self._open.pop(job_id, None)
            self._changed.pop(job_id, None)
            final = job.report(outcome)
            self._keep(final)
            self._metrics.ended(job, final)
            if self._recorder is not None:
                self._recorder.note(job)
        else:
            self._open[job_id] = self._changed[job_id] = job

    def refused(self, slo: str, code: str) -> None:
        """A request was turned away before it was a job: told at the next refresh."""
        self._refused[slo, code] += 1

    async def run(self) -> None:
        """Flush whenever there is something to tell, PERIOD_S apart at least and REFRESH_S at most."""
        clock = asyncio.get_running_loop().time
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._refreshed_mono + REFRESH_S - clock())):
                    await self._news.wait()
            self._news.clear()
            await self.flush()
            if self._final:  # nobody took them
                self._news.set()
            await asyncio.sleep(PERIOD_S)

    async def flush(self) -> None:
        """Send what has gathered, in messages of bounded size; final reports wait for a scheduler if need be."""
        changed, self._changed = self._changed, {}
        waiting = [job.report() for job in changed.values()]
        while self._final or waiting:
            batch = [self._final.popleft() for _ in range(min(_BATCH, len(self._final)))]
            batch += [waiting.pop() for _ in range(min(_BATCH - len(batch), len(waiting)))]
            left = batch
            try:
                left = await self._schedulers.report(batch, timeout_s=_REPORT_S)
            finally:
                self._final.extendleft(report for report in reversed(left) if report.phase.final)
            if left:  # none is there: the jobs go on, and what they were is told later
                return
        await self._refresh()

    async def _refresh(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._refreshed_mono < REFRESH_S:
            return
        self._refreshed_mono = now
        jobs = list(self._open.values())
        for start in range(0, max(1, len(jobs)), _BATCH):
            some = [job.report() for job in jobs[start : start + _BATCH] if not job.phase.final]
            await self._schedulers.refresh(some, timeout_s=_REPORT_S)
        await self._tell_refusals()

    async def _tell_refusals(self) -> None:
        """Those that nobody has taken yet are told again under the same keys."""
        self._untold += [Refused(uuid.uuid4().hex, slo, code, count) for (slo, code), count in self._refused.items()]
        self._refused.clear()
        del self._untold[:-_KEPT]
        if self._untold and await self._schedulers.refused(self._untold, timeout_s=_REPORT_S):
            self._untold = []

    async def leave(self) -> None:
        """Hand over what is left, and say that this gateway stops in good order."""
        await self.flush()
        await self._tell_refusals()
        await self._schedulers.leave(timeout_s=_REPORT_S)

    def _keep(self, report: JobReport) -> None:
        self._final.append(report)
        if len(self._final) > _KEPT:
            lost = self._final.popleft()
            self._metrics.reports_dropped.inc()
            log.error("a final report is dropped: no scheduler took any for long", job_id=lost.job_id, kept=_KEPT)
