"""REPORT: what gateways tell of their jobs goes to memory, to the database, and on to who learns from it."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from services.global_scheduler.forward import Forwarder
from services.global_scheduler.gateways import Gateways
from services.global_scheduler.metrics import SchedulerMetrics
from services.global_scheduler.open_jobs import OpenJobs
from services.global_scheduler.outcomes import outcome_of, refusal_of
from shared.domain.job import LOST, Phase, Slo
from shared.runtime.logs import get_log
from shared.store.tables import requests
from shared.store.write_behind import WriteBehind
from shared.wire.messages import JobReport, JobReports, PlaceRequest
from shared.wire.rpc_server import ServerCall

log = get_log(__name__)
ROWS_S = 1.0  # rows of requests that share a transaction
MAX_CLASSES = 1_000  # SLO classes remembered; names come from clients' keys


class Reports:
    """The newest jobs by id, and the places where their reports go.

    `on_decode` is called when a job has come to its decode instance; `on_end` once for each job that is open here no
    longer, for whatever reason, with the tokens of its answer if that is whole, and whether it kept its targets if that
    can be said: its work counts no more.
    """

    def __init__(
        self,
        scheduler_id: str,
        ring_jobs: int,
        store: WriteBehind,
        metrics: SchedulerMetrics,
        on_outcome: Callable[[dict[str, Any]], None],
        lengths: Sequence[Forwarder],
        open_jobs: OpenJobs,
        on_decode: Callable[[str], None],
        on_end: Callable[[str, int, bool | None], None],
        gateways: Gateways | None = None,
    ) -> None:
        self._scheduler_id = scheduler_id
        self._ring_jobs = ring_jobs
        self._store = store
        self._metrics = metrics
        self._on_outcome = on_outcome
        self._lengths = lengths
        self._jobs: OrderedDict[str, JobReport] = OrderedDict()
        self._classes: dict[str, Slo] = {}
        self._on_decode = on_decode
        self._on_end = on_end
        self._open = open_jobs
        self._gateways = gateways or Gateways(time.monotonic)

    def handle(self, reports: JobReports, _: ServerCall) -> None:
        """The REPORT method."""
        now = time.time()
        if reports.leaving:
            self._gateways.left(reports.gateway_id)
        else:
            self._gateways.heard(reports.gateway_id)
        for refused in reports.refused:
            self._on_outcome(refusal_of(refused, now))
        self._open.alive(reports.origin)
        for report in reports.reports:
            self.take(report, now)
            if not report.phase.final:
                self._open.heard(report.job_id, reports.origin)

    def placed(self, job_id: str) -> bool:
        """A job got a route: it is open, even if no report of it ever comes. Whether it is new here."""
        new = job_id not in self._open and job_id not in self._jobs
        self._open.placed(job_id)
        return new

    def learn_targets(self, request: PlaceRequest) -> None:
        """Remember the targets of the job's SLO class: reports carry its name only."""
        slo = request.job.slo
        if self._classes.get(slo.name) != slo and (slo.name in self._classes or len(self._classes) < MAX_CLASSES):
            self._classes[slo.name] = slo

    def take(self, report: JobReport, now: float) -> None:
        """Take one report in. A final phase is taken once; what comes after it was overtaken on the way."""
        known = self._jobs.get(report.job_id)
        if known is not None and known.phase.final and known.outcome != LOST:
            return
        self._jobs[report.job_id] = report
        if len(self._jobs) > self._ring_jobs:
            self._jobs.popitem(last=False)
        if known is None or _stage(known) != _stage(report):  # open jobs are told of again every few seconds
            self._store.put(requests, self._row(report, now), within_s=ROWS_S)
        if report.phase.final:
            self._open.ended(report.job_id)
            whole = report.phase is Phase.COMPLETED
            met = False if report.phase is Phase.FAILED else report.slo_met
            self._on_end(report.job_id, report.output_tokens if whole else 0, met)
            self._forward(report, now)
        elif report.phase is Phase.DECODE:
            self._on_decode(report.job_id)

    def sweep(self) -> None:
        """End what nobody speaks for: jobs of a gateway that is gone are lost; those of another scheduler leave."""
        swept = self._open.sweep(asyncio.get_running_loop().time())
        for job_id in swept.elsewhere:
            self._jobs.pop(job_id, None)
            self._on_end(job_id, 0, None)
        for job_id in swept.lost:
            known = self._jobs.get(job_id)
            if known is None:
                self._on_end(job_id, 0, None)
            else:
                ended = {"phase": Phase.FAILED, "outcome": LOST, "slo_met": False}
                self.take(msgspec.structs.replace(known, **ended), time.time())
        if swept.lost:
            self._metrics.lost.inc(len(swept.lost))
            log.warning("jobs lost with their gateway", count=len(swept.lost), first=swept.lost[0])

    def newest(self, phase: Phase | None, limit: int) -> list[dict[str, Any]]:
        """Jobs in memory, newest first, without timelines."""
        found: list[dict[str, Any]] = []
        for report in reversed(self._jobs.values()):
            if len(found) >= limit:
                break
            if phase is None or report.phase is phase:
                found.append(plain(report))
        return found

    def get(self, job_id: str) -> JobReport | None:
        """The newest report of a job that is still in memory."""
        return self._jobs.get(job_id)

    def _forward(self, report: JobReport, now: float) -> None:
        self._on_outcome(outcome_of(report, self._classes.get(report.slo, Slo(report.slo)), now))
        if report.phase is Phase.COMPLETED:
            for replica in self._lengths:
                replica.add(_length(report))

    def _row(self, report: JobReport, now: float) -> dict[str, Any]:
        row = plain(report)
        row["scheduler_id"] = self._scheduler_id
        row["final"] = report.phase.final
        row["updated_s"] = now
        row["timeline"] = None
        if report.timeline is not None and report.phase.final:
            row["timeline"] = msgspec.json.encode(report.timeline).decode()
        return row


def _length(report: JobReport) -> dict[str, Any]:
    """What the predictor learns from, and is judged by."""
    said = report.prediction
    found: dict[str, Any] = {
        "prompt_tokens": report.prompt_tokens,
        "output_tokens": report.output_tokens,
        "max_tokens": report.max_tokens or None,
    }
    if said is not None:
        found |= {"model": said.model, "classified": said.classified, "expected_tokens": said.mean}
    return found


def _stage(report: JobReport) -> tuple[object, ...]:
    """What of a report is worth a row: not the number of tokens so far."""
    return report.phase, report.prefill_instance, report.decode_instance, report.split, report.outcome


def plain(report: JobReport) -> dict[str, Any]:
    """A report without its timeline, as a row of the status table."""
    return {
        "job_id": report.job_id,
        "gateway_id": report.gateway_id,
        "caller": report.caller,
        "phase": report.phase.value,
        "arrived_s": report.arrived_s,
        "prompt_tokens": report.prompt_tokens,
        "output_tokens": report.output_tokens,
        "prefill_instance": report.prefill_instance,
        "decode_instance": report.decode_instance,
        "split": report.split,
        "slo": report.slo,
        "outcome": report.outcome,
        "ttft_s": report.ttft_s,
        "tpot_s": report.tpot_s,
        "longest_gap_s": report.longest_gap_s,
        "gaps": report.gaps,
        "gaps_over": report.gaps_over,
        "slo_met": report.slo_met,
    }
