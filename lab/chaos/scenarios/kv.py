"""Real engines and real KV: long prompts of many chunks under way while their ends die, freeze, or lie."""

import asyncio

from lab.chaos import garbage
from lab.chaos.arena import Arena
from lab.chaos.clusters import REAL
from lab.chaos.scenario import Scenario
from lab.chaos.scenarios.links import silence
from lab.chaos.scenarios.processes import NOTICED_S, freeze, kill_all, kill_one

BAD_S = 4.0


async def _kill_prefill(arena: Arena) -> None:
    await kill_one(arena, arena.prefill[0])


async def _kill_decode(arena: Arena) -> None:
    await kill_one(arena, arena.decode[0])


async def _kill_all_decode(arena: Arena) -> None:
    await kill_all(arena, *arena.decode)


async def _drain_all_decode(arena: Arena) -> None:
    with arena.away():
        for name in arena.decode:
            await arena.roles.drain(name, force=True)
        await asyncio.sleep(2.0)
        await arena.roles.as_first()


async def _freeze_exporter(arena: Arena) -> None:
    await freeze(arena, arena.prefill[0])


async def _garbage(arena: Arena) -> None:
    kv = [port for port in arena.ports if port.purpose == "kv"]
    await garbage.make_noise(kv, arena.rng)
    await garbage.say(kv, arena.rng)


async def _corrupt(arena: Arena) -> None:
    wires = arena.wires.between(purpose="kv")
    for wire in wires:
        wire.proxy.corrupt(0.3)
    await asyncio.sleep(BAD_S)
    for wire in wires:
        wire.proxy.heal()
    if not sum(wire.proxy.corrupted for wire in wires):
        raise AssertionError("nothing was corrupted: the scenario shows nothing")


async def _replay(arena: Arena) -> None:
    wires = arena.wires.between(purpose="kv")
    for _ in range(int(BAD_S / 0.25)):
        for wire in wires:
            wire.proxy.replay()
        await asyncio.sleep(0.25)
    if not sum(wire.proxy.replayed for wire in wires):
        raise AssertionError("nothing was replayed: the scenario shows nothing")


async def _lose(arena: Arena) -> None:
    wires = arena.wires.between(purpose="kv")
    for wire in wires:
        wire.proxy.lose(0.1)
    await asyncio.sleep(BAD_S)
    for wire in wires:
        wire.proxy.heal()
    if not sum(wire.proxy.lost for wire in wires):
        raise AssertionError("nothing was lost: the scenario shows nothing")


async def _swap(arena: Arena) -> None:
    wires = arena.wires.between(purpose="kv")
    for wire in wires:
        wire.proxy.swap(0.3)
    await asyncio.sleep(BAD_S)
    for wire in wires:
        wire.proxy.heal()
    if not sum(wire.proxy.swapped for wire in wires):
        raise AssertionError("nothing was swapped: the scenario shows nothing")


async def _cut(arena: Arena) -> None:
    for _ in range(int(BAD_S / 0.5)):
        for wire in arena.wires.between(purpose="kv"):
            wire.proxy.cut()
        await asyncio.sleep(0.5)


async def _silent(arena: Arena) -> None:
    await silence(*arena.wires.between(purpose="kv"))


async def _slow(arena: Arena) -> None:
    wires = arena.wires.between(purpose="kv")
    for wire in wires:
        wire.proxy.slow(latency_s=0.02, bytes_per_s=4_000_000)
    await asyncio.sleep(BAD_S)
    for wire in wires:
        wire.proxy.heal()


async def _stale(arena: Arena) -> None:
    """An exporter comes back under the same address: what was asked of its predecessor it does not answer for."""
    for _ in range(2):
        await kill_one(arena, arena.prefill[1])
        for wire in arena.wires.between(target=arena.prefill[1], purpose="kv"):
            wire.proxy.replay()


KV = (
    Scenario("kv-kill-prefill", "kill -9 of a prefill instance, its KV half pulled", _kill_prefill, REAL, away_s=1.0),
    Scenario("kv-kill-decode", "kill -9 of a decode instance that is pulling", _kill_decode, REAL, away_s=1.0),
    Scenario("kv-kill-all-decode", "kill -9 of both decode instances under long prompts", _kill_all_decode, REAL),
    Scenario("kv-drain-all", "both decode instances drain by force under long prompts", _drain_all_decode, REAL),
    Scenario(
        "kv-freeze",
        "a prefill instance stands still for 4 s, its KV half pulled",
        _freeze_exporter,
        REAL,
        away_s=NOTICED_S,
    ),
    Scenario("kv-garbage", "noise and well-framed nonsense on every KV port", _garbage, REAL),
    Scenario("kv-corrupt", "bits flip in 30 % of KV messages", _corrupt, REAL),
    Scenario("kv-lose", "10 % of KV messages do not arrive", _lose, REAL, away_s=1.0),
    Scenario("kv-swap", "30 % of KV messages come after the next one", _swap, REAL, away_s=1.0),
    Scenario("kv-replay", "old KV messages come again, four times a second", _replay, REAL),
    Scenario(
        "kv-stale", "an exporter is restarted twice; its predecessors' pulls come again", _stale, REAL, away_s=1.0
    ),
    Scenario("kv-cut", "all KV connections are reset twice a second", _cut, REAL),
    Scenario("kv-silent", "all KV links are silent for 4 s", _silent, REAL, away_s=NOTICED_S),
    Scenario("kv-slow", "all KV links carry 4 MB/s", _slow, REAL, away_s=1.0),
)
