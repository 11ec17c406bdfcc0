"""Steady users: each asks again as soon as it is answered, and every answer is judged."""

import asyncio
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from lab.chaos.client import HUNG_S, Ask, Ending, Reply, send
from lab.chaos.judge import Right, Tally, Verdict, judge
from shared.errors import Unavailable

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
