"""REPORT: what gateways report of their jobs goes to memory, to the database, to the monitor and to the predictors."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from services.global_scheduler.forward import DeliveryQueue
from services.global_scheduler.monitor_reporter import GatewayLiveness, MonitorReporter
from services.global_scheduler.placer import Placer, SchedulerMetrics
from services.global_scheduler.settings import SchedulerSettings
from shared.domain.job import LOST, Phase, Slo
from shared.domain.route import Route
from shared.errors import Busy, Delayed, InstancesLost, Overloaded
from shared.policy.truth import FEWEST_TOKENS, Compared
from shared.runtime.logs import get_log
from shared.runtime.tasks import until_next
from shared.store.tables import requests
from shared.store.write_behind import Row, WriteBehind
from shared.timeline import TimelineSums
from shared.wire.api import Ending, LostInstance, Outcome
from shared.wire.api.predictor import Observation
from shared.wire.api.scheduler import RequestRow
from shared.wire.messages import JobReport, JobReports, PlaceRequest, Refused
from shared.wire.rpc_server import ServerCall

log = get_log(__name__)
REFUSALS = (Busy.code, Overloaded.code, Delayed.code)  # outcomes of jobs that were turned away, and did not fail
LOSSES_KEPT = 32  # of a request, the newest: the monitor takes no more
SWEEP_S = 1.0
ROWS_S = 2.0  # rows of requests that share a transaction
MAX_CLASSES = 1_000  # SLO classes remembered; their names come from clients' keys
_STEP_S = 1.5 * SWEEP_S  # a longer time between two sweeps is a pause of this process, not silence of gateways


class Reports:
    """The newest jobs by id, and the open ones. When a job has ended its work no longer counts for placement."""

    def __init__(
        self,
        settings: SchedulerSettings,
        store: WriteBehind,
        metrics: SchedulerMetrics,
        placer: Placer,
        monitor: MonitorReporter,
        lengths: Sequence[DeliveryQueue],
        gateways: GatewayLiveness,
    ) -> None:
        self._scheduler_id = settings.scheduler_id
        self._ring_jobs = settings.ring_jobs
        self._store = store
        self._metrics = metrics
        self._placer = placer
        self._monitor = monitor
        self._lengths = lengths
        self._gateways = gateways
        self._jobs: OrderedDict[str, JobReport] = OrderedDict()
        self._classes: dict[str, Slo] = {}
        self._open = OpenJobs(settings.lost_after_s, asyncio.get_running_loop().time())

    def place(self, request: PlaceRequest, _: ServerCall) -> Route:
        """The PLACE method. A job with a route is open, even if no report of it ever comes."""
        job = request.job
        known = self._classes.get(job.slo.name)
        if known != job.slo and (known is not None or len(self._classes) < MAX_CLASSES):
            self._classes[job.slo.name] = job.slo  # reports have the class's name only
        route = self._placer.place(request)
        new = job.job_id not in self._open and job.job_id not in self._jobs
        self._open.placed(job.job_id)
        if new:
            self._monitor.placed(job, route)
        return route

    def handle(self, reports: JobReports, _: ServerCall) -> None:
        """The REPORT method."""
        now = time.time()
        if reports.leaving:
            self._gateways.stopped(reports.gateway_id)
        else:
            self._gateways.received(reports.gateway_id)
        for refused in reports.refused:
            self._monitor.request_ended(refusal_of(refused, now))
        self._open.alive(reports.origin)
        for report in reports.reports:
            self._apply(report, now)
            if not report.phase.final:
                self._open.reported(report.job_id, reports.origin)

    def sweep(self) -> None:
        """End the jobs that no gateway reports any more: lost with their gateway, or another scheduler's by now."""
        swept = self._open.sweep(asyncio.get_running_loop().time())
        for job_id in swept.elsewhere:
            self._jobs.pop(job_id, None)
            self._end(job_id, 0, None)
        for job_id in swept.lost:
            known = self._jobs.get(job_id)
            if known is None:
                self._end(job_id, 0, None)
            else:
                ended = {"phase": Phase.FAILED, "outcome": LOST, "slo_met": False}
                self._apply(msgspec.structs.replace(known, **ended), time.time())
        if swept.lost:
            self._metrics.lost.inc(len(swept.lost))
            log.warning("jobs lost with their gateway", count=len(swept.lost), first=swept.lost[0])

    def newest(self, phase: Phase | None, limit: int) -> list[RequestRow]:
        """Jobs in memory, newest first."""
        found: list[RequestRow] = []
        for report in reversed(self._jobs.values()):
            if len(found) >= limit:
                break
            if phase is None or report.phase is phase:
                found.append(row_of(report))
        return found

    def get(self, job_id: str) -> JobReport | None:
        """The newest report of a job that is in memory."""
        return self._jobs.get(job_id)

    def _apply(self, report: JobReport, now: float) -> None:
        """Apply a report. A report that comes after a final one of its job was overtaken on the way, and is ignored."""
        known = self._jobs.get(report.job_id)
        if known is not None and known.phase.final and known.outcome != LOST:
            return
        self._jobs[report.job_id] = report
        if len(self._jobs) > self._ring_jobs:
            self._jobs.popitem(last=False)
        if known is None or _row_key(known) != _row_key(report):
            self._store.put(requests, self._row(report, now), within_s=until_next(ROWS_S))
        if report.phase.final:
            self._open.ended(report.job_id)
            complete = report.phase is Phase.COMPLETED
            met = False if report.phase is Phase.FAILED else report.slo_met
            self._end(report.job_id, report.output_tokens if complete else 0, met, compared_of(report))
            self._monitor.request_ended(outcome_of(report, self._classes.get(report.slo, Slo(report.slo)), now))
            if complete:
                for replica in self._lengths:
                    replica.add(_length(report))
        elif report.phase is Phase.DECODE:
            self._placer.decodes(report.job_id)

    def _end(self, job_id: str, output_tokens: int, met: bool | None, compared: Compared | None = None) -> None:
        self._placer.ended(job_id, output_tokens, met, compared)
        self._monitor.job_ended(job_id, output_tokens)

    def _row(self, report: JobReport, now: float) -> Row:
        columns = {name: getattr(report, name) for name in _COLUMNS} | {"phase": report.phase.value}
        timeline = report.timeline_json or None if report.phase.final else None
        own = {"scheduler_id": self._scheduler_id, "final": report.phase.final, "updated_s": now}
        return {**columns, **own, "timeline": timeline}


