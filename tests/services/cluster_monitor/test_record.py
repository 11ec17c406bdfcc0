"""What heartbeats make of a record."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.cluster_monitor.registry import UNDER_WAY_S, Record
from shared.domain.instance import InstanceLoad, Promised, Role
from shared.wire.messages import Heartbeat
from tests.services.fake_worker import make_info


def record(**more: Any) -> Record:
    return Record(
        make_info("p0", "tcp://a:1"), Role.PREFILL, cast(Any, SimpleNamespace(connected=True)), 0.0, 0.0, **more
    )


def beat(draining: bool) -> Heartbeat:
    return Heartbeat("p0", 1, Role.PREFILL, draining, InstanceLoad())


@pytest.mark.parametrize(("later_s", "draining"), [(0.01, False), (UNDER_WAY_S, True)])
def test_a_heartbeat_from_before_a_resume_does_not_undo_it(later_s: float, draining: bool) -> None:
    resumed = record(resumed_mono=10.0)
    resumed.heard(beat(draining=True), 10.0 + later_s)
    assert resumed.draining is draining


def test_one_that_was_not_resumed_drains_at_once() -> None:
    one = record()
    one.heard(beat(draining=True), 0.0)
    assert one.draining
    one.heard(beat(draining=False), 0.0)
    assert not one.draining


def test_decodes_that_are_promised_to_an_instance_are_part_of_what_http_shows() -> None:
    one = record()
    one.load = InstanceLoad(time_s=1.0, promised=(Promised(7, 100, 20),))
    (promised,) = json.loads(json.dumps(one.describe()))["load"]["promised"]
    assert (promised["mark"], promised["decode_tokens"], promised["answer_tokens"]) == (7, 100, 20)
