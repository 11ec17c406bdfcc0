"""Steady users: each asks again as soon as it is answered, and every answer is judged."""

import asyncio
import json
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from random import Random
from typing import Any

from shared.errors import Unavailable

# MERGED client.py
# A lean client of the API that notes everything a person would feel: what came, when, and how it ended.
#
# Each request has a connection of its own, so that a fault of one cannot reach another.


HUNG_S = 30.0  # without a byte for so long, nobody waits any longer
_HEAD_BYTES = 1 << 16


class Ending(StrEnum):
    """How an answer ended, as far as HTTP goes."""

    DONE = "done"
    ERROR = "error"  # a status of 4xx or 5xx, or an error event in a stream
    CUT = "cut"  # the connection ended, and nothing said why
    HUNG = "hung"
    UNREACHABLE = "unreachable"  # nobody listens


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `key` names its kind: requests of one key have one right answer.

    slo: its class, "" for the default. api_key: the secret that it is sent with, "" for none.
    """

    key: str
    path: str
    body: dict[str, Any]
    slo: str = ""
    api_key: str = ""

    @property
    def streams(self) -> bool:
        """Whether tokens come one by one."""
        return bool(self.body.get("stream"))


@dataclass(slots=True)
class Reply:
    """What came back. Times are on the monotonic clock."""

    ending: Ending = Ending.CUT
    status: int = 0
    error: str = ""
    code: str = ""
    retry_after: bool = False
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    completion_tokens: int | None = None  # by the server's own count
    began_s: float = 0.0
    ended_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        """The longest wait between two signs of life, the first token's included."""
        times = [self.began_s, *self.token_times_s, self.ended_s]
        return max(after - before for before, after in pairwise(times))

    @property
    def ttft_s(self) -> float | None:
        """Sending to first token."""
        return self.token_times_s[0] - self.began_s if self.token_times_s else None


async def send(address: tuple[str, int], ask: Ask, hung_s: float = HUNG_S) -> Reply:
    """One request, to its end. Never raises what the server or the network does: that is in the reply."""
    reply = Reply(began_s=time.monotonic())
    writer = None
    try:
        async with asyncio.timeout(hung_s):
            reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
            writer.write(encode(ask))
            await writer.drain()
        await _read(reader, ask, reply, hung_s)
    except TimeoutError:
        reply.ending = Ending.HUNG
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        if reply.ending is not Ending.ERROR:  # after an error event nothing else is owed
            reply.ending = Ending.CUT if writer is not None else Ending.UNREACHABLE
            reply.error = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
    reply.ended_s = time.monotonic()
    return reply


def encode(ask: Ask) -> bytes:
    """The whole request as bytes."""
    payload = json.dumps(ask.body).encode()
    head = f"POST {ask.path} HTTP/1.1\r\nHost: chaos\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += f"X-Polyphase-SLO: {ask.slo}\r\n" if ask.slo else ""
    head += f"Authorization: Bearer {ask.api_key}\r\n" if ask.api_key else ""
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


async def _read(reader: asyncio.StreamReader, ask: Ask, reply: Reply, hung_s: float) -> None:
    async with asyncio.timeout(hung_s):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    reply.status = int(head.split(" ", 2)[1])
    reply.retry_after = "\r\nretry-after:" in head
    pieces = _pieces(reader, head, hung_s)
    if reply.status >= 300 or not ask.streams:
        body = b"".join([piece async for piece in pieces])
        _whole(json.loads(body), reply)
        return
    rest = b""
    async for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            _event(event.strip(), reply)


async def _pieces(reader: asyncio.StreamReader, head: str, hung_s: float) -> AsyncIterator[bytes]:
    """The body as it comes. Raises EOFError when it ends too early."""
    if "transfer-encoding: chunked" not in head:
        _, _, length = head.partition("content-length:")
        async with asyncio.timeout(hung_s):
            yield await reader.readexactly(int(length.split("\r\n")[0]))
        return
    while True:
        async with asyncio.timeout(hung_s):
            size = int(await reader.readuntil(b"\r\n"), 16)
            piece = (await reader.readexactly(size + 2))[:-2]
        if not size:
            return
        yield piece


def _whole(data: dict[str, Any], reply: Reply) -> None:
    """A body in one piece: an answer, or an error in OpenAI's shape."""
    if reply.status >= 300:
        reply.ending = Ending.ERROR
        _error(data, reply)
        return
    reply.ending = Ending.DONE
    reply.completion_tokens = (data.get("usage") or {}).get("completion_tokens")
    _choices(data, reply)


def _event(event: bytes, reply: Reply) -> None:
    if not event.startswith(b"data:"):
        return
    text = event[5:].strip()
    if text == b"[DONE]":
        if reply.ending is not Ending.ERROR:
            reply.ending = Ending.DONE
        return
    data = json.loads(text)
    if "error" in data:
        reply.ending = Ending.ERROR
        _error(data, reply)
        return
    if data.get("usage"):
        reply.completion_tokens = data["usage"].get("completion_tokens")
    _choices(data, reply)


