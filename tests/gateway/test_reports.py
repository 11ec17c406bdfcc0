"""When a gateway tells of its jobs: soon after something has changed, and every few seconds that it lives."""

import asyncio

from prometheus_client import CollectorRegistry

from gateway.metrics import GatewayMetrics
from gateway.reports import REFRESH_S, Reporter
from shared.timeline import Span
from shared.wire.messages import JobReport, Refused
from tests.gateway.cluster import make_job


class Schedulers:
    """Takes reports, or does not; counts how often it is asked."""

    def __init__(self) -> None:
        self.there = True
        self.reported: list[list[JobReport]] = []
        self.refreshed = 0
        self.refusals: list[list[Refused]] = []
        self.left = False
        self.asked = asyncio.Event()

    async def report(self, reports: list[JobReport], *, timeout_s: float) -> list[JobReport]:
        self.reported.append(reports)
        self.asked.set()
        return [] if self.there else reports

    async def refresh(self, open_jobs: list[JobReport], *, timeout_s: float) -> None:
        self.refreshed += 1

    async def refused(self, counts: list[Refused], *, timeout_s: float) -> bool:
        self.refusals.append(list(counts))
        return self.there

    async def leave(self, *, timeout_s: float) -> None:
        self.left = True


async def test_it_tells_at_once_and_sleeps_while_nothing_changes() -> None:
    schedulers = Schedulers()
    reporter = Reporter(schedulers, GatewayMetrics("demo", CollectorRegistry()))  # type: ignore[arg-type]
    job, _ = make_job([1, 2, 3], 5)
    running = asyncio.create_task(reporter.run())
    async with asyncio.timeout(REFRESH_S - 1):
        await asyncio.sleep(0)
        reporter.report(job)
        await schedulers.asked.wait()
    assert [report.job_id for report in schedulers.reported[0]] == [job.spec.job_id]
    for _ in range(5):
        await asyncio.sleep(0.05)
    assert len(schedulers.reported) == 1
    assert schedulers.refreshed == 1  # that it lives, with its first word
    running.cancel()


async def test_final_reports_that_nobody_takes_are_told_again() -> None:
    schedulers = Schedulers()
    schedulers.there = False
    reporter = Reporter(schedulers, GatewayMetrics("demo", CollectorRegistry()))  # type: ignore[arg-type]
    job, _ = make_job([1, 2, 3], 5)
    job.phase = type(job.phase).FAILED
    running = asyncio.create_task(reporter.run())
    reporter.report(job, "lost")
    async with asyncio.timeout(5):
        while len(schedulers.reported) < 3:
            schedulers.asked.clear()
            await schedulers.asked.wait()
        schedulers.there = True
        schedulers.asked.clear()
        await schedulers.asked.wait()
    told = len(schedulers.reported)
    for _ in range(5):
        await asyncio.sleep(0.05)
    assert len(schedulers.reported) == told
    running.cancel()


async def test_refusals_are_told_with_the_next_refresh_and_again_under_the_same_keys() -> None:
    schedulers = Schedulers()
    schedulers.there = False
    reporter = Reporter(schedulers, GatewayMetrics("demo", CollectorRegistry()))  # type: ignore[arg-type]
    for code in ("busy", "busy", "unavailable"):
        reporter.refused("chat", code)
    await reporter.flush()
    (first,) = schedulers.refusals
    assert {(one.slo, one.code, one.count) for one in first} == {("chat", "busy", 2), ("chat", "unavailable", 1)}
    schedulers.there = True
    reporter.refused("chat", "busy")
    await reporter.leave()
    again = schedulers.refusals[-1]
    assert again[:2] == first
    assert (again[2].code, again[2].count) == ("busy", 1)
    assert schedulers.left
    told = len(schedulers.refusals)
    await reporter.leave()
    assert len(schedulers.refusals) == told  # there is nothing more to tell


async def test_reports_of_a_job_under_way_carry_what_is_known_and_whose_it_is() -> None:
    job, _ = make_job([1, 2, 3], 5, caller="anna")
    job.record_until(Span.INTAKE, job.spec.arrived_s + 0.1)
    report = job.report()
    assert report.timeline is not None
    assert [span.span for span in report.timeline.spans] == [Span.INTAKE]
    assert (report.caller, report.asked, report.prediction) == ("anna", False, None)
