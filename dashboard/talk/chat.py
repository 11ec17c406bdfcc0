"""One answer through the API, as it comes: read in a thread of its own, so that the page goes on meanwhile."""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

Message = dict[str, str]
MOST_SAID = 300  # characters of an error
STOPPED_S = 0.1  # at most so much later a stop takes effect


@dataclass(slots=True)
class Turn:
    """A question and its answer so far. Moments are unix seconds; `tag` is part of the request's id in the cluster."""

    question: str
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    asked_s: float = field(default_factory=time.time)
    first_s: float = 0.0
    last_s: float = 0.0
    error: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: int = 0
    stop: threading.Event = field(default_factory=threading.Event)  # set by who wants no more of it
    over: threading.Event = field(default_factory=threading.Event)  # set when nothing comes any more

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self.over.is_set()

    @property
    def answer(self) -> str:
        """What has come of it."""
        return "".join(self.pieces)

    @property
    def ttft_s(self) -> float | None:
        """From here, so with the way to the API and back."""
        return self.first_s - self.asked_s if self.first_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens after the first."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


def messages(turns: Sequence[Turn], turn: Turn) -> list[Message]:
    """The conversation up to this question."""
    said: list[Message] = []
    for one in turns:
        if one.answer and not one.error and one is not turn:
            said += [{"role": "user", "content": one.question}, {"role": "assistant", "content": one.answer}]
    return [*said, {"role": "user", "content": turn.question}]


def stream(
    client: httpx.AsyncClient, turn: Turn, conversation: Sequence[Message], body: dict[str, Any], secret: str
) -> None:
    """Ask, and gather what comes until the end, an error, or until it is stopped: before the first token, too."""
    headers = {"X-Request-Id": turn.tag, **({"Authorization": f"Bearer {secret}"} if secret else {})}
    sent = {"messages": list(conversation), "stream": True, "stream_options": {"include_usage": True}, **body}
    try:
        asyncio.run(_until_stopped(turn, _gather(client, turn, sent, headers)))
    except (httpx.HTTPError, ValueError) as error:  # ValueError: a key beyond ASCII, or what is no JSON
        turn.error = f"{type(error).__name__}: {error}"[:MOST_SAID]
    finally:
        turn.over.set()


async def _until_stopped(turn: Turn, gathering: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(gathering)
    try:
        while not (task.done() or turn.stop.is_set()):
            await asyncio.wait([task], timeout=STOPPED_S)
    finally:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _gather(client: httpx.AsyncClient, turn: Turn, sent: dict[str, Any], headers: dict[str, str]) -> None:
    async with client, client.stream("POST", "/v1/chat/completions", json=sent, headers=headers) as response:
        if not response.is_success:
            turn.error = refusal(response.status_code, (await response.aread()).decode("utf-8", "replace"))
            return
        async for event in events(response.aiter_lines()):
            take(turn, event)


async def events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """What a stream of server-sent events tells, up to its end."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def take(turn: Turn, event: dict[str, Any]) -> None:
    """One piece of the answer, its count of tokens at the end, or an error in place of both."""
    if "error" in event:
        turn.error = str(event["error"].get("message", event["error"]))[:MOST_SAID]
        return
    usage = event.get("usage")
    if usage:
        turn.tokens = int(usage.get("completion_tokens", 0))
    for choice in event.get("choices", []):
        delta = choice.get("delta", {})
        piece = delta.get("content") or delta.get("reasoning_content") or ""
        if piece:
            turn.last_s = time.time()
            turn.first_s = turn.first_s or turn.last_s
            turn.pieces.append(piece)


def refusal(status: int, said: str) -> str:
    """Why the API answered nothing, in its own words where it has some."""
    try:
        told = json.loads(said)["error"]
        return f"HTTP {status}: {told.get('message', told) if isinstance(told, dict) else told}"[:MOST_SAID]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {said[:MOST_SAID]}"