def _row_key(report: JobReport) -> tuple[object, ...]:
    """A row is written when these change: open jobs are reported every few seconds, with their tokens so far."""
    return report.phase, report.prefill_instance, report.decode_instance, report.split, report.outcome


_COLUMNS = RequestRow.__struct_fields__


def row_of(report: JobReport) -> RequestRow:
    """A report without its timeline, as HTTP answers have it."""
    return RequestRow(**{name: getattr(report, name) for name in _COLUMNS})


def compared_of(report: JobReport) -> Compared | None:
    """What the estimate of a complete job predicted, and what came of it. None where none was made, and where the job
    lost an instance: the estimate does not foresee that.
    """
    estimated, ttft_s = report.estimated, report.ttft_s
    if estimated is None or ttft_s is None or report.phase is not Phase.COMPLETED or report.losses:
        return None
    served_s = max(0.0, report.arrived_s + ttft_s - report.placed_s)
    tpot_s = report.tpot_s if report.output_tokens >= FEWEST_TOKENS else None
    return Compared(estimated, report.prompt_tokens, served_s, tpot_s)


def _length(report: JobReport) -> Observation:
    """What a predictor learns from, and is judged by."""
    found = Observation(report.prompt_tokens, report.output_tokens, report.max_tokens or None)
    if (prediction := report.prediction) is None:
        return found
    return msgspec.structs.replace(
        found, model=prediction.model, classified=prediction.classified, expected_tokens=prediction.mean
    )


