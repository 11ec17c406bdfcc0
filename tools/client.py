"""Client of the OpenAI API for measurements, checks and fault tests.

Each generation has a connection of its own, so that a fault of one request cannot reach another. `send` reads whole
answers with their tokens and reports errors of server and network in the answer. `stream_completion` only notes the
times of a stream's events: parsing every event would cost more than what is measured. `ApiClient` raises errors, and
serves the other routes of the API. `users` keeps a number of clients busy.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from random import Random
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from shared.domain.job import itl_met
from shared.errors import Unavailable

Address = tuple[str, int]
Json = dict[str, Any]  # a JSON object whose fields others define, such as a body of the OpenAI API
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HUNG_S = 30.0  # a server that sends no byte for so long has hung
TIMEOUT_S = 120.0  # the same for ApiClient


@dataclass(frozen=True, slots=True)
class Request:
    """One request. slo: its class, "" for the default. key: names its kind; one right answer belongs to a key."""

    path: str
    body: Json
    slo: str = ""
    api_key: str = ""
    key: str = ""
    method: str = "POST"

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    def encode(self) -> bytes:
        """The request as bytes of HTTP/1.1."""
        payload = json.dumps(self.body).encode()
        head = f"{self.method} {self.path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        head += f"X-Polyphase-SLO: {self.slo}\r\n" if self.slo else ""
        head += f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


def completion_body(prompt: str | list[int], max_tokens: int, model: str = "demo", **more: Any) -> Json:
    """A greedy, streamed completion of exactly `max_tokens` tokens; `more` overrides any field."""
    fixed = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
    return {**fixed, "temperature": 0, "ignore_eos": True, "stream": True, **more}


def chat_body(content: str | Sequence[Mapping[str, str]], max_tokens: int, model: str = "demo", **more: Any) -> Json:
    """The same as a chat. content: messages, or the text of a single one."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    fixed = {"model": model, "messages": messages, "max_tokens": max_tokens}
    return {**fixed, "temperature": 0, "ignore_eos": True, "stream": True, **more}


class Ending(StrEnum):
    """How an answer ended at the level of HTTP."""

    DONE = "done"
    ERROR = "error"  # a status of 4xx or 5xx, or an error event in a stream
    CUT = "cut"  # the connection ended without an error or an end of the answer
    HUNG = "hung"
    UNREACHABLE = "unreachable"  # no connection


@dataclass(slots=True)
class Response:
    """What came back. Times are on the monotonic clock. code: of an error."""

    ending: Ending = Ending.CUT
    status: int = 0
    error: str = ""
    code: str = ""
    retry_after: bool = False
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    usage: Json = field(default_factory=dict)
    began_mono: float = 0.0
    ended_mono: float = 0.0
    token_times_mono: list[float] = field(default_factory=list)

    @property
    def completion_tokens(self) -> int | None:
        """By the server's own count."""
        return self.usage.get("completion_tokens")

    @property
    def longest_gap_s(self) -> float:
        """The longest time without a token, from the sending of the request to its end."""
        times = [self.began_mono, *self.token_times_mono, self.ended_mono]
        return max(after - before for before, after in pairwise(times))

    @property
    def ttft_s(self) -> float | None:
        """Sending to first token."""
        return self.token_times_mono[0] - self.began_mono if self.token_times_mono else None

    @property
    def took_s(self) -> float:
        return self.ended_mono - self.began_mono


async def send(
    address: Address, request: Request, hung_s: float = HUNG_S, on_tokens: Callable[[Response], object] | None = None
) -> Response:
    """One request, to its end. `on_tokens` is called with the answer so far after each event with tokens."""
    response = Response(began_mono=time.monotonic())
    writer = None
    try:
        async with asyncio.timeout(hung_s):
            reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
            writer.write(request.encode())
            await writer.drain()
        await _read(reader, request, response, hung_s, on_tokens)
    except TimeoutError:
        response.ending = Ending.HUNG
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        if response.ending is not Ending.ERROR:  # the connection may end after an error event
            response.ending = Ending.CUT if writer is not None else Ending.UNREACHABLE
            response.error = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
    response.ended_mono = time.monotonic()
    return response


async def _read(
    reader: asyncio.StreamReader,
    request: Request,
    response: Response,
    hung_s: float,
    on_tokens: Callable[[Response], object] | None,
) -> None:
    async with asyncio.timeout(hung_s):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    response.status = int(head.split(" ", 2)[1])
    response.retry_after = "\r\nretry-after:" in head
    pieces = _body(reader, head, hung_s)
    if response.status >= 300 or not request.streams:
        data = json.loads(b"".join([piece async for piece in pieces]))
        if response.status >= 300:
            _add_error(data, response)
        else:
            response.ending = Ending.DONE
            _add(data, response)
        return
    rest = b""
    async for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            seen = len(response.tokens)
            _add_event(event.strip(), response)
            if on_tokens is not None and len(response.tokens) > seen:
                on_tokens(response)


async def _body(reader: asyncio.StreamReader, head: str, hung_s: float) -> AsyncIterator[bytes]:
    """The body in pieces. Raises EOFError when the connection ends too early."""
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


def _add_event(event: bytes, response: Response) -> None:
    if not event.startswith(b"data:"):
        return
    text = event[5:].strip()
    if text == b"[DONE]":
        if response.ending is not Ending.ERROR:
            response.ending = Ending.DONE
        return
    data = json.loads(text)
    if "error" in data:
        _add_error(data, response)
    else:
        _add(data, response)


