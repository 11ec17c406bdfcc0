"""Clocks that jump. Only wall clocks do; `time.time` of the processes says what it is told to."""

import asyncio

from lab.chaos.arena import Arena
from lab.chaos.scenario import Scenario

HOUR_S = 3600.0
_STAY_S = 1.5


async def _jump(arena: Arena, *names: str) -> None:
    """An hour ahead, an hour behind, and back."""
    for offset_s in (HOUR_S, -HOUR_S, 0.0):
        arena.switches.clock(offset_s, *names)
        await asyncio.sleep(_STAY_S)


async def _monitor(arena: Arena) -> None:
    await _jump(arena, *arena.named("monitor"))


async def _front(arena: Arena) -> None:
    await _jump(arena, *arena.named("scheduler"), arena.named("gateway")[0])


async def _instance(arena: Arena) -> None:
    await _jump(arena, arena.decode[0], arena.prefill[0])


async def _restart_behind(arena: Arena) -> None:
    """A restarted instance, whose clock is behind, looks older than its predecessor."""
    name = arena.decode[0]
    arena.switches.clock(-HOUR_S, name)
    await arena.processes.back(arena.processes.kill(name))
    await arena.roles.ready(name, timeout_s=10.0)


CLOCKS = (
    Scenario("clock-monitor", "the monitor's clock jumps an hour ahead, and behind", _monitor),
    Scenario("clock-front", "clocks of schedulers and a gateway jump an hour ahead, and behind", _front),
    Scenario("clock-instances", "clocks of two instances jump an hour ahead, and behind", _instance),
    Scenario("clock-restart", "a decode instance is restarted with its clock an hour behind", _restart_behind),
)
