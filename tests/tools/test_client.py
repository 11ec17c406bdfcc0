"""The client against servers that end their answers in every way."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.errors import Unavailable
from tools.client import (
    ApiClient,
    Ask,
    Ending,
    Prompts,
    Request,
    Response,
    StreamFailed,
    send,
    stream_completion,
    users,
)

STREAM = Request("/v1/completions", {"stream": True})
WHOLE = Request("/v1/completions", {})
ASK = Ask([1, 2, 3], 4, "job-1", "salt")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: object) -> bytes:
    text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
    return f"{len(text):x}\r\n".encode() + text + b"\r\n"


def token(number: int, **more: object) -> dict[str, object]:
    return {"choices": [{"text": chr(number), "token_ids": [number], "finish_reason": None, **more}]}


def answer(body: bytes, status: str = "200 OK", head: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n" % (status.encode(), head, len(body)) + body


A, LAST = chunk(token(97)), chunk(token(98, finish_reason="length"))
END = b"0\r\n\r\n"
DONE = chunk("[DONE]") + END
ERROR = {"error": {"message": "no decode instance", "type": "unavailable", "code": 503}}
ONE_PIECE = json.dumps({**token(97, finish_reason="length"), "usage": {"completion_tokens": 1}}).encode()
BUSY = json.dumps({"error": {"message": "later", "type": "rate_limit_error", "code": "busy"}}).encode()


@asynccontextmanager
async def serving(*pieces: "bytes | float") -> AsyncIterator[tuple[tuple[str, int], asyncio.Event]]:
    """Writes the pieces, pauses for the numbers among them (0: until the client leaves), and closes.

    The event is set when it is done.
    """
    left = asyncio.Event()

    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
            elif piece:
                await asyncio.sleep(piece)
            else:
                while await reader.read(1000):
                    pass
        left.set()
        writer.close()

    async with await asyncio.start_server(write, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[:2], left


@asynccontextmanager
async def api_to(*pieces: "bytes | float") -> AsyncIterator[tuple[ApiClient, asyncio.Event]]:
    async with serving(*pieces) as ((host, port), left), ApiClient(f"http://{host}:{port}", "m") as api:
        yield api, left


async def response_to(*pieces: "bytes | float", request: Request = STREAM, hung_s: float = 5.0) -> Response:
    async with serving(*pieces) as (address, _):
        return await send(address, request, hung_s)


def test_requests_have_what_the_caller_set() -> None:
    assert b"\r\nAuthorization: Bearer secret\r\n" in Request("/", {}, api_key="secret").encode()
    assert b"Authorization" not in STREAM.encode()
    body = ASK.request("m", stream=True).body
    assert (body["temperature"], body["return_token_ids"], body["cache_salt"]) == (0, True, "salt")
    assert body["stream_options"] == {"include_usage": True}
    assert "cache_salt" not in Ask([1], 1, "x").request("m", stream=False).body


async def test_answers_that_end_well() -> None:
    usage = chunk({"choices": [], "usage": {"completion_tokens": 2}})
    got = await response_to(HEAD, A, LAST, usage, DONE)
    assert (got.ending, got.tokens, got.text, got.finish_reason) == (Ending.DONE, [97, 98], "ab", "length")
    assert (got.completion_tokens, len(got.token_times_mono)) == (2, 2)
    delta = {"choices": [{"delta": {"content": "hi"}, "token_ids": [5], "finish_reason": "length"}]}
    got = await response_to(HEAD, chunk(delta), DONE)
    assert (got.ending, got.tokens, got.text) == (Ending.DONE, [5], "hi")
    got = await response_to(answer(ONE_PIECE), request=WHOLE)
    assert (got.ending, got.tokens, got.text, got.completion_tokens) == (Ending.DONE, [97], "a", 1)
    assert (await response_to(answer(ONE_PIECE)[:-5], request=WHOLE)).ending is Ending.CUT


@pytest.mark.parametrize(
    ("times_s", "gap_s"), [([13.0, 14.0], 3.0), ([11.0, 14.0], 3.0), ([11.0, 12.0], 7.0), ([], 9.0)]
)
def test_waits_are_between_all_signs_of_life(times_s: list[float], gap_s: float) -> None:
    ended_mono = 15.0 if gap_s == 3.0 else 19.0
    assert Response(began_mono=10.0, token_times_mono=times_s, ended_mono=ended_mono).longest_gap_s == gap_s


@pytest.mark.parametrize(
    ("pieces", "ending", "tokens", "error"),
    [
        ((HEAD, A), Ending.CUT, [97], None),
        ((HEAD, A, END), Ending.CUT, [97], ""),  # closed in order, but not [DONE]
        *(((HEAD, A, chunk(ERROR), end), Ending.ERROR, [97], "no decode instance") for end in (DONE, END, b"")),
        ((60.0,), Ending.HUNG, [], ""),
        ((HEAD, A, 60.0), Ending.HUNG, [97], ""),
        ((answer(BUSY, "429 Too Many Requests", b"Retry-After: 2\r\n"),), Ending.ERROR, [], "later"),
    ],
)
async def test_a_stream_that_ends_badly(
    pieces: "tuple[bytes | float, ...]", ending: Ending, tokens: list[int], error: str | None
) -> None:
    got = await response_to(*pieces, hung_s=0.5)
    assert (got.ending, got.tokens) == (ending, tokens)
    assert error is None or got.error == error
    assert (got.status, got.code, got.retry_after) == (429, "busy", True) or error != "later"


async def test_no_server() -> None:
    async with serving() as (address, _):
        pass
    assert (await send(address, STREAM)).ending is Ending.UNREACHABLE


PLAIN_HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize("tokens", [0, 1, 3])
async def test_gaps_are_between_tokens(tokens: int) -> None:
    async with serving(PLAIN_HEAD + b'data: {"x": 1}\n\n' * tokens + b"data: [DONE]\n\n") as (address, _):
        result = await stream_completion(*address, {})
    assert result.chunks == tokens
    assert len(result.gaps_s) == max(0, tokens - 1)
    assert all(gap >= 0.0 for gap in result.gaps_s)
    assert result.ttft_s + sum(result.gaps_s) == pytest.approx(result.last_s)
    assert result.last_s <= result.total_s


@pytest.mark.parametrize(
    "text",
    [b"HTTP/1.1 503 Busy\r\n\r\n", PLAIN_HEAD + b'data: {"error": "no"}\n\n', PLAIN_HEAD + b'data: {"x": 1}\n\n'],
    ids=["refused", "error", "cut off"],
)
async def test_an_incomplete_stream_fails(text: bytes) -> None:
    async with serving(text) as (address, _):
        with pytest.raises(StreamFailed):
            await stream_completion(*address, {})


async def test_an_api_client_raises_errors_and_missing_answers() -> None:
    async with api_to(answer(BUSY, "503 Service Unavailable")) as (api, _):
        for call in (api.stream, api.complete):
            with pytest.raises(Unavailable, match=r"503.*later"):
                await call(ASK)
    async with api_to() as (api, _):
        with pytest.raises(ConnectionError):
            await api.stream(ASK)
    async with api_to(HEAD, A) as (api, _):
        assert (await api.stream(ASK)).error
    async with api_to(HEAD, A, DONE) as (api, _):  # a stream that ends early has begun
        assert (await (await api.begin(ASK, tokens=5))).tokens == [97]


@pytest.mark.parametrize("tokens", [2, 9])  # a client that waits for its tokens may leave, too
async def test_cancelling_a_stream_that_has_begun_disconnects(tokens: int) -> None:
    async with api_to(HEAD, A, LAST, 0) as (api, left):
        beginning = asyncio.create_task(api.begin(ASK, tokens))
        await asyncio.wait([beginning], timeout=5.0 if tokens == 2 else 0.2)
        assert beginning.done() == (tokens == 2)
        assert not left.is_set()
        (await beginning if beginning.done() else beginning).cancel()
        await asyncio.wait_for(left.wait(), 5.0)


async def test_ended_jobs_are_counted_over_all_outcomes() -> None:
    body = (
        b"# TYPE polyphase_jobs_total counter\n"
        b'polyphase_jobs_total{outcome="cancelled",slo="default"} 3.0\n'
        b'polyphase_jobs_total{outcome="stop",slo="default"} 2.0\n'
        b"polyphase_jobs_created 1.0\n"
    )
    async with api_to(answer(body)) as (api, _):
        assert await api.jobs_ended() == 5


def test_prompts_have_the_lengths_that_are_wanted() -> None:
    tokens = [number * 7919 % 4093 for number in range(6000)]
    ladder = Prompts(tokens, 2048).ladder(200)
    assert (len(ladder), min(map(len, ladder)), max(map(len, ladder)) >= 1000) == (25, 1, True)
    assert len({tuple(prompt) for prompt in ladder}) == 25
    assert ladder == Prompts(tokens, 2048).ladder(200)
    assert max(map(len, Prompts(tokens, 512).ladder(24))) == 488
    assert set(map(len, Prompts(tokens, 2048).various(200, 2, 50, seed=1))) == set(range(2, 51))


async def test_users_send_until_the_block_ends_and_wait_for_their_answers() -> None:
    sent, answered = list[tuple[int, int]](), 0

    async def request(user: int, turn: int) -> bool:
        nonlocal answered
        sent.append((user, turn))
        await asyncio.sleep(0.01)
        answered += 1
        return user == 0

    async with users(2, request, retry_s=0.02):
        await asyncio.sleep(0.1)
    assert answered == len(sent)
    assert sorted(sent)[0] == (0, 1)
    assert {user for user, _ in sent} == {0, 1}
    with pytest.raises(LookupError):
        async with users(2, request):
            raise LookupError
