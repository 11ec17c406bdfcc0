"""The demo's client of the OpenAI API: it speaks HTTP as any client would."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Any, Self

import httpx

from shared.errors import Unavailable

TIMEOUT_S = 120.0


@dataclass(slots=True)
class Answer:
    """One completion. Times are on the monotonic clock, relative to the sending of the request."""

    request_id: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    first_s: float = 0.0
    took_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """One greedy completion to ask for. `salt` keeps it apart from prefix caches; a request id finds it again.

    slo: its class, "" for the default; only streams take it.
    """

    prompt: list[int] | str
    max_tokens: int
    request_id: str
    salt: str = ""
    ignore_eos: bool = True
    slo: str = ""

    def body(self, model: str, stream: bool) -> dict[str, Any]:
        """The JSON to send."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "request_id": self.request_id,
            "return_token_ids": True,
            "ignore_eos": self.ignore_eos,
        }
        if self.salt:
            body["cache_salt"] = self.salt
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


class ApiClient:
    """Use as an async context manager."""

    def __init__(self, base_url: str, model: str, api_key: str = "") -> None:
        self.model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=headers, timeout=TIMEOUT_S, limits=limits, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def post(self, path: str, **kwargs: Any) -> httpx.Response:
        """Any request, whatever its status."""
        return await self._http.post(path, **kwargs)

    async def get(self, path: str) -> dict[str, Any]:
        """JSON that must come with a 2xx. Raises Unavailable."""
        return _checked(await self._http.get(path))

    async def complete(self, ask: Ask) -> Answer:
        """A completion in one piece. Raises Unavailable for an error answer."""
        began = time.monotonic()
        data = _checked(await self._http.post("/v1/completions", json=ask.body(self.model, stream=False)))
        choice = data["choices"][0]
        took = time.monotonic() - began
        return Answer(
            ask.request_id,
            choice["text"],
            list(choice["token_ids"] or ()),
            choice["finish_reason"] or "",
            data["usage"],
            took,
            took,
        )

    async def stream(self, ask: Ask, begun: asyncio.Event | None = None) -> Answer:
        """A streamed completion, gathered; an error inside the stream is in `Answer.error`.

        `begun` is set when the first tokens are there. Raises Unavailable for an error answer.
        """
        answer = Answer(ask.request_id)
        async with self.streaming(ask) as events:
            async for answer in events:
                if begun is not None and answer.tokens:
                    begun.set()
        return answer

    @asynccontextmanager
    async def streaming(self, ask: Ask) -> AsyncIterator[AsyncIterator[Answer]]:
        """The answer so far, after each event; leaving the block early disconnects."""
        body, began = ask.body(self.model, stream=True), time.monotonic()
        headers = {"X-Polyphase-SLO": ask.slo} if ask.slo else {}
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if not response.is_success:
                await response.aread()
                _checked(response)
            yield _gather(response, ask.request_id, began)

    async def chat(self, content: str, max_tokens: int = 256, **more: Any) -> dict[str, Any]:
        """The chat completion's JSON. Raises Unavailable."""
        messages = [{"role": "user", "content": content}]
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, **more}
        return _checked(await self._http.post("/v1/chat/completions", json=body))

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        answer = _checked(await self._http.post("/tokenize", json={"model": self.model, "prompt": text}))
        return list(answer["tokens"])

    async def max_model_len(self) -> int:
        """Tokens that a request may have in all."""
        return int((await self.get("/v1/models"))["data"][0]["max_model_len"])


async def _gather(response: httpx.Response, request_id: str, began: float) -> AsyncIterator[Answer]:
    answer, ended = Answer(request_id), False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            ended = True
            break
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"].get("message", event["error"]))
            continue
        _take(answer, event, time.monotonic() - began)
        yield answer
    if not ended and not answer.error:
        answer.error = "the stream broke off"
    answer.took_s = time.monotonic() - began
    yield answer


def _take(answer: Answer, event: dict[str, Any], now_s: float) -> None:
    if event.get("usage"):
        answer.usage = event["usage"]
    for choice in event.get("choices", ()):
        answer.text += choice["text"]
        answer.tokens += choice.get("token_ids") or ()
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.first_s = answer.first_s or now_s


def _checked(response: httpx.Response) -> dict[str, Any]:
    if not response.is_success:
        raise Unavailable(f"{response.request.url.path}: HTTP {response.status_code}: {response.text[:300]}")
    data: dict[str, Any] = response.json()
    return data


# MERGED prompts.py
# Prompts of every length, for any model: a text of ordinary words, as that model's tokens, read from many places.


_WORDS = (
    "river",
    "stone",
    "garden",
    "winter",
    "letter",
    "music",
    "paper",
    "morning",
    "shadow",
    "engine",
    "harbour",
    "copper",
    "silver",
    "forest",
    "window",
    "kitchen",
    "market",
    "travel",
    "answer",
    "bridge",
    "summer",
    "candle",
    "meadow",
    "thunder",
    "ladder",
    "pocket",
    "village",
    "ocean",
    "mirror",
    "yellow",
    "number",
    "question",
    "quiet",
    "little",
    "people",
    "under",
    "between",
    "every",
    "after",
    "before",
    "with",
    "from",
    "about",
    "the",
    "a",
    "and",
    "of",
    "to",
    "in",
    "is",
    "was",
    "it",
    "that",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "have",
    "or",
    "one",
    "had",
    "by",
    "word",
    "but",
    "not",
    "what",
    "all",
)
_AT_ONCE = 250  # words in one call
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 150, 200, 300, 400, 512, 700, 900, 1100)


class Prompts:
    """Distinct prompts of wished lengths in tokens."""

    def __init__(self, tokens: list[int], max_model_len: int) -> None:
        self._tokens = tokens
        self._max_model_len = max_model_len

    @classmethod
    async def of(cls, api: ApiClient) -> "Prompts":
        """For the model behind an API."""
        rng = Random(7)
        words = [rng.choice(_WORDS) + rng.choice(("", "", "", ",", ".")) for _ in range(4000)]
        tokens: list[int] = []
        for start in range(0, len(words), _AT_ONCE):  # a text that is longer than the model's context is refused
            tokens += await api.tokenize(" ".join(words[start : start + _AT_ONCE]))
        return cls(tokens, await api.max_model_len())

    def of_length(self, tokens: int, seed: int) -> list[int]:
        """One prompt; another seed gives another one."""
        start = Random(seed).randrange(len(self._tokens) - tokens)
        return self._tokens[start : start + tokens]

    def ladder(self, room: int) -> list[list[int]]:
        """25 prompts of 1 to over 1,000 tokens, as far as the context leaves `room` for the answer."""
        longest = self._max_model_len - room
        return [self.of_length(min(length, longest), 100 + i) for i, length in enumerate(LENGTHS)]

    def various(self, count: int, low: int, high: int, seed: int) -> list[list[int]]:
        """`count` prompts of `low` to `high` tokens."""
        rng = Random(seed)
        return [self.of_length(rng.randint(low, high), rng.getrandbits(30)) for _ in range(count)]
