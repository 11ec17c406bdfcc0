import asyncio

import pytest

from services.cluster_monitor.situation import FORGET_S, Peers


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
