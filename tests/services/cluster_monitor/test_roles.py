"""Automatic role changes: of the policy in force, and of plans; and what operators' flips forbid."""

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.cluster_monitor.app import create_app
from services.cluster_monitor.roles import RoleController, in_words
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.instance import ClusterView, InstanceLoad, Role
from shared.domain.policies import PolicySet
from shared.domain.route import PolicySpec, Reason
from shared.errors import Conflict, InvalidRequest
from shared.policy import registry
from shared.policy.papers.tetriinfer import IdleFlip
from shared.policy.role_flip import FlipContext, FlipDecision, FlipHistory
from shared.wire.api import Origin
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.control_plane import request, until

STEADY = {"silence_s": 5.0}  # the workers are on the monitor's loop: while it stalls they cannot beat

IDLE = {"policies": {"role_flip": {"name": "idle", "for_s": 0.3}}, "role_flip_period_s": 0.05, **STEADY}

EMPTY, FULL = InstanceLoad(free_blocks=1000), InstanceLoad(free_blocks=100)


async def test_an_idle_instance_flips_by_itself_and_the_audit_says_why(start: Start) -> None:
    cluster: Cluster = await start(**IDLE)
    p0, p1, d0 = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    p0.loads[Role.DECODE] = FULL  # else it flips back when it has been idle again
    p0.load, p1.load, d0.load = EMPTY, FULL, FULL
    await cluster.wait_ready("p0", Role.DECODE)
    assert (p0.calls, p1.calls, d0.calls) == (["drain", "flip", "resume"], [], [])
    await until(lambda: cluster.state.operation_log.newest(1)[0].result == "succeeded", "audited")
    (entry,) = await cluster.client.flips()
    assert (entry.kind, entry.who, entry.to_role) == ("flip", "role_flip:idle", "decode")
    assert (idle := re.match(r"role_flip:idle \(load_share 0\.0, idle_s ([0-9.]+),", entry.why))
    assert float(idle[1]) >= 0.3
    (event,) = await cluster.client.events(kinds=["policy_flip"])
    assert event.text == f"prefill → decode by role_flip:idle: {entry.why}"
    assert entry.origin == event.origin == "policy"


async def test_a_flip_that_fails_is_tried_again(start: Start) -> None:
    cluster: Cluster = await start(**IDLE)
    p0, p1, d0 = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    p0.load, p1.load, d0.load = EMPTY, FULL, FULL
    p0.fail_flip = True
    await until(lambda: len(cluster.state.operation_log.newest(9)) >= 2, "two attempts")
    p0.fail_flip = False
    await cluster.wait_ready("p0", Role.DECODE)
    assert cluster.state.operation_log.newest(9)[-1].error == "the engine is stuck"


async def test_another_policy_holds_from_the_next_step_on_and_begins_anew(start: Start) -> None:
    """Off, then idle for half a minute: an idleness of before does not count; then idle at once; then off again."""
    cluster: Cluster = await start(role_flip_period_s=0.02, **STEADY)
    p0, p1, d0 = await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    p0.load, p1.load, d0.load = EMPTY, FULL, FULL
    await cluster.client.set_policies({"role_flip": PolicySpec("idle", {"for_s": 30.0})})
    await cluster.client.set_policies({"role_flip": PolicySpec("idle", {"for_s": 0.05})})
    await cluster.wait_ready("p0", Role.DECODE)
    held_s = float(str(cluster.state.operation_log.newest(9)[-1].why).partition("idle_s ")[2].partition(",")[0])
    assert held_s < 30.0
    await cluster.client.set_policies({"role_flip": None})
    await until(lambda: not any(one.operation for one in cluster.state.registry.all()), "what was under way has ended")
    flips = len(cluster.state.operation_log.newest(9))
    p0.load, p1.load, d0.load = FULL, FULL, EMPTY
    sequence = cluster.views[-1].sequence
    await until(lambda: cluster.views[-1].sequence > sequence + 10, "steps have passed")
    assert len(cluster.state.operation_log.newest(9)) == flips


@pytest.mark.parametrize(
    ("body", "origin"),
    [
        ({}, "operator"),
        ({"origin": "plan"}, "plan"),
        ({"why": "a loss"}, "plan"),  # from a planner of an earlier release
        ({"origin": "operator", "why": "a test"}, "operator"),
    ],
)
async def test_each_flip_has_an_origin(cluster: Cluster, body: dict[str, str], origin: str) -> None:
    await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    answer = await request(cluster.transport, "POST", "/instances/p0/flip", body)
    (entry,) = await cluster.client.flips()
    assert answer.json()["origin"] == entry.origin == origin
    events = await cluster.client.events(kinds=["policy_flip"])
    assert [event.origin for event in events] == ([] if origin == "operator" else [origin])
    profile = await cluster.get("/demand/profile")
    assert (profile["kept"], profile["barred"]) == ((["p0"], ["prefill"]) if origin == "operator" else ([], []))


async def test_no_plan_changes_the_role_that_an_operator_has_just_set(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    await cluster.client.flip("p0", who="ann")
    await cluster.wait_ready("p0", Role.DECODE)
    with pytest.raises(Conflict, match="an operator set the role of p0 less than 600 s ago, and a plan does not"):
        await cluster.client.flip("p0", origin=Origin.PLAN, to=Role.PREFILL)
    assert [one.result for one in await cluster.client.flips()] == ["refused", "succeeded"]
    await cluster.client.flip("p0", who="ann")


async def test_an_operators_flip_takes_precedence_for_as_long_as_the_settings_say(start: Start) -> None:
    cluster: Cluster = await start(role_flip_respects_s=0.0)
    await cluster.workers(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    await cluster.client.flip("p0", who="ann")
    await cluster.wait_ready("p0", Role.DECODE)
    assert (await cluster.client.flip("p0", origin=Origin.PLAN)).result == "succeeded"


async def test_a_policy_keeps_its_history_until_another_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flips: list[int] = []

    class Policy(IdleFlip):
        def propose(
            self, view: ClusterView, now: float, history: FlipHistory, context: FlipContext
        ) -> FlipDecision | None:
            history.flips.append((now, Role.PREFILL))
            flips.append(len(history.flips))
            return None

    steps = [(1, 5.0), (2, 5.0), (3, 6.0), (4, 6.0)]  # revisions, and the policy's for_s
    views = [ClusterView(n, 0.0, (), PolicySet(n, role_flip=PolicySpec("idle", {"for_s": s}))) for n, s in steps]
    monkeypatch.setitem(registry.ROLE_FLIP, "idle", Policy)
    log = cast(Any, SimpleNamespace(newest_first=lambda: ()))
    controller = RoleController(lambda: views.pop(0), lambda: None, cast(Any, None), log, 0.0)
    for _ in steps:
        controller.step(cast(Any, None))
    assert flips == [1, 2, 1, 2]


def test_an_unknown_policy_stops_the_start() -> None:
    with pytest.raises(InvalidRequest, match="role_flip: unknown role flip policy 'lazy'; known: idle, off, p"):
        create_app(MonitorSettings(policies={"role_flip": "lazy"}))


def test_reasons_in_words() -> None:
    assert in_words([Reason("a", {"x": 1.5, "y": "z"}), Reason("b", {"n": 2})]) == "a (x 1.5, y z); b (n 2)"
