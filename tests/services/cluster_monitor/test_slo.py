from typing import Any

import pytest

from services.cluster_monitor.slo import SloService
from shared.policy.served import Ended, How


def test_of_the_jobs_that_were_counted_only_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cluster_monitor.slo.SEEN", 100)
    store: Any = None  # nothing is written
    counted = list[Ended]()
    service = SloService((60.0, 300.0), store, counted.append)
    jobs = [(f"j{number}", Ended("chat", How.COMPLETED, 1_000.0)) for number in range(1_000)]
    assert service.take(jobs) == 1_000
    assert len(service._seen) == 100
    assert service.take(jobs[-100:]) == 0
    assert len(counted) == 1_000
