"""What the monitor is told of a job that ended."""

import pytest

from services.global_scheduler.reports import outcome_of
from shared.domain.job import Loss, Phase, Slo
from shared.domain.kv import TransferOutcome, TransferReport
from shared.errors import EngineFailed, InstancesLost
from shared.timeline import RequestTimeline, Span, SpanRecord
from shared.wire.messages import JobReport


def report(timeline: RequestTimeline) -> JobReport:
    return JobReport("j", "gateway-0", Phase.COMPLETED, 10.0, 100, slo="chat", timeline=timeline)


def test_time_before_the_first_token_is_told_by_itself() -> None:
    spans = [
        SpanRecord(Span.QUEUE, 10.0, 11.0),
        SpanRecord(Span.PREFILL, 11.0, 13.0),
        SpanRecord(Span.DECODE, 14.0, 20.0),
    ]
    spans.append(SpanRecord(Span.TRANSFER, 12.5, 14.0))  # beside the prefill, and beyond it
    told = outcome_of(
        report(RequestTimeline("j", 10.0, first_token_s=13.0, ended_s=20.0, spans=spans)), Slo("chat"), 21.0
    )
    assert told["seconds"] == {"queue": 1.0, "prefill": 2.0, "decode": 6.0, "transfer": 1.5}
    assert told["before_first"] == {"queue": 1.0, "prefill": 2.0, "transfer": 0.5}


def test_without_a_first_token_all_of_it_was_before() -> None:
    spans = [SpanRecord(Span.PLACEMENT, 10.0, 13.0)]
    told = outcome_of(report(RequestTimeline("j", 10.0, ended_s=13.0, spans=spans)), Slo("chat"), 21.0)
    assert told["before_first"] == pytest.approx({"placement": 3.0})


def test_faults_of_transfers_are_told_by_their_codes() -> None:
    errors = ("unreachable: tcp://h:1: refused", "unreachable: h:2", "?")
    moved = [TransferReport(TransferOutcome.RECOMPUTED, error=error) for error in errors]
    moved += [TransferReport(TransferOutcome.PULLED, wire_bytes=500), TransferReport(TransferOutcome.LOCAL)]
    told = outcome_of(report(RequestTimeline("j", 10.0, transfers=moved)), Slo("chat"), 21.0)
    assert (told["transfers"], told["transfers_failed"]) == (4, 3)
    assert told["transfer_bytes"] == 500
    assert told["transfer_faults"] == {"unreachable": 2, "unknown": 1}


def test_the_losses_of_a_request_that_was_refused_for_them_are_told() -> None:
    losses = [Loss(3, "d0", 1), Loss(3, "d1", 1)]
    refused = JobReport("j", "g", Phase.FAILED, 10.0, 100, outcome=InstancesLost.code, losses=losses)
    assert outcome_of(refused, Slo("chat"), 21.0)["losses"] == [
        {"position": 3, "instance_id": "d0"},
        {"position": 3, "instance_id": "d1"},
    ]
    failed = JobReport("j", "g", Phase.FAILED, 10.0, 100, outcome=EngineFailed.code, losses=losses)
    assert "losses" not in outcome_of(failed, Slo("chat"), 21.0)
