"""Two monitors of which one acts: it is lost in one way or another, and the other one takes over."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from lab.chaos.arena import Arena
from lab.chaos.clusters import PAIR
from lab.chaos.scenario import Scenario
from services.launcher.suite import until
from shared.errors import PolyphaseError, Standby
from shared.wire.clients.monitor import MonitorClient

TAKEN_OVER_S = 6.0  # the longest on a busy machine; what it took is told
_POLL_S = 0.01


async def _acts(arena: Arena, name: str) -> bool:
    """Whether that monitor acts, and tells of every instance."""
    url = next(f"http://{p.host}:{p.port}" for p in arena.ports if p.process == name and p.purpose == "http")
    async with MonitorClient(url) as monitor:
        try:
            return len(await monitor.call("GET", "/instances", timeout_s=0.5)) >= len(arena.roles.first)
        except PolyphaseError:
            return False


async def _who(arena: Arena) -> tuple[str, str]:
    """The monitor that acts, and the one that stands by. Raises DeadlineExceeded when nobody acts."""
    found: list[str] = []

    async def one() -> bool:
        found[:] = [name for name in arena.named("monitor") if await _acts(arena, name)]
        return len(found) == 1

    await until(one, TAKEN_OVER_S, "one monitor to act")
    return found[0], next(name for name in arena.named("monitor") if name != found[0])


async def _lose(arena: Arena, lose: Callable[[str], Awaitable[object] | object]) -> tuple[str, str]:
    """Take the one that acts away, wait for the other, and tell how long that took; who acted, and who does now."""
    active, other = await _who(arena)
    began = time.monotonic()
    done = lose(active)
    if isinstance(done, Awaitable):
        await done
    await until(lambda: _acts(arena, other), TAKEN_OVER_S, f"{other} to take over", poll_s=_POLL_S)
    arena.notes.append(f"taken over in {time.monotonic() - began:.2f} s")
    return active, other


async def _kill(arena: Arena) -> None:
    active, _ = await _lose(arena, arena.processes.kill)
    await until(lambda: _stands_by(arena, active), TAKEN_OVER_S * 3, f"{active} to stand by")


async def _freeze(arena: Arena) -> None:
    """It wakes, is not the one that acts, and says so; no two act."""
    active, other = await _lose(arena, arena.processes.freeze)
    await asyncio.sleep(1.0)
    arena.processes.thaw()
    await until(lambda: _stands_by(arena, active), TAKEN_OVER_S, f"{active} to stand by")
    assert await _acts(arena, other), f"{other} has stopped to act"


async def _no_database(arena: Arena) -> None:
    """The database refuses whatever the one that acts writes, and no other one's."""
    active, _ = await _lose(arena, arena.switches.read_only)
    arena.switches.writable(active)
    await until(lambda: _stands_by(arena, active), TAKEN_OVER_S, f"{active} to stand by")


async def _clock(arena: Arena) -> None:
    """Its clock jumps, which nobody takes for a reason to change; then it dies."""
    active, other = await _who(arena)
    for offset_s in (3600.0, -3600.0):
        arena.switches.clock(offset_s, active)
        await asyncio.sleep(1.5)
        assert await _acts(arena, active), f"{active} has stopped to act"
    arena.switches.clock(-3600.0, other)
    await _lose(arena, arena.processes.kill)


async def _both(arena: Arena) -> None:
    """With nobody left schedulers go by what they heard last; whoever is back first acts."""
    await arena.processes.back(arena.processes.kill(*arena.named("monitor")))
    await _who(arena)


async def _and_scheduler(arena: Arena) -> None:
    """And a scheduler at the same time."""
    scheduler = arena.processes.kill(arena.named("scheduler")[0])
    await _lose(arena, arena.processes.kill)
    await arena.processes.back(scheduler)


async def _flip_under_way(arena: Arena) -> None:
    """It is told as unknown, by whoever acts then; the instance is given work again."""
    name = arena.decode[0]
    asked = asyncio.create_task(arena.roles.flip(name, force=True))
    await asyncio.sleep(0.1)
    await _lose(arena, arena.processes.kill)
    await asyncio.gather(asked, return_exceptions=True)
    await arena.roles.as_first()


async def _stands_by(arena: Arena, name: str) -> bool:
    url = next(f"http://{p.host}:{p.port}" for p in arena.ports if p.process == name and p.purpose == "http")
    async with MonitorClient(url) as monitor:
        try:
            await monitor.call("GET", "/instances", timeout_s=0.5)
        except Standby:
            return True
        except PolyphaseError:
            return False
    return False


FAILOVER = (
    Scenario("monitor-failover-kill", "kill -9 of the monitor that acts", _kill, PAIR),
    Scenario("monitor-failover-freeze", "the monitor that acts stands still, and wakes", _freeze, PAIR),
    Scenario("monitor-failover-unwritable", "the monitor that acts cannot write to its database", _no_database, PAIR),
    Scenario("monitor-failover-clock", "its clock jumps an hour ahead and behind; then it is killed", _clock, PAIR),
    Scenario("monitor-failover-both", "kill -9 of both monitors at once", _both, PAIR),
    Scenario("monitor-failover-scheduler", "kill -9 of it and of a scheduler at once", _and_scheduler, PAIR),
    Scenario("monitor-failover-flip", "kill -9 of it while it flips an instance", _flip_under_way, PAIR, bound_s=60.0),
)
