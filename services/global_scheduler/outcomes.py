"""How a job ended, as the monitor is told of it."""

from collections import Counter, defaultdict
from math import inf
from typing import Any

from shared.domain.job import Phase, Slo
from shared.domain.kv import TransferOutcome
from shared.errors import Busy, Delayed, InstancesLost, Overloaded
from shared.timeline import RequestTimeline
from shared.wire.messages import JobReport, Refused

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
