"""A running suite that is checked, and the checks that the demo and the deployments share.

Answers are compared with those of a single instance; steady users must not notice what is done to the suite; and an
instance is lost in the middle of a stream.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from benchmarks.chaos.load import Load, learn_load
from benchmarks.demo.report import Section
from benchmarks.jobs import JobRecord, find_row, records
from benchmarks.suite import address_of, until_found
from services.launcher.suite import Suite
from services.launcher.up import RunningSuite
from shared.domain.kv import TransferOutcome
from shared.domain.route import PolicySpec
from shared.timeline import Span
from tools.client import ApiClient, Ask, Prompts, Response

ANSWER_TOKENS = 24
LOAD_PROMPTS = (20, 90, 300)  # tokens
FOUND_S = 30.0
TRIES = 3  # to do something to a request before it has ended
WHO = "polyphase demo"
LOCAL, FULL, RANDOM = ({"split": PolicySpec(name)} for name in ("none", "full", "random"))


@dataclass(frozen=True, slots=True)
class CheckedSuite:
    running: RunningSuite
    api: ApiClient
    prompts: Prompts

    @property
    def suite(self) -> Suite:
        return self.running.suite

    async def records(self, asks: Sequence[Ask], at_least: int | None = None) -> list[JobRecord]:
        return await records(self.suite, [ask.request_id for ask in asks], at_least)

    async def reference(self, prompts: Sequence[list[int]], max_tokens: int = ANSWER_TOKENS) -> "Reference":
        """The answers of an instance that computes everything itself, without a prefill instance and a KV transfer."""
        asks = asks_for(prompts, max_tokens)
        await self.suite.set_policies(LOCAL, WHO)
        try:
            answers = [await self.api.complete(ask) for ask in asks]
        finally:
            await self.suite.set_policies(FULL, WHO)
        outcomes = {outcome for record in await self.records(asks) for outcome in record.outcomes}
        assert outcomes <= {TransferOutcome.LOCAL.value}, outcomes
        return Reference(self, prompts, max_tokens, answers)

    async def decode_instance(self, ask: Ask) -> str:
        """The instance that decodes a request, once its gateway has reported it. Raises DeadlineExceeded, NotFound."""

        async def find() -> str | None:
            return (await find_row(self.suite, ask.request_id)).decode_instance or None

        return await until_found(find, FOUND_S, f"the instance that decodes {ask.request_id}")

    async def lose_in_stream(
        self, section: Section, lose: Callable[[str], object], streams: int, tokens: int, after: int
    ) -> str:
        """Lose the decode instance of one of several streams after so many tokens; returns its name."""
        prompts = self.prompts.various(streams, 60, 160, seed=41)
        plain = (await self.reference(prompts, tokens)).answers
        wanted = asks_for(prompts, tokens)
        victim = await lose_in_stream(self.api, section, wanted, plain, self.decode_instance, lose, after)
        found = await self.records(wanted)
        attempts = [record.attempts for record in found]
        section.check("the stream went on elsewhere", max(attempts) > 1, "a second attempt", attempts)
        section.figures["decode_loss_gap_s"] = max(map(_resume_gap_s, found))
        return victim


@dataclass(frozen=True, slots=True)
class Repeated:
    """Answers to the prompts of a reference and their jobs. same: how many have its tokens, without an error."""

    answers: list[Response]
    records: list[JobRecord]
    same: int

    @property
    def pulled(self) -> int:
        return sum(record.pulled for record in self.records)


@dataclass(frozen=True, slots=True)
class Reference:
    """Prompts with their right answers."""

    checked: CheckedSuite
    prompts: Sequence[list[int]]
    max_tokens: int
    answers: list[Response]

    async def repeat(self, *, stream: bool = False, at_once: int = 1) -> Repeated:
        """Send the prompts again, so many at a time."""
        few, asks = asyncio.Semaphore(at_once), asks_for(self.prompts, self.max_tokens)
        send = self.checked.api.stream if stream else self.checked.api.complete

        async def answer_to(ask: Ask) -> Response:
            async with few:
                return await send(ask)

        answers = await asyncio.gather(*map(answer_to, asks))
        return Repeated(answers, await self.checked.records(asks), same_tokens(self.answers, answers))


async def lose_in_stream(
    api: ApiClient,
    section: Section,
    asks: Sequence[Ask],
    plain: Sequence[Response],
    decode_instance: Callable[[Ask], Awaitable[str]],
    lose: Callable[[str], object],
    after: int,
) -> str:
    """Lose the instance that decodes the first of these streams after so many tokens; returns its name.

    No client may see the loss: the answers must equal the plain ones. `lose` runs in a thread. If the first stream
    ends before its instance is known, all are sent once more, under ids that begin with the former ones.
    """
    for number in range(TRIES):
        sent = [replace(ask, request_id=f"{ask.request_id}-{number}") for ask in asks]
        others = [asyncio.create_task(api.stream(ask)) for ask in sent[1:]]
        stream = await api.begin(sent[0], after)
        victim = await decode_instance(sent[0])
        if not stream.done():
            break
        await asyncio.gather(stream, *others)
    section.check("the stream was under way", not stream.done(), "under way", "ended")
    await asyncio.to_thread(lose, victim)
    answers = await asyncio.gather(stream, *others)
    section.lines.append(f"{victim} was lost after {after} of {asks[0].max_tokens} tokens of a stream")
    ended = [(answer.error, answer.finish_reason) for answer in answers]
    section.equal("streams that ended well", len(asks), ended.count(("", "length")))
    section.equal("every token exactly once", len(asks), same_tokens(plain, answers))
    same = [(a.text, a.completion_tokens) == (b.text, b.completion_tokens) for a, b in zip(plain, answers, strict=True)]
    section.equal("text and usage of an undisturbed run", len(asks), sum(same))
    return victim


@asynccontextmanager
async def under_load(section: Section, url: str, model: str, count: int, api_key: str = "") -> AsyncIterator[Load]:
    """For the block's length, steady users. Afterwards, each of their answers must be whole and right."""
    requests, right = await learn_load(url, model, api_key, LOAD_PROMPTS, ANSWER_TOKENS)
    async with Load([address_of(url)], requests, right, count, seed=7) as load:
        yield load
    tally = load.tally
    wrong = {verdict.value: tally.examples[verdict] for verdict in tally.examples}
    section.check("requests were served meanwhile", load.served > 0, "some", load.served)
    section.check("answers that were wrong or failed", not wrong, 0, wrong or 0)
    section.lines.append(f"longest wait for a token {tally.longest_gap_s:.1f} s")


def asks_for(prompts: Sequence[list[int]], max_tokens: int = ANSWER_TOKENS) -> list[Ask]:
    """A request for each prompt, with a salt of its own, so that no prefix cache replaces a KV transfer."""
    ids = [f"demo-{uuid.uuid4().hex[:12]}" for _ in prompts]
    return [Ask(prompt, max_tokens, name, name) for prompt, name in zip(prompts, ids, strict=True)]


def same_tokens(plain: Sequence[Response], answers: Sequence[Response]) -> int:
    """The number of answers without an error whose tokens are those of the plain answer."""
    return sum(a.tokens == b.tokens and not b.error for a, b in zip(plain, answers, strict=True))


def _resume_gap_s(record: JobRecord) -> float:
    """From the decision to resume to the start of the last decode."""
    decodes = sorted(span.started_s for span in record.timeline.spans if span.span is Span.DECODE)
    resumes = [decision.time_s for decision in record.timeline.decisions if decision.kind == "resume"]
    return max(0.0, decodes[-1] - resumes[0]) if decodes and resumes else 0.0
