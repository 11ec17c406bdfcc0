import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from services.cluster_monitor.registry import Record
from services.cluster_monitor.situation import FORGET_S, REST, STEADY, WORK, Judge, Peers, Watch
from shared.domain.instance import InstanceLoad, InstanceState, Role
from shared.domain.verdict import Level, Problem, Verdict
from shared.wire.api import EventKind
from tests.services.fake_worker import make_info


@pytest.fixture
async def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    made = Peers()
    now = [1_000.0]
    made._clock = lambda: now[0]
    made.now = now  # type: ignore[attr-defined]
    return made


def later(peers: Peers, seconds: float) -> None:
    peers.now[0] += seconds  # type: ignore[attr-defined]


async def test_silence_grows_from_what_was_told(peers: Peers) -> None:
    peers.update("s0", {"g0": 2.0})
    later(peers, 5.0)
    peers.update("s1", {"g0": 1.0, "g1": 8.0})
    assert peers.schedulers() == {"s0": 5.0, "s1": 0.0}
    assert peers.gateways() == {"g0": 1.0, "g1": 8.0}
    peers.update("s0", {"g0": 7.0})  # it has heard of it before the other
    assert peers.gateways()["g0"] == 1.0


async def test_who_left_is_missed_by_nobody_until_it_is_heard_of_again(peers: Peers) -> None:
    peers.update("s0", {"g0": 0.0})
    later(peers, 1.0)
    peers.update("s0", {}, ["g0"])
    peers.update("s1", {"g0": 1.0})
    assert peers.gateways() == {}
    later(peers, 5.0)
    peers.update("s1", {"g0": 1.0})
    assert peers.gateways() == {"g0": 1.0}


async def test_what_is_silent_for_long_is_forgotten(peers: Peers) -> None:
    peers.update("s0", {"g0": 0.0})
    later(peers, FORGET_S)
    assert (peers.schedulers(), peers.gateways()) == ({}, {})


async def test_the_loop_is_the_clock() -> None:
    peers = Peers()
    peers.update("s0", {})
    assert peers.schedulers()["s0"] <= asyncio.get_running_loop().time()


async def test_who_left_long_ago_is_forgotten(peers: Peers) -> None:
    peers.update("s0", {"g0": 0.0})
    peers.update("s0", {}, ["g0"])
    later(peers, FORGET_S + 1.0)
    assert peers.gateways() == {}
    assert peers._left == {}


class Watched:
    """A watch and the cluster that it watches."""

    def __init__(self) -> None:
        self.verdict = Verdict(0.0, Level.GOOD, "Good", (), (), {}, 60.0, 0)
        self.at_rest = True
        self.looks = 0
        self.noted: list[EventKind] = []
        events = SimpleNamespace(note=lambda kind, _: self.noted.append(kind))
        self.watch = Watch(self._look, lambda: self.at_rest, cast(Any, events))

    def _look(self) -> Verdict:
        self.looks += 1
        return self.verdict

    def steps(self, count: int) -> int:
        """How many of so many steps look."""
        before = self.looks
        for _ in range(count):
            self.watch.step()
        return self.looks - before


def test_a_cluster_at_rest_is_looked_at_now_and_then_and_one_at_work_more_often() -> None:
    watched = Watched()
    assert watched.steps(4 * REST) == 4
    watched.at_rest = False
    assert watched.steps(10 * WORK) == 10


@pytest.mark.parametrize("at_rest", [False, True])
def test_a_change_is_logged_when_it_lasts(at_rest: bool) -> None:
    watched = Watched()
    watched.steps(REST)
    problem = Problem("gateway_gone", Level.DEGRADED, "a gateway is silent")
    watched.verdict = msgspec.structs.replace(watched.verdict, level=Level.DEGRADED, problems=(problem,))
    watched.at_rest = at_rest
    first = REST if at_rest else WORK
    assert watched.steps(first) == 1
    watched.steps(STEADY - 2)
    assert watched.noted == []
    watched.steps(1)
    assert watched.noted == [EventKind.VERDICT, EventKind.GATEWAY_GONE]


async def test_a_cluster_is_at_rest_without_work_and_with_all_processes_there() -> None:
    record = Record(
        info=make_info("d0", "tcp://127.0.0.1:9"),
        role=Role.DECODE,
        connection=None,
        registered_s=0.0,
        registered_mono=0.0,
    )
    nothing: Any = SimpleNamespace(on_gone=lambda _: None, on_change=lambda _: None, all=lambda: [record])
    peers = Peers()
    judge = Judge(60.0, {}, nothing, nothing, nothing, nothing, peers)
    record.state = InstanceState.READY
    assert judge.at_rest()
    record.load = InstanceLoad(inflight=1)
    assert not judge.at_rest()
    record.load = InstanceLoad()
    peers.update("s0", {"g0": 7.0})
    assert judge.at_rest()
    peers.update("s0", {"g1": 9.0})
    assert not judge.at_rest()
    peers.update("s0", {"g1": 0.0})
    assert judge.at_rest()
    for state in set(InstanceState) - {InstanceState.READY}:
        record.state = state
        assert not judge.at_rest()
