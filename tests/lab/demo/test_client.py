"""The demo's client: what it makes of streams and errors."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lab.demo.client import ApiClient, Ask
from shared.errors import Unavailable

ASK = Ask([1, 2, 3], 4, "job-1", "salt")


def event(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [{'text': '', 'finish_reason': None, **choice}]})}\n\n"


def client(answer: Callable[[httpx.Request], httpx.Response]) -> ApiClient:
    api = ApiClient("http://test", "m")
    api._http = httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(answer))
    return api


async def streamed(text: str) -> Any:
    async with client(lambda _: httpx.Response(200, text=text)) as api:
        return await api.stream(ASK)


async def test_gathers_a_stream() -> None:
    usage = f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 3}})}\n\n"
    first, second = event(text="a", token_ids=[7]), event(text="b", token_ids=[8, 9], finish_reason="length")
    answer = await streamed(first + second + usage + "data: [DONE]\n\n")
    assert (answer.text, answer.tokens, answer.finish_reason) == ("ab", [7, 8, 9], "length")
    assert (answer.usage, answer.error) == ({"completion_tokens": 3}, "")


async def test_a_stream_without_its_end_is_an_error() -> None:
    assert (await streamed(event(text="a", token_ids=[7]))).error == "the stream broke off"


async def test_an_error_inside_a_stream() -> None:
    broken = f"data: {json.dumps({'error': {'message': 'engine lost'}})}\n\ndata: [DONE]\n\n"
    answer = await streamed(event(text="a", token_ids=[7]) + broken)
    assert (answer.text, answer.error) == ("a", "engine lost")


async def test_an_error_status_raises() -> None:
    async with client(lambda _: httpx.Response(503, json={"error": {"message": "busy"}})) as api:
        with pytest.raises(Unavailable, match=r"503.*busy"):
            await api.stream(ASK)
        with pytest.raises(Unavailable, match=r"503.*busy"):
            await api.complete(ASK)


def test_a_request_asks_for_greedy_token_ids_under_its_own_salt() -> None:
    body = ASK.body("m", stream=True)
    assert (body["temperature"], body["return_token_ids"], body["cache_salt"]) == (0, True, "salt")
    assert body["stream_options"] == {"include_usage": True}
    assert "cache_salt" not in Ask([1], 1, "x").body("m", stream=False)
