"""The real API layer over a cluster without engines: shapes, errors, cancellation, and errors inside a stream."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from shared.errors import Busy
from tests.gateway.api import PROMPT, Api, events, until
from tests.gateway.worker import Worker, answer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


async def test_models(api: Api) -> None:
    assert (await api.client.get("/v1/models")).json()["data"][0]["id"] == "demo"


async def test_a_completion_has_the_cluster_s_tokens_and_the_right_usage(api: Api) -> None:
    body = (await api.complete(return_token_ids=True)).json()
    assert body["choices"][0]["token_ids"] == answer(PROMPT, 6)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


async def test_a_stream_has_the_same_tokens(api: Api) -> None:
    chunks = await events(await api.complete(stream=True, return_token_ids=True))
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"] or ()]
    assert tokens == answer(PROMPT, 6)


async def test_n_answers_are_n_jobs(api: Api) -> None:
    body = (await api.complete(n=3, temperature=0.7, return_token_ids=True)).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [answer(PROMPT, 6)] * 3
    assert body["usage"]["completion_tokens"] == 18
    assert len(api.cluster.prefill.prefills) == 3


@pytest.mark.parametrize(
    "body",
    [
        {"seed": 5},
        {"presence_penalty": 0.5},
        {"min_tokens": 3},
        {"repetition_penalty": 1.2},
        {"structured_outputs": {"choice": ["a", "b"]}},
    ],
)
async def test_what_depends_on_earlier_tokens_is_not_carried(api: Api, body: dict[str, Any]) -> None:
    assert (await api.complete(**body)).status_code == 200
    assert not api.cluster.prefill.prefills[0].want_token


async def test_prompt_logprobs_stay_on_one_instance(api: Api) -> None:
    task = asyncio.create_task(api.complete(prompt_logprobs=1))
    await until(lambda: bool(api.cluster.decodes[0].decodes))
    await task
    assert not api.cluster.prefill.prefills


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_every_api_answers(api: Api, path: str) -> None:
    message = [{"role": "user", "content": "Hello"}]
    body: dict[str, Any] = {"model": "demo", "messages": message, "max_tokens": 4}
    if path == "/v1/responses":
        body = {"model": "demo", "input": "Hello", "max_output_tokens": 4}
    response = await api.client.post(path, json=body)
    assert response.status_code == 200, response.text


async def test_a_stop_string_ends_the_job_everywhere(api: Api) -> None:
    full = (await api.complete(max_tokens=40)).json()["choices"][0]["text"]
    stop = full[len(full) // 2 :][:6]
    decode = api.cluster.decodes[0]
    decode.cancelled.clear()

    async def slow(count: int) -> None:
        await asyncio.sleep(0.005 if count < 39 else 30)  # the last token never comes unless the job is stopped

    decode.before_token = slow
    choice = (await api.complete(max_tokens=40, stop=[stop])).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == full[: full.index(stop)]
    await asyncio.wait_for(decode.cancelled.wait(), 2)


async def test_a_client_that_leaves_stops_its_job(api: Api) -> None:
    decode = api.cluster.decodes[0]
    decode.before_token = lambda count: asyncio.sleep(0) if count < 2 else asyncio.Event().wait()
    task = asyncio.create_task(api.complete(max_tokens=50))
    await until(lambda: bool(decode.decodes))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(decode.cancelled.wait(), 2)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"max_tokens": -1}, 400),
        ({"temperature": "hot"}, 400),
        ({"prompt": list(range(300, 3000))}, 400),
        ({"max_tokens": 10**9}, 400),
        ({"model": "other"}, 404),
        ({"prompt": None}, 400),
        ({"n": 0}, 400),
        ({"prompt": [10**9]}, 400),
        ({"logprobs": 10**6}, 400),
        ({"top_p": 7}, 400),
    ],
)
async def test_bad_input_gets_a_4xx_in_openai_s_shape(api: Api, body: dict[str, Any], status: int) -> None:
    response = await api.complete(**body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]
    assert not api.cluster.prefill.prefills


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"\xff\xfe", b'{"model": 5'])
async def test_malformed_json_is_a_400(api: Api, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = await api.client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


async def test_a_large_body_is_a_413(api: Api) -> None:
    assert (await api.complete(prompt="x" * 200_000)).status_code == 413


async def test_transfer_parameters_of_a_client_are_ignored(api: Api) -> None:
    body = (await api.complete(kv_transfer_params={"import": {"transfer_id": "x"}}, return_token_ids=True)).json()
    assert body["choices"][0]["token_ids"] == answer(PROMPT, 6)


APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "temperature": 0},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 9, "temperature": 0},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 9, "temperature": 0},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "temperature": 0},
}


@pytest.fixture
def no_decode(api: Api) -> Iterator[list[Worker]]:
    workers, api.cluster.decodes = api.cluster.decodes, []
    yield workers
    api.cluster.decodes = workers


@pytest.mark.parametrize("path", APIS)
async def test_a_job_that_nobody_takes_is_a_503_that_says_when_to_come_back(
    api: Api, no_decode: list[Worker], path: str
) -> None:
    api.cluster.no_route = Busy("one is starting")  # also where a scheduler calls it a matter of load
    placed = len(api.cluster.places)
    response = await api.client.post(path, json={"model": "demo", **APIS[path]})
    assert response.status_code == 503, response.text
    assert int(response.headers["retry-after"]) >= 1
    assert "no instance took the job for 0.5 s" in response.json()["error"]["message"]
    assert len(api.cluster.places) - placed < 8, "its patience of 0.5 s was taken more than once"


def error_of(text: str) -> dict[str, Any]:
    """The error that a stream ends with, whatever its API's shape."""
    last = [line for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"][-1]
    error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
    return error


@pytest.mark.parametrize("path", APIS)
async def test_a_stream_of_a_job_that_nobody_takes_ends_in_a_typed_error(
    api: Api, no_decode: list[Worker], path: str
) -> None:
    response = await api.client.post(path, json={"model": "demo", "stream": True, **APIS[path]})
    error = error_of(response.text)
    assert error["type"]
    assert error["message"].startswith("no instance took the job for 0.5 s")


@pytest.mark.parametrize("path", APIS)
async def test_a_stream_that_fails_after_tokens_ends_in_a_typed_error(api: Api, path: str) -> None:
    workers = list(api.cluster.decodes)

    async def lose_all(count: int) -> None:
        if count == 3:
            api.cluster.decodes.clear()
            raise RuntimeError("a bug in the engine")

    for worker in workers:
        worker.before_token = lose_all
    try:
        response = await api.client.post(path, json={"model": "demo", "stream": True, **APIS[path]})
        assert response.text.count("data: ") >= 3
        error = error_of(response.text)
        assert error["type"]
        assert error["message"]
        assert "validation" not in error["message"]
    finally:
        api.cluster.decodes += workers
