"""The demo's checks under disturbance.

Clients that leave free both instances within a second (promise 2). A lost instance or control-plane service costs time
and no token (promise 3). Roles flip under load without a failed request (promise 4).
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.demo import jobs
from benchmarks.demo.answers import WHO, asks, compare, reference, same_tokens
from benchmarks.demo.client import ApiClient, Ask, Prompts
from benchmarks.demo.report import Section
from services.launcher.suite import Suite, until
from shared.domain.instance import Role
from shared.domain.job import Phase
from shared.errors import PolyphaseError, Unavailable
from shared.timeline import Span

BOUND_S = 1.0
# All clients leave when the first of them has a token. When all have one by then, a larger crowd is sent.
CROWDS = (8, 16, 32)
_SETTLED_S = 0.5  # the gateway has ended all jobs when it has ended none for this time


async def check_disconnects(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """A client leaves in the middle of its answer; then many at once, some of them still in prefill or transfer."""
    section = Section("A client that leaves frees what it held")
    await suite.wait_idle()
    (ask,) = asks([prompts.of_length(1000, seed=51)], max_tokens=900)
    await _leave([await api.begin(ask, tokens=5)])
    section.at_most("KV and staging free after leaving mid-answer", BOUND_S, await _idle_after(suite))
    (left,) = _phases(await jobs.records(suite, [ask.request_id]))
    section.check("it is recorded as cancelled", left == (Phase.CANCELLED, True), "cancelled, with tokens", left)
    for size in CROWDS:
        ended = await _jobs_ended(api)
        crowd = asks(prompts.various(size, 900, 1100, seed=52), max_tokens=800)
        await _first_then_all_leave(api, crowd)
        section.at_most(f"… after {size} leave at the first one's first token", BOUND_S, await _idle_after(suite))
        # The first token may come while the gateway still reads the last prompts: their requests have no job, and it
        # counts none. A job that it counts is reported by the same call, so that each must have a record.
        begun = await _jobs_ended(api) - ended
        found = _phases(await jobs.records_of(suite, [ask.request_id for ask in crowd], begun))
        section.equal("records of those whose job had begun, as the gateway counts them", begun, len(found))
        section.equal("jobs recorded as cancelled", begun, sum(phase == Phase.CANCELLED for phase, _ in found))
        if before := found.count((Phase.CANCELLED, False)):
            break
    section.check("of these before their first token", before > 0, "at least one", before)
    return section


def _phases(found: Sequence[jobs.JobRecord]) -> list[tuple[Phase, bool]]:
    """How each job ended, and whether it had tokens."""
    return [(Phase(record.row["phase"]), bool(record.row["output_tokens"])) for record in found]


async def _idle_after(suite: Suite) -> float:
    left = time.monotonic()
    await suite.wait_idle()
    return time.monotonic() - left


async def _jobs_ended(api: ApiClient) -> int:
    """The gateway's count of ended jobs, once it stays the same."""
    before = -1
    while (now := await api.jobs_ended()) != before:
        before = now
        await asyncio.sleep(_SETTLED_S)
    return now


async def _first_then_all_leave(api: ApiClient, crowd: list[Ask]) -> None:
    begun = [asyncio.create_task(api.begin(ask)) for ask in crowd]
    await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
    await _leave([task.result() if task.done() else task for task in begun])


