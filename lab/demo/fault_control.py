"""The control of promise 1: with KV zeroed on the way the comparison must fail, or it would prove nothing."""

import asyncio
from collections.abc import Awaitable, Callable

from lab.demo import jobs
from lab.demo.client import ApiClient
from lab.demo.findings import Section
from lab.demo.identity import ANSWER_TOKENS, asks, reference
from lab.demo.prompts import Prompts
from services.launcher.suite import Suite
from shared.domain.instance import Role

FAULT = "POLYPHASE_WORKER_KV_FAULT"
Restart = Callable[[str, dict[str, str]], Awaitable[None]]


async def check_zeroed_kv(suite: Suite, api: ApiClient, prompts: Prompts, restart: Restart) -> Section:
    """One decode instance imports zeroes in place of KV; all others of its role are drained meanwhile."""
    section = Section("Control: the comparison notices when KV is wrong")
    ladder = prompts.ladder(ANSWER_TOKENS)
    plain = await reference(suite, api, ladder)
    faulty, *others = sorted(await suite.ready(Role.DECODE))
    await _restart(suite, restart, faulty, "zero")
    async with suite.monitor() as monitor:
        for other in others:
            await monitor.drain(other, timeout_s=30.0, who="polyphase demo")
    answers = await asyncio.gather(*(api.complete(ask) for ask in asks(ladder)))
    found = await jobs.records(suite, [answer.request_id for answer in answers])
    async with suite.monitor() as monitor:
        for other in others:
            await monitor.resume(other, who="polyphase demo")
    await _restart(suite, restart, faulty, "")
    total, same = len(ladder), sum(a.tokens == b.tokens for a, b in zip(plain, answers, strict=True))
    section.equal("zeroed KV pulled", total, sum(record.pulled for record in found))
    section.check("answers that stay the same", same <= total // 2, f"at most {total // 2}", same)
    section.figures["zeroed_kv_identical"] = same
    return section


async def _restart(suite: Suite, restart: Restart, name: str, fault: str) -> None:
    pid = suite.state.pid(name)
    await restart(name, {FAULT: fault})
    await suite.restarted(name, pid)
    await suite.wait_ready()
