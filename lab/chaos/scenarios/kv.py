"""Real engines and real KV: long prompts of many chunks under way while their ends die, freeze, or lie."""

import asyncio
from random import Random
from typing import Any

import msgspec

from lab.chaos import hostile
from lab.chaos.arena import Arena
from lab.chaos.clusters import LEASE_S, NARROW, REAL
from lab.chaos.load import Ask, Ending, describe, fresh, send
from lab.chaos.scenario import Scenario
from lab.chaos.scenarios.network import silence
from lab.chaos.scenarios.processes import NOTICED_S, freeze, kill_all, kill_one
from shared.domain.kv import TransferOutcome
from shared.timeline import RequestTimeline, Span

BAD_S = 4.0
WAITING = 6  # long prompts at once, of which one has blocks
STORM = 40  # clients that leave


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
    await hostile.make_noise(kv, arena.rng)
    await hostile.say(kv, arena.rng)


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


async def _wait_for_blocks(arena: Arena) -> None:
    """Long prompts of which one at a time has blocks at the decode instance: the others wait there, staged."""
    asks = [fresh(hostile.wanting(_long_body(arena), max_tokens=300)) for _ in range(WAITING)]
    with arena.away():
        replies = await asyncio.gather(*(send(arena.gateways[0], ask) for ask in asks))
    if len({tuple(reply.tokens) for reply in replies}) != 1 or replies[0].ending is not Ending.DONE:
        raise AssertionError(f"the same prompt, unlike answers: {'; '.join(map(describe, replies))}")
    timelines = [await _timeline(arena, ask) for ask in asks]
    _pulled(timelines)
    waits_s = [_waited_s(each) for each in timelines]
    arena.notes.append(f"decodes waited {', '.join(f'{wait_s:.1f}' for wait_s in sorted(waits_s))} s for blocks")
    if max(waits_s) < 2 * LEASE_S:
        raise AssertionError(
            f"no decode waited for two leases, {max(waits_s):.1f} s at most: the scenario shows nothing"
        )


async def _cancel_storm(arena: Arena) -> None:
    """Clients that leave while their decode waits, pulls, or has begun; then one that stays."""
    rng = Random(arena.rng.getrandbits(32))

    async def one(_: int) -> None:
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        await hostile.leave(arena.gateways[0], fresh(hostile.wanting(_long_body(arena))), rng.uniform(0.1, 2.0))

    with arena.away():
        await hostile.crowd(STORM, one)
        ask = fresh(hostile.wanting(_long_body(arena)))
        reply = await send(arena.gateways[0], ask)
    if reply.ending is not Ending.DONE:
        raise AssertionError(f"after the storm: {describe(reply)}")
    _pulled([await _timeline(arena, ask)])


def _long_body(arena: Arena) -> dict[str, Any]:
    """Of a request with the longest of the testbed's prompts."""
    long = max(arena.bed.prompts)
    return dict(next(ask.body for ask in arena.asks if ask.key == f"prompt of {long}"))


async def _timeline(arena: Arena, ask: Ask) -> RequestTimeline:
    """What the scheduler knows of a request that has ended. Raises AssertionError when it knows nothing of its end."""
    for _ in range(50):
        for scheduler in arena.suite.schedulers():
            async with scheduler:
                rows = await scheduler.requests(limit=500)
                for job_id in [row["job_id"] for row in rows if ask.body["request_id"] in row["job_id"]]:
                    timeline = msgspec.convert(await scheduler.timeline(job_id), RequestTimeline)
                    if timeline.ended_s:
                        return timeline
        await asyncio.sleep(0.1)
    raise AssertionError(f"no scheduler knows how {ask.body['request_id']} ended")


def _waited_s(timeline: RequestTimeline) -> float:
    """From the end of the prefill to the begin of the pull."""
    prefilled_s = next(each.ended_s for each in timeline.spans if each.span is Span.PREFILL)
    return timeline.transfers[-1].started_s - prefilled_s


def _pulled(timelines: list[RequestTimeline]) -> None:
    wrong = [report for each in timelines for report in each.transfers if report.outcome is not TransferOutcome.PULLED]
    empty = [report for each in timelines for report in each.transfers if not report.tokens]
    if wrong or empty or not all(each.transfers for each in timelines):
        raise AssertionError(f"KV that was staged and wanted was not reported as pulled: {wrong or empty or timelines}")


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
    Scenario(
        "kv-wait-for-blocks",
        "decodes wait for blocks longer than the lease of their KV, without a prefetch",
        _wait_for_blocks,
        NARROW,
        bound_s=90.0,
    ),
    Scenario(
        "kv-cancel-storm",
        "clients leave while their decodes wait and pull; the report of one that stays is right",
        _cancel_storm,
        NARROW,
        bound_s=90.0,
    ),
)
