"""What the random mode may do. A draw follows from the seed and its number alone: any stretch can be run again."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from lab.chaos import garbage, rude
from lab.chaos.arena import Arena
from lab.chaos.load import fresh
from lab.chaos.wires import Wire
from shared.errors import PolyphaseError

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
    await garbage.make_noise([port], rng)
    if port.purpose != "http":
        await garbage.say([port], rng)
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
        await rude.leave(address, fresh(rng.choice(arena.asks)), rng.uniform(0.0, 0.8))

    await rude.crowd(30, one)
    return "30 clients"


async def _slow_readers(arena: Arena, rng: Random, seconds: float) -> str:
    ask = rude.wanting(dict(arena.asks[0].body), max_tokens=100)
    await rude.crowd(8, lambda n: rude.never_read(arena.gateways[n % len(arena.gateways)], fresh(ask), seconds))
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
