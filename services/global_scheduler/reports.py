"""REPORT: what gateways tell of their jobs goes to memory, to the database, and on to who learns from it."""

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec

from services.global_scheduler.forward import Forwarder
from services.global_scheduler.news import Gateways
from services.global_scheduler.placer import SchedulerMetrics
from shared.domain.job import LOST, Phase, Slo
from shared.domain.kv import TransferOutcome
from shared.errors import Busy, Delayed, InstancesLost, Overloaded
from shared.runtime.logs import get_log
from shared.store.tables import requests
from shared.store.write_behind import WriteBehind
from shared.timeline import RequestTimeline
from shared.wire.messages import JobReport, JobReports, PlaceRequest, Refused
from shared.wire.rpc_server import ServerCall

# MERGED outcomes.py
# How a job ended, as the monitor is told of it.


REFUSALS = (Busy.code, Overloaded.code, Delayed.code)  # outcomes of jobs that were turned away, not broken

LOSSES_KEPT = 32  # of a request, the newest, as the monitor takes them


def outcome_of(report: JobReport, slo: Slo, now: float) -> dict[str, Any]:
    """Of a job in a final phase; `now` is unix seconds."""
    refused = report.phase is Phase.FAILED and report.outcome in REFUSALS
    found: dict[str, Any] = {
        "job_id": report.job_id,
        "slo": report.slo,
        "ended_s": now,
        "phase": "refused" if refused else report.phase.value,
        "code": report.outcome,
        "ttft_s": report.ttft_s,
        "tpot_s": report.tpot_s,
        "ttft_target_s": slo.ttft_s,
        "tpot_target_s": slo.tpot_s,
        "itl_target_s": slo.itl_s,
        "longest_gap_s": report.longest_gap_s,
        "gaps": report.gaps,
        "gaps_over": report.gaps_over,
        "failed": report.phase is Phase.FAILED,
        "prompt_tokens": report.prompt_tokens,
        "output_tokens": report.output_tokens,
        "predicted": _predicted(report),
    }
    if report.outcome == InstancesLost.code:
        found["losses"] = [
            {"position": loss.position, "instance_id": loss.instance_id} for loss in report.losses[-LOSSES_KEPT:]
        ]
    return found | (_spent(report.timeline) if report.timeline is not None else {})


def refusal_of(refused: Refused, now: float) -> dict[str, Any]:
    """Of requests that never were jobs."""
    return {
        "job_id": f"refused:{refused.key}",
        "slo": refused.slo,
        "ended_s": now,
        "phase": "refused",
        "code": refused.code,
        "count": refused.count,
    }


def _predicted(report: JobReport) -> str:
    """Who said how long its answer would be; "none" where nobody did who was asked, empty where nobody was."""
    if not report.asked:
        return ""
    said = report.prediction
    if said is None:
        return "none"
    return "classifier" if said.model else "observed"


def _spent(timeline: RequestTimeline) -> dict[str, Any]:
    """Seconds by kind of stretch, those before its first token once more, and its transfers."""
    seconds: dict[str, float] = defaultdict(float)
    before: dict[str, float] = defaultdict(float)
    first_s = timeline.first_token_s or inf
    for span in timeline.spans:
        seconds[span.span.value] += max(0.0, span.ended_s - span.started_s)
        if span.started_s < first_s:
            before[span.span.value] += max(0.0, min(span.ended_s, first_s) - span.started_s)
    moved = [one for one in timeline.transfers if one.outcome is not TransferOutcome.LOCAL]
    failed = [one for one in moved if one.outcome is TransferOutcome.RECOMPUTED]
    whole_s = max(0.0, timeline.ended_s - timeline.arrived_s) if timeline.ended_s else 0.0
    return {
        "seconds": dict(seconds),
        "before_first": dict(before),
        "whole_s": whole_s,
        "transfers": len(moved),
        "transfers_failed": len(failed),
        "transfer_bytes": sum(one.wire_bytes for one in moved),
        "transfer_faults": dict(Counter(_fault(one.error) for one in failed)),
    }


def _fault(error: str) -> str:
    """The code that an import's error begins with (`services.worker.kv.errors.KvFault`)."""
    code = error.partition(":")[0].strip()
    return code if code.isidentifier() else "unknown"


# MERGED open_jobs.py
# Which jobs are open here, by whose word, and which of them nobody speaks for any more.


SWEEP_S = 1.0
_STEP_S = 1.5 * SWEEP_S  # more than that between two sweeps is this process's own pause, and no one's silence


@dataclass(slots=True)
class _Open:
    origin: str  # of the gateway process that told of it; empty until it did
    heard_s: float


@dataclass(frozen=True, slots=True)
class Swept:
    """Jobs that are open here no longer. lost: their gateway's process is gone. elsewhere: it lives, and tells
    another scheduler of them, or was never given their placement.
    """

    lost: tuple[str, ...]
    elsewhere: tuple[str, ...]


class OpenJobs:
    """Open jobs and when each was last heard of; the same of gateway processes.

    Ages are on a clock that counts the time between two sweeps, but no pause of this process: what others sent while it
    was frozen waits unread, and is not silence. Nor do steps of the host's clock matter. `now_mono` is monotonic.
    """

    def __init__(self, lost_after_s: float, now_mono: float) -> None:
        self._lost_after_s = lost_after_s
        self._mono = now_mono
        self._clock_s = 0.0
        self._jobs: dict[str, _Open] = {}
        self._origins: dict[str, float] = {}

    def __len__(self) -> int:
        """Open jobs."""
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        """Whether that job is open."""
        return job_id in self._jobs

    def placed(self, job_id: str) -> None:
        """It got a route here."""
        known = self._jobs.get(job_id)
        self._jobs[job_id] = _Open(known.origin if known else "", self._clock_s)

    def heard(self, job_id: str, origin: str) -> None:
        """Its gateway says that it goes on."""
        self._jobs[job_id] = _Open(origin, self._clock_s)

    def alive(self, origin: str) -> None:
        """A gateway process shows that it lives."""
        self._origins[origin] = self._clock_s

    def ended(self, job_id: str) -> None:
        """It is over; unknown ones are ignored."""
        self._jobs.pop(job_id, None)

    def sweep(self, now_mono: float) -> Swept:
        """Let time pass, and drop what nobody speaks for."""
        self._clock_s += min(_STEP_S, max(0.0, now_mono - self._mono))
        self._mono = now_mono
        since_s = self._clock_s - self._lost_after_s
        self._origins = {origin: heard_s for origin, heard_s in self._origins.items() if heard_s > since_s}
        silent = [(job_id, one.origin) for job_id, one in self._jobs.items() if one.heard_s <= since_s]
        for job_id, _ in silent:
            del self._jobs[job_id]
        return Swept(
            tuple(job_id for job_id, origin in silent if origin and origin not in self._origins),
            tuple(job_id for job_id, origin in silent if not origin or origin in self._origins),
        )


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
