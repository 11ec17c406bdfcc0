import pytest

from services.cluster_monitor.app import create_app
from services.cluster_monitor.auto_flips import in_words
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.instance import InstanceLoad, Role
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.control_plane import until

IDLE = {"role_flip": "idle", "role_flip_parameters": {"for_s": 0.3}, "role_flip_period_s": 0.05}
EMPTY, FULL = InstanceLoad(free_blocks=1000), InstanceLoad(free_blocks=100)


async def test_an_idle_instance_flips_by_itself_and_the_audit_says_why(start: Start) -> None:
    cluster: Cluster = await start(**IDLE)
    p0, p1, d0 = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    p0.load, p1.load, d0.load = EMPTY, FULL, FULL
    await cluster.wait_ready("p0", Role.DECODE)
    assert (p0.calls, p1.calls, d0.calls) == (["drain", "flip", "resume"], [], [])
    await until(lambda: cluster.state.audit.newest(1)[0]["result"] == "succeeded", "audited")
    (entry,) = await cluster.client.flips()
    assert (entry["kind"], entry["who"], entry["to_role"]) == ("flip", "role_flip:idle", "decode")
    assert entry["why"].startswith("role_flip:idle (load_share 0.0, idle_s 0.3")


async def test_a_flip_that_fails_is_tried_again(start: Start) -> None:
    cluster: Cluster = await start(**IDLE)
    p0, p1, d0 = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    p0.load, p1.load, d0.load = EMPTY, FULL, FULL
    p0.fail_flip = True
    await until(lambda: len(cluster.state.audit.newest(9)) >= 2, "two attempts")
    p0.fail_flip = False
    await cluster.wait_ready("p0", Role.DECODE)
    assert cluster.state.audit.newest(9)[-1]["error"] == "the engine is stuck"


async def test_people_give_no_reason(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL)
    assert (await cluster.client.flip("p0"))["why"] is None


def test_an_unknown_policy_stops_the_start() -> None:
    with pytest.raises(InvalidRequest, match="known: idle, predictive, pressure"):
        create_app(MonitorSettings(role_flip="lazy"))


def test_reasons_in_words() -> None:
    assert in_words([Reason("a", {"x": 1.5, "y": "z"}), Reason("b", {"n": 2})]) == "a (x 1.5, y z); b (n 2)"
