"""What the suite promises, each promise as a check on a running suite; `polyphase demo` and the e2e tests run them.

Tokens are those of a single instance that computes everything itself (1). Clients that leave free both instances within
a second (2). A lost instance or control-plane service costs time and no token (3). Roles flip under load without a
failed request (4). Bad input gets a 4xx (5). The first token does not wait for the KV transfer (6). Also: sample
answers on all surfaces of the API, and predicted lengths beside the true ones.
"""

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import httpx

from benchmarks.chaos.load import Load
from benchmarks.demo.checked_suite import (
    ANSWER_TOKENS,
    FULL,
    RANDOM,
    TRIES,
    WHO,
    CheckedSuite,
    Repeated,
    asks_for,
    under_load,
)
from benchmarks.demo.report import Check, Section
from benchmarks.jobs import JobRecord, find_prompt, records
from benchmarks.suite import until_found
from shared.domain.instance import Role
from shared.domain.job import Phase
from shared.errors import Unavailable
from shared.runtime.http import METRICS_KEPT_S
from shared.timeline import Span
from tools.client import CHAT, COMPLETIONS, ApiClient, Ask

READY_S, MEMORY_GIB = 60.0, 8.0


async def start(checked: CheckedSuite, section: Section) -> None:
    memory, took_s = checked.suite.memory_bytes() / 2**30, checked.running.took_s
    section.at_most("ready to serve", READY_S, took_s)
    section.check("memory of all processes", memory < MEMORY_GIB, f"under {MEMORY_GIB:g} GiB", f"{memory:.2f} GiB")
    section.figures |= {"ready_s": took_s, "memory_gib": memory}
    names = [process.name for process in checked.running.plan.processes]
    section.lines.append(f"{len(names)} processes: {', '.join(names)}")


SAMPLE_QUESTIONS = (
    "Hello!",
    "What is the capital of France?",
    "What is prefill?",
    "List the days of the week.",
    "Tell me a short story about a fox.",
    "Write a short story about a dragon.",
)


async def samples(checked: CheckedSuite, section: Section) -> None:
    api = checked.api
    section.columns = ("question", "answer", "tokens", "ended by")
    for question in SAMPLE_QUESTIONS:
        answer = await api.chat(question, temperature=0, max_tokens=96)
        choice = answer["choices"][0]
        text = " ".join((choice["message"]["content"] or "").split())
        section.rows.append((question, text, str(answer["usage"]["completion_tokens"]), choice["finish_reason"]))
    section.all_of("questions answered", len(section.rows), sum(bool(row[1]) for row in section.rows))
    two = await api.chat("Hello!", n=2, temperature=0.8, max_tokens=16)
    section.equal("n = 2 gives two choices", 2, len(two["choices"]))
    detail = await api.chat("Hello!", logprobs=True, top_logprobs=2, max_tokens=4)
    section.check("logprobs", bool(detail["choices"][0]["logprobs"]["content"]), "one a token")
    bodies = {
        "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
        "/v1/responses": {"input": "Hello!", "max_output_tokens": 16},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16},
    }
    got = {path: (await api.post(path, json={"model": api.model, **body})).status_code for path, body in bodies.items()}
    section.equal("other surfaces answer", dict.fromkeys(bodies, 200), got)


MAX_TOKENS, AT_ONCE = 512, 4
READABLE = 44  # characters of a question in the table
LENGTH_QUESTIONS = """
Hello!
What is the capital of Italy?
Name three colours.
Give a synonym for happy.
Translate 'good morning' into French.
Is the sun a star?
Suggest a name for a small bakery.
Write a sentence about rain.
Explain in one sentence what a loop is.
Describe how bread is made.
Write a function in Python that reverses a string.
Write a SQL query that counts the orders of each customer.
Explain the difference between a list and a tuple, with an example.
Write a JavaScript function that checks whether a number is prime.
Write a letter to a friend about a long journey by train.
Pretend you are a pirate and tell me about your last adventure.
Write a dialogue between a teacher and a student about space travel.
Summarise the plot of a film about a lost dog in a paragraph.
Act as a tour guide and describe the old town to me.
List ten ways to save energy at home.
Write a short story about a lighthouse keeper.
How do I sort a list of words by their length in Python?
Compose a poem about the sea in winter.
Create an HTML page with a heading and a table of three rows.
""".strip().splitlines()


