"""The demo's client of the API, and prompts of any length for any model."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from shared.errors import Unavailable
from tools.client import COMPLETIONS, Ending, Request, Response, completion_body, send

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A greedy completion. salt: keeps it apart from prefix caches. slo: its class, "" for the default."""

    prompt: list[int] | str
    max_tokens: int
    request_id: str
    salt: str = ""
    ignore_eos: bool = True
    slo: str = ""

    def request(self, model: str, *, stream: bool, api_key: str = "") -> Request:
        more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        if self.salt:
            more["cache_salt"] = self.salt
        body = completion_body(
            self.prompt,
            self.max_tokens,
            model,
            request_id=self.request_id,
            return_token_ids=True,
            ignore_eos=self.ignore_eos,
            stream=stream,
            **more,
        )
        return Request(COMPLETIONS, body, self.slo, api_key)


class ApiClient:
    """Use as an async context manager."""

    def __init__(self, base_url: str, model: str, api_key: str = "") -> None:
        self.model = model
        self._api_key = api_key
        url = urlsplit(base_url)
        self._address = url.hostname or "127.0.0.1", url.port or 80
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def complete(self, ask: Ask) -> Response:
        """A completion in one piece. Raises Unavailable for an error answer, ConnectionError without an answer."""
        return await self._send(ask.request(self.model, stream=False, api_key=self._api_key))

    async def stream(self, ask: Ask, on_tokens: Callable[[Response], object] | None = None) -> Response:
        """A streamed completion; an error inside the stream is in the response.

        Raises Unavailable for an error answer, ConnectionError without an answer.
        """
        return await self._send(ask.request(self.model, stream=True, api_key=self._api_key), on_tokens)

    async def begin(self, ask: Ask, tokens: int = 1) -> asyncio.Task[Response]:
        """Start a stream; returns its task when `tokens` tokens have come, or when it has ended.

        To cancel the task, or this call, is to disconnect.
        """
        reached = asyncio.Event()

        def note(response: Response) -> None:
            if len(response.tokens) >= tokens:
                reached.set()

        stream = asyncio.create_task(self.stream(ask, note))
        stream.add_done_callback(lambda _: reached.set())
        try:
            await reached.wait()
        except BaseException:
            stream.cancel()
            raise
        return stream

    async def _send(self, request: Request, on_tokens: Callable[[Response], object] | None = None) -> Response:
        response = await send(self._address, request, TIMEOUT_S, on_tokens)
        if response.status >= 300:
            raise Unavailable(f"{request.path}: HTTP {response.status}: {response.error}")
        if response.status == 0:
            raise ConnectionError(f"{request.path}: {response.ending} {response.error}")
        if response.ending is Ending.HUNG:
            response.error = f"no byte for {TIMEOUT_S:g} s"
        return response

    async def post(self, path: str, **kwargs: Any) -> httpx.Response:
        """Any request, whatever its status."""
        return await self._http.post(path, **kwargs)

    async def get(self, path: str) -> dict[str, Any]:
        """JSON that comes with a 2xx. Raises Unavailable."""
        return _checked(await self._http.get(path))

    async def chat(self, content: str, max_tokens: int = 256, **more: Any) -> dict[str, Any]:
        """The JSON of a chat completion. Raises Unavailable."""
        messages = [{"role": "user", "content": content}]
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, **more}
        return _checked(await self._http.post("/v1/chat/completions", json=body))

    async def tokenize(self, text: str) -> list[int]:
        answer = _checked(await self._http.post("/tokenize", json={"model": self.model, "prompt": text}))
        return list(answer["tokens"])

    async def max_model_len(self) -> int:
        return int((await self.get("/v1/models"))["data"][0]["max_model_len"])

    async def jobs_ended(self) -> int:
        """Jobs that have ended at the gateway so far, by its metric `polyphase_jobs_total`."""
        lines = (await self._http.get("/metrics")).text.splitlines()
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("polyphase_jobs_total{")))


def _checked(response: httpx.Response) -> dict[str, Any]:
    if not response.is_success:
        raise Unavailable(f"{response.request.url.path}: HTTP {response.status_code}: {response.text[:300]}")
    data: dict[str, Any] = response.json()
    return data


_WORDS = """
river stone garden winter letter music paper morning shadow engine harbour copper silver forest window kitchen
market travel answer bridge summer candle meadow thunder ladder pocket village ocean mirror yellow number
question quiet little people under between every after before with from about the a and of to in is was it that
for on are as with his they at be this have or one had by word but not what all
"""

_AT_ONCE = 250  # words in one call: a text that is longer than the model's context is refused
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 150, 200, 300, 400, 512, 700, 900, 1100)


class Prompts:
    """Prompts of given lengths in tokens: pieces of a text of ordinary words, each from another place."""

    def __init__(self, tokens: list[int], max_model_len: int) -> None:
        self._tokens = tokens
        self._max_model_len = max_model_len

    @classmethod
    async def of(cls, api: ApiClient) -> "Prompts":
        """Prompts for the model behind an API."""
        rng = Random(7)
        ordinary = _WORDS.split()
        words = [rng.choice(ordinary) + rng.choice(("", "", "", ",", ".")) for _ in range(4000)]
        tokens: list[int] = []
        for start in range(0, len(words), _AT_ONCE):
            tokens += await api.tokenize(" ".join(words[start : start + _AT_ONCE]))
        return cls(tokens, await api.max_model_len())

    def of_length(self, tokens: int, seed: int) -> list[int]:
        """A prompt that depends on the seed."""
        start = Random(seed).randrange(len(self._tokens) - tokens)
        return self._tokens[start : start + tokens]

    def ladder(self, room: int) -> list[list[int]]:
        """25 prompts of 1 to over 1,000 tokens; the context leaves at least `room` tokens for the answer."""
        longest = self._max_model_len - room
        return [self.of_length(min(length, longest), 100 + i) for i, length in enumerate(LENGTHS)]

    def various(self, count: int, low: int, high: int, seed: int) -> list[list[int]]:
        """`count` prompts of `low` to `high` tokens."""
        rng = Random(seed)
        return [self.of_length(rng.randint(low, high), rng.getrandbits(30)) for _ in range(count)]
