"""Scenarios of migrations and prefix pulls between real engines: an end dies or freezes, the lease of staged KV ends,
links are slow, corrupt or silent, operations cross each other.

Long answers of several kinds of sampling decode at one instance. Each has to be token by token that of the same request
undisturbed, wherever it went.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.chaos.faults import FAULT_S, NOTICED_S, disturbed, frozen
from benchmarks.chaos.load import Verdict, describe, fresh, judge, learn
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.testbeds import LEASE_S, MOBILE
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.jobs import find_row, records
from benchmarks.suite import until_found
from services.launcher.suite import until
from shared.domain.job import Phase
from shared.errors import DeadlineExceeded, NotFound, PolyphaseError
from shared.timeline import RequestTimeline
from shared.wire.api.scheduler import RequestRow
from tools.client import Request, Response, send

ANSWER = 480  # tokens: they last for the longest of these faults
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "bounded": {"temperature": 0.8, "seed": 7, "min_tokens": 40, "top_k": 20},
}
ROUNDS = 6  # moves of each answer, to and fro
CHATS = 3
TURN, QUESTION, NEXT = 40, 30, 24  # tokens of the first answer, of the next question and of its answer
HEARD_S = 0.5  # until the scheduler has heard what caches hold
BEGUN_S, MOVED_S, UNDER_WAY_S = 20.0, 5.0, 15.0
SLOW_BYTES_S = 1_000_000

move = partial(scenario, "mobility", bed=MOBILE, bound_s=60.0)


@move("move-kill-exporter", "kill -9 of an instance whose answers migrate, their KV half pulled", outage_s=1.0)
async def _kill_exporter(suite: SuiteUnderTest) -> None:
    async with migrating(suite) as (source, _):
        old = suite.processes.kill(source)
    await suite.processes.back(old)


@move("move-kill-importer", "kill -9 of the instance to which answers migrate", outage_s=1.0)
async def _kill_importer(suite: SuiteUnderTest) -> None:
    async with migrating(suite) as (_, target):
        old = suite.processes.kill(target)
    await suite.processes.back(old)


@move("move-freeze-exporter", "an instance whose answers migrate stands still for 4 s", outage_s=NOTICED_S)
async def _freeze_exporter(suite: SuiteUnderTest) -> None:
    async with migrating(suite) as (source, _), frozen(suite, source):
        await asyncio.sleep(FAULT_S)


@move(
    "move-lease-lost",
    "the importer stands still until the lease of the KV that it was to pull has ended",
    outage_s=NOTICED_S,
)
async def _lease_lost(suite: SuiteUnderTest) -> None:
    """The importer wakes when the exporter has dropped the KV, and asks for what is gone."""
    async with migrating(suite) as (source, target), frozen(suite, target):

        async def dropped() -> bool:
            return not await _staged_bytes(suite, source)

        await until(dropped, 10 * LEASE_S, f"{source} to drop KV whose lease has ended")


@move("move-slow", "answers migrate to and fro over links that carry 1 MB/s")
async def _slow(suite: SuiteUnderTest) -> None:
    await _to_and_fro(suite, lambda proxy: proxy.slow(latency_s=0.02, bytes_per_s=SLOW_BYTES_S))


@move("move-corrupt", "bits flip in 30 % of KV messages while answers migrate to and fro")
async def _corrupt(suite: SuiteUnderTest) -> None:
    await _to_and_fro(suite, lambda proxy: proxy.spoil("corrupted", 0.3))


@move("move-twice", "each answer is moved twice at once, again and again")
async def _twice(suite: SuiteUnderTest) -> None:
    """The second of two moves finds a request that is on its way."""
    await _to_and_fro(suite, lambda proxy: None, at_once=2)


@move("move-flip-target", "the instance to which answers migrate flips to the other role")
async def _flip_target(suite: SuiteUnderTest) -> None:
    async with migrating(suite) as (_, target):
        flipping = asyncio.create_task(suite.flip(target))

        async def begun() -> bool:
            if flipping.done():
                flipping.result()  # raises why it was refused
            return flipping.done() or bool((await suite.instances())[target].operation)

        await until(begun, UNDER_WAY_S, f"the flip of {target} to begin")
    await flipping
    await suite.reset_roles()


@move("move-drain-kill", "an instance drains; the instance to which its answers migrate dies")
async def _drain_kill(suite: SuiteUnderTest) -> None:
    """Until the other one is back, no instance takes decodes."""
    source, target = suite.decode
    async with answering(suite, source):
        async with disturbed(suite.wires.between(target, source, "kv"), Proxy.stall):
            draining = asyncio.create_task(suite.drain(source, timeout_s=30.0))
            await _until_staged(suite, source)
            old = suite.processes.kill(target)
        with suite.outage():
            await suite.processes.back(old)
            await suite.until_ready(target)
        await draining
        await suite.resume(source)


@move("pull-kill-holder", "kill -9 of the instance from which the prefixes of next turns are pulled", outage_s=1.0)
async def _kill_holder(suite: SuiteUnderTest) -> None:
    async with pulling(suite, Proxy.stall) as holder:
        old = suite.processes.kill(holder)
    await suite.processes.back(old)


@move("pull-corrupt", "bits flip in 30 % of KV messages while the prefixes of next turns are pulled")
async def _corrupt_pull(suite: SuiteUnderTest) -> None:
    async with pulling(suite, lambda proxy: proxy.spoil("corrupted", 0.3)):
        pass


# Answers that migrate.


@asynccontextmanager
async def answering(suite: SuiteUnderTest, instance: str) -> AsyncIterator[list[str]]:
    """Long answers decode at this instance; at the block's end each has to come whole. Yields the requests' ids.

    Notes what became of them. Raises AssertionError where an answer is not right, or none began to migrate.
    """
    requests = [_long(suite, name) for name in KINDS]
    await _learn(suite, requests)
    others = [name for name in suite.decode if name != instance]
    for name in others:
        await suite.drain(name)
    sent = [fresh(request) for request in requests]
    ids = _ids(sent)
    answers = [asyncio.create_task(send(suite.gateways[0], request)) for request in sent]
    try:
        rows = await asyncio.gather(*(_begun(suite, each) for each in ids))
        assert {row.decode_instance for row in rows} == {instance}, f"answers began elsewhere: {rows}"
        for name in others:
            await suite.resume(name)
        yield ids
        got = await asyncio.gather(*answers)
    finally:
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
    _require_right(suite, requests, got)
    kinds = Counter(decision.kind for record in await records(suite, ids) for decision in record.timeline.decisions)
    found = {name: kinds[name] for name in ("migration", "stay", "resume")}
    suite.notes.append(f"{found['migration']} migrations, {found['stay']} given up, {found['resume']} resumes")
    suite.figures |= found
    assert found["migration"], "no answer began to migrate"


@asynccontextmanager
async def migrating(
    suite: SuiteUnderTest, change: Callable[[Proxy], object] = Proxy.stall
) -> AsyncIterator[tuple[str, str]]:
    """Answers are on their way from one instance to another, and the link between these is disturbed for the block's
    length; by default KV is staged at the source and cannot be pulled. Yields the instances.
    """
    source, target = suite.decode
    async with answering(suite, source) as ids, disturbed(suite.wires.between(target, source, "kv"), change):

        async def under_way() -> bool:
            """The scheduler may not know yet that the target is ready again: then an answer stays."""
            await asyncio.gather(*(_order_move(suite, each, target) for each in ids))
            return bool(await _staged_bytes(suite, source))

        await until(under_way, UNDER_WAY_S, f"KV to be staged at {source}", poll_s=0.3)
        yield source, target


async def _to_and_fro(suite: SuiteUnderTest, change: Callable[[Proxy], object], *, at_once: int = 1) -> None:
    """Move each answer up to ROUNDS times, each time by so many orders at once, while KV between the decode instances
    is disturbed.
    """
    first, second = suite.decode
    wires = (*suite.wires.between(first, second, "kv"), *suite.wires.between(second, first, "kv"))
    async with answering(suite, first) as ids, disturbed(wires, change):

        async def moved(request_id: str) -> None:
            with suppress(DeadlineExceeded, NotFound):  # slow, or ended
                for number in range(ROUNDS):
                    await _until_moved(suite, request_id, (second, first)[number % 2], at_once)

        await asyncio.gather(*(moved(each) for each in ids))


async def _until_moved(suite: SuiteUnderTest, request_id: str, to: str, at_once: int) -> None:
    """Order the move until the answer comes from there. Raises DeadlineExceeded, and NotFound when it has ended."""

    async def there() -> bool:
        if (await find_row(suite, request_id, Phase.DECODE)).decode_instance == to:
            return True
        await asyncio.gather(*(_order_move(suite, request_id, to) for _ in range(at_once)))
        return False

    await until(there, MOVED_S, f"{request_id} to decode at {to}", poll_s=0.2)


async def _order_move(suite: SuiteUnderTest, request_id: str, to: str) -> None:
    """An order may be refused: the answer may have ended, or be there already."""
    with suppress(PolyphaseError):
        row = await find_row(suite, request_id, Phase.DECODE)
        async with suite.monitor() as monitor:
            await monitor.move(row.job_id, to=to)


async def _begun(suite: SuiteUnderTest, request_id: str) -> RequestRow:
    async def find() -> RequestRow | None:
        try:
            return await find_row(suite, request_id, Phase.DECODE)
        except NotFound:
            return None

    return await until_found(find, BEGUN_S, f"{request_id} to decode")


async def _staged_bytes(suite: SuiteUnderTest, *instances: str) -> int:
    rows = await suite.instances()
    return sum(rows[name].load.staged_bytes for name in instances)


async def _until_staged(suite: SuiteUnderTest, *instances: str) -> None:
    async def staged() -> bool:
        return bool(await _staged_bytes(suite, *instances))

    await until(staged, UNDER_WAY_S, f"KV to be staged at {' or '.join(instances)}")


# Next turns of chats.


@asynccontextmanager
async def pulling(suite: SuiteUnderTest, change: Callable[[Proxy], object]) -> AsyncIterator[str]:
    """Next turns of chats are computed where nothing of them is: their prefixes are being pulled from the instance that
    decoded the turns before, over links that are disturbed for the block's length. Yields the holder.

    Raises AssertionError where an answer is not right.
    """
    computes, others = suite.prefill[0], suite.prefill[1:]
    holder, *idle = suite.decode
    chats = [_first(suite, number) for number in range(CHATS)]
    await _learn(suite, chats)
    seconds = [_second(suite, first) for first in chats]
    await _learn(suite, seconds)
    salted = [fresh(first) for first in chats]
    for name in (computes, *idle):
        await suite.drain(name)
    firsts = await asyncio.gather(*(send(suite.gateways[0], request) for request in salted))
    _require_right(suite, chats, firsts)
    for name in (computes, *idle):
        await suite.resume(name)
    for name in others:
        await suite.drain(name)
    await asyncio.sleep(HEARD_S)
    sent = []
    for request, first in zip(seconds, salted, strict=True):
        named = fresh(request)
        sent.append(replace(named, body={**named.body, "cache_salt": first.body["cache_salt"]}))
    answers = [asyncio.create_task(send(suite.gateways[0], request)) for request in sent]
    try:
        async with disturbed(suite.wires.between(computes, "", "kv"), change):
            if change is Proxy.stall:
                await _until_staged(suite, holder)
            yield holder
            got = await asyncio.gather(*answers)
    finally:
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await suite.reset_roles()
    _require_right(suite, seconds, got)
    found = [record.timeline for record in await records(suite, _ids(sent))]
    pulls = Counter(each.transfers[0].outcome.value for each in found if holder in _pulled_from(each))
    suite.notes.append("pulls of prefixes: " + ", ".join(f"{count} {name}" for name, count in pulls.items()))
    suite.figures |= {f"pulls_{name}": count for name, count in pulls.items()}
    assert pulls, f"no prefix was to be pulled from {holder}"


def _pulled_from(timeline: RequestTimeline) -> set[object]:
    """The instances from which placement had the prompt's beginning pulled."""
    reasons = (reason for decision in timeline.decisions for reason in decision.reasons)
    return {reason.figures["pull_from"] for reason in reasons if "pull_from" in reason.figures}


