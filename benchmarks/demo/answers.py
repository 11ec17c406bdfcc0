"""The demo's checks of answers.

Tokens are those of a single instance that computes everything itself (promise 1). Bad input gets a 4xx (promise 5). The
first token does not wait for the KV transfer (promise 6). Also: sample answers on all surfaces of the API, and
predicted lengths beside the true ones.
"""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.demo import jobs
from benchmarks.demo.client import ApiClient, Ask, Prompts
from benchmarks.demo.report import Section
from services.launcher.suite import Suite
from shared.domain.instance import Role
from shared.domain.kv import TransferOutcome
from shared.domain.route import PolicySpec
from shared.timeline import Span
from tools.client import CHAT, COMPLETIONS, Response

ANSWER_TOKENS = 24
WHO = "polyphase demo"
LOCAL, FULL, RANDOM = ({"split": PolicySpec(name)} for name in ("none", "full", "random"))
SPLITS = 60


def asks(prompts: Sequence[list[int]], max_tokens: int = ANSWER_TOKENS) -> list[Ask]:
    """A request for each prompt, with a salt of its own, so that no prefix cache replaces a KV transfer."""
    ids = [f"demo-{uuid.uuid4().hex[:12]}" for _ in prompts]
    return [Ask(prompt, max_tokens, name, name) for prompt, name in zip(prompts, ids, strict=True)]


async def reference(
    suite: Suite, api: ApiClient, prompts: Sequence[list[int]], max_tokens: int = ANSWER_TOKENS
) -> list[Response]:
    """The answers of an instance that computes everything itself, without a prefill instance and a KV transfer."""
    await suite.set_policies(LOCAL, WHO)
    try:
        wanted = asks(prompts, max_tokens)
        answers = [await api.complete(ask) for ask in wanted]
        outcomes = Counter(o for r in await jobs.records(suite, [a.request_id for a in wanted]) for o in r.outcomes)
        assert set(outcomes) <= {TransferOutcome.LOCAL.value}, outcomes
        return answers
    finally:
        await suite.set_policies(FULL, WHO)


def same_tokens(plain: Sequence[Response], answers: Sequence[Response]) -> int:
    """The number of answers without an error whose tokens are those of the plain answer."""
    return sum(a.tokens == b.tokens and not b.error for a, b in zip(plain, answers, strict=True))


