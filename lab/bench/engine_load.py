"""What is sent to the engine of `bench engine`, bursts of unlike prompts and answers that outgrow its KV; what came."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from lab.bench.engine_suite import PATIENT, SHAPE
from lab.demo.client import Answer, ApiClient, Ask
from shared.errors import Unavailable
from shared.timeline import RequestTimeline

PROMPTS = (24, 48, 96, 192, 384, 768)  # tokens of a burst's prompts
BURST, BURST_OUTPUT = 36, 4
APART_S = 0.01  # between one request and the next: their order is that of the list
# Prompts and answers of the requests that outgrow the KV: what is predicted of an answer rests on its prompt's length.
SORTS = (((20, 31), (34, 62)), ((64, 120), (130, 158)), ((140, 250), (290, 318)))
PRESSING = 33
_VOCABULARY = range(300, SHAPE.vocab_size)  # without special tokens


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to be. slo: its class, "" for the default."""

    prompt: tuple[int, ...]
    output_tokens: int
    slo: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was. sent_s: after the first was sent; ttft_s, jct_s: from then on."""

    wanted: Wanted
    request_id: str
    sent_s: float
    ttft_s: float
    jct_s: float
    tokens: tuple[int, ...]

    @property
    def first_s(self) -> float:
        """When its first token came, after the first request was sent."""
        return self.sent_s + self.ttft_s


def burst(seed: int) -> list[Wanted]:
    """As many prompts of each length, in any order; every other one is patient."""
    rng = Random(seed)
    lengths = list(PROMPTS) * (BURST // len(PROMPTS))
    rng.shuffle(lengths)
    classes = ("", PATIENT)
    return [
        Wanted(tuple(rng.choices(_VOCABULARY, k=length)), BURST_OUTPUT, classes[at % 2])
        for at, length in enumerate(lengths)
    ]


def pressing(seed: int) -> list[Wanted]:
    """As many of each of the `SORTS`, in any order."""
    rng = Random(seed)
    sorts = list(SORTS) * (PRESSING // len(SORTS))
    rng.shuffle(sorts)
    return [
        Wanted(tuple(rng.choices(_VOCABULARY, k=rng.randint(*prompt))), rng.randint(*output))
        for prompt, output in sorts
    ]


async def send(api: ApiClient, wanted: Sequence[Wanted], label: str, at_once: int = 0) -> list[Served]:
    """One after the other, `APART_S` apart; with `at_once`, never more than so many. In the order of `wanted`.

    `label` is of the run: a prompt that is sent again under another one is found in no prefix cache. Raises Unavailable
    when one fails.
    """
    loop = asyncio.get_running_loop()
    seats, began_s = asyncio.Semaphore(at_once or len(wanted)), loop.time()

    async def one(at: int, request: Wanted) -> Served:
        await asyncio.sleep(began_s + at * APART_S - loop.time())
        async with seats:
            sent_s, name = loop.time() - began_s, f"{label}n{at}"
            ask = Ask(list(request.prompt), request.output_tokens, name, salt=name, slo=request.slo)
            answer = await api.stream(ask)
        _check(answer, request)
        return Served(request, name, sent_s, answer.first_s, answer.took_s, tuple(answer.tokens))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(at, request)) for at, request in enumerate(wanted)]
    return [task.result() for task in tasks]


def predicted_in_time(timeline: RequestTimeline) -> bool:
    """Whether the length of its answer was predicted before its first token."""
    said = [decision.time_s for decision in timeline.decisions if decision.kind == "prediction"]
    return bool(said) and said[0] <= timeline.first_token_s


def _check(answer: Answer, request: Wanted) -> None:
    if answer.error or len(answer.tokens) != request.output_tokens:
        raise Unavailable(
            f"a request failed: {answer.error or f'{len(answer.tokens)} of {request.output_tokens} tokens'}"
        )