def _first(suite: SuiteUnderTest, number: int) -> Request:
    """The first turn of a chat."""
    prompt = _longest(suite).body["prompt"]
    return _changed(_longest(suite), f"turn 1 of chat {number}", [*prompt[number:], *prompt[:number]], TURN)


def _second(suite: SuiteUnderTest, first: Request) -> Request:
    asked = first.body["prompt"][7 : 7 + QUESTION]
    prompt = [*first.body["prompt"], *suite.right[first.key].tokens, *asked]
    return _changed(first, first.key.replace("turn 1", "turn 2"), prompt, NEXT)


# Requests, and their right answers.


def _long(suite: SuiteUnderTest, kind: str) -> Request:
    request = _longest(suite)
    return _changed(request, f"long, {kind}", request.body["prompt"], ANSWER, **KINDS[kind])


def _longest(suite: SuiteUnderTest) -> Request:
    key = f"prompt of {max(suite.bed.prompts)}"
    return next(request for request in suite.requests if request.key == key)


def _changed(request: Request, key: str, prompt: list[int], max_tokens: int, **more: Any) -> Request:
    return replace(request, key=key, body={**request.body, "prompt": prompt, "max_tokens": max_tokens, **more})


async def _learn(suite: SuiteUnderTest, requests: Sequence[Request]) -> None:
    """The right answers to requests that this suite has not had yet."""
    suite.right |= await learn(suite.gateways[0], [each for each in requests if each.key not in suite.right])


def _require_right(suite: SuiteUnderTest, requests: Sequence[Request], answers: Sequence[Response]) -> None:
    wrong = [
        f"{request.key}: {verdict}: {describe(answer)}"
        for request, answer in zip(requests, answers, strict=True)
        if (verdict := judge(suite.right[request.key], answer)) is not Verdict.WHOLE
    ]
    assert not wrong, "; ".join(wrong)


def _ids(sent: Sequence[Request]) -> list[str]:
    return [str(request.body["request_id"]) for request in sent]
