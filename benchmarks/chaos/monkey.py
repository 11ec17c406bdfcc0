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
from benchmarks.chaos.arena import Arena, running_arena
from benchmarks.chaos.clusters import OPEN
from benchmarks.chaos.load import BROKEN, HARM, UNCLEAN, Tally, Verdict, fresh
from benchmarks.chaos.proxy import Proxy, Wire, disturb
from benchmarks.chaos.scenario import WARM_S, Calm, calm, check_left_behind, died, footprint, recovered
from shared.errors import PolyphaseError

MEAN_PAUSE_S = 3.0  # between two draws; faults that last longer overlap
Act = Callable[[Arena, Random, float], Awaitable[str]]  # a fault of that many seconds; returns what it hit


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
    name = rng.choices([n for n, _, _, _ in FAULTS], [weight for _, weight, _, _ in FAULTS])[0]
    _, _, longest_s, act = next(fault for fault in FAULTS if fault[0] == name)
    return Draw(number, name, rng.expovariate(1.0 / MEAN_PAUSE_S), rng.uniform(0.2, longest_s), act, rng)


def _process(arena: Arena, rng: Random) -> str:
    return rng.choice([spec.name for spec in arena.plan.processes])


async def _kill(arena: Arena, rng: Random, _: float) -> str:
    name = _process(arena, rng)
    arena.processes.kill(name)
    return name


async def _kill_several(arena: Arena, rng: Random, _: float) -> str:
    names = rng.sample([spec.name for spec in arena.plan.processes], 3)
    arena.processes.kill(*names)
    return ", ".join(names)


async def _stop(arena: Arena, rng: Random, _: float) -> str:
    name = _process(arena, rng)
    arena.processes.stop(name)
    return name


async def _freeze(arena: Arena, rng: Random, seconds: float) -> str:
    name = _process(arena, rng)
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


def _on_links(change: Callable[[Proxy, Random], object]) -> Act:
    """A fault of one link, of all links of a process, or of a fifth of all links."""

    async def act(arena: Arena, rng: Random, seconds: float) -> str:
        kind = rng.randrange(3)
        if kind == 0:
            wires: tuple[Wire, ...] = (rng.choice(arena.wires.all),)
        elif kind == 1:
            wires = arena.wires.touching(_process(arena, rng))
        else:
            wires = tuple(rng.sample(arena.wires.all, len(arena.wires.all) // 5))
        await disturb(wires, lambda proxy: change(proxy, rng), seconds)
        return wires[0].name if len(wires) == 1 else f"{len(wires)} links"

    return act


def _slow(proxy: Proxy, rng: Random) -> None:
    proxy.slow(latency_s=rng.uniform(0.0, 0.3), bytes_per_s=rng.uniform(50_000, 1_000_000))


def _state_links(arena: Arena) -> tuple[Wire, ...]:
    return (*arena.wires.between(purpose="heartbeats"), *arena.wires.between(purpose="broadcasts"))


async def _corrupt(arena: Arena, rng: Random, seconds: float) -> str:
    await disturb(_state_links(arena), lambda proxy: proxy.corrupt(rng.uniform(0.0, 0.5)), seconds)
    return "heartbeats and broadcasts"


async def _replay(arena: Arena, rng: Random, _: float) -> str:
    for wire in _state_links(arena):
        wire.proxy.replay()
    return "heartbeats and broadcasts"


async def _garbage(arena: Arena, rng: Random, _: float) -> str:
    port = rng.choice(arena.ports)
    await hostile.make_noise([port], rng)
    if port.purpose != "http":
        await hostile.send_messages([port], rng)
    return f"{port.process} ({port.purpose})"


async def _clock(arena: Arena, rng: Random, seconds: float) -> str:
    name, offset_s = _process(arena, rng), rng.choice((-1, 1)) * rng.choice((2.0, 60.0, 3600.0))
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


async def _leaving_clients(arena: Arena, rng: Random, seconds: float) -> str:
    async def client(number: int) -> None:
        await asyncio.sleep(rng.uniform(0.0, seconds))
        await hostile.leave(arena.gateway(number), fresh(rng.choice(arena.requests)), rng.uniform(0.0, 0.8))

    await hostile.crowd(30, client)
    return "30 clients"


async def _slow_readers(arena: Arena, rng: Random, seconds: float) -> str:
    request = hostile.changed(arena.requests[0], max_tokens=100)
    await hostile.crowd(8, lambda number: hostile.never_read(arena.gateway(number), fresh(request), seconds))
    return "8 clients"


# name, weight, longest duration in seconds, fault
FAULTS: tuple[tuple[str, float, float, Act], ...] = (
    ("kill", 5.0, 1.0, _kill),
    ("kill several", 1.0, 1.0, _kill_several),
    ("stop", 2.0, 1.0, _stop),
    ("freeze", 4.0, 6.0, _freeze),
    ("drain", 2.0, 5.0, _drain),
    ("flip", 3.0, 5.0, _flip),
    ("silent link", 3.0, 6.0, _on_links(lambda proxy, _: proxy.stall())),
    ("refused link", 2.0, 6.0, _on_links(lambda proxy, _: proxy.cut(refuse=True))),
    ("cut link", 3.0, 1.0, _on_links(lambda proxy, _: proxy.cut())),
    ("slow link", 2.0, 6.0, _on_links(_slow)),
    ("corrupt state", 1.0, 4.0, _corrupt),
    ("replayed state", 1.0, 1.0, _replay),
    ("garbage", 2.0, 1.0, _garbage),
    ("clock", 2.0, 5.0, _clock),
    ("database", 2.0, 5.0, _database),
    ("leaving clients", 2.0, 3.0, _leaving_clients),
    ("slow readers", 1.0, 5.0, _slow_readers),
)

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
        async with running_arena(OPEN, folder / f"suite-{found.suites}", console, seed) as arena:
            before, well = await calm(arena, seed), True
            while well and time.monotonic() < end_s:
                well = await _round(arena, before, found, number)
                number += ROUND
    found.log(f"{number - first} faults in {found.rounds} rounds; {len(found.violations)} violations")
    return _result(found, number - first)


async def _round(arena: Arena, before: Calm, found: Findings, first: int) -> bool:
    """ROUND faults and recovery; returns whether the suite is well."""
    arena.processes.touched.clear()
    now, since_s = footprint(arena), time.time()
    async with arena.users(found.seed + first) as load:
        load.tally = Tally()
        try:
            await load.warm(WARM_S)
        except TimeoutError:
            found.violate(first, f"not every user was answered within {WARM_S:.0f} s without a fault")
            return False
        await _faults(arena, found, first)
        await arena.restore()
        healed_s = time.monotonic()
        resetting = asyncio.create_task(arena.roles.reset(_END_S))
        recovery = await recovered(arena, load, before.rate, healed_s)
        await asyncio.gather(resetting, return_exceptions=True)
    await check_left_behind(arena, before.footprint, recovery, since_s)
    left = [*recovery.left, *recovery.ghosts, *died(arena, now)]
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


async def _faults(arena: Arena, found: Findings, first: int) -> None:
    """Each fault begins after its pause, also when the previous fault has not ended."""
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
        target = await drawn.act(arena, drawn.rng, drawn.seconds)
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
