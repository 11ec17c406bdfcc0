"""The demo's client and its prompts."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.demo.client import ApiClient, Ask, Prompts
from shared.errors import Unavailable
from tools.client import Ending

ASK = Ask([1, 2, 3], 4, "job-1", "salt")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKENS = [n * 7919 % 4093 for n in range(6000)]


def event(data: Any) -> bytes:
    text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
    return f"{len(text):x}\r\n".encode() + text + b"\r\n"


def token(number: int) -> bytes:
    return event({"choices": [{"text": "", "finish_reason": None, "token_ids": [number]}]})


@asynccontextmanager
async def serving(*pieces: bytes, stay: bool = False) -> AsyncIterator[tuple[ApiClient, asyncio.Event]]:
    """A server that answers with the pieces; the event is set when its client has disconnected."""
    left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.writelines(pieces)
        while stay and await reader.read(1000):
            pass
        left.set()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with ApiClient(f"http://127.0.0.1:{port}", "m") as api:
            yield api, left


async def test_a_stream() -> None:
    async with serving(HEAD, token(7), token(8), event("[DONE]"), b"0\r\n\r\n") as (api, _):
        answer = await api.stream(ASK)
    assert (answer.tokens, answer.ending, answer.error) == ([7, 8], Ending.DONE, "")


async def test_a_stream_that_breaks_off_has_an_error() -> None:
    async with serving(HEAD, token(7)) as (api, _):
        assert (await api.stream(ASK)).error


async def test_an_error_status_raises() -> None:
    body = b'{"error": {"message": "busy"}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with serving(head, body) as (api, _):
        with pytest.raises(Unavailable, match=r"503.*busy"):
            await api.stream(ASK)
        with pytest.raises(Unavailable, match=r"503.*busy"):
            await api.complete(ASK)


async def test_no_answer_is_a_connection_error() -> None:
    async with serving() as (api, _):
        with pytest.raises(ConnectionError):
            await api.stream(ASK)


@pytest.mark.parametrize("tokens", [2, 9])  # a client that waits for its tokens may leave, too
async def test_cancelling_a_stream_that_has_begun_disconnects(tokens: int) -> None:
    async with serving(HEAD, token(7), token(8), stay=True) as (api, left):
        beginning = asyncio.create_task(api.begin(ASK, tokens))
        await asyncio.wait([beginning], timeout=5.0 if tokens == 2 else 0.2)
        assert beginning.done() == (tokens == 2)
        assert not left.is_set()
        (await beginning if beginning.done() else beginning).cancel()
        await asyncio.wait_for(left.wait(), 5.0)


async def test_a_stream_that_ends_early_has_begun() -> None:
    async with serving(HEAD, token(7), event("[DONE]"), b"0\r\n\r\n") as (api, _):
        assert (await (await api.begin(ASK, tokens=5))).tokens == [7]


async def test_ended_jobs_are_counted_over_all_outcomes() -> None:
    body = (
        b"# TYPE polyphase_jobs_total counter\n"
        b'polyphase_jobs_total{outcome="cancelled",slo="default"} 3.0\n'
        b'polyphase_jobs_total{outcome="stop",slo="default"} 2.0\n'
        b"polyphase_jobs_created 1.0\n"
    )
    async with serving(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body), body) as (api, _):
        assert await api.jobs_ended() == 5


def test_a_request_is_greedy_and_has_its_salt() -> None:
    body = ASK.request("m", stream=True).body
    assert (body["temperature"], body["return_token_ids"], body["cache_salt"]) == (0, True, "salt")
    assert body["stream_options"] == {"include_usage": True}
    assert "cache_salt" not in Ask([1], 1, "x").request("m", stream=False).body


@pytest.mark.parametrize("room", [12, 24, 200])
def test_the_ladder_reaches_from_1_to_over_1000_tokens(room: int) -> None:
    ladder = Prompts(TOKENS, 2048).ladder(room)
    lengths = [len(prompt) for prompt in ladder]
    assert len(ladder) == 25
    assert (min(lengths), max(lengths) >= 1000) == (1, True)
    assert len({tuple(prompt) for prompt in ladder}) == 25
    assert ladder == Prompts(TOKENS, 2048).ladder(room)


def test_a_short_context_shortens_the_ladder() -> None:
    assert max(len(prompt) for prompt in Prompts(TOKENS, 512).ladder(24)) == 488


def test_various_keeps_its_bounds() -> None:
    chosen = Prompts(TOKENS, 2048).various(200, 2, 50, seed=1)
    assert {len(prompt) for prompt in chosen} == set(range(2, 51))
