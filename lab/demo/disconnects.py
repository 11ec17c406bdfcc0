"""Promise 2: when the client leaves, both legs stop and their memory is free within a second."""

import asyncio
import time

from lab.demo.client import ApiClient, Ask
from lab.demo.findings import Section
from lab.demo.identity import asks
from lab.demo.jobs import records_of_begun
from lab.demo.prompts import Prompts
from services.launcher.suite import Suite
from shared.domain.job import Phase

BOUND_S = 1.0
# A client that is slow to see the first one's first token leaves when all have theirs; then a larger crowd is asked.
CROWDS = (8, 16, 32)


async def check_disconnects(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """Leave in the middle of an answer; then many at once, some of them still in prefill or transfer."""
    section = Section("A client that leaves frees what it held")
    await suite.wait_idle()
    (one,) = asks([prompts.of_length(1000, seed=51)], max_tokens=900)
    await _read(api, one, tokens=5)
    section.at_most("KV and staging free after leaving mid-answer", BOUND_S, await _idle_after(suite))
    (left,) = await _phases(suite, [one])
    section.check("it is recorded as cancelled", left == (Phase.CANCELLED, True), "cancelled, with tokens", left)
    for size in CROWDS:
        crowd = asks(prompts.various(size, 900, 1100, seed=52), max_tokens=800)
        await _first_then_all_leave(api, crowd)
        section.at_most(f"… after {size} leave at the first one's first token", BOUND_S, await _idle_after(suite))
        found = await _phases(suite, crowd)
        # The first token may come while the last prompts are still being read: those have no job yet.
        section.check("of these whose job had begun", 2 * len(found) >= size, f"at least {size // 2}", len(found))
        section.equal("jobs recorded as cancelled", len(found), sum(phase == Phase.CANCELLED for phase, _ in found))
        if before := found.count((Phase.CANCELLED, False)):
            break
    section.check("of these before their first token", before > 0, "at least one", before)
    return section


async def _phases(suite: Suite, crowd: list[Ask]) -> list[tuple[Phase, bool]]:
    """How each job that had begun ended, and whether it had tokens."""
    found = await records_of_begun(suite, [ask.request_id for ask in crowd])
    return [(Phase(one.row["phase"]), bool(one.row["output_tokens"])) for one in found]


async def _idle_after(suite: Suite) -> float:
    left = time.monotonic()
    await suite.wait_idle()
    return time.monotonic() - left


async def _first_then_all_leave(api: ApiClient, crowd: list[Ask]) -> None:
    reading = [asyncio.create_task(_read(api, ask, tokens=1)) for ask in crowd]
    await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
    for task in reading:
        task.cancel()
    for result in await asyncio.gather(*reading, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _read(api: ApiClient, ask: Ask, tokens: int) -> None:
    async with api.streaming(ask) as events:
        async for answer in events:
            if len(answer.tokens) >= tokens:
                return
