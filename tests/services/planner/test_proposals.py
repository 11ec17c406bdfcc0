"""Flips of a proposal in their order, by a monitor that has its rules and little else."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from services.planner.proposals import (
    EVENTS,
    KEPT,
    MAX_WHY,
    Cause,
    Decider,
    Proposal,
    ProposalEvents,
    Proposals,
    carry_out,
)
from services.planner.settings import PlannerSettings
from services.planner.watch import Watch
from shared.cost.library import Library
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.errors import Conflict, InvalidRequest, NotFound, OutcomeUnknown, PeerLost, PolyphaseError, Unavailable
from shared.plan.running import Expected, Flip
from shared.runtime.tasks import Background
from shared.store.write_behind import WriteBehind
from shared.wire.api import Operation, OperationKind, OperationResult, Origin
from shared.wire.api.planner import ProposalState, ProposalStep
from shared.wire.clients.monitor import MonitorClient
from tests.services.fake_worker import make_info

P, D = Role.PREFILL, Role.DECODE

NOTHING = Expected(0.0, 0.0, 0.0, 0.0, 0.0)


class Monitor:
    """Refuses the last ready instance of a role, and one that has the role already."""

    def __init__(self, roles: dict[str, Role]) -> None:
        self.roles = roles
        self.ready = Counter(roles.values())
        self.flipped: list[str] = []
        self.forced: list[str] = []
        self.whys: list[str] = []
        self.most_away = 0
        self.fails: dict[str, PolyphaseError] = {}
        self.outcomes: list[Operation | PolyphaseError] = []

    async def flip(
        self, instance_id: str, *, force: bool, drain_timeout_s: float, who: str, why: str, origin: Origin, to: Role
    ) -> Operation:
        role = self.roles[instance_id]
        self.flipped.append(instance_id)
        self.forced += [instance_id] if force else []
        self.whys.append(why)
        assert (role, origin) == (to.other, Origin.PLAN)
        if self.ready[role] <= 1 and not force:
            raise Conflict(f"{instance_id} is the last")
        self.ready[role] -= 1
        self.most_away = max(self.most_away, len(self.roles) - self.ready.total())
        await asyncio.sleep(0)
        if error := self.fails.get(instance_id):
            self.ready[role] += 1
            raise error
        self.ready[to] += 1
        self.roles[instance_id] = to
        return flipped(drain_s=0.1)

    async def operation(self, operation_id: str) -> Operation:
        told = self.outcomes.pop(0)
        if isinstance(told, PolyphaseError):
            raise told
        return told


def flipped(result: OperationResult = OperationResult.SUCCEEDED, **fields: Any) -> Operation:
    return Operation("o1", OperationKind.FLIP, "p0", 1, P, D, "planner", 1.0, result=result, **fields)


def roles_of(letters: str) -> dict[str, Role]:
    return {f"{letter}{at}": P if letter == "p" else D for at, letter in enumerate(letters)}


async def carried_out(monitor: Monitor, *names: str, why: str = "") -> tuple[str, list[ProposalStep]]:
    flips = tuple(Flip(name, monitor.roles[name], monitor.roles[name].other) for name in names)
    proposal = Proposal(
        state=ProposalState.APPLYING,
        cause=Cause.LOSS,
        why=why,
        flips=flips,
        routes=(),
        changes_routes=False,
        now=NOTHING,
        then=NOTHING,
        made_s=0.0,
        noticed_s=0.0,
        took_s=0.0,
    )
    steps: list[ProposalStep] = []
    async with asyncio.timeout(5.0):
        error = await carry_out(proposal, Counter(monitor.ready), monitor, 1.0, steps.append)  # type: ignore[arg-type]
    return error, steps


@pytest.mark.parametrize(
    ("letters", "names"),
    [
        ("pd", ["d1", "p0"]),
        ("ppd", ["d2", "p0"]),
        ("pddd", ["p0", "d1", "d2"]),
        ("pd", ["p0"]),
        ("ppp" + "d", ["p0", "p1", "p2"]),
        ("pppppddd", ["p0", "p1", "d5", "p2", "d6", "d7"]),
    ],
)
async def test_all_flips_are_made_in_whatever_order(letters: str, names: list[str]) -> None:
    monitor = Monitor(roles_of(letters))
    wanted = {name: role.other if name in names else role for name, role in monitor.roles.items()}
    error, steps = await carried_out(monitor, *names)
    assert error == ""
    assert monitor.roles == wanted
    assert [step.ok for step in steps] == [True] * len(names)
    assert set(monitor.forced) <= {"p0", "p2"}, "only where nobody else computes prompts"


async def test_at_most_half_of_a_role_is_away_at_once() -> None:
    monitor = Monitor(roles_of("pdddddd"))
    assert (await carried_out(monitor, "d1", "d2", "d3", "d4"))[0] == ""
    assert monitor.most_away == 3
    assert not monitor.forced


async def test_the_last_decode_instance_stays() -> None:
    monitor = Monitor(roles_of("pd"))
    error, steps = await carried_out(monitor, "d1")
    assert error == "d1 is the last that decodes"
    assert not steps
    assert not monitor.flipped


async def test_a_step_that_fails_ends_it() -> None:
    monitor = Monitor(roles_of("ppdd"))
    monitor.fails["p0"] = PeerLost("p0 is gone")
    error, steps = await carried_out(monitor, "p0", "p1")
    assert error == "flip p0 to decode: p0 is gone"
    assert monitor.flipped == ["p0"], "nothing more is begun"
    assert [step.ok for step in steps] == [False]


async def test_the_outcome_of_a_lost_answer_is_requested() -> None:
    monitor = Monitor(roles_of("ppdd"))
    monitor.fails["p0"] = OutcomeUnknown("lost", operation_id="o1")
    monitor.outcomes = [PeerLost("away"), flipped(OperationResult.RUNNING), flipped(drain_s=0.5)]
    error, steps = await carried_out(monitor, "p0")
    assert error == ""
    assert steps[0].text == "drained in 0.50 s"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (flipped(OperationResult.UNKNOWN, error="the monitor ended"), "the monitor ended"),
        (NotFound("no operation"), "lost"),
    ],
)
async def test_an_answer_that_never_comes_is_a_failure(told: Any, said: str) -> None:
    monitor = Monitor(roles_of("ppdd"))
    monitor.fails["p0"] = OutcomeUnknown("lost", operation_id="o1")
    monitor.outcomes = [told]
    assert (await carried_out(monitor, "p0"))[0] == f"flip p0 to decode: {said}"


async def test_reasons_are_as_long_as_the_monitor_takes_them() -> None:
    monitor = Monitor(roles_of("ppdd"))
    await carried_out(monitor, "p0", why="x" * 10_000)
    assert monitor.whys == ["x" * MAX_WHY]


class Tasks:
    """Keeps the work that is started, for the test to run."""

    work: Coroutine[Any, Any, None]

    def start(self, _: str, work: Coroutine[Any, Any, None]) -> None:
        self.work = work


class Store:
    def put(self, *_: object) -> None:
        pass


def opened() -> tuple[Proposals, Proposal]:
    """An open proposal that flips p0, in its book."""
    proposals = Proposals(cast(WriteBehind, Store()), CollectorRegistry(), 60.0)
    flips = (Flip("p0", P, D),)
    wanted = Proposal(ProposalState.OPEN, Cause.LOSS, "", flips, (), False, NOTHING, NOTHING, 0.0, 0.0, 0.0)
    proposals.make(wanted)
    return proposals, wanted


def accepted(monitor: Monitor) -> tuple[Proposals, Coroutine[Any, Any, None]]:
    """A proposal that flips p0 was accepted: the proposals, and the work that carries it out."""
    ready = InstanceState.READY
    views = [InstanceView(make_info(name, "tcp://x"), role, ready) for name, role in monitor.roles.items()]
    (proposals, wanted), tasks = opened(), Tasks()
    decider = Decider(PlannerSettings(), cast(MonitorClient, monitor), proposals, cast(Background, tasks))
    decider.view = ClusterView(1, 0.0, tuple(views))
    decider.accept(wanted.proposal_id, "anna")
    return proposals, tasks.work


async def test_a_defect_is_recorded_as_the_cause_and_still_ends_the_task() -> None:
    monitor = Monitor(roles_of("ppdd"))
    monitor.fails["p0"] = cast(PolyphaseError, ValueError("no such field"))
    proposals, work = accepted(monitor)
    with pytest.raises(ExceptionGroup):
        await work
    (ended,) = proposals.newest(1)
    assert (ended.state, ended.error) == (ProposalState.FAILED, "the planner itself failed: ValueError: no such field")


async def test_a_defect_of_a_review_is_the_cause_of_the_withdrawal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def step() -> None:
        raise ValueError("no such field")

    proposals, _ = opened()
    settings = PlannerSettings(step_s=0.001)
    watch = Watch(settings, cast(MonitorClient, Monitor({})), proposals, Library.built_in(), lambda _: None)
    monkeypatch.setattr(watch, "step", step)
    with pytest.raises(ValueError, match="no such field"):
        await watch.run()
    (ended,) = proposals.newest(1)
    assert (ended.state, ended.error) == (
        ProposalState.WITHDRAWN,
        "the planner itself failed: ValueError: no such field",
    )


async def test_the_end_of_the_planner_is_recorded_as_such() -> None:
    proposals, work = accepted(Monitor(roles_of("ppdd")))
    task = asyncio.create_task(work)
    await asyncio.sleep(0)  # it has begun
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert proposals.newest(1)[0].error == "the planner ended meanwhile"


class EventSink:
    """A monitor that accepts events, or raises an error."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.error: PolyphaseError | None = None

    async def report_event(self, event: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.events.append(event)


def proposal(state: ProposalState, who: str = "", error: str = "") -> Proposal:
    found = Proposal(
        state=state,
        cause=Cause.LOSS,
        why="shorter queues",
        flips=(),
        routes=(),
        changes_routes=False,
        now=NOTHING,
        then=NOTHING,
        made_s=0.0,
        noticed_s=0.0,
        took_s=0.0,
    )
    return msgspec.structs.replace(found, proposal_id="plan-1", who=who, error=error)


@pytest.mark.parametrize("failure", [None, Unavailable("away")])
async def test_each_state_is_an_event_in_order_once_the_monitor_answers(failure: PolyphaseError | None) -> None:
    monitor = EventSink()
    events = ProposalEvents(cast(MonitorClient, monitor))
    events.record(proposal(ProposalState.OPEN))
    events.record(proposal(ProposalState.APPLYING, "anna"))
    events.record(proposal(ProposalState.FAILED, "anna", "d0 did not drain"))
    monitor.error = failure
    await events.step()
    monitor.error = None
    await events.step()
    assert [(event["kind"], event["text"]) for event in monitor.events] == [
        ("plan_proposed", "shorter queues"),
        ("plan_accepted", "by anna: shorter queues"),
        ("plan_failed", "by anna: d0 did not drain"),
    ]
    assert {event["subject"] for event in monitor.events} == {"plan-1"}
    assert EVENTS.keys() == set(ProposalState)


async def test_an_event_that_the_monitor_refuses_does_not_block_the_next() -> None:
    monitor = EventSink()
    events = ProposalEvents(cast(MonitorClient, monitor))
    events.record(proposal(ProposalState.OPEN))
    monitor.error = InvalidRequest("no")
    await events.step()
    monitor.error = None
    events.record(proposal(ProposalState.REFUSED))
    await events.step()
    assert [event["kind"] for event in monitor.events] == ["plan_refused"]


async def test_an_event_may_be_pushed_out_while_it_is_sent() -> None:
    monitor = EventSink()
    events = ProposalEvents(cast(MonitorClient, monitor))
    for state in [ProposalState.OPEN] * (KEPT - 1) + [ProposalState.APPLIED]:
        events.record(proposal(state))
    accept = monitor.report_event

    async def full(event: dict[str, Any]) -> None:
        monitor.report_event = accept  # type: ignore[method-assign]
        events.record(proposal(ProposalState.FAILED))
        await accept(event)

    monitor.report_event = full  # type: ignore[method-assign]
    await events.step()
    kinds = [event["kind"] for event in monitor.events]
    assert kinds == ["plan_proposed"] * (KEPT - 1) + ["plan_applied", "plan_failed"]