def _add(data: Json, response: Response) -> None:
    response.usage = data.get("usage") or response.usage
    for choice in data.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        tokens = choice.get("token_ids") or ()
        response.text += part.get("content") or part.get("text") or ""
        response.tokens += tokens
        response.finish_reason = choice.get("finish_reason") or response.finish_reason
        if tokens:
            response.token_times_mono.append(time.monotonic())


def _add_error(data: Json, response: Response) -> None:
    response.ending = Ending.ERROR
    error = data["error"] if isinstance(data.get("error"), dict) else {}
    response.error = str(error.get("message", data))[:300]
    response.code = str(error.get("code") or error.get("type") or "")


@dataclass(frozen=True, slots=True)
class StreamResult:
    """Times of one stream, in seconds from its sending."""

    ttft_s: float
    total_s: float
    chunks: int  # events that carried tokens
    last_s: float = 0.0  # the last of these events
    gaps_s: tuple[float, ...] = ()  # between an event and the next

    def gaps_met(self, itl_s: float) -> bool:
        """Whether at most one gap in a hundred exceeds the target."""
        return itl_met(len(self.gaps_s), sum(gap_s > itl_s for gap_s in self.gaps_s))


class StreamFailed(Exception):
    """The server answered something else than a complete stream."""


class Refused(StreamFailed):
    """The server was too busy (429)."""


async def stream_completion(
    host: str, port: int, body: Json, api_key: str = "", slo: str = "", path: str = COMPLETIONS
) -> StreamResult:
    """Send one streaming request and read the stream to its end. Raises Refused, StreamFailed, OSError."""
    request = Request(path, body, slo, api_key).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        began = time.perf_counter()
        writer.write(request)
        status = await reader.readline()
        if b" 429 " in status:
            raise Refused(f"{status!r}")
        if b" 200 " not in status:
            raise StreamFailed(f"{status!r}: {(await reader.read(2000))[-500:]!r}")
        first, last, gaps = 0.0, 0.0, list[float]()
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                if line.startswith(b'data: {"error"'):
                    raise StreamFailed(line.decode())
                now = time.perf_counter() - began
                if first:
                    gaps.append(now - last)
                first, last = first or now, now
            elif line.startswith(b"data: [DONE]"):
                return StreamResult(first, time.perf_counter() - began, len(gaps) + bool(first), last, tuple(gaps))
        raise StreamFailed("the stream ended without [DONE]")
    finally:
        writer.close()


async def run_load(
    host: str, port: int, bodies: Sequence[Json], concurrency: int, path: str = COMPLETIONS
) -> list[StreamResult]:
    """All requests, `concurrency` at a time, in order of their sending."""
    pending = list(enumerate(bodies))[::-1]
    results: dict[int, StreamResult] = {}

    async def worker() -> None:
        while pending:
            index, body = pending.pop()
            results[index] = await stream_completion(host, port, body, path=path)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return [results[index] for index in range(len(bodies))]


@asynccontextmanager
async def users(
    count: int, request: Callable[[int, int], Awaitable[bool]], retry_s: float = 0.2
) -> AsyncIterator[None]:
    """For the block's length, `count` users that send a request as soon as the previous one is answered.

    `request(user, turn)` sends one and returns whether it was served; after one that was not, the user waits `retry_s`.
    At the end all requests under way are waited for; an exception of the block cancels them.
    """
    stop = asyncio.Event()

    async def user(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            if not await request(number, turn):
                await asyncio.sleep(retry_s)

    tasks = [asyncio.create_task(user(number)) for number in range(count)]
    try:
        yield
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
    finally:
        stop.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, BaseException):
            raise error


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
        more: Json = {"stream_options": {"include_usage": True}} if stream else {}
        if self.salt:
            more["cache_salt"] = self.salt
        more |= {"request_id": self.request_id, "return_token_ids": True, "ignore_eos": self.ignore_eos}
        body = completion_body(self.prompt, self.max_tokens, model, stream=stream, **more)
        return Request(COMPLETIONS, body, self.slo, api_key)


class ApiClient:
    """A client of one gateway and model, whose methods raise errors. Use as an async context manager."""

    def __init__(self, base_url: str, model: str, api_key: str = "") -> None:
        self.model = model
        self._api_key = api_key
        url = urlsplit(base_url)
        self._address = url.hostname or "127.0.0.1", url.port or 80
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
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

    async def get(self, path: str) -> Json:
        """JSON that comes with a 2xx. Raises Unavailable."""
        return _checked(await self._http.get(path))

    async def chat(self, content: str, max_tokens: int = 256, **more: Any) -> Json:
        """The JSON of a chat completion. Raises Unavailable."""
        messages = [{"role": "user", "content": content}]
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, **more}
        return _checked(await self._http.post(CHAT, json=body))

    async def tokenize(self, text: str) -> list[int]:
        answer = _checked(await self._http.post("/tokenize", json={"model": self.model, "prompt": text}))
        return list(answer["tokens"])

    async def max_model_len(self) -> int:
        return int((await self.get("/v1/models"))["data"][0]["max_model_len"])

    async def jobs_ended(self) -> int:
        """Jobs that have ended at the gateway so far, by its metric `polyphase_jobs_total`."""
        lines = (await self._http.get("/metrics")).text.splitlines()
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("polyphase_jobs_total{")))


def _checked(response: httpx.Response) -> Json:
    if not response.is_success:
        raise Unavailable(f"{response.request.url.path}: HTTP {response.status_code}: {response.text[:300]}")
    data: Json = response.json()
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
