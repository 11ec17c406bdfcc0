"""What a process is called goes to the monitor beside the outcomes of requests, which one bad name would all cost."""

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.settings import GatewaySettings
from services.global_scheduler.news import Gateways
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


def test_who_has_no_name_neither_lives_nor_leaves() -> None:
    gateways = Gateways(lambda: 0.0)
    gateways.heard("")
    gateways.left("")
    assert (gateways.silent_s(), gateways.gone()) == ({}, [])
