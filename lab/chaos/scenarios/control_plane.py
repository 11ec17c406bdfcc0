"""Two of a service, and either is lost: nobody waits for the one that is gone."""

import asyncio

from lab.chaos.arena import Arena
from lab.chaos.scenario import Scenario
from lab.chaos.scenarios.processes import kill_one


async def either_scheduler(arena: Arena) -> None:
    """One after the other, each back before the next."""
    for name in arena.named("scheduler"):
        await kill_one(arena, name)
        await asyncio.sleep(0.5)


async def either_gateway(arena: Arena) -> None:
    """One after the other; whoever asked the other one notices nothing."""
    for name in arena.named("gateway"):
        await kill_one(arena, name)
        await asyncio.sleep(0.5)


async def monitor_and_decode(arena: Arena) -> None:
    """An instance dies while nobody can say so: jobs are still placed there, and wait for a connection."""
    monitor = arena.processes.kill(*arena.named("monitor"))
    decode = arena.processes.kill(arena.decode[0])
    await arena.processes.back(monitor | decode)
    await arena.roles.ready(*arena.roles.first)


CONTROL_PLANE = (
    Scenario("either-scheduler", "kill -9 of one scheduler, then of the other", either_scheduler),
    Scenario("either-gateway", "kill -9 of one gateway, then of the other", either_gateway, breaks=True, bound_s=60.0),
    Scenario("monitor-and-decode", "kill -9 of the monitor and of a decode instance together", monitor_and_decode),
)