async def lengths(checked: CheckedSuite, section: Section) -> None:
    """Each question once, sampled; the timelines have the predictions."""
    few = asyncio.Semaphore(AT_ONCE)

    async def length_of(number: int, question: str) -> int:
        async with few:
            answer = await checked.api.chat(question, MAX_TOKENS, request_id=f"length-{number}", seed=number)
        return int(answer["usage"]["completion_tokens"])

    true = await asyncio.gather(*(length_of(*each) for each in enumerate(LENGTH_QUESTIONS)))
    found = await records(checked.suite, [f"length-{number}" for number in range(len(LENGTH_QUESTIONS))])
    classified = inside = 0
    section.columns = ("question", "predicted", "expected", "true", "in range")
    for question, tokens, record in zip(LENGTH_QUESTIONS, true, found, strict=True):
        prediction = next((each for each in record.timeline.decisions if each.kind == "prediction"), None)
        if prediction is None or prediction.reasons[0].what != "classifier":
            section.rows.append((question[:READABLE], "–", "–", str(tokens), ""))
            continue
        figures = prediction.reasons[0].figures
        lower, upper = int(figures["lower_tokens"]), int(figures["upper_tokens"])
        right = lower <= tokens < upper
        classified += 1
        inside += right
        reach = f"{lower} to {upper - 1}" if upper <= MAX_TOKENS else f"{lower} and more"
        expected, mark = f"{figures['expected_tokens']:.0f}", "✔" if right else ""
        section.rows.append((question[:READABLE], reach, expected, str(tokens), mark))
    of_all = f"{classified}/{len(section.rows)}"
    section.check("the classifier answers", classified > 0, "some questions at least", of_all)
    in_time = classified >= 0.9 * len(section.rows)
    section.check("answered by the classifier in time", in_time, "nine of ten", of_all, timed=True)
    section.lines.append(
        f"{inside} of {classified} in the predicted range; docs/predictor.md has the accuracy on held-out prompts."
    )
    section.figures |= {"lengths_in_predicted_range": inside, "lengths_predicted": classified}


ALL = 1_000  # at a time


async def identity(checked: CheckedSuite, section: Section) -> None:
    """25 prompts one after the other, then all at once."""
    reference = await checked.reference(checked.prompts.ladder(ANSWER_TOKENS))
    _compare(section, "one after the other", await reference.repeat())
    _compare(section, "all at once, streamed", await reference.repeat(stream=True, at_once=ALL))
    section.figures["identity_prompts"] = len(reference.prompts)
    section.figures["longest_prompt_tokens"] = max(len(prompt) for prompt in reference.prompts)


def _compare(section: Section, how: str, repeated: Repeated) -> None:
    """Check that the answers equal those of the reference, and that the KV of each was pulled."""
    section.all_of(f"identical, {how}", len(repeated.answers), repeated.same)
    section.all_of(f"KV pulled, {how}", len(repeated.answers), repeated.pulled)
    moved = sum(transfer.wire_bytes for record in repeated.records for transfer in record.timeline.transfers)
    section.figures["kv_moved_bytes"] = section.figures.get("kv_moved_bytes", 0) + moved


SPLITS = 60


async def splits(checked: CheckedSuite, section: Section) -> None:
    """Partial prefill: the prefill instance computes any part of the prompt, the decode instance the rest."""
    chosen = checked.prompts.various(SPLITS, 2, 400, seed=11)
    reference = await checked.reference(chosen, 12)
    await checked.suite.set_policies(RANDOM, WHO)
    try:
        repeated = await reference.repeat(at_once=6)
    finally:
        await checked.suite.set_policies(FULL, WHO)
    section.all_of("requests whose tokens are identical", SPLITS, repeated.same)
    computed = [record.split for record in repeated.records]
    expected = Counter("local" if split == 0 else "pulled" for split in computed)
    outcomes = Counter(outcome for record in repeated.records for outcome in record.outcomes)
    section.equal("KV imports by outcome, as the splits say", dict(expected), dict(outcomes))
    section.figures["partial_splits"] = sum(0 < s < len(p) for s, p in zip(computed, chosen, strict=True))
    shown = sorted(Random(3).sample(range(SPLITS), 5))
    section.lines.append("Some of the splits: " + ", ".join(f"{computed[i]} of {len(chosen[i])} tokens" for i in shown))


