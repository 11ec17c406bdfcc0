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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from benchmarks.demo.report import Check, Section
from benchmarks.suite import JobRecord, find_row, records
from services.launcher.suite import Suite, until
from services.launcher.up import RunningSuite
from shared.domain.instance import Role
from shared.domain.job import Phase
from shared.domain.kv import TransferOutcome
from shared.domain.route import PolicySpec
from shared.errors import PolyphaseError, Unavailable
from shared.timeline import Span
from tools.client import CHAT, COMPLETIONS, ApiClient, Ask, Prompts, Response, users

ANSWER_TOKENS = 24
WHO = "polyphase demo"
LOCAL, FULL, RANDOM = ({"split": PolicySpec(name)} for name in ("none", "full", "random"))


@dataclass(frozen=True, slots=True)
class Place:
    """A running suite, a client of it, and prompts for its model."""

    running: RunningSuite
    api: ApiClient
    prompts: Prompts

    @property
    def suite(self) -> Suite:
        return self.running.suite

    async def records(self, asks: Sequence[Ask], at_least: int | None = None) -> list[JobRecord]:
        """The records of the jobs of these requests."""
        return await records(self.suite, [ask.request_id for ask in asks], at_least)

    async def reference(self, prompts: Sequence[list[int]], max_tokens: int = ANSWER_TOKENS) -> list[Response]:
        """The answers of an instance that computes everything itself, without a prefill instance and a KV transfer."""
        await self.suite.set_policies(LOCAL, WHO)
        try:
            wanted = asks_for(prompts, max_tokens)
            answers = [await self.api.complete(ask) for ask in wanted]
            outcomes = {outcome for record in await self.records(wanted) for outcome in record.outcomes}
            assert outcomes <= {TransferOutcome.LOCAL.value}, outcomes
            return answers
        finally:
            await self.suite.set_policies(FULL, WHO)

    async def at_once(self, asks: Sequence[Ask]) -> list[Response]:
        """The answers to requests that are sent at once."""
        return await asyncio.gather(*(self.api.complete(ask) for ask in asks))

    async def lose_in_stream(
        self, section: Section, lose: Callable[[str], object], streams: int, tokens: int, after: int
    ) -> str:
        """Lose the decode instance of one of several streams after so many tokens; returns its name.

        `lose` runs in a thread. No client may see the loss.
        """
        prompts = self.prompts.various(streams, 60, 160, seed=41)
        plain = await self.reference(prompts, tokens)
        wanted = asks_for(prompts, tokens)
        others = [asyncio.create_task(self.api.stream(ask)) for ask in wanted[1:]]
        stream = await self.api.begin(wanted[0], after)
        victim = str((await find_row(self.suite, wanted[0].request_id)).decode_instance)
        await asyncio.to_thread(lose, victim)
        answers = await asyncio.gather(stream, *others)
        section.lines.append(f"{victim} was lost after {after} of {tokens} tokens of a stream")
        ended = [(answer.error, answer.finish_reason) for answer in answers]
        section.equal("streams that ended well", streams, ended.count(("", "length")))
        section.equal("every token exactly once", streams, same_tokens(plain, answers))
        same = [
            (a.text, a.completion_tokens) == (b.text, b.completion_tokens) for a, b in zip(plain, answers, strict=True)
        ]
        section.equal("text and usage of an undisturbed run", streams, sum(same))
        found = await self.records(wanted)
        attempts = [record.attempts for record in found]
        section.check("the stream went on elsewhere", max(attempts) > 1, "a second attempt", attempts)
        section.figures["decode_loss_gap_s"] = max(map(_resume_gap_s, found))
        return victim


@dataclass(slots=True)
class Load:
    """What the users in the background got."""

    served: int = 0
    failed: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    def check(self, section: Section) -> None:
        section.check("requests were served meanwhile", self.served > 0, "some", self.served)
        section.check("requests that failed", not self.failed, 0, "; ".join(self.failed[:3]) or 0)


