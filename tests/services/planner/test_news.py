from typing import Any, cast

import pytest

from services.planner.proposals import KEPT, PlanNews, Proposal, ProposalState
from shared.errors import InvalidRequest, PolyphaseError, Unavailable
from shared.wire.clients.monitor import MonitorClient


class Monitor:
    """Takes events, or raises what it is told to."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.error: PolyphaseError | None = None

    async def happened(self, event: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.taken.append(event)


class Told:
    """As much of a proposal as is told."""

    def __init__(self, state: ProposalState, who: str = "", error: str = "") -> None:
        self.proposal_id, self.state, self.who, self.error, self.why = "plan-1", state, who, error, "shorter queues"


def became(news: PlanNews, *told: Told) -> None:
    for one in told:
        news.became(cast(Proposal, one))


@pytest.fixture
def monitor() -> Monitor:
    return Monitor()


async def test_each_state_is_an_event_in_order(monitor: Monitor) -> None:
    news = PlanNews(cast(MonitorClient, monitor))
    became(news, Told(ProposalState.OPEN), Told(ProposalState.APPLYING, "anna"))
    became(news, Told(ProposalState.FAILED, "anna", "d0 did not drain"))
    await news.step()
    assert [(event["kind"], event["text"]) for event in monitor.taken] == [
        ("plan_proposed", "shorter queues"),
        ("plan_accepted", "by anna: shorter queues"),
        ("plan_failed", "by anna: d0 did not drain"),
    ]
    assert {event["subject"] for event in monitor.taken} == {"plan-1"}


async def test_what_the_monitor_could_not_take_is_told_later(monitor: Monitor) -> None:
    news = PlanNews(cast(MonitorClient, monitor))
    became(news, Told(ProposalState.OPEN))
    monitor.error = Unavailable("away")
    await news.step()
    monitor.error = None
    await news.step()
    assert len(monitor.taken) == 1


async def test_what_it_refuses_stands_in_nobodys_way(monitor: Monitor) -> None:
    news = PlanNews(cast(MonitorClient, monitor))
    became(news, Told(ProposalState.OPEN))
    monitor.error = InvalidRequest("no")
    await news.step()
    monitor.error = None
    became(news, Told(ProposalState.REFUSED))
    await news.step()
    assert [event["kind"] for event in monitor.taken] == ["plan_refused"]


def test_every_state_has_a_kind_of_event() -> None:
    from services.planner.proposals import EVENTS

    assert EVENTS.keys() == set(ProposalState)


async def test_an_event_may_be_pushed_out_while_it_is_told(monitor: Monitor) -> None:
    news = PlanNews(cast(MonitorClient, monitor))
    became(news, *[Told(ProposalState.OPEN)] * (KEPT - 1), Told(ProposalState.APPLIED))
    take = monitor.happened

    async def full(event: dict[str, Any]) -> None:
        monitor.happened = take  # type: ignore[method-assign]
        became(news, Told(ProposalState.FAILED))
        await take(event)

    monitor.happened = full  # type: ignore[method-assign]
    await news.step()
    kinds = [event["kind"] for event in monitor.taken]
    assert kinds == ["plan_proposed"] * (KEPT - 1) + ["plan_applied", "plan_failed"]
