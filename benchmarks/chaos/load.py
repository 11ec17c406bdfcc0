"""Steady users of the API: each sends a request as soon as the previous one is answered.

`judge` compares each answer token by token with the right one, which `learn` obtains while nothing disturbs the suite.
"""

import asyncio
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any, Self

from benchmarks.suite import address_of
from shared.errors import Unavailable
from tools.client import (
    CHAT,
    COMPLETIONS,
    HUNG_S,
    Address,
    ApiClient,
    Ending,
    Prompts,
    Request,
    Response,
    chat_body,
    completion_body,
    send,
    users,
)

_RETRY_S = 0.2  # between an error and the user's next request
_KEPT = 20_000  # answers and tokens whose times are remembered
_BUSY = (429, 503, 504)  # statuses that are allowed when the cluster cannot serve a request
_WINDOW = 6  # tokens that identify a position in the right answer


class Verdict(StrEnum):
    """The verdict on one answer. Clients are promised `WHOLE` or `ERROR`."""

    WHOLE = "whole"
    ERROR = "error"  # a typed error with Retry-After, after right tokens or none
    LOST = "lost"  # tokens are missing
    DOUBLED = "doubled"  # tokens came twice
    WRONG = "wrong"  # tokens or text that are not of this answer
    CUT = "cut"  # the connection ended without an error
    HUNG = "hung"
    CRASH = "crash"  # an error without a type, such as 500, or 503 without Retry-After
    UNREACHABLE = "unreachable"


HARM = (Verdict.LOST, Verdict.DOUBLED, Verdict.WRONG)
UNCLEAN = (Verdict.HUNG, Verdict.CRASH)
BROKEN = (Verdict.CUT, Verdict.UNREACHABLE)
_BY_ENDING = {Ending.HUNG: Verdict.HUNG, Ending.CUT: Verdict.CUT, Ending.UNREACHABLE: Verdict.UNREACHABLE}


@dataclass(frozen=True, slots=True)
class RightAnswer:
    """The right answer to one kind of request, and the time that it takes when nothing disturbs it."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    took_s: float


def judge(right: RightAnswer, response: Response) -> Verdict:
    """The verdict on an answer. Wrong tokens outweigh the way in which the answer ended."""
    if (difference := compare(right.tokens, response.tokens)) is not None:
        return difference
    if not right.text.startswith(response.text):
        return Verdict.WRONG
    if response.ending is Ending.ERROR:
        return Verdict.ERROR if _is_typed_error(response) else Verdict.CRASH
    if response.ending is not Ending.DONE:
        return _BY_ENDING[response.ending]
    if len(response.tokens) < len(right.tokens):
        return Verdict.LOST
    same = (response.text, response.finish_reason) == (right.text, right.finish_reason)
    counted = response.completion_tokens in (None, len(right.tokens))
    return Verdict.WHOLE if same and counted else Verdict.WRONG


def compare(right: tuple[int, ...], got: list[int]) -> Verdict | None:
    """What is wrong with the tokens so far; None for a right beginning.

    The tokens from the first difference on are searched in the right answer. Found later, tokens are missing; found
    earlier, tokens came twice. Of several places the nearest counts.
    """
    if list(right[: len(got)]) == got:
        return None
    at = next((i for i, (a, b) in enumerate(zip(right, got, strict=False)) if a != b), len(right))
    rest = tuple(got[at : at + _WINDOW])
    if not rest:
        return None
    found = [i for i in range(len(right)) if right[i : i + len(rest)] == rest]
    if not found:
        return Verdict.WRONG
    nearest = min(found, key=lambda i: abs(i - at))
    return Verdict.LOST if nearest > at else Verdict.DOUBLED


def _is_typed_error(response: Response) -> bool:
    """Whether the error has a code and a message and, before the stream began, a Retry-After."""
    if not response.code or not response.error:
        return False
    if response.status == 200:
        return response.code != "500"
    return response.status in _BUSY and (response.retry_after or response.status == 504)


@dataclass(slots=True)
class Tally:
    """The verdicts on the answers of a period."""

    counts: Counter[Verdict] = field(default_factory=Counter)
    longest_gap_s: float = 0.0
    examples: dict[Verdict, str] = field(default_factory=dict)

    def add(self, verdict: Verdict, gap_s: float, example: str) -> None:
        self.counts[verdict] += 1
        if verdict in (Verdict.WHOLE, Verdict.ERROR):  # the waits of other answers have other causes
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
        if verdict is not Verdict.WHOLE:
            self.examples.setdefault(verdict, example)

    def count(self, *verdicts: Verdict) -> int:
        return sum(self.counts[verdict] for verdict in verdicts)


async def learn_load(
    base_url: str, model: str, api_key: str, lengths: Sequence[int], max_tokens: int
) -> tuple[tuple[Request, ...], dict[str, RightAnswer]]:
    """The requests of a load with prompts of these lengths, and the right answers to them. Raises Unavailable."""
    async with ApiClient(base_url, model, api_key) as api:
        source = await Prompts.of(api)
    prompts = [source.of_length(length, seed=length) for length in lengths]
    requests = tuple(replace(request, api_key=api_key) for request in request_kinds(model, prompts, max_tokens))
    return requests, await learn(address_of(base_url), requests)


def request_kinds(model: str, prompts: Sequence[list[int]], max_tokens: int) -> tuple[Request, ...]:
    """The kinds of requests of the load, which differ in prompt length, API, streaming, and in what may be resumed."""
    more: dict[str, Any] = {"model": model, "return_token_ids": True, "stream_options": {"include_usage": True}}

    def completion(key: str, prompt: list[int], **others: Any) -> Request:
        return Request(COMPLETIONS, completion_body(prompt, max_tokens, **more, **others), key=key)

    _, middle, *_ = prompts = sorted(prompts, key=len)
    completions = [completion(f"prompt of {len(prompt)}", prompt) for prompt in prompts]
    chat = Request(CHAT, chat_body("Tell me a short story about a fox.", max_tokens, **more), key="chat")
    # A penalty makes tokens depend on more than the context: an interrupted answer is computed again from its start.
    penalised = completion("penalised", middle, presence_penalty=0.1)
    unary = [replace(each, key=f"{each.key}, in one piece", body=unstreamed(each)) for each in (completions[0], chat)]
    return (*completions, chat, penalised, *unary)


def unstreamed(request: Request) -> dict[str, Any]:
    return {key: value for key, value in request.body.items() if key not in ("stream", "stream_options")}


def fresh(request: Request) -> Request:
    """The same request under a new request id and cache salt, so that no prefix cache replaces a KV transfer."""
    name = f"chaos-{uuid.uuid4().hex[:12]}"
    return replace(request, body={**request.body, "request_id": name, "cache_salt": name})


async def learn(address: Address, requests: Sequence[Request]) -> dict[str, RightAnswer]:
    """The right answers by key: each request is sent alone. Raises Unavailable when one fails."""
    right: dict[str, RightAnswer] = {}
    for request in requests:
        got = await send(address, fresh(request))
        if got.ending is not Ending.DONE or len(got.tokens) != request.body["max_tokens"]:
            raise Unavailable(f"without a fault, {request.key!r} ended as {got.ending}: {got.status} {got.error}")
        right[request.key] = RightAnswer(tuple(got.tokens), got.text, got.finish_reason, got.took_s)
    return right


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer of the load. Times are on the monotonic clock."""

    began_mono: float
    ended_mono: float
    verdict: Verdict


