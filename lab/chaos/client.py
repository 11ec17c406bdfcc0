"""A lean client of the API that notes everything a person would feel: what came, when, and how it ended.

Each request has a connection of its own, so that a fault of one cannot reach another.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

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