def _choices(data: dict[str, Any], reply: Reply) -> None:
    for choice in data.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        tokens = choice.get("token_ids") or ()
        reply.text += part.get("content") or part.get("text") or ""
        reply.tokens += tokens
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        if tokens:
            reply.token_times_s.append(time.monotonic())


def _error(data: dict[str, Any], reply: Reply) -> None:
    error = data["error"] if isinstance(data.get("error"), dict) else {}
    reply.error = str(error.get("message", data))[:300]
    reply.code = str(error.get("code") or error.get("type") or "")


# MERGED judge.py
# What one answer was worth: compared token by token with the right one. Pure.


_BUSY = (429, 503, 504)  # what a client may be told when the cluster cannot serve it
_WINDOW = 6  # tokens by which a place in the right answer is recognised


class Verdict(StrEnum):
    """Of one answer. Only `WHOLE` and `ERROR` are what a client was promised."""

    WHOLE = "whole"
    ERROR = "error"  # a typed error that says to come back, after a right beginning
    LOST = "lost"  # tokens are missing
    DOUBLED = "doubled"  # tokens came twice
    WRONG = "wrong"  # tokens or text that are not of this answer
    CUT = "cut"  # it ended without saying why
    HUNG = "hung"
    CRASH = "crash"  # an error that is no answer: 500, a body that is no error, 503 without Retry-After
    UNREACHABLE = "unreachable"


HARM = (Verdict.LOST, Verdict.DOUBLED, Verdict.WRONG)
UNCLEAN = (Verdict.HUNG, Verdict.CRASH)
BROKEN = (Verdict.CUT, Verdict.UNREACHABLE)


