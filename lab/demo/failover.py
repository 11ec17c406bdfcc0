"""Promise 3, the instances: a lost one costs time, never a token."""

import asyncio
import uuid
from dataclasses import dataclass

from lab.demo import jobs
from lab.demo.client import Answer, ApiClient, Ask
from lab.demo.findings import Section
from lab.demo.identity import asks, reference
from lab.demo.prompts import Prompts
from services.launcher.suite import Suite, until
from shared.domain.instance import Role

LONG_TOKENS = 400
KILL_AFTER = 40
PROMPTS = 16


@dataclass(frozen=True, slots=True)
class Loss:
    """An instance that was killed."""

    victim: str
    pid: int


async def check_decode_loss(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """kill -9 of the decode instance in the middle of a stream."""
    section = Section("kill -9 of a decode instance in the middle of a stream")
    prompt = prompts.of_length(120, seed=21)
    (plain,) = await reference(suite, api, [prompt], LONG_TOKENS)
    name = f"demo-{uuid.uuid4().hex[:12]}"
    answer, loss = await _stream_and_kill(suite, api, Ask(prompt, LONG_TOKENS, name, name))
    section.lines.append(f"{loss.victim} (process {loss.pid}) was killed after {KILL_AFTER} of {LONG_TOKENS} tokens")
    section.equal("the stream ended well", ("", "length"), (answer.error, answer.finish_reason))
    section.check(
        "text identical to an undisturbed run",
        answer.text == plain.text,
        "identical",
        _difference(plain.tokens, answer.tokens),
    )
    section.equal("every token exactly once", len(plain.tokens), len(answer.tokens))
    section.equal("usage", plain.usage["completion_tokens"], answer.usage.get("completion_tokens"))
    (record,) = await jobs.records(suite, [name])
    section.check("the job went on elsewhere", record.attempts > 1, "a second attempt", f"{record.attempts} attempts")
    gap = _longest_gap_s(record)
    section.figures["decode_loss_gap_s"] = gap
    await _back(section, suite, Role.DECODE, loss)
    return section


async def check_prefill_loss(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """kill -9 of a prefill instance while it works on several prompts."""
    section = Section("kill -9 of a prefill instance with prompts in it")
    chosen = prompts.various(PROMPTS, 900, 1100, seed=31)
    plain = await reference(suite, api, chosen, 16)
    wanted = asks(chosen, 16)
    running = [asyncio.create_task(api.stream(ask)) for ask in wanted]
    victim = await _busiest_prefill(suite)
    loss = Loss(victim, suite.kill(victim))
    answers = await asyncio.gather(*running)
    section.lines.append(f"{victim} (process {loss.pid}) was killed with {len(chosen)} requests under way")
    section.equal("requests answered", len(chosen), sum(not answer.error for answer in answers))
    same = sum(a.tokens == b.tokens for a, b in zip(plain, answers, strict=True))
    section.equal("identical", f"{len(chosen)}/{len(chosen)}", f"{same}/{len(chosen)}")
    found = await jobs.records(suite, [ask.request_id for ask in wanted])
    again = sum(r.attempts > 1 or "recomputed" in r.outcomes for r in found)
    section.check("some had to be done again", again > 0, "at least one", again)
    await _back(section, suite, Role.PREFILL, loss)
    return section


async def _stream_and_kill(suite: Suite, api: ApiClient, ask: Ask) -> tuple[Answer, Loss]:
    loss = None
    async with api.streaming(ask) as events:
        answer = Answer()
        async for answer in events:
            if loss is None and len(answer.tokens) >= KILL_AFTER:
                victim = (await jobs.find_row(suite, ask.request_id))["decode_instance"]
                loss = Loss(victim, suite.kill(victim))
    assert loss is not None, f"the stream had only {len(answer.tokens)} tokens: {answer.error}"
    return answer, loss


async def _busiest_prefill(suite: Suite) -> str:
    """The prefill instance with the most jobs in it, once there are any."""
    found = ""

    async def look() -> bool:
        nonlocal found
        prefill = [e for e in (await suite.instances()).values() if e["role"] == Role.PREFILL.value]
        busiest = max(prefill, key=lambda entry: entry["load"]["inflight"])
        found = busiest["instance_id"] if busiest["load"]["inflight"] else ""
        return bool(found)

    await until(look, 10.0, "prompts in a prefill instance", poll_s=0.01)
    return found


async def _back(section: Section, suite: Suite, role: Role, loss: Loss) -> None:
    await suite.restarted(loss.victim, loss.pid)
    await suite.wait_ready()
    state = next(process for process in suite.state.processes if process.name == loss.victim)
    section.check(f"the launcher started {loss.victim} again", True, "ready", f"ready after {state.took_s:.1f} s")
    section.figures[f"restart_{role.value}_s"] = state.took_s


def _longest_gap_s(record: jobs.JobRecord) -> float:
    """Between the end of one attempt's spans and the beginning of the next one's decode."""
    decodes = sorted(s["started_s"] for s in record.timeline["spans"] if s["span"] == "decode")
    resumes = [d["time_s"] for d in record.timeline["decisions"] if d["kind"] == "resume"]
    return max(0.0, decodes[-1] - resumes[0]) if decodes and resumes else 0.0


def _difference(plain: list[int], got: list[int]) -> str:
    if plain == got:
        return "identical"
    at = next((i for i, (a, b) in enumerate(zip(plain, got, strict=False)) if a != b), min(len(plain), len(got)))
    return f"differs from token {at} of {len(plain)}"
