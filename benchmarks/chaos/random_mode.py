"""The random mode: overlapping faults under load, drawn from a seed.

A draw follows from the seed and its number alone, so that any stretch can be repeated. ROUND draws are a scenario: no
answer may be lost, doubled, wrong or hung, no request may crash, and afterwards the suite must recover within the bound
with nothing left behind.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from benchmarks.chaos import hostile
from benchmarks.chaos.faults import disturbed, frozen, garbage, links
from benchmarks.chaos.handles import Processes
from benchmarks.chaos.load import fresh
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.testbeds import OPEN
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.chaos.wires import Wire
from shared.errors import PolyphaseError

MEAN_PAUSE_S = 3.0  # between two draws; faults that last longer overlap
STATE = links("heartbeats", "broadcasts")
Act = Callable[[SuiteUnderTest, Random, float], Awaitable[str]]  # a fault of that many seconds; returns what it hit


@dataclass(frozen=True, slots=True)
class Draw:
    number: int
    name: str
    pause_s: float  # before it
    seconds: float
    act: Act
    rng: Random


def draw(seed: int, number: int) -> Draw:
    rng = Random(f"{seed}/{number}")
    name = rng.choices(list(FAULTS), [weight for weight, _, _ in FAULTS.values()])[0]
    _, longest_s, act = FAULTS[name]
    return Draw(number, name, rng.expovariate(1.0 / MEAN_PAUSE_S), rng.uniform(0.2, longest_s), act, rng)


def _process(suite: SuiteUnderTest, rng: Random) -> str:
    return rng.choice([spec.name for spec in suite.plan.processes])


def _signal(send: Callable[..., object], count: int = 1) -> Act:
    async def act(suite: SuiteUnderTest, rng: Random, _: float) -> str:
        names = rng.sample([spec.name for spec in suite.plan.processes], count)
        send(suite.processes, *names)
        return ", ".join(names)

    return act


async def _freeze(suite: SuiteUnderTest, rng: Random, seconds: float) -> str:
    name = _process(suite, rng)
    async with frozen(suite, name):
        await asyncio.sleep(seconds)
    return name


async def _drain(suite: SuiteUnderTest, rng: Random, seconds: float) -> str:
    name = rng.choice([*suite.roles])
    with suppress(PolyphaseError):
        await suite.drain(name, timeout_s=seconds)
        await suite.resume(name)
    return name


async def _flip(suite: SuiteUnderTest, rng: Random, seconds: float) -> str:
    name = rng.choice([*suite.roles])
    with suppress(PolyphaseError):
        await suite.flip(name, timeout_s=seconds)
    return name


def _on_links(change: Callable[[Proxy, Random], object]) -> Act:
    """A fault of one link, of all links of a process, or of a fifth of all links."""

    async def act(suite: SuiteUnderTest, rng: Random, seconds: float) -> str:
        kind = rng.randrange(3)
        if kind == 0:
            wires: tuple[Wire, ...] = (rng.choice(suite.wires.all),)
        elif kind == 1:
            wires = suite.wires.touching(_process(suite, rng))
        else:
            wires = tuple(rng.sample(suite.wires.all, len(suite.wires.all) // 5))
        async with disturbed(wires, lambda proxy: change(proxy, rng)):
            await asyncio.sleep(seconds)
        return wires[0].name if len(wires) == 1 else f"{len(wires)} links"

    return act


def _slow(proxy: Proxy, rng: Random) -> None:
    proxy.slow(latency_s=rng.uniform(0.0, 0.3), bytes_per_s=rng.uniform(50_000, 1_000_000))


async def _corrupt(suite: SuiteUnderTest, rng: Random, seconds: float) -> str:
    async with disturbed(STATE(suite), lambda proxy: proxy.spoil("corrupted", rng.uniform(0.0, 0.5))):
        await asyncio.sleep(seconds)
    return "heartbeats and broadcasts"


async def _replay(suite: SuiteUnderTest, rng: Random, _: float) -> str:
    for wire in STATE(suite):
        wire.proxy.replay()
    return "heartbeats and broadcasts"


async def _garbage(suite: SuiteUnderTest, rng: Random, _: float) -> str:
    port = rng.choice(suite.ports)
    await garbage(lambda _: [port])(suite)
    return f"{port.process} ({port.purpose})"


async def _clock(suite: SuiteUnderTest, rng: Random, seconds: float) -> str:
    name, offset_s = _process(suite, rng), rng.choice((-1, 1)) * rng.choice((2.0, 60.0, 3600.0))
    suite.switches.clock(offset_s, name)
    await asyncio.sleep(seconds)
    suite.switches.clock(0.0, name)
    return f"{name} by {offset_s:+.0f} s"


async def _database(suite: SuiteUnderTest, rng: Random, seconds: float) -> str:
    kind = rng.choice(suite.database.KINDS)
    async with suite.database.broken(kind):
        await asyncio.sleep(seconds)
    return kind


async def _leaving_clients(suite: SuiteUnderTest, rng: Random, seconds: float) -> str:
    await hostile.leaving_clients(suite.gateways, suite.requests, 30, seconds, rng)
    return "30 clients"


async def _slow_readers(suite: SuiteUnderTest, rng: Random, seconds: float) -> str:
    request = hostile.changed(suite.requests[0], max_tokens=100)
    await hostile.crowd(8, lambda number: hostile.never_read(suite.gateway(number), fresh(request), seconds))
    return "8 clients"


# name: weight, longest duration in seconds, fault
FAULTS: dict[str, tuple[float, float, Act]] = {
    "kill": (5.0, 1.0, _signal(Processes.kill)),
    "kill several": (1.0, 1.0, _signal(Processes.kill, 3)),
    "stop": (2.0, 1.0, _signal(Processes.stop)),
    "freeze": (4.0, 6.0, _freeze),
    "drain": (2.0, 5.0, _drain),
    "flip": (3.0, 5.0, _flip),
    "silent link": (3.0, 6.0, _on_links(lambda proxy, _: proxy.stall())),
    "refused link": (2.0, 6.0, _on_links(lambda proxy, _: proxy.cut(refuse=True))),
    "cut link": (3.0, 1.0, _on_links(lambda proxy, _: proxy.cut())),
    "slow link": (2.0, 6.0, _on_links(_slow)),
    "corrupt state": (1.0, 4.0, _corrupt),
    "replayed state": (1.0, 1.0, _replay),
    "garbage": (2.0, 1.0, _garbage),
    "clock": (2.0, 5.0, _clock),
    "database": (2.0, 5.0, _database),
    "leaving clients": (2.0, 3.0, _leaving_clients),
    "slow readers": (1.0, 5.0, _slow_readers),
}

ROUND = 12
_END_S = 30.0  # the longest time that a fault may take to end


def random_round(seed: int, first: int, drawn: Counter[str], log: Callable[[str], object]) -> Scenario:
    """ROUND draws from this number on as one scenario. Each begins after its pause, also when others have not ended."""

    async def inject(suite: SuiteUnderTest, fault: Draw, failed: list[str]) -> None:
        drawn[fault.name] += 1
        began = time.monotonic()
        try:
            target = await fault.act(suite, fault.rng, fault.seconds)
        except Exception as error:  # a boundary: a fault that fails is a finding, and the run goes on
            target = f"failed: {type(error).__name__}: {error}"
            failed.append(f"{fault.name} {target}")
        log(f"{fault.number:4} {fault.name}: {target}, {time.monotonic() - began:.1f} s")

    async def inject_all(suite: SuiteUnderTest) -> None:
        running: list[asyncio.Task[None]] = []
        failed: list[str] = []
        try:
            for number in range(first, first + ROUND):
                fault = draw(seed, number)
                await asyncio.sleep(fault.pause_s)
                running.append(asyncio.create_task(inject(suite, fault, failed)))
            await asyncio.wait(running, timeout=_END_S)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        assert not failed, "; ".join(failed)

    name, costs = f"draws {first} to {first + ROUND - 1}", {"outage_s": float("inf"), "bound_s": 600.0}
    return Scenario(name, "faults at random", inject_all, OPEN, errors=True, breaks=True, resets=True, **costs)
