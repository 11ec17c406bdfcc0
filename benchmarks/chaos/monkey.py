"""The random mode: overlapping faults under load, drawn from a seed, for a given time.

A draw follows from the seed and its number alone, so that any stretch can be repeated. No answer may be lost, doubled,
wrong or hung, and no request may crash. Every ROUND draws the faults end, and the suite must recover within the bound
with nothing left behind; otherwise it is replaced by a fresh one.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.markup import escape

from benchmarks.chaos import hostile
from benchmarks.chaos.faults import DATABASE_FAULTS, broken_database, disturbed, frozen, garbage, state_links
from benchmarks.chaos.load import BROKEN, HARM, UNCLEAN, Tally, Verdict, fresh
from benchmarks.chaos.proxy import Proxy, Wire
from benchmarks.chaos.scenario import WARM_S, Calm, calm, check_left_behind, died, footprint, recovered
from benchmarks.chaos.testbeds import OPEN
from benchmarks.chaos.under_test import Processes, SuiteUnderTest, running_suite_under_test
from shared.errors import PolyphaseError

MEAN_PAUSE_S = 3.0  # between two draws; faults that last longer overlap
Act = Callable[[SuiteUnderTest, Random, float], Awaitable[str]]  # a fault of that many seconds; returns what it hit


@dataclass(frozen=True, slots=True)
class Draw:
    """A fault that was drawn."""

    number: int
    name: str
    pause_s: float  # before it
    seconds: float
    act: Act
    rng: Random


def draw(seed: int, number: int) -> Draw:
    """The draw with this number."""
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
    async with disturbed(state_links(suite), lambda proxy: proxy.spoil("corrupted", rng.uniform(0.0, 0.5))):
        await asyncio.sleep(seconds)
    return "heartbeats and broadcasts"


async def _replay(suite: SuiteUnderTest, rng: Random, _: float) -> str:
    for wire in state_links(suite):
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
    kind = rng.choice(DATABASE_FAULTS)
    async with broken_database(suite, kind):
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


@dataclass(slots=True)
class Findings:
    """What a run has found so far."""

    seed: int
    console: Console
    began_s: float = field(default_factory=time.monotonic)
    tally: Tally = field(default_factory=Tally)
    drawn: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    rounds: int = 0
    suites: int = 0
    slowest_s: float = 0.0

    def log(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self.began_s:7.1f} s[/]  {text}", highlight=False, soft_wrap=True)

    def violate(self, first: int, what: str) -> None:
        """Add a violation; `first` is the first draw of its round."""
        self.violations.append(f"draws {first} to {first + ROUND - 1}: {what}")
        self.log(f"[red]{escape(what)}[/]")


async def random_run(folder: Path, seconds: float, seed: int, console: Console, first: int = 0) -> dict[str, Any]:
    """Returns figures and aims. Raises StartFailed or Unavailable when the suite does not start."""
    found, number = Findings(seed, console), first
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        found.suites += 1
        async with running_suite_under_test(OPEN, folder / f"suite-{found.suites}", console, seed) as suite:
            before, well = await calm(suite, seed), True
            while well and time.monotonic() < end_s:
                well = await _round(suite, before, found, number)
                number += ROUND
    found.log(f"{number - first} faults in {found.rounds} rounds; {len(found.violations)} violations")
    return _result(found, number - first)


async def _round(suite: SuiteUnderTest, before: Calm, found: Findings, first: int) -> bool:
    """ROUND faults and recovery; returns whether the suite is well."""
    suite.processes.touched.clear()
    now, since_s = footprint(suite), time.time()
    async with suite.users(found.seed + first) as load:
        load.tally = Tally()
        try:
            await load.warm(WARM_S)
        except TimeoutError:
            found.violate(first, f"not every user was answered within {WARM_S:.0f} s without a fault")
            return False
        await _faults(suite, found, first)
        await suite.restore()
        healed_s = time.monotonic()
        resetting = asyncio.create_task(suite.reset_roles(_END_S))
        recovery = await recovered(suite, load, before.rate, healed_s)
        await asyncio.gather(resetting, return_exceptions=True)
    await check_left_behind(suite, before.footprint, recovery, since_s)
    left = [*recovery.left, *recovery.ghosts, *died(suite, now)]
    tally = load.tally
    for verdict in (*HARM, *UNCLEAN):
        if count := tally.count(verdict):
            found.violate(first, f"{count} {verdict}: {tally.examples[verdict]}")
    found.tally.counts += tally.counts
    found.tally.longest_gap_s = max(found.tally.longest_gap_s, tally.longest_gap_s)
    found.rounds += 1
    found.slowest_s = max(found.slowest_s, recovery.recovered_s or 0.0)
    if recovery.recovered_s is None:
        found.violate(first, f"not back: {'; '.join(recovery.missing)}")
    if left:
        found.violate(first, f"left behind: {'; '.join(left)}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in tally.counts.items())
    back = "not back" if recovery.recovered_s is None else f"back after {recovery.recovered_s:.1f} s"
    found.log(f"draws {first} to {first + ROUND - 1}: {counts}, longest wait {tally.longest_gap_s:.1f} s, {back}")
    return recovery.recovered_s is not None and not recovery.left


async def _faults(suite: SuiteUnderTest, found: Findings, first: int) -> None:
    """Each fault begins after its pause, also when the previous fault has not ended."""
    running: list[asyncio.Task[None]] = []
    try:
        for number in range(first, first + ROUND):
            drawn = draw(found.seed, number)
            await asyncio.sleep(drawn.pause_s)
            running.append(asyncio.create_task(_act(suite, drawn, found, first)))
        await asyncio.wait(running, timeout=_END_S)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _act(suite: SuiteUnderTest, drawn: Draw, found: Findings, first: int) -> None:
    found.drawn[drawn.name] += 1
    began = time.monotonic()
    try:
        target = await drawn.act(suite, drawn.rng, drawn.seconds)
    except Exception as error:  # a boundary: a fault that fails is a finding, and the run goes on
        target = f"failed: {type(error).__name__}: {error}"
        found.violate(first, f"{drawn.name} {target}")
    found.log(f"{drawn.number:4} {drawn.name}: {escape(target)}, {time.monotonic() - began:.1f} s")


def _result(found: Findings, faults: int) -> dict[str, Any]:
    figures: dict[str, float] = {
        "minutes": round((time.monotonic() - found.began_s) / 60.0, 1),
        "faults": faults,
        "rounds": found.rounds,
        "suites": found.suites,
        **{f"{v}_answers": found.tally.count(v) for v in Verdict},
        "longest_wait_s": round(found.tally.longest_gap_s, 3),
        "slowest_recovery_s": round(found.slowest_s, 3),
        **{f"drawn_{name.replace(' ', '_')}": count for name, count in sorted(found.drawn.items())},
    }
    whole = found.tally.count(Verdict.WHOLE)
    broken = found.tally.count(*BROKEN)
    got = "; ".join(found.violations) or f"{whole} whole, {broken} lost with their gateway"
    aim = {"want": "no violation", "got": got, "met": not found.violations}
    return {"figures": figures, "aims": {"every answer whole or clean, every round recovered": aim}}