@asynccontextmanager
async def under_load(api: ApiClient, count: int, ask: Callable[[int], Ask]) -> AsyncIterator[Load]:
    """For the block's length, users that send `ask(seed)`, each time with another seed."""
    load = Load()

    async def request(user: int, turn: int) -> bool:
        wanted = ask(user * 1000 + turn)
        try:
            answer = await api.stream(wanted)
        except (PolyphaseError, OSError) as error:
            load.failed.append(f"{type(error).__name__}: {error}")
            return False
        if answer.error or len(answer.tokens) != wanted.max_tokens:
            load.failed.append(answer.error or f"{len(answer.tokens)} of {wanted.max_tokens} tokens")
        else:
            load.served += 1
            load.longest_s = max(load.longest_s, answer.took_s)
        return True

    async with users(count, request):
        yield load


def asks_for(prompts: Sequence[list[int]], max_tokens: int = ANSWER_TOKENS) -> list[Ask]:
    """A request for each prompt, with a salt of its own, so that no prefix cache replaces a KV transfer."""
    ids = [f"demo-{uuid.uuid4().hex[:12]}" for _ in prompts]
    return [Ask(prompt, max_tokens, name, name) for prompt, name in zip(prompts, ids, strict=True)]


def same_tokens(plain: Sequence[Response], answers: Sequence[Response]) -> int:
    """The number of answers without an error whose tokens are those of the plain answer."""
    return sum(a.tokens == b.tokens and not b.error for a, b in zip(plain, answers, strict=True))


def _of(total: int, count: int) -> tuple[str, str]:
    """What is wanted and what there is, of a total."""
    return f"{total}/{total}", f"{count}/{total}"


READY_S, MEMORY_GIB = 60.0, 8.0


async def start(place: Place, section: Section) -> None:
    memory, took_s = place.suite.memory_bytes() / 2**30, place.running.took_s
    section.at_most("ready to serve", READY_S, took_s)
    section.check("memory of all processes", memory < MEMORY_GIB, f"under {MEMORY_GIB:g} GiB", f"{memory:.2f} GiB")
    section.figures |= {"ready_s": took_s, "memory_gib": memory}
    names = [process.name for process in place.running.plan.processes]
    section.lines.append(f"{len(names)} processes: {', '.join(names)}")


SAMPLE_QUESTIONS = (
    "Hello!",
    "What is the capital of France?",
    "What is prefill?",
    "List the days of the week.",
    "Tell me a short story about a fox.",
    "Write a short story about a dragon.",
)


async def samples(place: Place, section: Section) -> None:
    """Some answers to read, and one of each other API."""
    api = place.api
    section.columns = ("asked", "answered", "tokens", "ended by")
    for question in SAMPLE_QUESTIONS:
        answer = await api.chat(question, temperature=0, max_tokens=96)
        choice = answer["choices"][0]
        text = " ".join((choice["message"]["content"] or "").split())
        section.rows.append((question, text, str(answer["usage"]["completion_tokens"]), choice["finish_reason"]))
    section.equal("questions answered", *_of(len(section.rows), sum(bool(row[1]) for row in section.rows)))
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


async def lengths(place: Place, section: Section) -> None:
    """Each question once, sampled; the timelines have the predictions."""
    few = asyncio.Semaphore(AT_ONCE)

    async def length_of(number: int, question: str) -> int:
        async with few:
            answer = await place.api.chat(question, MAX_TOKENS, request_id=f"length-{number}", seed=number)
        return int(answer["usage"]["completion_tokens"])

    true = await asyncio.gather(*(length_of(*each) for each in enumerate(LENGTH_QUESTIONS)))
    found = await records(place.suite, [f"length-{number}" for number in range(len(LENGTH_QUESTIONS))])
    classified = inside = 0
    section.columns = ("asked", "predicted", "expected", "true", "in range")
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
    _, of_all = _of(len(section.rows), classified)
    section.check("the classifier answers", classified > 0, "some questions at least", of_all)
    section.check("answered by the classifier in time", classified >= 0.9 * len(section.rows), "nine of ten", of_all)
    section.lines.append(
        f"{inside} of {classified} in the predicted range; docs/predictor.md has the accuracy on held-out prompts."
    )
    section.figures |= {"lengths_in_predicted_range": inside, "lengths_predicted": classified}


