"""Faults that many scenarios share. Each function returns a fault: an async function of the running suite."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.proxy import Proxy, Wire, disturb

Fault = Callable[[Arena], Awaitable[None]]
Targets = Callable[[Arena], Sequence[str]]  # names of processes
Links = Callable[[Arena], Iterable[Wire]]

# A frozen process cannot be told from a slow one before its heartbeats, two a second, are missed for two seconds.
NOTICED_S = 2.5
FAULT_S = 4.0
HOUR_S = 3600.0
_CLOCK_S = 1.5


def kill(targets: Targets, *, outage: bool = False) -> Fault:
    """SIGKILL to the targets at once, until the launcher has restarted them.

    outage: no other process can do their work, so clients may wait for as long as the restart takes.
    """

    async def fault(arena: Arena) -> None:
        with arena.outage() if outage else nullcontext():
            await arena.processes.back(arena.processes.kill(*targets(arena)))
            if outage:
                await arena.roles.ready(*arena.roles.first)

    return fault


def freeze(targets: Targets, *, outage: bool = False) -> Fault:
    """SIGSTOP to the targets for FAULT_S."""

    async def fault(arena: Arena) -> None:
        with arena.outage() if outage else nullcontext():
            arena.processes.freeze(*targets(arena))
            await asyncio.sleep(FAULT_S)
            arena.processes.thaw()

    return fault


def kill_in_turn(targets: Targets) -> Fault:
    """SIGKILL to one target after the other, each restarted before the next."""

    async def fault(arena: Arena) -> None:
        for name in targets(arena):
            await arena.processes.back(arena.processes.kill(name))
            await asyncio.sleep(0.5)

    return fault


def clock_jump(targets: Targets) -> Fault:
    """The wall clocks of the targets jump an hour ahead, an hour behind, and back."""

    async def fault(arena: Arena) -> None:
        for offset_s in (HOUR_S, -HOUR_S, 0.0):
            arena.switches.clock(offset_s, *targets(arena))
            await asyncio.sleep(_CLOCK_S)

    return fault


def link_fault(links: Links, change: Callable[[Proxy], object], counter: str = "") -> Fault:
    """Disturb links for FAULT_S. `counter`: the proxies' count that must not stay 0, or the scenario fails."""

    async def fault(arena: Arena) -> None:
        wires = tuple(links(arena))
        await disturb(wires, change, FAULT_S)
        _require_effect(wires, counter)

    return fault


def replay(links: Links, period_s: float, *, back: bool = True) -> Fault:
    """Send recent messages again and again for FAULT_S; without `back` only those of the side that connected."""

    async def fault(arena: Arena) -> None:
        wires = tuple(links(arena))
        for _ in range(int(FAULT_S / period_s)):
            for wire in wires:
                wire.proxy.replay(back=back)
            await asyncio.sleep(period_s)
        _require_effect(wires, "replayed")

    return fault


def _require_effect(wires: Iterable[Wire], counter: str) -> None:
    if counter and not sum(getattr(wire.proxy, counter) for wire in wires):
        raise AssertionError(f"no message was {counter}: the scenario shows nothing")