async def _leave(clients: Sequence[asyncio.Task[Any]]) -> None:
    """Disconnect. Raises what ended a client before."""
    for client in clients:
        client.cancel()
    for result in await asyncio.gather(*clients, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


RESUME_S = 2.0
STREAM_TOKENS = 500
HANG_S = 30.0


async def check_control_plane(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """kill -9 of scheduler, monitor, predictor and planner, each under a stream and with new requests arriving."""
    section = Section("kill -9 of the scheduler, the monitor, the predictor and the planner")
    for process in suite.state.processes:
        if process.name.startswith(("scheduler", "monitor", "predictor", "planner")):
            await _lose_service(section, suite, api, prompts, process.name)
    await suite.wait_ready()
    return section


async def _lose_service(section: Section, suite: Suite, api: ApiClient, prompts: Prompts, process: str) -> None:
    stream = await asyncio.wait_for(api.begin(_short_prompt(prompts, STREAM_TOKENS)), HANG_S)
    pid = suite.kill(process)
    killed = time.monotonic()
    arriving = asyncio.create_task(_first_success(api, prompts))
    restart_s = await suite.restarted(process, pid)
    served, refused = await asyncio.wait_for(arriving, HANG_S)
    after_ready = served - (killed + restart_s)
    answer = await asyncio.wait_for(stream, HANG_S)
    section.equal(f"{process}: the stream under way goes on", ("", STREAM_TOKENS), (answer.error, len(answer.tokens)))
    got = f"{max(0.0, after_ready):.2f} s after its restart, {refused} × 503 before"
    if not refused and after_ready <= 0:
        got = "without a refusal, while it was away"
    section.check(f"{process}: a new request is served", after_ready <= RESUME_S, "within 2 s of its restart", got)
    section.figures[f"restart_{process.replace('-', '_')}_s"] = restart_s
    section.figures[f"resume_after_{process.replace('-', '_')}_s"] = max(0.0, after_ready)


async def _first_success(api: ApiClient, prompts: Prompts) -> tuple[float, int]:
    """The time of the first whole answer to a new request, and the number of 503 before it."""
    refused = 0
    while True:
        try:
            answer = await api.complete(_short_prompt(prompts, 4))
        except Unavailable:
            refused += 1
            await asyncio.sleep(0.05)
            continue
        assert len(answer.tokens) == 4, answer
        return time.monotonic(), refused


def _short_prompt(prompts: Prompts, tokens: int) -> Ask:
    (ask,) = asks([prompts.of_length(64, seed=uuid.uuid4().int >> 104)], tokens)
    return ask


LONG_TOKENS = 400
KILL_AFTER = 40
PROMPTS = 16


async def check_decode_loss(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """kill -9 of the decode instance in the middle of a stream."""
    section = Section("kill -9 of a decode instance in the middle of a stream")
    prompt = prompts.of_length(120, seed=21)
    (plain,) = await reference(suite, api, [prompt], LONG_TOKENS)
    (ask,) = asks([prompt], LONG_TOKENS)
    stream = await api.begin(ask, KILL_AFTER)
    victim = (await jobs.find_row(suite, ask.request_id))["decode_instance"]
    pid = suite.kill(victim)
    answer = await stream
    section.lines.append(f"{victim} (process {pid}) was killed after {KILL_AFTER} of {LONG_TOKENS} tokens")
    section.equal("the stream ended well", ("", "length"), (answer.error, answer.finish_reason))
    difference = _difference(plain.tokens, answer.tokens)
    section.check("text identical to an undisturbed run", answer.text == plain.text, "identical", difference)
    section.equal("every token exactly once", len(plain.tokens), len(answer.tokens))
    section.equal("usage", plain.completion_tokens, answer.completion_tokens)
    (record,) = await jobs.records(suite, [ask.request_id])
    section.check("the job went on elsewhere", record.attempts > 1, "a second attempt", f"{record.attempts} attempts")
    section.figures["decode_loss_gap_s"] = _resume_gap_s(record)
    await _await_restart(section, suite, Role.DECODE, victim, pid)
    return section


async def check_prefill_loss(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """kill -9 of a prefill instance while it works on several prompts."""
    section = Section("kill -9 of a prefill instance with prompts in it")
    chosen = prompts.various(PROMPTS, 900, 1100, seed=31)
    plain = await reference(suite, api, chosen, 16)
    wanted = asks(chosen, 16)
    running = [asyncio.create_task(api.stream(ask)) for ask in wanted]
    victim = await _busiest_prefill(suite)
    pid = suite.kill(victim)
    answers = await asyncio.gather(*running)
    section.lines.append(f"{victim} (process {pid}) was killed with {len(chosen)} requests under way")
    section.equal("requests answered", len(chosen), sum(not answer.error for answer in answers))
    section.equal("identical", f"{len(chosen)}/{len(chosen)}", f"{same_tokens(plain, answers)}/{len(chosen)}")
    found = await jobs.records(suite, [ask.request_id for ask in wanted])
    again = sum(record.attempts > 1 or "recomputed" in record.outcomes for record in found)
    section.check("some had to be done again", again > 0, "at least one", again)
    await _await_restart(section, suite, Role.PREFILL, victim, pid)
    return section


async def _busiest_prefill(suite: Suite) -> str:
    """The prefill instance with the most jobs in it, once there are any."""
    busiest: dict[str, Any] = {}

    async def busy() -> bool:
        nonlocal busiest
        prefill = [entry for entry in (await suite.instances()).values() if entry["role"] == Role.PREFILL.value]
        busiest = max(prefill, key=lambda entry: entry["load"]["inflight"])
        return bool(busiest["load"]["inflight"])

    await until(busy, 10.0, "prompts in a prefill instance", poll_s=0.01)
    return str(busiest["instance_id"])


async def _await_restart(section: Section, suite: Suite, role: Role, victim: str, pid: int) -> None:
    await suite.restarted(victim, pid)
    await suite.wait_ready()
    state = next(process for process in suite.state.processes if process.name == victim)
    section.check(f"the launcher started {victim} again", True, "ready", f"ready after {state.took_s:.1f} s")
    section.figures[f"restart_{role.value}_s"] = state.took_s


def _resume_gap_s(record: jobs.JobRecord) -> float:
    """From the decision to resume to the start of the last decode."""
    decodes = sorted(span.started_s for span in record.timeline.spans if span.span is Span.DECODE)
    resumes = [decision.time_s for decision in record.timeline.decisions if decision.kind == "resume"]
    return max(0.0, decodes[-1] - resumes[0]) if decodes and resumes else 0.0


def _difference(plain: list[int], got: list[int]) -> str:
    if plain == got:
        return "identical"
    at = next((i for i, (a, b) in enumerate(zip(plain, got, strict=False)) if a != b), min(len(plain), len(got)))
    return f"differs from token {at} of {len(plain)}"


FLIP_MS = 10.0
USERS = 6


@dataclass(slots=True)
class Load:
    """What the users in the background got."""

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
                flip_ms, drain_ms = row["flip_s"] * 1e3, row["drain_s"] * 1e3
                times = (f"{flip_ms:.3f} ms", f"{drain_ms:.0f} ms")
                rows.append((instance, f"{target.other.value} → {target.value}", *times, str(load.served - before)))
                section.at_most(f"{instance} to {target.value}: the flip itself", FLIP_MS, flip_ms, "ms")
                for name, value in (("flip", flip_ms), ("drain", drain_ms)):
                    key = f"{name}_to_{target.value}_ms"
                    section.figures[key] = max(section.figures.get(key, 0.0), value)
            wanted = asks(chosen)
            answers = await asyncio.gather(*(api.complete(ask) for ask in wanted))
            await compare(suite, section, f"after {instance} flipped there and back", plain, wanted, answers)
    section.table = (("instance", "flip", "flip time", "drain time", "served meanwhile"), rows)
    section.check("requests that failed", not load.failed, 0, "; ".join(load.failed[:3]) or 0)
    section.figures["requests_under_flips"] = load.served
    return section


@asynccontextmanager
async def under_load(api: ApiClient, prompts: Prompts, users: int = USERS) -> AsyncIterator[Load]:
    """For the block's length, users that send a request as soon as the previous one is answered."""
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
            answer = await api.stream(ask)
        except (PolyphaseError, OSError) as error:
            load.failed.append(f"{type(error).__name__}: {error}")
            continue
        if answer.error or len(answer.tokens) != ask.max_tokens:
            load.failed.append(answer.error or f"{len(answer.tokens)} of {ask.max_tokens} tokens")
        else:
            load.served += 1


async def _flip(suite: Suite, instance: str, target: Role) -> dict[str, Any]:
    async with suite.monitor() as monitor:
        row = await monitor.flip(instance, drain_timeout_s=30.0, who=WHO)
    await suite.wait_ready([instance])
    assert (await suite.instances())[instance]["role"] == target.value
    return row
