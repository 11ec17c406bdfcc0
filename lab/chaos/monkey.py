"""The random mode: faults drawn from a seed, overlapping, under load, for as long as told.

Always: no answer lost, doubled, wrong, crashed or hung. Every ROUND draws the faults end, and the suite must be back
within the bound, with nothing left behind; a suite that is not is replaced by a fresh one, and the run goes on.
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

from lab.chaos import hostile
from lab.chaos.arena import Arena, running_arena
from lab.chaos.clusters import OPEN
from lab.chaos.load import BROKEN, HARM, UNCLEAN, Tally, Verdict, fresh
from lab.chaos.proxy import Wire
from lab.chaos.scenario import WARM_S, Calm, calm, died, footprint, look_behind, recovered
from shared.errors import PolyphaseError

# MERGED draws.py
# What the random mode may do. A draw follows from the seed and its number alone: any stretch can be run again.


MEAN_PAUSE_S = 3.0  # between two draws; faults overlap when they last longer
Act = Callable[[Arena, Random, float], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Draw:
    """One fault that was drawn. `act` says whom it hit."""

    number: int
    name: str
    pause_s: float  # before it
    seconds: float
    act: Act
    rng: Random


def draw(seed: int, number: int) -> Draw:
    """The fault of that number."""
    rng = Random(f"{seed}/{number}")
    name = rng.choices([n for n, _, _, _ in FAULTS], [weight for _, weight, _, _ in FAULTS])[0]
    _, _, longest_s, act = next(fault for fault in FAULTS if fault[0] == name)
    return Draw(number, name, rng.expovariate(1.0 / MEAN_PAUSE_S), rng.uniform(0.2, longest_s), act, rng)


def _any(arena: Arena, rng: Random) -> str:
    return rng.choice([spec.name for spec in arena.plan.processes])


async def _kill(arena: Arena, rng: Random, _: float) -> str:
    name = _any(arena, rng)
    arena.processes.kill(name)
    return name


async def _kill_several(arena: Arena, rng: Random, _: float) -> str:
    names = rng.sample([spec.name for spec in arena.plan.processes], 3)
    arena.processes.kill(*names)
    return ", ".join(names)


async def _stop(arena: Arena, rng: Random, _: float) -> str:
    name = _any(arena, rng)
    arena.processes.stop(name)
    return name


async def _freeze(arena: Arena, rng: Random, seconds: float) -> str:
    name = _any(arena, rng)
    arena.processes.freeze(name)
    await asyncio.sleep(seconds)
    arena.processes.thaw(name)
    return name


async def _drain(arena: Arena, rng: Random, seconds: float) -> str:
    name = rng.choice([*arena.roles.first])
    with suppress(PolyphaseError):
        await arena.roles.drain(name, timeout_s=seconds)
        await arena.roles.resume(name)
    return name


async def _flip(arena: Arena, rng: Random, seconds: float) -> str:
    name = rng.choice([*arena.roles.first])
    with suppress(PolyphaseError):
        await arena.roles.flip(name, timeout_s=seconds)
    return name


def _wires(arena: Arena, rng: Random) -> tuple[Wire, ...]:
    """One way, every way of one process, or a fifth of all."""
    kind = rng.randrange(3)
    if kind == 0:
        return (rng.choice(arena.wires.all),)
    if kind == 1:
        return arena.wires.touching(_any(arena, rng))
    return tuple(rng.sample(arena.wires.all, len(arena.wires.all) // 5))


def _said(wires: tuple[Wire, ...]) -> str:
    return wires[0].name if len(wires) == 1 else f"{len(wires)} links"


async def _silence(arena: Arena, rng: Random, seconds: float) -> str:
    wires = _wires(arena, rng)
    for wire in wires:
        wire.proxy.stall()
    await asyncio.sleep(seconds)
    for wire in wires:
        wire.proxy.heal()
    return _said(wires)


async def _refuse(arena: Arena, rng: Random, seconds: float) -> str:
    wires = _wires(arena, rng)
    for wire in wires:
        wire.proxy.cut(refuse=True)
    await asyncio.sleep(seconds)
    for wire in wires:
        wire.proxy.heal()
    return _said(wires)


async def _cut(arena: Arena, rng: Random, _: float) -> str:
    wires = _wires(arena, rng)
    for wire in wires:
        wire.proxy.cut()
    return _said(wires)


async def _slow(arena: Arena, rng: Random, seconds: float) -> str:
    wires = _wires(arena, rng)
    for wire in wires:
        wire.proxy.slow(latency_s=rng.uniform(0.0, 0.3), bytes_per_s=rng.uniform(50_000, 1_000_000))
    await asyncio.sleep(seconds)
    for wire in wires:
        wire.proxy.heal()
    return _said(wires)


async def _corrupt(arena: Arena, rng: Random, seconds: float) -> str:
    wires = (*arena.wires.between(purpose="heartbeats"), *arena.wires.between(purpose="broadcasts"))
    for wire in wires:
        wire.proxy.corrupt(rng.uniform(0.0, 0.5))
    await asyncio.sleep(seconds)
    for wire in wires:
        wire.proxy.heal()
    return "heartbeats and broadcasts"


async def _replay(arena: Arena, rng: Random, _: float) -> str:
    for wire in (*arena.wires.between(purpose="heartbeats"), *arena.wires.between(purpose="broadcasts")):
        wire.proxy.replay()
    return "heartbeats and broadcasts"


async def _garbage(arena: Arena, rng: Random, _: float) -> str:
    port = rng.choice(arena.ports)
    await hostile.make_noise([port], rng)
    if port.purpose != "http":
        await hostile.say([port], rng)
    return f"{port.process} ({port.purpose})"


async def _clock(arena: Arena, rng: Random, seconds: float) -> str:
    name, offset_s = _any(arena, rng), rng.choice((-1, 1)) * rng.choice((2.0, 60.0, 3600.0))
    arena.switches.clock(offset_s, name)
    await asyncio.sleep(seconds)
    arena.switches.clock(0.0, name)
    return f"{name} by {offset_s:+.0f} s"


async def _database(arena: Arena, rng: Random, seconds: float) -> str:
    kind = rng.choice(("locked", "read-only", "full", "gone"))
    if kind == "locked":
        async with arena.database.locked():
            await asyncio.sleep(seconds)
        return kind
    if kind == "gone":
        arena.database.remove()
    elif kind == "full":
        arena.database.fill_disk()
    else:
        arena.switches.read_only(*arena.database.users)
    await asyncio.sleep(seconds)
    arena.database.restore()
    arena.switches.writable(*arena.database.users)
    return kind


async def _storm(arena: Arena, rng: Random, seconds: float) -> str:
    async def one(number: int) -> None:
        await asyncio.sleep(rng.uniform(0.0, seconds))
        address = arena.gateways[number % len(arena.gateways)]
        await hostile.leave(address, fresh(rng.choice(arena.asks)), rng.uniform(0.0, 0.8))

    await hostile.crowd(30, one)
    return "30 clients"


async def _slow_readers(arena: Arena, rng: Random, seconds: float) -> str:
    ask = hostile.wanting(dict(arena.asks[0].body), max_tokens=100)
    await hostile.crowd(8, lambda n: hostile.never_read(arena.gateways[n % len(arena.gateways)], fresh(ask), seconds))
    return "8 clients"


# name, weight, longest duration in seconds, what is done
FAULTS: tuple[tuple[str, float, float, Act], ...] = (
    ("kill", 5.0, 1.0, _kill),
    ("kill several", 1.0, 1.0, _kill_several),
    ("stop", 2.0, 1.0, _stop),
    ("freeze", 4.0, 6.0, _freeze),
    ("drain", 2.0, 5.0, _drain),
    ("flip", 3.0, 5.0, _flip),
    ("silent link", 3.0, 6.0, _silence),
    ("refused link", 2.0, 6.0, _refuse),
    ("cut link", 3.0, 1.0, _cut),
    ("slow link", 2.0, 6.0, _slow),
    ("corrupt state", 1.0, 4.0, _corrupt),
    ("replayed state", 1.0, 1.0, _replay),
    ("garbage", 2.0, 1.0, _garbage),
    ("clock", 2.0, 5.0, _clock),
    ("database", 2.0, 5.0, _database),
    ("leaving clients", 2.0, 3.0, _storm),
    ("slow readers", 1.0, 5.0, _slow_readers),
)

ROUND = 12
_END_S = 30.0  # the longest that a fault may take to end


@dataclass(slots=True)
class Findings:
    """What a run found so far."""

    seed: int
    console: Console
    began_s: float = field(default_factory=time.monotonic)
    tally: Tally = field(default_factory=Tally)
    drawn: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    rounds: int = 0
    suites: int = 0
    slowest_s: float = 0.0

    def say(self, text: str) -> None:
        """One line of the log."""
        self.console.print(f"[dim]{time.monotonic() - self.began_s:7.1f} s[/]  {text}", highlight=False, soft_wrap=True)

    def violate(self, first: int, what: str) -> None:
        """Something that must not be; `first` is the first draw of its round."""
        self.violations.append(f"draws {first} to {first + ROUND - 1}: {what}")
        self.say(f"[red]{escape(what)}[/]")


async def random_run(folder: Path, seconds: float, seed: int, console: Console, first: int = 0) -> dict[str, Any]:
    """Figures and aims. Raises StartFailed or Unavailable when the suite does not start."""
    found, number = Findings(seed, console), first
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        found.suites += 1
        async with running_arena(OPEN, folder / f"suite-{found.suites}", console, seed) as arena:
            before, well = await calm(arena, seed), True
            while well and time.monotonic() < end_s:
                well = await _round(arena, before, found, number)
                number += ROUND
    found.say(f"{number - first} faults in {found.rounds} rounds; {len(found.violations)} violations")
    return _result(found, number - first)


async def _round(arena: Arena, before: Calm, found: Findings, first: int) -> bool:
    """ROUND faults and a look at what they left; whether the suite is well."""
    arena.processes.touched.clear()
    now, since_s = footprint(arena), time.time()
    async with arena.users(found.seed + first) as load:
        load.tally = Tally()
        try:
            await load.warm(WARM_S)
        except TimeoutError:
            found.violate(first, f"not every user was answered within {WARM_S:.0f} s, without any fault")
            return False
        await _faults(arena, found, first)
        await arena.restore()
        healed_s = time.monotonic()
        putting_back = asyncio.create_task(arena.roles.as_first(_END_S))
        recovery = await recovered(arena, load, before.rate, healed_s)
        await asyncio.gather(putting_back, return_exceptions=True)
    await look_behind(arena, before.footprint, recovery, since_s)
    left = [*recovery.left, *recovery.ghosts, *died(arena, now)]
    _judge(found, load.tally, first)
    found.rounds += 1
    found.slowest_s = max(found.slowest_s, recovery.recovered_s or 0.0)
    if recovery.recovered_s is None:
        found.violate(first, f"not back: {'; '.join(recovery.missing)}")
    if left:
        found.violate(first, f"left behind: {'; '.join(left)}")
    back = "not back" if recovery.recovered_s is None else f"back after {recovery.recovered_s:.1f} s"
    found.say(f"draws {first} to {first + ROUND - 1}: {_summary(load.tally)}, {back}")
    return recovery.recovered_s is not None and not recovery.left


async def _faults(arena: Arena, found: Findings, first: int) -> None:
    """They begin when they were drawn to, whether or not the one before has ended."""
    running: list[asyncio.Task[None]] = []
    try:
        for number in range(first, first + ROUND):
            drawn = draw(found.seed, number)
            await asyncio.sleep(drawn.pause_s)
            running.append(asyncio.create_task(_act(arena, drawn, found, first)))
        await asyncio.wait(running, timeout=_END_S)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _act(arena: Arena, drawn: Draw, found: Findings, first: int) -> None:
    found.drawn[drawn.name] += 1
    began = time.monotonic()
    try:
        whom = await drawn.act(arena, drawn.rng, drawn.seconds)
    except Exception as error:  # a boundary: a fault that cannot be made is a finding, not the end
        whom = f"could not be made: {type(error).__name__}: {error}"
        found.violate(first, f"{drawn.name} {whom}")
    found.say(f"{drawn.number:4} {drawn.name}: {escape(whom)}, {time.monotonic() - began:.1f} s")


def _judge(found: Findings, tally: Tally, first: int) -> None:
    for verdict in (*HARM, *UNCLEAN):
        if count := tally.count(verdict):
            found.violate(first, f"{count} {verdict}: {tally.examples[verdict]}")
    found.tally.counts += tally.counts
    found.tally.longest_gap_s = max(found.tally.longest_gap_s, tally.longest_gap_s)


def _summary(tally: Tally) -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in tally.counts.items())
    return f"{counts}, longest wait {tally.longest_gap_s:.1f} s"


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
