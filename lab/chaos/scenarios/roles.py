"""Drains and flips, raced against each other, against deaths and against the monitor's own restart."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from lab.chaos.arena import Arena
from lab.chaos.scenario import Scenario
from services.launcher.suite import until
from shared.errors import Conflict, PolyphaseError

_REFUSED = (PolyphaseError,)  # a race has losers; what they are told is not what is looked at


async def drain_in_turn(arena: Arena) -> None:
    """Each instance drains under load and resumes: nobody notices."""
    for name in (*arena.decode, *arena.prefill):
        await arena.roles.drain(name)
        await arena.roles.resume(name)


async def drain_last(arena: Arena) -> None:
    """All decode instances but one drain; the last one's drain must be refused."""
    *others, last = arena.decode
    for name in others:
        await arena.roles.drain(name)
    try:
        with arena.away():  # should it be carried out after all
            try:
                await arena.roles.drain(last, timeout_s=3.0)
            except Conflict:
                return
            raise AssertionError("the last ready decode instance was drained without being forced")
    finally:
        await arena.roles.as_first()


async def drain_all_forced(arena: Arena) -> None:
    """Every decode instance drains, on purpose; jobs wait until one is back."""
    with arena.away():
        for name in arena.decode:
            await arena.roles.drain(name, force=True)
        await asyncio.sleep(2.0)
        await arena.roles.as_first()


async def flip_race(arena: Arena) -> None:
    """Everything is asked of everybody at once. Some of it is refused; some instance of each role must remain."""
    names = (*arena.decode, *arena.prefill)
    for _ in range(3):
        await _together(*(arena.roles.flip(name) for name in names), *(arena.roles.drain(name) for name in names))
        await _together(*(arena.roles.resume(name) for name in names))
        ready = {entry["role"] for entry in (await arena.suite.instances()).values() if entry["state"] == "ready"}
        if ready != {"prefill", "decode"}:
            raise AssertionError(f"after a race of flips and drains only these roles are ready: {sorted(ready)}")
    await arena.roles.as_first()


async def flip_and_kill(arena: Arena) -> None:
    """An instance dies in the middle of its flip, another in the middle of its drain."""
    flipping = asyncio.create_task(arena.roles.flip(arena.decode[0]))
    draining = asyncio.create_task(arena.roles.drain(arena.decode[1]))
    await asyncio.sleep(0.1)
    old = arena.processes.kill(arena.decode[0], arena.decode[1])
    for task in (flipping, draining):
        with suppress(*_REFUSED):
            await task
    await arena.processes.back(old)
    await arena.roles.as_first()


async def monitor_dies_in_flips(arena: Arena) -> None:
    """Thrice: a flip begins, the monitor dies in it, comes back, and can put everything right again."""
    (monitor,) = arena.named("monitor")
    for name in (arena.decode[0], arena.prefill[0], arena.decode[1]):
        flipping = asyncio.create_task(arena.roles.flip(name))
        await asyncio.sleep(0.15)
        old = arena.processes.kill(monitor)
        with suppress(*_REFUSED):
            await flipping
        await arena.processes.back(old)
        await arena.roles.as_first()


async def monitor_frozen_in_drain(arena: Arena) -> None:
    """A drain is asked of a monitor that stands still; what it answers and what then happens must be one thing."""
    (monitor,), name = arena.named("monitor"), arena.decode[0]
    arena.processes.freeze(monitor)
    draining = asyncio.create_task(arena.roles.drain(name, timeout_s=1.0))
    await asyncio.sleep(4.0)
    arena.processes.thaw(monitor)
    with suppress(*_REFUSED):
        await draining
    await until(lambda: _no_operation(arena), 10.0, "the operation to end")
    await arena.roles.as_first()


async def _no_operation(arena: Arena) -> bool:
    return not any(entry["operation"] for entry in (await arena.suite.instances()).values())


async def _together(*wishes: Coroutine[Any, Any, None]) -> None:
    for result in await asyncio.gather(*wishes, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, _REFUSED):
            raise result


ROLES = (
    Scenario("drain-in-turn", "every instance drains and resumes, one after the other", drain_in_turn),
    Scenario("drain-last", "all decode instances but one drain; the last one is asked to", drain_last),
    Scenario("drain-all", "every decode instance drains by force, and resumes", drain_all_forced),
    Scenario("flip-race", "flips and drains of all instances at once, three times", flip_race),
    Scenario("flip-and-kill", "instances die in the middle of a flip and of a drain", flip_and_kill),
    Scenario("flip-monitor-dies", "the monitor dies in the middle of three flips", monitor_dies_in_flips),
    Scenario(
        "drain-monitor-frozen", "a drain is asked of a monitor that stands still for 4 s", monitor_frozen_in_drain
    ),
)