async def check_identity(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """25 prompts one after the other, then all at once."""
    section = Section("Prefill → KV transfer → decode gives the tokens of a single instance")
    ladder = prompts.ladder(ANSWER_TOKENS)
    plain = await reference(suite, api, ladder)
    wanted = asks(ladder)
    answers = [await api.complete(ask) for ask in wanted]
    await compare(suite, section, "one after the other", plain, wanted, answers)
    wanted = asks(ladder)
    answers = await asyncio.gather(*(api.stream(ask) for ask in wanted))
    await compare(suite, section, "all at once, streamed", plain, wanted, answers)
    section.figures["identity_prompts"] = len(ladder)
    section.figures["longest_prompt_tokens"] = max(len(prompt) for prompt in ladder)
    return section


async def compare(
    suite: Suite, section: Section, how: str, plain: list[Response], wanted: list[Ask], answers: list[Response]
) -> None:
    """Check that the answers equal the plain ones, and that the KV of each was pulled."""
    total = len(plain)
    section.equal(f"identical, {how}", f"{total}/{total}", f"{same_tokens(plain, answers)}/{total}")
    found = await jobs.records(suite, [ask.request_id for ask in wanted])
    pulled = sum(record.pulled for record in found)
    section.equal(f"KV pulled, {how}", f"{total}/{total}", f"{pulled}/{total}")
    moved = sum(transfer.wire_bytes for record in found for transfer in record.timeline.transfers)
    section.figures["kv_moved_bytes"] = section.figures.get("kv_moved_bytes", 0) + moved


async def check_splits(suite: Suite, api: ApiClient, prompts: Prompts, count: int = SPLITS) -> Section:
    """Partial prefill: the prefill instance computes any part of the prompt, the decode instance the rest."""
    section = Section("Any split of the prompt gives the same tokens")
    chosen = prompts.various(count, 2, 400, seed=11)
    plain = await reference(suite, api, chosen, 12)
    wanted = asks(chosen, 12)
    answers: list[Response] = []
    await suite.set_policies(RANDOM, WHO)
    try:
        for start in range(0, count, 6):
            answers += await asyncio.gather(*(api.complete(ask) for ask in wanted[start : start + 6]))
    finally:
        await suite.set_policies(FULL, WHO)
    section.equal("requests whose tokens are identical", f"{count}/{count}", f"{same_tokens(plain, answers)}/{count}")
    found = await jobs.records(suite, [ask.request_id for ask in wanted])
    splits = [record.split for record in found]
    expected = Counter("local" if split == 0 else "pulled" for split in splits)
    outcomes = Counter(outcome for record in found for outcome in record.outcomes)
    section.equal("KV imports by outcome, as the splits say", dict(expected), dict(outcomes))
    section.figures["partial_splits"] = sum(0 < s < len(p) for s, p in zip(splits, chosen, strict=True))
    shown = sorted(Random(3).sample(range(count), 5))
    section.lines.append("Some of the splits: " + ", ".join(f"{splits[i]} of {len(chosen[i])} tokens" for i in shown))
    return section


FAULT = "POLYPHASE_WORKER_KV_FAULT"
Restart = Callable[[str, dict[str, str]], Awaitable[None]]


async def check_zeroed_kv(suite: Suite, api: ApiClient, prompts: Prompts, restart: Restart) -> Section:
    """One decode instance imports zeroes in place of KV, while all others of its role are drained."""
    section = Section("Control: the comparison notices when KV is wrong")
    ladder = prompts.ladder(ANSWER_TOKENS)
    plain = await reference(suite, api, ladder)
    faulty, *others = sorted(await suite.ready(Role.DECODE))
    await _restart(suite, restart, faulty, "zero")
    async with suite.monitor() as monitor:
        for other in others:
            await monitor.drain(other, timeout_s=30.0, who=WHO)
    wanted = asks(ladder)
    answers = await asyncio.gather(*(api.complete(ask) for ask in wanted))
    found = await jobs.records(suite, [ask.request_id for ask in wanted])
    async with suite.monitor() as monitor:
        for other in others:
            await monitor.resume(other, who=WHO)
    await _restart(suite, restart, faulty, "")
    total, same = len(ladder), same_tokens(plain, answers)
    section.equal("zeroed KV pulled", total, sum(record.pulled for record in found))
    section.check("answers that stay the same", same <= total // 2, f"at most {total // 2}", same)
    section.figures["zeroed_kv_identical"] = same
    return section


async def _restart(suite: Suite, restart: Restart, name: str, fault: str) -> None:
    pid = suite.state.pid(name)
    await restart(name, {FAULT: fault})
    await suite.restarted(name, pid)
    await suite.wait_ready()


REQUESTS = 5
TOKENS = 16


async def check_first_token(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """Long prompts, one at a time; their timelines say which came first."""
    section = Section("The first token leaves before the decode instance goes on")
    chosen = prompts.various(REQUESTS, 900, 1100, seed=5)
    plain = await reference(suite, api, chosen, TOKENS)
    wanted = asks(chosen, TOKENS)
    answers = [await api.stream(ask) for ask in wanted]
    found = await jobs.records(suite, [ask.request_id for ask in wanted])
    leads = [_lead_s(record) for record in found]
    section.equal(
        "first token before the first step of the decode instance",
        f"{REQUESTS}/{REQUESTS}",
        f"{sum(lead > 0 for lead in leads)}/{REQUESTS}",
    )
    section.equal("no token twice or missing", f"{REQUESTS}/{REQUESTS}", f"{same_tokens(plain, answers)}/{REQUESTS}")
    section.figures["first_token_lead_ms"] = sorted(leads)[len(leads) // 2] * 1e3
    section.lines.append("Lead over the decode instance: " + ", ".join(f"{lead * 1e3:.1f} ms" for lead in leads))
    return section


def _lead_s(record: jobs.JobRecord) -> float:
    """The time from the first token to the first step of the decode instance; 0 without a transfer."""
    if not record.pulled:
        return 0.0
    decode = next(span for span in record.timeline.spans if span.span is Span.DECODE)
    return decode.started_s - record.timeline.first_token_s


SOURCE = "classifier"
MAX_TOKENS = 512
AT_ONCE = 4
READABLE = 44  # characters of a question in the table
LENGTH_QUESTIONS = (
    "Hello!",
    "What is the capital of Italy?",
    "Name three colours.",
    "Give a synonym for happy.",
    "Translate 'good morning' into French.",
    "Is the sun a star?",
    "Suggest a name for a small bakery.",
    "Write a sentence about rain.",
    "Explain in one sentence what a loop is.",
    "Describe how bread is made.",
    "Write a function in Python that reverses a string.",
    "Write a SQL query that counts the orders of each customer.",
    "Explain the difference between a list and a tuple, with an example.",
    "Write a JavaScript function that checks whether a number is prime.",
    "Write a letter to a friend about a long journey by train.",
    "Pretend you are a pirate and tell me about your last adventure.",
    "Write a dialogue between a teacher and a student about space travel.",
    "Summarise the plot of a film about a lost dog in a paragraph.",
    "Act as a tour guide and describe the old town to me.",
    "List ten ways to save energy at home.",
    "Write a short story about a lighthouse keeper.",
    "How do I sort a list of words by their length in Python?",
    "Compose a poem about the sea in winter.",
    "Create an HTML page with a heading and a table of three rows.",
)


async def check_lengths(suite: Suite, api: ApiClient) -> Section:
    """Each question once, sampled; the timelines have the predictions."""
    section = Section("How long answers get is predicted, by a classifier trained on this model's own answers")
    few = asyncio.Semaphore(AT_ONCE)

    async def length_of(number: int, question: str) -> int:
        async with few:
            answer = await api.chat(question, MAX_TOKENS, request_id=f"length-{number}", seed=number)
        return int(answer["usage"]["completion_tokens"])

    true = await asyncio.gather(*(length_of(*each) for each in enumerate(LENGTH_QUESTIONS)))
    found = await jobs.records(suite, [f"length-{number}" for number in range(len(LENGTH_QUESTIONS))])
    rows: list[tuple[str, ...]] = []
    classified = inside = 0
    for question, tokens, record in zip(LENGTH_QUESTIONS, true, found, strict=True):
        prediction = next((each for each in record.timeline.decisions if each.kind == "prediction"), None)
        if prediction is None or prediction.reasons[0].what != SOURCE:
            rows.append((question[:READABLE], "–", "–", str(tokens), ""))
            continue
        figures = prediction.reasons[0].figures
        lower, upper = int(figures["lower_tokens"]), int(figures["upper_tokens"])
        right = lower <= tokens < upper
        classified += 1
        inside += right
        reach = f"{lower} to {upper - 1}" if upper <= MAX_TOKENS else f"{lower} and more"
        rows.append(
            (question[:READABLE], reach, f"{figures['expected_tokens']:.0f}", str(tokens), "✔" if right else "")
        )
    section.table = (("asked", "predicted", "expected", "true", "in range"), rows)
    of_all = f"{classified}/{len(rows)}"
    section.check("the classifier answers", classified > 0, "some questions at least", of_all)
    section.check("answered by the classifier in time", classified >= 0.9 * len(rows), "nine of ten", of_all)
    section.lines.append(
        f"{inside} of {classified} in the predicted range; docs/predictor.md has the accuracy on held-out prompts."
    )
    section.figures |= {"lengths_in_predicted_range": inside, "lengths_predicted": classified}
    return section


SAMPLE_QUESTIONS = (
    "Hello!",
    "What is the capital of France?",
    "What is prefill?",
    "List the days of the week.",
    "Tell me a short story about a fox.",
    "Write a short story about a dragon.",
)


async def check_samples(api: ApiClient) -> Section:
    """Some answers to read, and one of each other API."""
    section = Section("Real answers of a real model")
    rows: list[tuple[str, ...]] = []
    empty = 0
    for question in SAMPLE_QUESTIONS:
        answer = await api.chat(question, temperature=0, max_tokens=96)
        choice = answer["choices"][0]
        text = " ".join((choice["message"]["content"] or "").split())
        empty += not text
        rows.append((question, text, str(answer["usage"]["completion_tokens"]), choice["finish_reason"]))
    section.table = (("asked", "answered", "tokens", "ended by"), rows)
    section.equal("questions answered", f"{len(rows)}/{len(rows)}", f"{len(rows) - empty}/{len(rows)}")
    two = await api.chat("Hello!", n=2, temperature=0.8, max_tokens=16)
    section.equal("n = 2 gives two choices", 2, len(two["choices"]))
    detail = await api.chat("Hello!", logprobs=True, top_logprobs=2, max_tokens=4)
    section.check("logprobs", bool(detail["choices"][0]["logprobs"]["content"]), "one a token")
    said = [{"role": "user", "content": "Hello!"}]
    bodies = {
        "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
        "/v1/responses": {"input": "Hello!", "max_output_tokens": 16},
        "/v1/messages": {"messages": said, "max_tokens": 16},
    }
    got = {path: (await api.post(path, json={"model": api.model, **body})).status_code for path, body in bodies.items()}
    section.equal("other surfaces answer", dict.fromkeys(bodies, 200), got)
    return section


@dataclass(frozen=True, slots=True)
class Bad:
    """A request that must be refused with one of the statuses `want`."""

    name: str
    path: str
    want: Collection[int]
    body: dict[str, Any] | None = None
    content: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


def cases(model: str, max_model_len: int, max_body_bytes: int) -> tuple[Bad, ...]:
    said = [{"role": "user", "content": "Hello!"}]
    chat, plain = {"model": model, "messages": said}, {"model": model, "prompt": "Hello"}
    return (
        Bad("malformed JSON", CHAT, (400,), content=b'{"model": '),
        Bad("an empty body", CHAT, (400, 422), content=b""),
        Bad("no messages", CHAT, (400, 422), {"model": model}),
        Bad("messages of a wrong type", CHAT, (400, 422), {"model": model, "messages": "Hello"}),
        Bad("an unknown role", CHAT, (400, 422), {"model": model, "messages": [{"role": 7}]}),
        Bad("temperature as a word", CHAT, (400, 422), {**chat, "temperature": "warm"}),
        Bad("temperature below zero", CHAT, (400, 422), {**chat, "temperature": -1}),
        Bad("top_p over one", CHAT, (400, 422), {**chat, "top_p": 1.5}),
        Bad("n = 0", CHAT, (400, 422), {**chat, "n": 0}),
        Bad("negative max_tokens", COMPLETIONS, (400, 422), {**plain, "max_tokens": -1}),
        Bad("huge max_tokens", COMPLETIONS, (400, 422), {**plain, "max_tokens": 10**9}),
        Bad("a prompt beyond the context", COMPLETIONS, (400,), {**plain, "prompt": [5] * (max_model_len + 1)}),
        Bad("token ids that do not exist", COMPLETIONS, (400,), {**plain, "prompt": [10**9]}),
        Bad("negative token ids", COMPLETIONS, (400, 422), {**plain, "prompt": [-5]}),
        Bad("an unknown model", CHAT, (404,), {**chat, "model": "no-such-model"}),
        Bad("a body over the limit", CHAT, (413,), content=b" " * (max_body_bytes + 1)),
        Bad("an unknown SLO class", CHAT, (400,), chat, headers={"x-polyphase-slo": "no-such-class"}),
        Bad("an unknown path", "/v1/no-such-thing", (404,), chat),
    )


async def check_bad_input(api: ApiClient, max_body_bytes: int = 4 << 20) -> Section:
    """Send all cases; then a good request must be answered."""
    section = Section("Bad input is refused, with the right status")
    rows: list[tuple[str, ...]] = []
    for case in cases(api.model, await api.max_model_len(), max_body_bytes):
        headers = {"content-type": "application/json", **case.headers}
        content = json.dumps(case.body).encode() if case.content is None else case.content
        response = await api.post(case.path, headers=headers, content=content)
        message = _message(response.content, response.headers.get("content-type", ""))
        right = response.status_code in case.want and (message is not None or case.want == (404,))
        section.check(case.name, right, " or ".join(map(str, case.want)), response.status_code)
        rows.append((case.name, str(response.status_code), (message or "(not OpenAI's shape)")[:90]))
    section.table = (("sent", "status", "message"), rows)
    answer = await api.chat("Hello!", max_tokens=8)
    section.check("a good request afterwards", bool(answer["choices"]), "answered", "answered")
    return section


def _message(content: bytes, kind: str) -> str | None:
    """The message of an error in OpenAI's format, in one line; None for another format."""
    if "json" not in kind:
        return None
    try:
        return " ".join(str(json.loads(content)["error"]["message"]).split())
    except (ValueError, KeyError, TypeError):
        return None