def outcome_of(report: JobReport, slo: Slo, now: float) -> Outcome:
    """How a job in a final phase ended, for the monitor; `now` is unix seconds."""
    refused = report.phase is Phase.FAILED and report.outcome in REFUSALS
    lost = report.losses[-LOSSES_KEPT:] if report.outcome == InstancesLost.code else ()
    predicted = ""
    if report.asked:
        predicted = "none" if report.prediction is None else "classifier" if report.prediction.model else "observed"
    outcome = Outcome(
        job_id=report.job_id,
        slo=report.slo,
        ended_s=now,
        phase=cast(Ending, "refused" if refused else report.phase.value),
        code=report.outcome,
        ttft_s=report.ttft_s,
        tpot_s=report.tpot_s,
        ttft_target_s=slo.ttft_s,
        tpot_target_s=slo.tpot_s,
        itl_target_s=slo.itl_s,
        longest_gap_s=report.longest_gap_s,
        gaps=report.gaps,
        gaps_over=report.gaps_over,
        failed=report.phase is Phase.FAILED,
        prompt_tokens=report.prompt_tokens,
        output_tokens=report.output_tokens,
        predicted=predicted,
        losses=[LostInstance(loss.position, loss.instance_id) for loss in lost],
    )
    sums = report.sums
    if sums is None and report.timeline_json:  # this scheduler ended the job, whose gateway is gone
        sums = TimelineSums.of(report.timeline())
    return outcome if sums is None else msgspec.structs.replace(outcome, **msgspec.structs.asdict(sums))


def refusal_of(refused: Refused, now: float) -> Outcome:
    """Requests that were turned away before they were jobs."""
    job_id = f"refused:{refused.key}"
    return Outcome(job_id=job_id, slo=refused.slo, ended_s=now, phase="refused", code=refused.code, count=refused.count)


@dataclass(slots=True)
class _OpenJob:
    origin: str  # of the gateway process that reported the job; empty until it did
    last_report_s: float


@dataclass(frozen=True, slots=True)
class Swept:
    """Jobs that are no longer open here. lost: their gateway process is gone. elsewhere: it lives, and reports them to
    another scheduler, or never received their placement.
    """

    lost: tuple[str, ...]
    elsewhere: tuple[str, ...]


class OpenJobs:
    """When each open job, and each gateway process, was last reported.

    The clock counts the time between two sweeps, but no pause of this process: messages that arrived while it was
    frozen wait unread, and are not silence. Steps of the host's clock do not matter either. `now_mono` is monotonic.
    """

    def __init__(self, lost_after_s: float, now_mono: float) -> None:
        self._lost_after_s = lost_after_s
        self._mono = now_mono
        self._clock_s = 0.0
        self._jobs: dict[str, _OpenJob] = {}
        self._origins: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def placed(self, job_id: str) -> None:
        """The job got a route here."""
        known = self._jobs.get(job_id)
        self._jobs[job_id] = _OpenJob(known.origin if known else "", self._clock_s)

    def reported(self, job_id: str, origin: str) -> None:
        """The job's gateway process reports that it goes on."""
        self._jobs[job_id] = _OpenJob(origin, self._clock_s)

    def alive(self, origin: str) -> None:
        """The gateway process has shown that it lives."""
        self._origins[origin] = self._clock_s

    def ended(self, job_id: str) -> None:
        """The job has ended; unknown ones are ignored."""
        self._jobs.pop(job_id, None)

    def sweep(self, now_mono: float) -> Swept:
        """Advance the clock, and drop jobs and gateway processes that were silent for too long."""
        self._clock_s += min(_STEP_S, max(0.0, now_mono - self._mono))
        self._mono = now_mono
        since_s = self._clock_s - self._lost_after_s
        self._origins = {origin: last_s for origin, last_s in self._origins.items() if last_s > since_s}
        silent = [(job_id, one.origin) for job_id, one in self._jobs.items() if one.last_report_s <= since_s]
        for job_id, _ in silent:
            del self._jobs[job_id]
        return Swept(
            tuple(job_id for job_id, origin in silent if origin and origin not in self._origins),
            tuple(job_id for job_id, origin in silent if not origin or origin in self._origins),
        )
