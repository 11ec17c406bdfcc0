"""Promise 2: when the client leaves, both legs stop and their memory is free within a second."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from lab.demo import jobs
from lab.demo.answers import asks, compare_with, reference
from lab.demo.client import Answer, ApiClient, Ask, Prompts
from lab.demo.jobs import records_of_begun
from lab.demo.report import Section
from services.launcher.suite import Suite, until
from shared.domain.instance import Role
from shared.domain.job import Phase
from shared.errors import PolyphaseError, Unavailable

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


# MERGED control_plane.py
# Promise 3, the control plane: serving goes on, or resumes within two seconds of a restart, and nothing hangs.


RESUME_S = 2.0
STREAM_TOKENS = 500
HANG_S = 30.0


async def check_control_plane(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """kill -9 of scheduler, monitor, predictor and planner, each under a stream and with new requests arriving."""
    section = Section("kill -9 of the scheduler, the monitor, the predictor and the planner")
    for process in suite.state.processes:
        if process.name.startswith(("scheduler", "monitor", "predictor", "planner")):
            await _lose(section, suite, api, prompts, process.name)
    await suite.wait_ready()
    return section


async def _lose(section: Section, suite: Suite, api: ApiClient, prompts: Prompts, process: str) -> None:
    begun = asyncio.Event()
    stream = asyncio.create_task(api.stream(_ask(prompts, STREAM_TOKENS), begun))
    await asyncio.wait_for(begun.wait(), HANG_S)
    pid = suite.kill(process)
    killed = time.monotonic()
    arriving = asyncio.create_task(_first_success(api, prompts))
    restart_s = await suite.restarted(process, pid)
    ready = killed + restart_s
    served, refused = await asyncio.wait_for(arriving, HANG_S)
    after_ready = served - ready
    answer = await asyncio.wait_for(stream, HANG_S)
    section.equal(f"{process}: the stream under way goes on", ("", STREAM_TOKENS), (answer.error, len(answer.tokens)))
    said = f"{max(0.0, after_ready):.2f} s after its restart, {refused} × 503 before"
    if not refused and after_ready <= 0:
        said = "without a refusal, while it was away"
    section.check(f"{process}: a new request is served", after_ready <= RESUME_S, "within 2 s of its restart", said)
    section.figures[f"restart_{process.replace('-', '_')}_s"] = restart_s
    section.figures[f"resume_after_{process.replace('-', '_')}_s"] = max(0.0, after_ready)


async def _first_success(api: ApiClient, prompts: Prompts) -> tuple[float, int]:
    """When a new request was first answered in full, and how many got a 503 before."""
    refused = 0
    while True:
        try:
            answer: Answer = await api.complete(_ask(prompts, 4))
        except Unavailable:
            refused += 1
            await asyncio.sleep(0.05)
            continue
        assert len(answer.tokens) == 4, answer
        return time.monotonic(), refused


def _ask(prompts: Prompts, tokens: int) -> Ask:
    name = f"demo-{uuid.uuid4().hex[:12]}"
    return Ask(prompts.of_length(64, seed=int(name[-6:], 16)), tokens, name, name)


# MERGED failover.py
# Promise 3, the instances: a lost one costs time, never a token.


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


# MERGED flips.py
# Promise 4: roles flip under load, in both directions, and no request fails.


FLIP_MS = 10.0
USERS = 6


@dataclass(slots=True)
class Load:
    """What the background users saw."""

    served: int = 0
    failed: list[str] = field(default_factory=list)


async def check_flips(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """One instance of each role there and back again, while six users keep asking."""
    section = Section("Roles flip under load, in both directions")
    rows: list[tuple[str, ...]] = []
    chosen = prompts.various(8, 40, 600, seed=41)
    plain = await reference(suite, api, chosen)
    async with under_load(api, prompts) as load:
        for role in (Role.PREFILL, Role.DECODE):
            instance = sorted(await suite.ready(role))[-1]
            for target in (role.other, role):
                before = load.served
                row = await _flip(suite, instance, target)
                rows.append(
                    (
                        instance,
                        f"{target.other.value} → {target.value}",
                        f"{row['flip_s'] * 1e3:.3f} ms",
                        f"{row['drain_s'] * 1e3:.0f} ms",
                        str(load.served - before),
                    )
                )
                _judge(section, instance, target, row)
            answers = list(await asyncio.gather(*(api.complete(ask) for ask in asks(chosen))))
            await compare_with(suite, section, f"after {instance} flipped there and back", plain, answers)
    section.table = (("instance", "flip", "flip time", "drain time", "served meanwhile"), rows)
    section.check("requests that failed", not load.failed, 0, "; ".join(load.failed[:3]) or 0)
    section.figures["requests_under_flips"] = load.served
    return section


@asynccontextmanager
async def under_load(api: ApiClient, prompts: Prompts, users: int = USERS) -> AsyncIterator[Load]:
    """Users who ask again as soon as they are answered, for the length of the block."""
    load = Load()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(users):
            group.create_task(_user(api, prompts, load, stop, number))
        try:
            yield load
        finally:
            stop.set()


async def _user(api: ApiClient, prompts: Prompts, load: Load, stop: asyncio.Event, number: int) -> None:
    turn = 0
    while not stop.is_set():
        turn += 1
        seed = number * 1000 + turn
        ask = Ask(prompts.of_length(20 + seed % 300, seed), 8 + seed % 40, f"load-{uuid.uuid4().hex[:12]}")
        try:
            answer: Answer = await api.stream(ask)
        except (PolyphaseError, httpx.HTTPError) as error:
            load.failed.append(f"{type(error).__name__}: {error}")
            continue
        if answer.error or len(answer.tokens) != ask.max_tokens:
            load.failed.append(answer.error or f"{len(answer.tokens)} of {ask.max_tokens} tokens")
        else:
            load.served += 1


async def _flip(suite: Suite, instance: str, target: Role) -> dict[str, Any]:
    async with suite.monitor() as monitor:
        row = await monitor.flip(instance, drain_timeout_s=30.0, who="polyphase demo")
    await suite.wait_ready([instance])
    assert (await suite.instances())[instance]["role"] == target.value
    return row


def _judge(section: Section, instance: str, target: Role, row: dict[str, Any]) -> None:
    flip_ms, drain_ms = row["flip_s"] * 1e3, row["drain_s"] * 1e3
    section.at_most(f"{instance} to {target.value}: the flip itself", FLIP_MS, flip_ms, "ms")
    for name, value in (("flip", flip_ms), ("drain", drain_ms)):
        key = f"{name}_to_{target.value}_ms"
        section.figures[key] = max(section.figures.get(key, 0.0), value)
