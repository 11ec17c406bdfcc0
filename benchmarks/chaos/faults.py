"""The library of faults that scenarios and the random mode share.

`frozen`, `kept_dead` and `disturbed` hold a fault for a block's length, as `Database.broken` does. The other functions
return a fault of a scenario: an async function of the suite under test.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext

from benchmarks.chaos import hostile
from benchmarks.chaos.garbage import make_noise, send_messages
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.chaos.wires import Port, Wire
from benchmarks.suite import background
from services.launcher.suite import until
from services.launcher.supervisor import State
from tools.client import Json, Request

Fault = Callable[[SuiteUnderTest], Awaitable[None]]
Targets = Callable[[SuiteUnderTest], Sequence[str]]  # names of processes
Links = Callable[[SuiteUnderTest], Iterable[Wire]]
Cases = Callable[[SuiteUnderTest], Iterable[tuple[str, Json]]]  # paths and bodies of requests

# A frozen process looks like a slow one until its heartbeats, two a second, are missed for two seconds.
NOTICED_S = 2.5
FAULT_S = 4.0
HOUR_S = 3600.0
_CLOCK_S = 1.5
_KILL_AGAIN_S = 0.1


def services(*names: str, count: int | None = None) -> Targets:
    """So many processes of these services; all of them by default."""
    return lambda suite: suite.named(*names)[:count]


def decode(count: int | None = None) -> Targets:
    """So many decode instances; all of them by default."""
    return lambda suite: suite.decode[:count]


def prefill(count: int | None = None) -> Targets:
    """So many prefill instances; all of them by default."""
    return lambda suite: suite.prefill[:count]


def links(*purposes: str, source: Targets | None = None, target: Targets | None = None) -> Links:
    """The links for these purposes, by default for all, from one process and to one process (`Wires.between`)."""

    def found(suite: SuiteUnderTest) -> Iterable[Wire]:
        names = (targets(suite)[0] if targets else "" for targets in (source, target))
        return suite.wires.between(*names, *purposes)

    return found


def links_of(targets: Targets, service: str = "") -> Links:
    """The links from and to the targets; with `service` those to its processes alone."""

    def found(suite: SuiteUnderTest) -> Iterable[Wire]:
        wires = (wire for name in targets(suite) for wire in suite.wires.touching(name))
        return [wire for wire in wires if service in ("", wire.port.service)]

    return found


@asynccontextmanager
async def frozen(suite: SuiteUnderTest, *names: str) -> AsyncIterator[None]:
    """SIGSTOP, and SIGCONT at the end."""
    suite.processes.freeze(*names)
    try:
        yield
    finally:
        suite.processes.thaw(*names)


@asynccontextmanager
async def kept_dead(suite: SuiteUnderTest, *names: str) -> AsyncIterator[None]:
    """SIGKILL, again after every restart by the launcher; afterwards, wait until the processes are back."""

    async def kill() -> None:
        while True:
            suite.processes.kill(*names)
            await asyncio.sleep(_KILL_AGAIN_S)

    def back(name: str) -> bool:
        status = suite.processes.statuses[name]
        return status.state is State.READY and bool(status.pid)

    async with background(kill()):
        yield
    await until(lambda: all(map(back, names)), 60.0, f"{', '.join(names)} to be back")


@asynccontextmanager
async def disturbed(wires: Iterable[Wire], change: Callable[[Proxy], object]) -> AsyncIterator[None]:
    """A fault of these links."""
    wires = tuple(wires)
    for wire in wires:
        change(wire.proxy)
    try:
        yield
    finally:
        for wire in wires:
            wire.proxy.heal()


def kill(targets: Targets, *, outage: bool = False) -> Fault:
    """SIGKILL to the targets at once, until the launcher has restarted them.

    outage: no other process can do their work, so clients may wait for as long as the restart takes.
    """

    async def fault(suite: SuiteUnderTest) -> None:
        with suite.outage() if outage else nullcontext():
            await suite.kill_until_back(*targets(suite))
            if outage:
                await suite.until_ready()

    return fault


def kill_in_turn(targets: Targets) -> Fault:
    """SIGKILL to one target after the other, each restarted before the next."""

    async def fault(suite: SuiteUnderTest) -> None:
        for name in targets(suite):
            await suite.kill_until_back(name)
            await asyncio.sleep(0.5)

    return fault


def replace(targets: Targets) -> Fault:
    """SIGTERM to one target after the other; the launcher starts each again before the next one ends."""

    async def fault(suite: SuiteUnderTest) -> None:
        for name in targets(suite):
            await suite.processes.back(suite.processes.stop(name))

    return fault


def freeze(targets: Targets, *, outage: bool = False) -> Fault:
    """SIGSTOP to the targets for FAULT_S."""

    async def fault(suite: SuiteUnderTest) -> None:
        with suite.outage() if outage else nullcontext():
            async with frozen(suite, *targets(suite)):
                await asyncio.sleep(FAULT_S)

    return fault


def clock_jump(targets: Targets) -> Fault:
    """The wall clocks of the targets jump an hour ahead, an hour behind, and back."""

    async def fault(suite: SuiteUnderTest) -> None:
        for offset_s in (HOUR_S, -HOUR_S, 0.0):
            suite.switches.clock(offset_s, *targets(suite))
            await asyncio.sleep(_CLOCK_S)

    return fault


def link_fault(wires: Links, change: Callable[[Proxy], object], outage_s: float | None = None) -> Fault:
    """Disturb links for FAULT_S. outage_s: clients may have to wait for so much longer; None: for no time."""

    async def fault(suite: SuiteUnderTest) -> None:
        with nullcontext() if outage_s is None else suite.outage(outage_s):
            async with disturbed(wires(suite), change):
                await asyncio.sleep(FAULT_S)

    return fault


def silence(wires: Links, outage_s: float | None = None) -> Fault:
    """Links forward nothing for FAULT_S, and notify neither side."""
    return link_fault(wires, Proxy.stall, outage_s)


def flap(wires: Links, *, share: float = 1.0) -> Fault:
    """Reset a share of the links' connections twice a second for FAULT_S, drawn anew each time."""

    async def fault(suite: SuiteUnderTest) -> None:
        chosen = tuple(wires(suite))
        for _ in range(int(FAULT_S / 0.5)):
            for wire in suite.rng.sample(chosen, int(share * len(chosen))):
                wire.proxy.cut()
            await asyncio.sleep(0.5)

    return fault


