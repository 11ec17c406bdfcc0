"""Scenarios of KV transfers between real engines, whose ends die, freeze or lie while long prompts are on the way."""

import asyncio
from functools import partial
from random import Random

from benchmarks.chaos import hostile
from benchmarks.chaos.faults import (
    NOTICED_S,
    decode,
    drain_all_decode,
    flap,
    freeze,
    garbage,
    kill,
    link_fault,
    links,
    prefill,
    replay,
    silence,
    spoil,
)
from benchmarks.chaos.load import describe, fresh
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.testbeds import LEASE_S, NARROW, REAL
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.jobs import JobRecord, records
from shared.domain.kv import TransferOutcome
from shared.timeline import Span
from tools.client import Ending, Request, send

WAITING = 6  # long prompts at once; the decode instance has blocks for one
STORM = 40  # clients that leave

_KV = links("kv")

kv = partial(scenario, "KV", bed=REAL)
narrow = partial(scenario, "KV", bed=NARROW, bound_s=90.0)

kv("kv-kill-prefill", "kill -9 of a prefill instance, its KV half pulled", kill(prefill(1)), outage_s=1.0)
kv("kv-kill-decode", "kill -9 of a decode instance that is pulling", kill(decode(1)), outage_s=1.0)
kv("kv-kill-all-decode", "kill -9 of both decode instances under long prompts", kill(decode(), outage=True))
kv("kv-drain-all", "both decode instances drain by force under long prompts", drain_all_decode)
kv("kv-freeze", "a prefill instance stands still for 4 s, its KV half pulled", freeze(prefill(1)), outage_s=NOTICED_S)
kv("kv-garbage", "noise and well-framed nonsense on every KV port", garbage(lambda s: s.ports_for("worker", "kv")))
kv("kv-corrupt", "bits flip in 30 % of KV messages", spoil(_KV, "corrupted", 0.3))
kv("kv-lose", "10 % of KV messages do not arrive", spoil(_KV, "lost", 0.1), outage_s=1.0)
kv("kv-swap", "30 % of KV messages come after the next one", spoil(_KV, "swapped", 0.3), outage_s=1.0)
kv("kv-replay", "old KV messages come again, four times a second", replay(_KV, 0.25))
kv("kv-cut", "all KV connections are reset twice a second", flap(_KV))
kv("kv-silent", "all KV links are silent for 4 s", silence(_KV), outage_s=NOTICED_S)
kv(
    "kv-slow",
    "all KV links carry 4 MB/s",
    link_fault(_KV, lambda proxy: proxy.slow(latency_s=0.02, bytes_per_s=4_000_000)),
    outage_s=1.0,
)


@kv("kv-stale", "an exporter is restarted twice; its predecessors' pulls come again", outage_s=1.0)
async def _stale(suite: SuiteUnderTest) -> None:
    """An exporter restarts under the same address: it must not answer pulls that its predecessor was sent."""
    for _ in range(2):
        await suite.kill_until_back(suite.prefill[1])
        for wire in suite.wires.between("", suite.prefill[1], "kv"):
            wire.proxy.replay()


@narrow("kv-wait-for-blocks", "decodes wait for blocks longer than the lease of their KV, without a prefetch")
async def _wait_for_blocks(suite: SuiteUnderTest) -> None:
    """Long prompts, for one of which the decode instance has blocks: the others wait, with their KV staged."""
    requests = [fresh(hostile.changed(_longest(suite), max_tokens=300)) for _ in range(WAITING)]
    with suite.outage():
        answers = await asyncio.gather(*(send(suite.gateways[0], request) for request in requests))
    same = len({tuple(answer.tokens) for answer in answers}) == 1 and answers[0].ending is Ending.DONE
    assert same, f"different answers to the same prompt: {'; '.join(map(describe, answers))}"
    waits_s = sorted(_waited_s(record) for record in await _require_pulled(suite, requests))
    suite.notes.append(f"decodes waited {', '.join(f'{wait_s:.1f}' for wait_s in waits_s)} s for blocks")
    assert waits_s[-1] >= 2 * LEASE_S, f"decodes waited for {waits_s[-1]:.1f} s at most, less than two leases"


@narrow("kv-cancel-storm", "clients leave while their decodes wait and pull; the report of one that stays is right")
async def _cancel_storm(suite: SuiteUnderTest) -> None:
    rng = Random(suite.rng.getrandbits(32))

    async def client(_: int) -> None:
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        await hostile.leave(suite.gateways[0], fresh(_longest(suite)), rng.uniform(0.1, 2.0))

    with suite.outage():
        await hostile.crowd(STORM, client)
        request = fresh(_longest(suite))
        answer = await send(suite.gateways[0], request)
    assert answer.ending is Ending.DONE, f"after the storm: {describe(answer)}"
    await _require_pulled(suite, [request])


def _longest(suite: SuiteUnderTest) -> Request:
    key = f"prompt of {max(suite.bed.prompts)}"
    return next(request for request in suite.requests if request.key == key)


async def _require_pulled(suite: SuiteUnderTest, requests: list[Request]) -> list[JobRecord]:
    """The records of requests that have ended, the KV of each of which must have been pulled."""
    found = await records(suite, [request.body["request_id"] for request in requests])
    reports = [report for record in found for report in record.timeline.transfers]
    wrong = [report for report in reports if report.outcome is not TransferOutcome.PULLED or not report.tokens]
    pulled = not wrong and all(record.timeline.transfers for record in found)
    assert pulled, f"staged KV was not reported as pulled: {wrong or found}"
    return found


def _waited_s(record: JobRecord) -> float:
    """From the end of the prefill to the start of the pull."""
    prefilled_s = next(each.ended_s for each in record.timeline.spans if each.span is Span.PREFILL)
    return record.timeline.transfers[-1].started_s - prefilled_s