FAULT = "POLYPHASE_WORKER_KV_FAULT"


async def zeroed_kv(checked: CheckedSuite, section: Section) -> None:
    """One decode instance imports zeroes in place of KV, while all others of its role are drained."""
    reference = await checked.reference(checked.prompts.ladder(ANSWER_TOKENS))
    faulty, *others = sorted(await checked.suite.ready(Role.DECODE))
    await _restart(checked, faulty, "zero")
    async with checked.suite.monitor() as monitor:
        for other in others:
            await monitor.drain(other, timeout_s=30.0, who=WHO)
        repeated = await reference.repeat(at_once=ALL)
        for other in others:
            await monitor.resume(other, who=WHO)
    await _restart(checked, faulty, "")
    total = len(reference.prompts)
    section.equal("zeroed KV pulled", total, repeated.pulled)
    section.check("answers that stay the same", repeated.same <= total // 2, f"at most {total // 2}", repeated.same)
    section.figures["zeroed_kv_identical"] = repeated.same


async def _restart(checked: CheckedSuite, name: str, fault: str) -> None:
    pid = checked.suite.state.pid(name)
    await checked.running.supervisor.restart(name, {FAULT: fault})
    await checked.suite.restarted(name, pid)
    await checked.suite.wait_ready()


async def first_token(checked: CheckedSuite, section: Section) -> None:
    """Long prompts, one at a time; their timelines say which came first."""
    reference = await checked.reference(checked.prompts.various(5, 900, 1100, seed=5), 16)
    repeated = await reference.repeat(stream=True)
    leads, total = [_lead_s(record) for record in repeated.records], len(reference.prompts)
    section.all_of("first token before the first step of the decode instance", total, sum(lead > 0 for lead in leads))
    section.all_of("no token twice or missing", total, repeated.same)
    section.figures["first_token_lead_ms"] = sorted(leads)[total // 2] * 1e3
    section.lines.append("Lead over the decode instance: " + ", ".join(f"{lead * 1e3:.1f} ms" for lead in leads))


def _lead_s(record: JobRecord) -> float:
    """The time from the first token to the first step of the decode instance; 0 without a transfer."""
    if not record.pulled:
        return 0.0
    decode = next(span for span in record.timeline.spans if span.span is Span.DECODE)
    return decode.started_s - record.timeline.first_token_s


FREE_S = 1.0
# All clients leave when the first of them has a token. When all have one by then, a larger crowd is sent.
CROWDS = (8, 16, 32)
# The gateway has ended all jobs when it has ended none for this time. A busy one repeats its metrics for a while.
_SETTLED_S = METRICS_KEPT_S + 0.2


async def disconnects(checked: CheckedSuite, section: Section) -> None:
    """A client leaves in the middle of its answer; then many at once, some of them still in prefill or transfer."""

    async def leave(clients: Sequence[asyncio.Task[Any]], how: str) -> None:
        for client in clients:
            client.cancel()
        for result in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        section.at_most(how, FREE_S, await checked.suite.wait_idle())

    await checked.suite.wait_idle()
    (ask,) = asks_for([checked.prompts.of_length(1000, seed=51)], max_tokens=900)
    await leave([await checked.api.begin(ask, tokens=5)], "KV and staging free after leaving mid-answer")
    (left,) = _endings(await checked.records([ask]))
    section.check("it is recorded as cancelled", left == (Phase.CANCELLED, True), "cancelled, with tokens", left)
    for size in CROWDS:
        ended = await _jobs_ended(checked.api)
        crowd = asks_for(checked.prompts.various(size, 900, 1100, seed=52), max_tokens=800)
        begun = [asyncio.create_task(checked.api.begin(ask)) for ask in crowd]
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        streams = [task.result() if task.done() else task for task in begun]
        await leave(streams, f"… after {size} leave at the first one's first token")
        # The first token may come while the gateway still reads the last prompts: their requests have no job, and it
        # counts none. A job that it counts is reported by the same call, so that each must have a record.
        for _ in range(TRIES):  # a job may begin, and end at once, after the count
            jobs = await _jobs_ended(checked.api) - ended
            found = _endings(await checked.records(crowd, at_least=jobs))
            if len(found) == jobs:
                break
        section.equal("records of those whose job had begun, as the gateway counts them", jobs, len(found))
        section.equal("jobs recorded as cancelled", jobs, sum(phase == Phase.CANCELLED for phase, _ in found))
        if before := found.count((Phase.CANCELLED, False)):
            break
    section.check("of these before their first token", before > 0, "at least one", before)


def _endings(found: Sequence[JobRecord]) -> list[tuple[Phase, bool]]:
    """How each job ended, and whether it had tokens."""
    return [(record.row.phase, bool(record.row.output_tokens)) for record in found]


async def _jobs_ended(api: ApiClient) -> int:
    """The gateway's count of ended jobs, once it stays the same."""
    before = -1
    while (now := await api.jobs_ended()) != before:
        before = now
        await asyncio.sleep(_SETTLED_S)
    return now


FLIP_MS = 500.0  # a heartbeat shows the new role, and two calls
USERS = 6


async def flips(checked: CheckedSuite, section: Section) -> None:
    """One instance of each role takes the other role and its own again, under load."""
    section.columns = ("instance", "flip", "flip time", "drain time", "served meanwhile")
    reference = await checked.reference(checked.prompts.various(8, 40, 600, seed=41))
    plan = checked.running.plan
    async with under_load(section, plan.api_url, plan.model, USERS) as load:
        for role in (Role.PREFILL, Role.DECODE):
            instance = sorted(await checked.suite.ready(role))[-1]
            for target in (role.other, role):
                await _flip(checked, section, instance, target, load)
            how = f"after {instance} flipped there and back"
            _compare(section, how, await reference.repeat(at_once=ALL))
    section.figures["requests_under_flips"] = load.served


async def _flip(checked: CheckedSuite, section: Section, instance: str, target: Role, load: Load) -> None:
    before = load.served
    async with checked.suite.monitor() as monitor:
        done = await monitor.flip(instance, drain_timeout_s=30.0, who=WHO)
    await checked.suite.wait_ready([instance])
    assert (await checked.suite.instances())[instance].role is target
    assert done.flip_s is not None
    assert done.drain_s is not None
    flip_ms, drain_ms = done.flip_s * 1e3, done.drain_s * 1e3
    times = (f"{flip_ms:.0f} ms", f"{drain_ms:.0f} ms", str(load.served - before))
    section.rows.append((instance, f"{target.other.value} → {target.value}", *times))
    section.at_most(f"{instance} to {target.value}: from the end of the drain until it serves", FLIP_MS, flip_ms, "ms")
    for name, value in (("flip", flip_ms), ("drain", drain_ms)):
        key = f"{name}_to_{target.value}_ms"
        section.figures[key] = max(section.figures.get(key, 0.0), value)


async def decode_loss(checked: CheckedSuite, section: Section) -> None:
    pids: dict[str, int] = {}

    def kill(victim: str) -> None:
        pids[victim] = checked.suite.kill(victim)

    victim = await checked.lose_in_stream(section, kill, streams=1, tokens=400, after=40)
    await _await_restart(checked, section, Role.DECODE, victim, pids[victim])


async def prefill_loss(checked: CheckedSuite, section: Section) -> None:
    """One prefill instance, to which all prompts come, while all others of its role are drained."""
    reference = await checked.reference(checked.prompts.various(16, 900, 1100, seed=31), 16)
    total = len(reference.prompts)
    victim, *others = sorted(await checked.suite.ready(Role.PREFILL))
    for _ in range(TRIES):  # the prompts may all be computed when it is killed
        async with checked.suite.monitor() as monitor:
            for other in others:
                await monitor.drain(other, timeout_s=30.0, who=WHO)
            running = asyncio.create_task(reference.repeat(stream=True, at_once=ALL))
            await until_found(partial(_prompt_or_end, checked, victim, running), HANG_S, f"a prompt in {victim}")
            for other in others:
                await monitor.resume(other, who=WHO)
        pid = checked.suite.kill(victim)
        repeated = await running
        section.lines.append(f"{victim} (process {pid}) was killed with {total} requests under way")
        section.equal("requests answered", total, sum(not answer.error for answer in repeated.answers))
        section.all_of("identical", total, repeated.same)
        await _await_restart(checked, section, Role.PREFILL, victim, pid)
        if again := sum(record.attempts > 1 or "recomputed" in record.outcomes for record in repeated.records):
            break
    section.check("some had to be done again", again > 0, "at least one", again)


async def _prompt_or_end(checked: CheckedSuite, victim: str, running: "asyncio.Task[Repeated]") -> bool | None:
    """Whether the instance has a prompt, or all have been answered already; None where neither is the case."""
    return True if running.done() or await find_prompt(checked.suite, victim) else None


async def _await_restart(checked: CheckedSuite, section: Section, role: Role, victim: str, pid: int) -> None:
    await checked.suite.restarted(victim, pid)
    await checked.suite.wait_ready()
    state = next(process for process in checked.suite.state.processes if process.name == victim)
    section.check(f"the launcher started {victim} again", True, "ready", f"ready after {state.took_s:.1f} s")
    section.figures[f"restart_{role.value}_s"] = state.took_s


RESUME_S, HANG_S = 2.0, 60.0
STREAM_TOKENS = 500


async def control_plane(checked: CheckedSuite, section: Section) -> None:
    for process in checked.suite.state.processes:
        if process.name.startswith(("scheduler", "monitor", "predictor", "planner")):
            await _lose_service(checked, section, process.name)
    await checked.suite.wait_ready()


async def _lose_service(checked: CheckedSuite, section: Section, process: str) -> None:
    async with asyncio.timeout(HANG_S):
        stream = await checked.api.begin(_short_prompt(checked, STREAM_TOKENS))
    pid = checked.suite.kill(process)
    killed = time.monotonic()
    arriving = asyncio.create_task(_first_success(checked))
    restart_s = await checked.suite.restarted(process, pid)
    served, refused = await asyncio.wait_for(arriving, HANG_S)
    after_ready_s = served - (killed + restart_s)
    answer = await asyncio.wait_for(stream, HANG_S)
    section.equal(f"{process}: the stream under way goes on", ("", STREAM_TOKENS), (answer.error, len(answer.tokens)))
    got = f"{max(0.0, after_ready_s):.2f} s after its restart, {refused} × 503 before"
    if not refused and after_ready_s <= 0:
        got = "without a refusal, while it was away"
    resumed = after_ready_s <= RESUME_S
    section.check(f"{process}: a new request is served", resumed, "within 2 s of its restart", got, timed=True)
    name = process.replace("-", "_")
    section.figures |= {f"restart_{name}_s": restart_s, f"resume_after_{name}_s": max(0.0, after_ready_s)}


async def _first_success(checked: CheckedSuite) -> tuple[float, int]:
    """The time of the first whole answer to a new request, and the number of 503 before it."""
    refused = 0
    while True:
        with suppress(Unavailable):
            answer = await checked.api.complete(_short_prompt(checked, 4))
            assert len(answer.tokens) == 4, answer
            return time.monotonic(), refused
        refused += 1
        await asyncio.sleep(0.05)


def _short_prompt(checked: CheckedSuite, tokens: int) -> Ask:
    (ask,) = asks_for([checked.prompts.of_length(64, seed=uuid.uuid4().int >> 104)], tokens)
    return ask


MAX_BODY_BYTES = 4 << 20
Bad = tuple[str, str, tuple[int, ...], dict[str, Any] | bytes]


def bad_requests(model: str, max_model_len: int, max_body_bytes: int) -> tuple[Bad, ...]:
    """Name, path, statuses that are right, and body of requests that must be refused."""
    chat = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    plain = {"model": model, "prompt": "Hello"}
    either = (400, 422)
    return (
        ("malformed JSON", CHAT, (400,), b'{"model": '),
        ("an empty body", CHAT, either, b""),
        ("no messages", CHAT, either, {"model": model}),
        ("messages of a wrong type", CHAT, either, {"model": model, "messages": "Hello"}),
        ("an unknown role", CHAT, either, {"model": model, "messages": [{"role": 7}]}),
        ("temperature as a word", CHAT, either, {**chat, "temperature": "warm"}),
        ("temperature below zero", CHAT, either, {**chat, "temperature": -1}),
        ("top_p over one", CHAT, either, {**chat, "top_p": 1.5}),
        ("n = 0", CHAT, either, {**chat, "n": 0}),
        ("negative max_tokens", COMPLETIONS, either, {**plain, "max_tokens": -1}),
        ("huge max_tokens", COMPLETIONS, either, {**plain, "max_tokens": 10**9}),
        ("a prompt beyond the context", COMPLETIONS, (400,), {**plain, "prompt": [5] * (max_model_len + 1)}),
        ("token ids that do not exist", COMPLETIONS, (400,), {**plain, "prompt": [10**9]}),
        ("negative token ids", COMPLETIONS, either, {**plain, "prompt": [-5]}),
        ("an unknown model", CHAT, (404,), {**chat, "model": "no-such-model"}),
        ("a body over the limit", CHAT, (413,), b" " * (max_body_bytes + 1)),
        (UNKNOWN_CLASS, CHAT, (400,), chat),
        ("an unknown path", "/v1/no-such-thing", (404,), chat),
    )


UNKNOWN_CLASS = "an unknown SLO class"  # the case that has a header of its own


async def bad_input(checked: CheckedSuite, section: Section) -> None:
    """Send all bad requests; then a good request must be answered."""
    api = checked.api
    section.columns = ("sent", "status", "message")
    for name, path, want, body in bad_requests(api.model, await api.max_model_len(), MAX_BODY_BYTES):
        headers = {"content-type": "application/json"}
        headers |= {"x-polyphase-slo": "no-such-class"} if name == UNKNOWN_CLASS else {}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await api.post(path, headers=headers, content=content)
        message = _message(response)
        right = response.status_code in want and (message is not None or want == (404,))
        section.check(name, right, " or ".join(map(str, want)), response.status_code)
        section.rows.append((name, str(response.status_code), (message or "(not OpenAI's shape)")[:90]))
    answer = await api.chat("Hello!", max_tokens=8)
    section.check("a good request afterwards", bool(answer["choices"]), "answered", "answered")


def _message(response: httpx.Response) -> str | None:
    """The message of an error in OpenAI's format, in one line; None for another format."""
    try:
        return " ".join(str(response.json()["error"]["message"]).split())
    except (ValueError, KeyError, TypeError):
        return None


CHECKS: dict[str, Check[CheckedSuite]] = {
    "The whole suite is up": start,
    "Real answers of a real model": samples,
    "How long answers get is predicted, by a classifier trained on this model's own answers": lengths,
    "Prefill → KV transfer → decode gives the tokens of a single instance": identity,
    "Any split of the prompt gives the same tokens": splits,
    "Control: the comparison notices when KV is wrong": zeroed_kv,
    "The first token leaves before the decode instance goes on": first_token,
    "A client that leaves frees what it held": disconnects,
    "Roles flip under load, in both directions": flips,
    "kill -9 of a decode instance in the middle of a stream": decode_loss,
    "kill -9 of a prefill instance with prompts in it": prefill_loss,
    "kill -9 of the scheduler, the monitor, the predictor and the planner": control_plane,
    "Bad input is refused, with the right status": bad_input,
}
