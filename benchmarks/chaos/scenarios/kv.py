"""Scenarios of KV transfers between real engines, whose ends die, freeze or lie while long prompts are on the way."""

import asyncio
from random import Random

import msgspec

from benchmarks.chaos import hostile
from benchmarks.chaos.arena import Arena
from benchmarks.chaos.clusters import LEASE_S, NARROW, REAL
from benchmarks.chaos.faults import FAULT_S, NOTICED_S, freeze, kill, link_fault, replay
from benchmarks.chaos.load import describe, fresh
from benchmarks.chaos.proxy import Proxy, Wire
from benchmarks.chaos.scenario import Scenario
from shared.domain.kv import TransferOutcome
from shared.timeline import RequestTimeline, Span
from tools.client import Ending, Request, send

WAITING = 6  # long prompts at once; the decode instance has blocks for one
STORM = 40  # clients that leave


def _kv_links(arena: Arena) -> tuple[Wire, ...]:
    return arena.wires.between(purpose="kv")


async def _drain_all_decode(arena: Arena) -> None:
    with arena.outage():
        for name in arena.decode:
            await arena.roles.drain(name, force=True)
        await asyncio.sleep(2.0)
        await arena.roles.reset()


async def _garbage(arena: Arena) -> None:
    ports = [port for port in arena.ports if port.purpose == "kv"]
    await hostile.make_noise(ports, arena.rng)
    await hostile.send_messages(ports, arena.rng)


async def _cut(arena: Arena) -> None:
    for _ in range(int(FAULT_S / 0.5)):
        for wire in _kv_links(arena):
            wire.proxy.cut()
        await asyncio.sleep(0.5)


async def _stale(arena: Arena) -> None:
    """An exporter restarts under the same address: it must not answer pulls that its predecessor was sent."""
    for _ in range(2):
        await arena.processes.back(arena.processes.kill(arena.prefill[1]))
        for wire in arena.wires.between(target=arena.prefill[1], purpose="kv"):
            wire.proxy.replay()


async def _wait_for_blocks(arena: Arena) -> None:
    """Long prompts, for one of which the decode instance has blocks: the others wait, with their KV staged."""
    requests = [fresh(hostile.changed(_longest(arena), max_tokens=300)) for _ in range(WAITING)]
    with arena.outage():
        answers = await asyncio.gather(*(send(arena.gateways[0], request) for request in requests))
    if len({tuple(answer.tokens) for answer in answers}) != 1 or answers[0].ending is not Ending.DONE:
        raise AssertionError(f"different answers to the same prompt: {'; '.join(map(describe, answers))}")
    timelines = [await _timeline(arena, request) for request in requests]
    _require_pulled(timelines)
    waits_s = sorted(_waited_s(each) for each in timelines)
    arena.notes.append(f"decodes waited {', '.join(f'{wait_s:.1f}' for wait_s in waits_s)} s for blocks")
    if waits_s[-1] < 2 * LEASE_S:
        raise AssertionError(f"decodes waited for {waits_s[-1]:.1f} s at most, less than two leases")


async def _cancel_storm(arena: Arena) -> None:
    """Clients that leave while their decode waits, pulls, or has begun; then a client that stays."""
    rng = Random(arena.rng.getrandbits(32))

    async def client(_: int) -> None:
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        await hostile.leave(arena.gateways[0], fresh(_longest(arena)), rng.uniform(0.1, 2.0))

    with arena.outage():
        await hostile.crowd(STORM, client)
        request = fresh(_longest(arena))
        answer = await send(arena.gateways[0], request)
    if answer.ending is not Ending.DONE:
        raise AssertionError(f"after the storm: {describe(answer)}")
    _require_pulled([await _timeline(arena, request)])


def _longest(arena: Arena) -> Request:
    """The request with the longest of the testbed's prompts."""
    key = f"prompt of {max(arena.bed.prompts)}"
    return next(request for request in arena.requests if request.key == key)


