"""When a scheduler reports to the monitor."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from services.global_scheduler import monitor_reporter
from services.global_scheduler.forward import DeliveryQueue, ForwardMetrics
from services.global_scheduler.monitor_reporter import MANY, GatewayLiveness, MonitorReporter
from shared.domain.policies import PolicySet
from shared.wire.api import Outcome, SchedulerNews


class Reporting:
    """A reporter whose clock is set, and the monitor that it reports to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.5
        clock = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now)
        monkeypatch.setattr(monitor_reporter, "time", clock)
        self.sent: list[tuple[float, int]] = []  # when, and how many outcomes
        metrics = ForwardMetrics(CollectorRegistry())
        placer = cast(Any, SimpleNamespace(followed=(PolicySet(), "")))
        queues = DeliveryQueue("monitor", metrics), DeliveryQueue("demand", metrics)
        self.reporter = MonitorReporter("s0", placer, cast(Any, self), *queues, GatewayLiveness(clock.monotonic))

    async def scheduler_news(self, _: str, news: SchedulerNews) -> None:
        self.sent.append((self.now - 1000.5, len(news.outcomes)))

    async def periods(self, *ended: int) -> None:
        """So many requests end in each of the next periods."""
        for count in ended:
            self.now += 1.0
            for number in range(count):
                self.reporter.request_ended(Outcome(job_id=f"{self.now}-{number}", slo="chat", ended_s=self.now))
            await self.reporter.report()


@pytest.mark.parametrize(
    ("ended", "sent"),
    [
        ((0,) * 7, [(1.0, 0), (4.0, 0), (7.0, 0)]),
        ((1, 1, 1, 1, 1), [(1.0, 1), (3.0, 2), (5.0, 2)]),
        ((1, MANY, MANY - 1, 1, 0, 0, 0), [(1.0, 1), (2.0, MANY), (4.0, MANY), (7.0, 0)]),
    ],
    ids=["none", "few", "many"],
)
async def test_few_requests_are_reported_less_often_than_many(
    monkeypatch: pytest.MonkeyPatch, ended: tuple[int, ...], sent: list[tuple[float, int]]
) -> None:
    reporting = Reporting(monkeypatch)
    await reporting.periods(*ended)
    assert reporting.sent == sent


async def test_a_change_of_policies_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reporting = Reporting(monkeypatch)
    await reporting.periods(1)
    await reporting.reporter.report(force=True)
    assert reporting.sent == [(1.0, 1), (1.0, 0)]
