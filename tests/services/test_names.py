"""What a process is called goes to the monitor beside the outcomes of requests, which one bad name would all cost."""

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.settings import GatewaySettings
from services.global_scheduler.monitor_reporter import GatewayLiveness
from services.global_scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings


@pytest.mark.parametrize("name", ["", "rack 1", "rack/1", "x" * 129])
@pytest.mark.parametrize(
    ("kind", "setting"),
    [(GatewaySettings, "gateway_id"), (SchedulerSettings, "scheduler_id"), (WorkerSettings, "instance_id")],
)
def test_a_name_that_the_monitor_does_not_take_is_no_setting(kind: Any, setting: str, name: str) -> None:
    with pytest.raises(ValidationError) as refused:
        kind(**{setting: name})
    assert (setting,) in [error["loc"] for error in refused.value.errors()]


def test_an_empty_name_of_a_gateway_is_ignored() -> None:
    gateways = GatewayLiveness(lambda: 0.0)
    gateways.received("")
    gateways.stopped("")
    assert (gateways.silent_s(), gateways.recently_stopped()) == ({}, [])
