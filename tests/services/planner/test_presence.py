"""Who is at work, lost or back, out of broadcasts; time is the test's own."""

from collections.abc import Iterator

import msgspec
import pytest

from services.planner import watch
from services.planner.watch import LOST_KEPT, Presence
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from tests.services.fake_worker import make_info

READY, SILENT, DRAINING = InstanceState.READY, InstanceState.UNRESPONSIVE, InstanceState.DRAINING


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def time(self) -> float:
        return self.now_s

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(watch, "time", made)
    return made


def view(*states: tuple[str, InstanceState], generation: int = 1) -> ClusterView:
    views = [
        InstanceView(make_info(name, "tcp://x", generation=generation), Role.PREFILL, state) for name, state in states
    ]
    return ClusterView(1, 0.0, tuple(views))


def lost(watched: Presence) -> list[str]:
    return [one.instance_id for one in watched.lost]


def test_who_is_gone_is_lost_at_once_and_told_once(clock: Clock) -> None:
    watched = Presence(0.0)
    assert watched.update(view(("a", READY), ("b", READY))) == []
    watched.update(view(("a", READY)))
    assert watched.take_lost() == {"b": 1_000.0}
    watched.update(view(("a", READY)))
    assert watched.take_lost() == {}
    assert lost(watched) == ["b"]
    assert watched.update(view(("a", READY), ("b", READY), generation=1)) == ["b"]
    assert lost(watched) == []


def test_a_silent_host_is_lost_after_a_moment(clock: Clock) -> None:
    watched = Presence(0.0)
    watched.update(view(("a", READY), ("b", READY)))
    watched.update(view(("a", READY), ("b", SILENT)))
    assert watched.take_lost() == {}
    clock.now_s += watch.SILENT_S + 0.01
    assert list(watched.take_lost()) == ["b"]
    watched.update(view(("a", READY)))
    assert watched.take_lost() == {}, "its end is no second loss"
    assert lost(watched) == ["b"]


def test_one_that_goes_silent_and_then_dies_is_lost(clock: Clock) -> None:
    watched = Presence(0.0)
    watched.update(view(("a", READY), ("b", READY)))
    watched.update(view(("a", READY), ("b", SILENT)))
    watched.update(view(("a", READY)))
    assert list(watched.take_lost()) == ["b"]


def test_a_moment_of_silence_is_no_news(clock: Clock) -> None:
    watched = Presence(0.0)
    watched.update(view(("a", READY), ("b", READY)))
    watched.update(view(("a", SILENT), ("b", SILENT)))
    clock.now_s += 0.2
    assert watched.take_lost() == {}
    assert watched.update(view(("a", READY), ("b", READY))) == []
    clock.now_s += 10.0
    assert watched.take_lost() == {}
    assert lost(watched) == []


def test_another_life_under_the_same_name_has_come(clock: Clock) -> None:
    watched = Presence(5.0)
    watched.update(view(("a", READY)))
    watched.update(view())
    assert watched.take_lost() == {}
    assert watched.update(view(("a", READY), generation=2)) == ["a"]


def test_who_leaves_in_good_order_is_gone_but_not_missed(clock: Clock) -> None:
    watched = Presence(0.0)
    watched.update(view(("a", READY), ("b", READY)))
    watched.update(view(("a", READY), ("b", DRAINING)))
    assert watched.take_lost() == {}
    watched.update(view(("a", READY)))
    assert list(watched.take_lost()) == ["b"]
    assert lost(watched) == []


def test_the_lost_are_bounded(clock: Clock) -> None:
    watched = Presence(0.0)
    watched.update(view(*((f"w{at}", READY) for at in range(LOST_KEPT + 9))))
    watched.update(view())
    assert len(watched.take_lost()) == LOST_KEPT + 9
    assert len(watched.lost) == LOST_KEPT


def test_a_role_that_changes_is_a_change(clock: Clock) -> None:
    watched = Presence(0.0)
    watched.update(view(("a", READY)))
    clock.now_s += 3.0
    watched.update(view(("a", READY)))
    assert watched.changed_s == 1_000.0
    (one,) = view(("a", READY)).instances
    watched.update(ClusterView(2, 0.0, (msgspec.structs.replace(one, role=Role.DECODE),)))
    assert watched.changed_s == 1_003.0
