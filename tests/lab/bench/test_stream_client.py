"""The lean client: times of a stream's tokens, and streams that are none."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from lab.bench.stream_client import StreamFailed, stream_completion

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[int]:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("tokens", [0, 1, 3])
async def test_gaps_are_between_tokens(tokens: int) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b'data: {"x": 1}\n\n' * tokens + b"data: [DONE]\n\n")
        await writer.drain()

    async with answering(answer) as port:
        seen = await stream_completion("127.0.0.1", port, {})
    assert seen.chunks == tokens
    assert len(seen.gaps_s) == max(0, tokens - 1)
    assert all(gap >= 0.0 for gap in seen.gaps_s)
    assert seen.ttft_s + sum(seen.gaps_s) == pytest.approx(seen.last_s)
    assert seen.last_s <= seen.total_s


@pytest.mark.parametrize(
    "text",
    [b"HTTP/1.1 503 Busy\r\n\r\n", HEAD + b'data: {"error": "no"}\n\n', HEAD + b'data: {"x": 1}\n\n'],
    ids=["refused", "error", "cut off"],
)
async def test_what_is_no_whole_stream_fails(text: bytes) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(text)
        await writer.drain()

    async with answering(answer) as port:
        with pytest.raises(StreamFailed):
            await stream_completion("127.0.0.1", port, {})