def spoil(wires: Links, kind: str, share: float) -> Fault:
    """Spoil this share of messages for FAULT_S (`Proxy.spoil`). The scenario fails when it hit no message."""

    async def fault(suite: SuiteUnderTest) -> None:
        chosen = tuple(wires(suite))
        async with disturbed(chosen, lambda proxy: proxy.spoil(kind, share)):
            await asyncio.sleep(FAULT_S)
        _require_effect(chosen, kind)

    return fault


def replay(wires: Links, period_s: float, *, back: bool = True) -> Fault:
    """Send recent messages again and again for FAULT_S; without `back` only those of the side that connected."""

    async def fault(suite: SuiteUnderTest) -> None:
        chosen = tuple(wires(suite))
        for _ in range(int(FAULT_S / period_s)):
            for wire in chosen:
                wire.proxy.replay(back=back)
            await asyncio.sleep(period_s)
        _require_effect(chosen, "replayed")

    return fault


def _require_effect(wires: Iterable[Wire], kind: str) -> None:
    assert sum(wire.proxy.counts[kind] for wire in wires), f"no message was {kind}: the scenario shows nothing"


def garbage(ports: Callable[[SuiteUnderTest], Sequence[Port]]) -> Fault:
    """Noise on these ports, and well-framed messages without sense on those that are not HTTP."""

    async def fault(suite: SuiteUnderTest) -> None:
        chosen = ports(suite)
        await make_noise(chosen, suite.rng)
        await send_messages([port for port in chosen if port.purpose != "http"], suite.rng)

    return fault


def bodies(
    cases: Cases, statuses: Container[int], reason: str = "", *, rounds: int = 1, seconds: float = 15.0
) -> Fault:
    """Send requests one after the other, in each round to another gateway (`hostile.require`)."""

    async def fault(suite: SuiteUnderTest) -> None:
        for number in range(rounds):
            for path, body in cases(suite):
                request = Request(path, {"model": "demo", **body})
                await hostile.require(suite.gateway(number), request, statuses, reason, seconds)

    return fault


async def drain_all_decode(suite: SuiteUnderTest) -> None:
    """Jobs wait until an instance is back."""
    with suite.outage():
        for name in suite.decode:
            await suite.drain(name, force=True)
        await asyncio.sleep(2.0)
        await suite.reset_roles()
