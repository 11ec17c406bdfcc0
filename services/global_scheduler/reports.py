"""REPORT: what gateways tell of their jobs goes to memory, to the database, and on to who learns from it."""

import time
from collections import OrderedDict
from typing import Any

import msgspec

from services.global_scheduler.forward import Forwarder
from services.global_scheduler.metrics import SchedulerMetrics
from shared.domain.job import Phase, Slo
from shared.store.tables import requests
from shared.store.write_behind import WriteBehind
from shared.wire.messages import JobReport, JobReports, PlaceRequest
from shared.wire.rpc_server import ServerCall

MAX_CLASSES = 1_000  # SLO classes remembered; names come from clients' keys


class Reports:
    """The newest jobs by id, and the places where their reports go."""

    def __init__(
        self,
        scheduler_id: str,
        ring_jobs: int,
        store: WriteBehind,
        metrics: SchedulerMetrics,
        outcomes: Forwarder,
        lengths: Forwarder,
    ) -> None:
        self._scheduler_id = scheduler_id
        self._ring_jobs = ring_jobs
        self._store = store
        self._metrics = metrics
        self._outcomes = outcomes
        self._lengths = lengths
        self._jobs: OrderedDict[str, JobReport] = OrderedDict()
        self._classes: dict[str, Slo] = {}

    async def handle(self, reports: JobReports, _: ServerCall) -> None:
        """The REPORT method."""
        now = time.time()
        for report in reports.reports:
            self.take(report, now)

    def learn_targets(self, request: PlaceRequest) -> None:
        """Remember the targets of the job's SLO class: reports carry its name only."""
        slo = request.job.slo
        if self._classes.get(slo.name) != slo and (slo.name in self._classes or len(self._classes) < MAX_CLASSES):
            self._classes[slo.name] = slo

    def take(self, report: JobReport, now: float) -> None:
        """Take one report in. A final phase is taken once; what comes after it was overtaken on the way."""
        known = self._jobs.get(report.job_id)
        if known is not None and known.phase.final:
            return
        self._jobs[report.job_id] = report
        if len(self._jobs) > self._ring_jobs:
            self._jobs.popitem(last=False)
        self._store.put(requests, self._row(report, now))
        if report.phase.final:
            self._metrics.ended(report)
            self._forward(report, now)

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
        if report.phase is not Phase.CANCELLED:
            slo = self._classes.get(report.slo, Slo(report.slo))
            self._outcomes.add(
                {
                    "slo": report.slo,
                    "ended_s": now,
                    "ttft_s": report.ttft_s,
                    "tpot_s": report.tpot_s,
                    "ttft_target_s": slo.ttft_s,
                    "tpot_target_s": slo.tpot_s,
                    "failed": report.phase is Phase.FAILED,
                }
            )
        if report.phase is Phase.COMPLETED:
            self._lengths.add({"prompt_tokens": report.prompt_tokens, "output_tokens": report.output_tokens})

    def _row(self, report: JobReport, now: float) -> dict[str, Any]:
        row = plain(report)
        row["scheduler_id"] = self._scheduler_id
        row["final"] = report.phase.final
        row["updated_s"] = now
        row["timeline"] = None
        if report.timeline is not None:
            row["timeline"] = msgspec.json.encode(report.timeline).decode()
        return row


def plain(report: JobReport) -> dict[str, Any]:
    """A report without its timeline, as a row of the status table."""
    return {
        "job_id": report.job_id,
        "gateway_id": report.gateway_id,
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
        "slo_met": report.slo_met,
    }