async def identity(place: Place, section: Section) -> None:
    """25 prompts one after the other, then all at once."""
    ladder = place.prompts.ladder(ANSWER_TOKENS)
    plain = await place.reference(ladder)
    wanted = asks_for(ladder)
    answers = [await place.api.complete(ask) for ask in wanted]
    await _compare(place, section, "one after the other", plain, wanted, answers)
    wanted = asks_for(ladder)
    answers = await asyncio.gather(*(place.api.stream(ask) for ask in wanted))
    await _compare(place, section, "all at once, streamed", plain, wanted, answers)
    section.figures["identity_prompts"] = len(ladder)
    section.figures["longest_prompt_tokens"] = max(len(prompt) for prompt in ladder)


async def _compare(
    place: Place, section: Section, how: str, plain: list[Response], wanted: list[Ask], answers: list[Response]
) -> None:
    """Check that the answers equal the plain ones, and that the KV of each was pulled."""
    section.equal(f"identical, {how}", *_of(len(plain), same_tokens(plain, answers)))
    found = await place.records(wanted)
    section.equal(f"KV pulled, {how}", *_of(len(plain), sum(record.pulled for record in found)))
    moved = sum(transfer.wire_bytes for record in found for transfer in record.timeline.transfers)
    section.figures["kv_moved_bytes"] = section.figures.get("kv_moved_bytes", 0) + moved


SPLITS = 60


async def splits(place: Place, section: Section) -> None:
    """Partial prefill: the prefill instance computes any part of the prompt, the decode instance the rest."""
    chosen = place.prompts.various(SPLITS, 2, 400, seed=11)
    plain = await place.reference(chosen, 12)
    wanted = asks_for(chosen, 12)
    answers: list[Response] = []
    await place.suite.set_policies(RANDOM, WHO)
    try:
        for first in range(0, SPLITS, 6):
            answers += await place.at_once(wanted[first : first + 6])
    finally:
        await place.suite.set_policies(FULL, WHO)
    section.equal("requests whose tokens are identical", *_of(SPLITS, same_tokens(plain, answers)))
    found = await place.records(wanted)
    computed = [record.split for record in found]
    expected = Counter("local" if split == 0 else "pulled" for split in computed)
    outcomes = Counter(outcome for record in found for outcome in record.outcomes)
    section.equal("KV imports by outcome, as the splits say", dict(expected), dict(outcomes))
    section.figures["partial_splits"] = sum(0 < s < len(p) for s, p in zip(computed, chosen, strict=True))
    shown = sorted(Random(3).sample(range(SPLITS), 5))
    section.lines.append("Some of the splits: " + ", ".join(f"{computed[i]} of {len(chosen[i])} tokens" for i in shown))


FAULT = "POLYPHASE_WORKER_KV_FAULT"


