"""Promise 1: tokens through prefill → KV transfer → decode are those of one instance that does everything itself."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from lab.demo import jobs
from lab.demo.client import Answer, ApiClient, Ask
from lab.demo.findings import Section
from lab.demo.prompts import Prompts
from services.launcher.suite import Suite
from shared.domain.instance import Role
from shared.domain.kv import TransferOutcome
from shared.domain.route import PolicySpec

ANSWER_TOKENS = 24
WHO = "polyphase demo"
LOCAL, FULL, RANDOM = ({"split": PolicySpec(name)} for name in ("none", "full", "random"))
SPLITS = 60


def asks(prompts: Sequence[list[int]], max_tokens: int = ANSWER_TOKENS, salted: bool = True) -> list[Ask]:
    """A request for each prompt. Each has a salt of its own: no prefix cache can stand in for a transfer."""
    ids = [f"demo-{uuid.uuid4().hex[:12]}" for _ in prompts]
    return [Ask(p, max_tokens, i, i if salted else "") for p, i in zip(prompts, ids, strict=True)]


async def reference(
    suite: Suite, api: ApiClient, prompts: Sequence[list[int]], max_tokens: int = ANSWER_TOKENS
) -> list[Answer]:
    """What one instance answers that does all by itself: no prefill instance, no KV transfer."""
    await suite.set_policies(LOCAL, WHO)
    try:
        wanted = asks(prompts, max_tokens)
        answers = [await api.complete(ask) for ask in wanted]
        outcomes = Counter(o for r in await jobs.records(suite, [a.request_id for a in wanted]) for o in r.outcomes)
        assert set(outcomes) <= {TransferOutcome.LOCAL.value}, outcomes
        return answers
    finally:
        await suite.set_policies(FULL, WHO)


async def check_identity(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """25 prompts one after the other, then all at once."""
    section = Section("Prefill → KV transfer → decode gives the tokens of a single instance")
    ladder = prompts.ladder(ANSWER_TOKENS)
    plain = await reference(suite, api, ladder)
    one_by_one = asks(ladder)
    answers = [await api.complete(ask) for ask in one_by_one]
    await _compare(section, "one after the other", suite, plain, answers)
    together = asks(ladder)
    answers = list(await asyncio.gather(*(api.stream(ask) for ask in together)))
    await _compare(section, "all at once, streamed", suite, plain, answers)
    section.figures["identity_prompts"] = len(ladder)
    section.figures["longest_prompt_tokens"] = max(len(prompt) for prompt in ladder)
    return section


async def check_splits(suite: Suite, api: ApiClient, prompts: Prompts, count: int = SPLITS) -> Section:
    """Partial prefill: the prefill instance computes any part of the prompt, the decode instance the rest."""
    section = Section("Any split of the prompt gives the same tokens")
    chosen = prompts.various(count, 2, 400, seed=11)
    plain = await reference(suite, api, chosen, 12)
    wanted = asks(chosen, 12)
    splits: list[int] = []
    answers: list[Answer] = []
    await suite.set_policies(RANDOM, WHO)
    try:
        for start in range(0, count, 6):
            answers += await asyncio.gather(*(api.complete(ask) for ask in wanted[start : start + 6]))
    finally:
        await suite.set_policies(FULL, WHO)
    same = sum(a.tokens == b.tokens for a, b in zip(plain, answers, strict=True))
    section.equal("requests whose tokens are identical", f"{count}/{count}", f"{same}/{count}")
    found = await jobs.records(suite, [ask.request_id for ask in wanted])
    splits = [record.split for record in found]
    expected = Counter("local" if split == 0 else "pulled" for split in splits)
    outcomes = Counter(outcome for record in found for outcome in record.outcomes)
    section.equal("KV imports by outcome, as the splits say", dict(expected), dict(outcomes))
    partial = sum(0 < s < len(p) for s, p in zip(splits, chosen, strict=True))
    section.figures["partial_splits"] = partial
    shown = Random(3).sample(range(count), 5)
    section.lines.append(
        "Some of the splits: " + ", ".join(f"{splits[i]} of {len(chosen[i])} tokens" for i in sorted(shown))
    )
    return section


async def compare_with(suite: Suite, section: Section, name: str, plain: list[Answer], answers: list[Answer]) -> None:
    """Add the verdicts that `answers` equal `plain` and that every one's KV was pulled."""
    await _compare(section, name, suite, plain, answers)


async def _compare(section: Section, how: str, suite: Suite, plain: list[Answer], answers: list[Answer]) -> None:
    total = len(plain)
    same = sum(a.tokens == b.tokens and not b.error for a, b in zip(plain, answers, strict=True))
    section.equal(f"identical, {how}", f"{total}/{total}", f"{same}/{total}")
    found = await jobs.records(suite, [answer.request_id for answer in answers])
    pulled = sum(record.pulled for record in found)
    section.equal(f"KV pulled, {how}", f"{total}/{total}", f"{pulled}/{total}")
    moved = sum(t["wire_bytes"] for record in found for t in record.timeline["transfers"])
    section.figures["kv_moved_bytes"] = section.figures.get("kv_moved_bytes", 0) + moved


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
            await monitor.drain(other, timeout_s=30.0, who=WHO)
    answers = await asyncio.gather(*(api.complete(ask) for ask in asks(ladder)))
    found = await jobs.records(suite, [answer.request_id for answer in answers])
    async with suite.monitor() as monitor:
        for other in others:
            await monitor.resume(other, who=WHO)
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
