"""Partitions, and links that are slow, break or flap, between any two processes."""

import asyncio

from lab.chaos.arena import Arena
from lab.chaos.scenario import Scenario
from lab.chaos.scenarios.processes import NOTICED_S
from lab.chaos.wires import Wire

SILENT_S = 4.0
_PLACE_S = 2.0  # a gateway waits for a scheduler's answer so long


async def silence(*wires: Wire, seconds: float = SILENT_S) -> None:
    """Nothing comes through, and nobody is told."""
    for wire in wires:
        wire.proxy.stall()
    await asyncio.sleep(seconds)
    for wire in wires:
        wire.proxy.heal()


async def refusal(*wires: Wire, seconds: float = SILENT_S) -> None:
    """Connections break, and new ones are refused."""
    for wire in wires:
        wire.proxy.cut(refuse=True)
    await asyncio.sleep(seconds)
    for wire in wires:
        wire.proxy.heal()


async def _gateway_to_decode(arena: Arena) -> None:
    await silence(*arena.wires.between(target=arena.decode[0], purpose="rpc"))


async def _gateway_to_workers(arena: Arena) -> None:
    with arena.away():
        await refusal(*(w for w in arena.wires.touching(arena.named("gateway")[0]) if w.port.service == "worker"))


async def _gateway_to_schedulers(arena: Arena) -> None:
    with arena.away(_PLACE_S):
        await silence(*(w for w in arena.wires.touching(arena.named("gateway")[0]) if w.port.service == "scheduler"))


async def _one_scheduler(arena: Arena) -> None:
    await silence(*arena.wires.between(target=arena.named("scheduler")[0], purpose="rpc"))


async def _heartbeats(arena: Arena) -> None:
    await silence(*arena.wires.between(arena.decode[0], purpose="heartbeats"))


async def _monitor(arena: Arena) -> None:
    await silence(*arena.wires.touching(*arena.named("monitor")))


async def _instance(arena: Arena) -> None:
    await silence(*arena.wires.touching(arena.decode[0]))


async def _slow(arena: Arena) -> None:
    wires = arena.wires.between(purpose="rpc")
    for wire in wires:
        wire.proxy.slow(latency_s=0.1, bytes_per_s=200_000)
    await asyncio.sleep(SILENT_S)
    for wire in wires:
        wire.proxy.heal()


async def _flap(arena: Arena) -> None:
    for _ in range(10):
        for wire in arena.rng.sample(arena.wires.all, len(arena.wires.all) // 8):
            wire.proxy.cut()
        await asyncio.sleep(0.5)


LINKS = (
    Scenario("link-silent", "one decode instance's RPC is silent for 4 s", _gateway_to_decode, away_s=NOTICED_S),
    Scenario("link-gateway-workers", "one of two gateways cannot reach any instance for 4 s", _gateway_to_workers),
    Scenario("link-gateway-schedulers", "one of two gateways hears of no scheduler for 4 s", _gateway_to_schedulers),
    Scenario("link-one-scheduler", "one of two schedulers is silent for 4 s", _one_scheduler, away_s=NOTICED_S),
    Scenario("link-heartbeats", "one instance's heartbeats do not arrive for 4 s", _heartbeats),
    Scenario("link-monitor", "the monitor is cut off from everybody for 4 s", _monitor),
    Scenario("link-instance", "a decode instance is cut off from everybody for 4 s", _instance, away_s=NOTICED_S),
    Scenario("link-slow", "all RPC takes 100 ms longer, at 200 kB/s, for 4 s", _slow, away_s=1.0),
    Scenario(
        "link-flap", "an eighth of all connections is reset twice a second for 4 s", _flap, away_s=2.0, errors=True
    ),
)
