"""The client against servers that end their answers in every way."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tools.client import Ending, Request, Response, StreamFailed, send, stream_completion

STREAM = Request("/v1/completions", {"stream": True})
WHOLE = Request("/v1/completions", {})
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: object) -> bytes:
    text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
    return f"{len(text):x}\r\n".encode() + text + b"\r\n"


def token(number: int, **more: object) -> dict[str, object]:
    return {"choices": [{"text": chr(number), "token_ids": [number], "finish_reason": None, **more}]}


DONE = chunk("[DONE]") + b"0\r\n\r\n"


@asynccontextmanager
async def serving(*pieces: "bytes | float") -> AsyncIterator[tuple[str, int]]:
    """Writes the pieces, pauses for the numbers among them, and closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
            else:
                await asyncio.sleep(piece)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[:2]


async def response_to(*pieces: "bytes | float", request: Request = STREAM, hung_s: float = 5.0) -> Response:
    async with serving(*pieces) as address:
        return await send(address, request, hung_s)


def test_a_request_carries_its_api_key() -> None:
    assert b"\r\nAuthorization: Bearer secret\r\n" in Request("/", {}, api_key="secret").encode()
    assert b"Authorization" not in STREAM.encode()


async def test_a_stream_that_ends_well() -> None:
    usage = chunk({"choices": [], "usage": {"completion_tokens": 2}})
    last = chunk(token(98, finish_reason="length"))
    got = await response_to(HEAD, chunk(token(97)), last, usage, DONE)
    assert (got.ending, got.tokens, got.text, got.finish_reason) == (Ending.DONE, [97, 98], "ab", "length")
    assert got.completion_tokens == 2
    assert len(got.token_times_s) == 2


def test_waits_are_between_all_signs_of_life() -> None:
    assert Response(began_s=10.0, token_times_s=[13.0, 14.0], ended_s=15.0).longest_gap_s == 3.0  # the first token's
    assert Response(began_s=10.0, token_times_s=[11.0, 14.0], ended_s=15.0).longest_gap_s == 3.0
    assert Response(began_s=10.0, token_times_s=[11.0, 12.0], ended_s=19.0).longest_gap_s == 7.0
    assert Response(began_s=10.0, ended_s=14.0).longest_gap_s == 4.0


async def test_a_chat_stream() -> None:
    delta = {"choices": [{"delta": {"content": "hi"}, "token_ids": [5], "finish_reason": "length"}]}
    got = await response_to(HEAD, chunk(delta), DONE)
    assert (got.ending, got.tokens, got.text) == (Ending.DONE, [5], "hi")


async def test_a_stream_that_breaks_off() -> None:
    got = await response_to(HEAD, chunk(token(97)))
    assert (got.ending, got.tokens) == (Ending.CUT, [97])
    assert (
        await response_to(HEAD, chunk(token(97)), b"0\r\n\r\n")
    ).ending is Ending.CUT  # closed in order, but not [DONE]


async def test_an_error_event_ends_a_stream() -> None:
    error = chunk({"error": {"message": "no decode instance", "type": "unavailable", "code": 503}})
    for end in (DONE, b"0\r\n\r\n", b""):
        got = await response_to(HEAD, chunk(token(97)), error, end)
        assert got.code == "503"
        assert got.error == "no decode instance"
        assert got.ending is Ending.ERROR


async def test_a_status_with_an_error() -> None:
    body = json.dumps({"error": {"message": "later", "type": "rate_limit_error", "code": "busy"}}).encode()
    head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\ncontent-length: %d\r\n\r\n" % len(body)
    got = await response_to(head, body)
    assert (got.ending, got.status, got.code, got.retry_after) == (Ending.ERROR, 429, "busy", True)


async def test_silence_is_a_hang() -> None:
    assert (await response_to(60.0, hung_s=0.2)).ending is Ending.HUNG
    assert (await response_to(HEAD, chunk(token(97)), 60.0, hung_s=0.2)).ending is Ending.HUNG


async def test_nobody_there() -> None:
    async with serving() as address:
        pass
    assert (await send(address, STREAM)).ending is Ending.UNREACHABLE


async def test_an_answer_in_one_piece() -> None:
    body = json.dumps({**token(97, finish_reason="length"), "usage": {"completion_tokens": 1}}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    got = await response_to(head, body, request=WHOLE)
    assert (got.ending, got.tokens, got.text, got.completion_tokens) == (Ending.DONE, [97], "a", 1)
    assert (await response_to(head, body[:-5], request=WHOLE)).ending is Ending.CUT


PLAIN_HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize("tokens", [0, 1, 3])
async def test_gaps_are_between_tokens(tokens: int) -> None:
    async with serving(PLAIN_HEAD + b'data: {"x": 1}\n\n' * tokens + b"data: [DONE]\n\n") as address:
        seen = await stream_completion(*address, {})
    assert seen.chunks == tokens
    assert len(seen.gaps_s) == max(0, tokens - 1)
    assert all(gap >= 0.0 for gap in seen.gaps_s)
    assert seen.ttft_s + sum(seen.gaps_s) == pytest.approx(seen.last_s)
    assert seen.last_s <= seen.total_s


@pytest.mark.parametrize(
    "text",
    [b"HTTP/1.1 503 Busy\r\n\r\n", PLAIN_HEAD + b'data: {"error": "no"}\n\n', PLAIN_HEAD + b'data: {"x": 1}\n\n'],
    ids=["refused", "error", "cut off"],
)
async def test_an_incomplete_stream_fails(text: bytes) -> None:
    async with serving(text) as address:
        with pytest.raises(StreamFailed):
            await stream_completion(*address, {})