async def _timeline(arena: Arena, request: Request) -> RequestTimeline:
    """The timeline of a request that has ended. Raises AssertionError when no scheduler has one with an end."""
    name = request.body["request_id"]
    for _ in range(50):
        for scheduler in arena.suite.schedulers():
            async with scheduler:
                rows = await scheduler.requests(limit=500)
                for job_id in [row["job_id"] for row in rows if name in row["job_id"]]:
                    timeline = msgspec.convert(await scheduler.timeline(job_id), RequestTimeline)
                    if timeline.ended_s:
                        return timeline
        await asyncio.sleep(0.1)
    raise AssertionError(f"no scheduler knows how {name} ended")


def _waited_s(timeline: RequestTimeline) -> float:
    """From the end of the prefill to the start of the pull."""
    prefilled_s = next(each.ended_s for each in timeline.spans if each.span is Span.PREFILL)
    return timeline.transfers[-1].started_s - prefilled_s


def _require_pulled(timelines: list[RequestTimeline]) -> None:
    reports = [report for each in timelines for report in each.transfers]
    wrong = [report for report in reports if report.outcome is not TransferOutcome.PULLED or not report.tokens]
    if wrong or not all(each.transfers for each in timelines):
        raise AssertionError(f"staged KV was not reported as pulled: {wrong or timelines}")


KV = (
    Scenario(
        "kv-kill-prefill",
        "kill -9 of a prefill instance, its KV half pulled",
        kill(lambda arena: arena.prefill[:1]),
        REAL,
        outage_s=1.0,
    ),
    Scenario(
        "kv-kill-decode",
        "kill -9 of a decode instance that is pulling",
        kill(lambda arena: arena.decode[:1]),
        REAL,
        outage_s=1.0,
    ),
    Scenario(
        "kv-kill-all-decode",
        "kill -9 of both decode instances under long prompts",
        kill(lambda arena: arena.decode, outage=True),
        REAL,
    ),
    Scenario("kv-drain-all", "both decode instances drain by force under long prompts", _drain_all_decode, REAL),
    Scenario(
        "kv-freeze",
        "a prefill instance stands still for 4 s, its KV half pulled",
        freeze(lambda arena: arena.prefill[:1]),
        REAL,
        outage_s=NOTICED_S,
    ),
    Scenario("kv-garbage", "noise and well-framed nonsense on every KV port", _garbage, REAL),
    Scenario(
        "kv-corrupt",
        "bits flip in 30 % of KV messages",
        link_fault(_kv_links, lambda proxy: proxy.corrupt(0.3), "corrupted"),
        REAL,
    ),
    Scenario(
        "kv-lose",
        "10 % of KV messages do not arrive",
        link_fault(_kv_links, lambda proxy: proxy.lose(0.1), "lost"),
        REAL,
        outage_s=1.0,
    ),
    Scenario(
        "kv-swap",
        "30 % of KV messages come after the next one",
        link_fault(_kv_links, lambda proxy: proxy.swap(0.3), "swapped"),
        REAL,
        outage_s=1.0,
    ),
    Scenario("kv-replay", "old KV messages come again, four times a second", replay(_kv_links, 0.25), REAL),
    Scenario(
        "kv-stale", "an exporter is restarted twice; its predecessors' pulls come again", _stale, REAL, outage_s=1.0
    ),
    Scenario("kv-cut", "all KV connections are reset twice a second", _cut, REAL),
    Scenario(
        "kv-silent", "all KV links are silent for 4 s", link_fault(_kv_links, Proxy.stall), REAL, outage_s=NOTICED_S
    ),
    Scenario(
        "kv-slow",
        "all KV links carry 4 MB/s",
        link_fault(_kv_links, lambda proxy: proxy.slow(latency_s=0.02, bytes_per_s=4_000_000)),
        REAL,
        outage_s=1.0,
    ),
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
