"""Predictions are bounded in number and time, whatever the predictor does."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.worker.jobs.lengths import LengthClient

ANSWER = {"bucket": 1, "lower_tokens": 200, "upper_tokens": 400, "confidence": 0.5, "source": "classifier"}


class Predictor:
    """An HTTP server that keeps what it is asked; it answers once `go` is set."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        self.go = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                self.asked.append(json.loads(await reader.readexactly(int(length))))
                await self.go.wait()
                body = json.dumps(ANSWER).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def running(timeout_s: float) -> AsyncIterator[tuple[Predictor, LengthClient]]:
    predictor = Predictor()
    server = await asyncio.start_server(predictor.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with LengthClient(f"http://127.0.0.1:{port}", timeout_s) as client:
            yield predictor, client
    finally:
        predictor.go.set()
        server.close()


async def until(client: LengthClient, outcome: str, count: int) -> None:
    async with asyncio.timeout(10):
        while client.outcomes[outcome] < count:
            await asyncio.sleep(0.01)


async def test_an_answer_is_there_once_it_came() -> None:
    async with running(5.0) as (predictor, client):
        asked = client.ask(list(range(10_000)), 100)
        assert asked.prediction is None
        predictor.go.set()
        await until(client, "ok", 1)
        assert asked.prediction is not None
        assert asked.prediction.upper_tokens == 400
        assert predictor.asked[0]["prompt_token_ids"] == list(range(10_000 - 256, 10_000))
        assert predictor.asked[0]["prompt_tokens"] == 10_000


async def test_few_calls_are_under_way_however_many_jobs_wait() -> None:
    async with running(5.0) as (predictor, client):
        for _ in range(1000):
            client.ask([1, 2, 3], 100)
        assert client.outcomes["skipped"] > 900
        predictor.go.set()
        await until(client, "ok", 1000 - client.outcomes["skipped"])
        assert len(predictor.asked) < 20


async def test_a_predictor_that_says_nothing_costs_no_more_than_the_deadline() -> None:
    async with running(0.1) as (_, client):
        asked = client.ask([1], 100)
        await until(client, "late", 1)
        assert asked.prediction is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://10.255.255.1:80"])
async def test_a_predictor_that_cannot_be_reached_is_no_error(url: str) -> None:
    async with LengthClient(url, 0.2) as client:
        asked = client.ask([1], 100)
        async with asyncio.timeout(10):
            while not client.outcomes:
                await asyncio.sleep(0.01)
        assert asked.prediction is None


async def test_a_call_that_nobody_wants_any_more_ends() -> None:
    async with running(30.0) as (predictor, client):
        asked = client.ask([1], 100)
        async with asyncio.timeout(10):
            while not predictor.asked:
                await asyncio.sleep(0.01)
            asked.cancel()
            while client._calls:
                await asyncio.sleep(0.01)
        assert asked.prediction is None