class Load:
    """Steady users of some gateways. Use as an async context manager; at its end requests under way are waited for."""

    def __init__(
        self,
        addresses: Sequence[Address],
        requests: Sequence[Request],
        right: dict[str, RightAnswer],
        count: int,
        seed: int,
        hung_s: float = HUNG_S,
    ) -> None:
        self.tally = Tally()
        self.answered: deque[Answered] = deque(maxlen=_KEPT)
        self.requests = requests
        self._addresses, self._right, self._hung_s = addresses, right, hung_s
        self._token_times_mono: deque[float] = deque(maxlen=_KEPT)
        self._rngs = [Random(seed * 1000 + number) for number in range(count)]
        self._waiting = set(range(count))  # users without an answer so far
        self._all_answered = asyncio.Event()
        self._users = users(count, self._request, _RETRY_S)

    async def __aenter__(self) -> Self:
        await self._users.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._users.__aexit__(*error)

    async def warm(self, bound_s: float) -> None:
        """Wait until each user has had an answer. Raises TimeoutError."""
        async with asyncio.timeout(bound_s):
            await self._all_answered.wait()

    def rate(self, begin_mono: float, end_mono: float) -> float:
        """Tokens per second between two moments of the monotonic clock."""
        return sum(begin_mono <= time_mono < end_mono for time_mono in self._token_times_mono) / (end_mono - begin_mono)

    @property
    def served(self) -> int:
        return self.tally.count(Verdict.WHOLE)

    def served_since(self, begin_mono: float) -> bool:
        """Whether a request that was sent after this moment has a whole answer."""
        return any(each.began_mono > begin_mono and each.verdict is Verdict.WHOLE for each in self.answered)

    async def _request(self, user: int, turn: int) -> bool:
        request = self._rngs[user].choice(self.requests)
        got = await send(self._addresses[(user + turn) % len(self._addresses)], fresh(request), self._hung_s)
        right = self._right[request.key]
        verdict = judge(right, got)
        # Without streaming the client sees nothing until the end: only the time beyond the usual one is a wait.
        gap_s = got.longest_gap_s - (0.0 if request.streams else right.took_s)
        self.tally.add(verdict, gap_s, f"{request.key}: {describe(got)}")
        self.answered.append(Answered(got.began_mono, got.ended_mono, verdict))
        self._token_times_mono.extend(got.token_times_mono if request.streams else [got.ended_mono] * len(got.tokens))
        self._waiting.discard(user)
        if not self._waiting:
            self._all_answered.set()
        return verdict is Verdict.WHOLE


def describe(response: Response) -> str:
    line = f"{response.ending} after {response.took_s:.1f} s and {len(response.tokens)} tokens"
    details = " ".join(str(part) for part in (response.status or "", response.code, response.error) if part)
    return f"{line}: {details}" if details else line