@dataclass(frozen=True, slots=True)
class Right:
    """The right answer of one kind of request, and how long it takes when nothing disturbs it."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    took_s: float


def judge(right: Right, reply: Reply) -> Verdict:
    """The verdict. What is wrong in what came outweighs how it ended."""
    difference = compare(right.tokens, reply.tokens)
    if difference is not None:
        return difference
    if not right.text.startswith(reply.text):
        return Verdict.WRONG
    match reply.ending:
        case Ending.HUNG:
            return Verdict.HUNG
        case Ending.CUT:
            return Verdict.CUT
        case Ending.UNREACHABLE:
            return Verdict.UNREACHABLE
        case Ending.ERROR:
            return Verdict.ERROR if _clean(reply) else Verdict.CRASH
    return _of_done(right, reply)


def compare(right: tuple[int, ...], got: list[int]) -> Verdict | None:
    """What is wrong with the tokens so far; None for a right beginning. A tie goes to the nearer explanation."""
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


def _of_done(right: Right, reply: Reply) -> Verdict:
    if len(reply.tokens) < len(right.tokens):
        return Verdict.LOST
    same = reply.text == right.text and reply.finish_reason == right.finish_reason
    counted = reply.completion_tokens in (None, len(right.tokens))
    return Verdict.WHOLE if same and counted else Verdict.WRONG


def _clean(reply: Reply) -> bool:
    """Whether the error says what it is and, before the stream began, when to come back."""
    if not reply.code or not reply.error:
        return False
    if reply.status == 200:
        return reply.code != "500"
    return reply.status in _BUSY and (reply.retry_after or reply.status == 504)


@dataclass(slots=True)
class Tally:
    """All answers of a stretch of time."""

    counts: Counter[Verdict] = field(default_factory=Counter)
    longest_gap_s: float = 0.0
    examples: dict[Verdict, str] = field(default_factory=dict)

    def add(self, verdict: Verdict, gap_s: float, example: str) -> None:
        """One more."""
        self.counts[verdict] += 1
        if verdict in (Verdict.WHOLE, Verdict.ERROR):  # of the others, how long they took says nothing
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
        if verdict is not Verdict.WHOLE:
            self.examples.setdefault(verdict, example)

    def count(self, *verdicts: Verdict) -> int:
        """How many were of these."""
        return sum(self.counts[verdict] for verdict in verdicts)


Address = tuple[str, int]
_CHAT, _COMPLETE = "/v1/chat/completions", "/v1/completions"
_POLITE_S = 0.2  # between an error and the next try
_STAMPS = 20_000


def palette(prompts: dict[int, list[int]], tokens: int) -> tuple[Ask, ...]:
    """Requests of every kind that the load is made of: short and of many chunks, carried and not, streamed and not."""
    short, middle, *long = (prompts[size] for size in sorted(prompts))
    plain = [_completion(f"prompt of {len(p)}", p, tokens) for p in (short, middle, *long)]
    said = [{"role": "user", "content": "Tell me a short story about a fox."}]
    chat = Ask("chat", _CHAT, _body({"messages": said}, tokens))
    # Tokens of these depend on more than the context: a lost answer is run again from its start.
    pinned = _completion("penalised", middle, tokens, presence_penalty=0.1)
    unary = [replace(ask, key=f"{ask.key}, in one piece", body=_in_one_piece(ask.body)) for ask in (plain[0], chat)]
    return (*plain, chat, pinned, *unary)


def _completion(key: str, prompt: list[int], tokens: int, **more: Any) -> Ask:
    return Ask(key, _COMPLETE, _body({"prompt": prompt, **more}, tokens))


def _body(what: dict[str, Any], tokens: int) -> dict[str, Any]:
    return {
        "model": "demo",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **what,
    }


def _in_one_piece(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("stream", "stream_options")}


def fresh(ask: Ask) -> Ask:
    """The same request under a name and a salt of its own: no prefix cache stands in for a transfer."""
    name = f"chaos-{uuid.uuid4().hex[:12]}"
    return replace(ask, body={**ask.body, "request_id": name, "cache_salt": name})


async def learn(address: Address, asks: Sequence[Ask]) -> dict[str, Right]:
    """The right answers, asked for one by one while nothing disturbs. Raises Unavailable when one fails."""
    right: dict[str, Right] = {}
    for ask in asks:
        reply = await send(address, fresh(ask))
        if reply.ending is not Ending.DONE or len(reply.tokens) != ask.body["max_tokens"]:
            raise Unavailable(f"undisturbed, {ask.key!r} ended as {reply.ending}: {reply.status} {reply.error}")
        took_s = reply.ended_s - reply.began_s
        right[ask.key] = Right(tuple(reply.tokens), reply.text, reply.finish_reason, took_s)
    return right


@dataclass(slots=True)
class Load:
    """Users of some gateways. Use as an async context manager; at its end every answer under way is waited for."""

    addresses: Sequence[Address]
    asks: Sequence[Ask]
    right: dict[str, Right]
    users: int
    seed: int
    hung_s: float = HUNG_S
    tally: Tally = field(default_factory=Tally)
    ended: deque[tuple[float, float, Verdict, str]] = field(default_factory=lambda: deque(maxlen=_STAMPS))
    _tokens_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STAMPS))
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _answered: set[int] = field(default_factory=set)
    _all_answered: asyncio.Event = field(default_factory=asyncio.Event)
    _users: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> "Load":
        self._users = [asyncio.create_task(self._user(number)) for number in range(self.users)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        if kind is not None:
            for user in self._users:
                user.cancel()
        await asyncio.gather(*self._users, return_exceptions=kind is not None)

    async def warm(self, bound_s: float) -> None:
        """Wait until every user was answered once."""
        async with asyncio.timeout(bound_s):
            await self._all_answered.wait()

    def rate(self, begin_s: float, end_s: float) -> float:
        """Tokens a second between two moments of the monotonic clock."""
        return sum(begin_s <= stamp < end_s for stamp in self._tokens_s) / (end_s - begin_s)

    def served_since(self, begin_s: float) -> bool:
        """Whether a request that was sent after that moment came back whole."""
        return any(began > begin_s and verdict is Verdict.WHOLE for began, _, verdict, _ in self.ended)

    async def _user(self, number: int) -> None:
        rng, turn = Random(self.seed * 1000 + number), number
        while not self._stop.is_set():
            turn += 1
            ask = self.asks[rng.randrange(len(self.asks))]
            verdict = await self.one(ask, self.addresses[turn % len(self.addresses)])
            self._answered.add(number)
            if len(self._answered) == self.users:
                self._all_answered.set()
            if verdict is not Verdict.WHOLE:
                await asyncio.sleep(_POLITE_S)

    async def one(self, ask: Ask, address: Address) -> Verdict:
        """Send one request and take its answer in."""
        reply = await send(address, fresh(ask), self.hung_s)
        right = self.right[ask.key]
        verdict = judge(right, reply)
        gap_s = reply.longest_gap_s - (0.0 if ask.streams else right.took_s)
        said = f"{ask.key}: {describe(reply)}"
        self.tally.add(verdict, gap_s, said)
        self.ended.append((reply.began_s, reply.ended_s, verdict, said))
        self._tokens_s.extend(reply.token_times_s if ask.streams else [reply.ended_s] * len(reply.tokens))
        return verdict


def describe(reply: Reply) -> str:
    """An answer in one line, for a report."""
    head = f"{reply.ending} after {reply.ended_s - reply.began_s:.1f} s and {len(reply.tokens)} tokens"
    said = " ".join(str(part) for part in (reply.status or "", reply.code, reply.error) if part)
    return f"{head}: {said}" if said else head