async def zeroed_kv(place: Place, section: Section) -> None:
    """One decode instance imports zeroes in place of KV, while all others of its role are drained."""
    ladder = place.prompts.ladder(ANSWER_TOKENS)
    plain = await place.reference(ladder)
    faulty, *others = sorted(await place.suite.ready(Role.DECODE))
    await _restart(place, faulty, "zero")
    async with place.suite.monitor() as monitor:
        for other in others:
            await monitor.drain(other, timeout_s=30.0, who=WHO)
    wanted = asks_for(ladder)
    answers = await place.at_once(wanted)
    found = await place.records(wanted)
    async with place.suite.monitor() as monitor:
        for other in others:
            await monitor.resume(other, who=WHO)
    await _restart(place, faulty, "")
    total, same = len(ladder), same_tokens(plain, answers)
    section.equal("zeroed KV pulled", total, sum(record.pulled for record in found))
    section.check("answers that stay the same", same <= total // 2, f"at most {total // 2}", same)
    section.figures["zeroed_kv_identical"] = same


async def _restart(place: Place, name: str, fault: str) -> None:
    pid = place.suite.state.pid(name)
    await place.running.supervisor.restart(name, {FAULT: fault})
    await place.suite.restarted(name, pid)
    await place.suite.wait_ready()


async def first_token(place: Place, section: Section) -> None:
    """Long prompts, one at a time; their timelines say which came first."""
    chosen = place.prompts.various(5, 900, 1100, seed=5)
    plain = await place.reference(chosen, 16)
    wanted = asks_for(chosen, 16)
    answers = [await place.api.stream(ask) for ask in wanted]
    leads = [_lead_s(record) for record in await place.records(wanted)]
    total = len(chosen)
    early = sum(lead > 0 for lead in leads)
    section.equal("first token before the first step of the decode instance", *_of(total, early))
    section.equal("no token twice or missing", *_of(total, same_tokens(plain, answers)))
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
_SETTLED_S = 0.5  # the gateway has ended all jobs when it has ended none for this time


async def disconnects(place: Place, section: Section) -> None:
    """A client leaves in the middle of its answer; then many at once, some of them still in prefill or transfer."""

    async def leave(clients: Sequence[asyncio.Task[Any]], how: str) -> None:
        for client in clients:
            client.cancel()
        for result in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        section.at_most(how, FREE_S, await place.suite.wait_idle())

    await place.suite.wait_idle()
    (ask,) = asks_for([place.prompts.of_length(1000, seed=51)], max_tokens=900)
    await leave([await place.api.begin(ask, tokens=5)], "KV and staging free after leaving mid-answer")
    (left,) = _endings(await place.records([ask]))
    section.check("it is recorded as cancelled", left == (Phase.CANCELLED, True), "cancelled, with tokens", left)
    for size in CROWDS:
        ended = await _jobs_ended(place.api)
        crowd = asks_for(place.prompts.various(size, 900, 1100, seed=52), max_tokens=800)
        begun = [asyncio.create_task(place.api.begin(ask)) for ask in crowd]
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        streams = [task.result() if task.done() else task for task in begun]
        await leave(streams, f"… after {size} leave at the first one's first token")
        # The first token may come while the gateway still reads the last prompts: their requests have no job, and it
        # counts none. A job that it counts is reported by the same call, so that each must have a record.
        jobs = await _jobs_ended(place.api) - ended
        found = _endings(await place.records(crowd, at_least=jobs))
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


FLIP_MS = 10.0
USERS = 6


async def flips(place: Place, section: Section) -> None:
    """One instance of each role there and back again, while six users keep asking."""
    section.columns = ("instance", "flip", "flip time", "drain time", "served meanwhile")
    chosen = place.prompts.various(8, 40, 600, seed=41)
    plain = await place.reference(chosen)

    def ask(seed: int) -> Ask:
        prompt = place.prompts.of_length(20 + seed % 300, seed)
        return Ask(prompt, 8 + seed % 40, f"load-{uuid.uuid4().hex[:12]}")

    async with under_load(place.api, USERS, ask) as load:
        for role in (Role.PREFILL, Role.DECODE):
            instance = sorted(await place.suite.ready(role))[-1]
            for target in (role.other, role):
                before = load.served
                async with place.suite.monitor() as monitor:
                    row = await monitor.flip(instance, drain_timeout_s=30.0, who=WHO)
                await place.suite.wait_ready([instance])
                assert (await place.suite.instances())[instance].role == target.value
                flip_ms, drain_ms = (row.flip_s or 0.0) * 1e3, (row.drain_s or 0.0) * 1e3
                times = (f"{flip_ms:.3f} ms", f"{drain_ms:.0f} ms", str(load.served - before))
                section.rows.append((instance, f"{target.other.value} → {target.value}", *times))
                section.at_most(f"{instance} to {target.value}: the flip itself", FLIP_MS, flip_ms, "ms")
                for name, value in (("flip", flip_ms), ("drain", drain_ms)):
                    key = f"{name}_to_{target.value}_ms"
                    section.figures[key] = max(section.figures.get(key, 0.0), value)
            wanted = asks_for(chosen)
            how = f"after {instance} flipped there and back"
            await _compare(place, section, how, plain, wanted, await place.at_once(wanted))
    load.check(section)
    section.figures["requests_under_flips"] = load.served


async def decode_loss(place: Place, section: Section) -> None:
    pids: dict[str, int] = {}

    def kill(victim: str) -> None:
        pids[victim] = place.suite.kill(victim)

    victim = await place.lose_in_stream(section, kill, streams=1, tokens=400, after=40)
    await _await_restart(place, section, Role.DECODE, victim, pids[victim])


def _resume_gap_s(record: JobRecord) -> float:
    """From the decision to resume to the start of the last decode."""
    decodes = sorted(span.started_s for span in record.timeline.spans if span.span is Span.DECODE)
    resumes = [decision.time_s for decision in record.timeline.decisions if decision.kind == "resume"]
    return max(0.0, decodes[-1] - resumes[0]) if decodes and resumes else 0.0


async def prefill_loss(place: Place, section: Section) -> None:
    """kill -9 of a prefill instance while it works on several prompts."""
    chosen = place.prompts.various(16, 900, 1100, seed=31)
    plain = await place.reference(chosen, 16)
    wanted = asks_for(chosen, 16)
    running = [asyncio.create_task(place.api.stream(ask)) for ask in wanted]
    victim = ""

    async def busy() -> bool:
        nonlocal victim
        found = await place.suite.instances()
        inflight = {n: e.load.inflight for n, e in found.items() if e.role == Role.PREFILL.value}
        victim = max(inflight, key=inflight.__getitem__)
        return bool(inflight[victim])

    await until(busy, 10.0, "prompts in a prefill instance", poll_s=0.01)
    pid = place.suite.kill(victim)
    answers = await asyncio.gather(*running)
    section.lines.append(f"{victim} (process {pid}) was killed with {len(chosen)} requests under way")
    section.equal("requests answered", len(chosen), sum(not answer.error for answer in answers))
    section.equal("identical", *_of(len(chosen), same_tokens(plain, answers)))
    again = sum(record.attempts > 1 or "recomputed" in record.outcomes for record in await place.records(wanted))
    section.check("some had to be done again", again > 0, "at least one", again)
    await _await_restart(place, section, Role.PREFILL, victim, pid)


async def _await_restart(place: Place, section: Section, role: Role, victim: str, pid: int) -> None:
    await place.suite.restarted(victim, pid)
    await place.suite.wait_ready()
    state = next(process for process in place.suite.state.processes if process.name == victim)
    section.check(f"the launcher started {victim} again", True, "ready", f"ready after {state.took_s:.1f} s")
    section.figures[f"restart_{role.value}_s"] = state.took_s


RESUME_S, HANG_S = 2.0, 30.0
STREAM_TOKENS = 500


async def control_plane(place: Place, section: Section) -> None:
    """kill -9 of scheduler, monitor, predictor and planner, each under a stream and with new requests arriving."""
    for process in place.suite.state.processes:
        if process.name.startswith(("scheduler", "monitor", "predictor", "planner")):
            await _lose_service(place, section, process.name)
    await place.suite.wait_ready()


async def _lose_service(place: Place, section: Section, process: str) -> None:
    async with asyncio.timeout(HANG_S):
        stream = await place.api.begin(_short_prompt(place, STREAM_TOKENS))
    pid = place.suite.kill(process)
    killed = time.monotonic()
    arriving = asyncio.create_task(_first_success(place))
    restart_s = await place.suite.restarted(process, pid)
    served, refused = await asyncio.wait_for(arriving, HANG_S)
    after_ready_s = served - (killed + restart_s)
    answer = await asyncio.wait_for(stream, HANG_S)
    section.equal(f"{process}: the stream under way goes on", ("", STREAM_TOKENS), (answer.error, len(answer.tokens)))
    got = f"{max(0.0, after_ready_s):.2f} s after its restart, {refused} × 503 before"
    if not refused and after_ready_s <= 0:
        got = "without a refusal, while it was away"
    section.check(f"{process}: a new request is served", after_ready_s <= RESUME_S, "within 2 s of its restart", got)
    name = process.replace("-", "_")
    section.figures |= {f"restart_{name}_s": restart_s, f"resume_after_{name}_s": max(0.0, after_ready_s)}


async def _first_success(place: Place) -> tuple[float, int]:
    """The time of the first whole answer to a new request, and the number of 503 before it."""
    refused = 0
    while True:
        with suppress(Unavailable):
            answer = await place.api.complete(_short_prompt(place, 4))
            assert len(answer.tokens) == 4, answer
            return time.monotonic(), refused
        refused += 1
        await asyncio.sleep(0.05)


def _short_prompt(place: Place, tokens: int) -> Ask:
    (ask,) = asks_for([place.prompts.of_length(64, seed=uuid.uuid4().int >> 104)], tokens)
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


async def bad_input(place: Place, section: Section) -> None:
    """Send all bad requests; then a good request must be answered."""
    api = place.api
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


CHECKS: dict[str, Check[Place]] = {
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
