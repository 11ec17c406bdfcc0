"""A stream that is refused before its first token gets the answer of the same request without `stream`."""

import json
from typing import Any

import pytest

from shared.errors import InvalidRequest, Overloaded
from tests.gateway.api import PROMPT, Api
from tests.gateway.scripted import Script

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
SAID = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "strng"}
TEXT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"input": "x", "text": TEXT}, "strng"),
    ("/v1/responses", {"input": "x", "priority": 3}, "priority (3) cannot be served"),
    ("/v1/responses", {"input": "x", "structured_outputs": {"regex": "(a"}}, "regex"),
    ("/v1/chat/completions", {"messages": SAID, "response_format": FORMAT}, "strng"),
    ("/v1/chat/completions", {"messages": SAID, "response_format": FORMAT, "n": 2}, "strng"),
    ("/v1/chat/completions", {"messages": SAID, "logprobs": True, "response_format": FORMAT}, "strng"),
    ("/v1/chat/completions", {"messages": SAID, "priority": 3}, "priority (3) cannot be served"),
    ("/v1/completions", {"prompt": PROMPT, "structured_outputs": {"grammar": "root ::= ("}}, "grammar"),
    ("/v1/completions", {"prompt": ["a", "b"], "structured_outputs": {"json": SCHEMA}}, "strng"),
    ("/v1/completions", {"prompt": PROMPT, "temperature": float("nan")}, "temperature must be a finite number"),
    ("/invocations", {"messages": SAID, "response_format": FORMAT}, "strng"),
    (
        "/v1/messages",
        {"messages": SAID, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "strng",
    ),
]


async def post(api: Api, path: str, **body: Any) -> Any:
    full = json.dumps({"model": "demo", "max_tokens": 6, **body})
    return await api.client.post(path, content=full, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("path", "body", "why"), REFUSED)
async def test_the_status_and_the_reason_are_those_without_a_stream(
    api: Api, path: str, body: dict[str, Any], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = await post(api, path, **body)
    assert plain.status_code == 400, plain.text
    assert why in plain.text
    capfd.readouterr()
    streamed = await post(api, path, stream=True, **body)
    assert streamed.status_code == 400
    assert streamed.json() == plain.json()
    assert streamed.headers["content-type"] == plain.headers["content-type"]
    assert "Traceback" not in "".join(capfd.readouterr())
    assert not api.cluster.prefill.prefills
    assert api.admission.jobs == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x"}),
        ("/v1/chat/completions", {"messages": SAID}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/messages", {"messages": SAID}),
    ],
)
@pytest.mark.parametrize("error", [InvalidRequest("it cannot be"), Overloaded("full", retry_after_s=3.0)])
async def test_so_are_those_of_a_job_that_ends_before_its_first_token(
    api: Api, path: str, body: dict[str, Any], error: InvalidRequest | Overloaded
) -> None:
    script = Script()
    with api.running_jobs(script):
        script.acts.put_nowait(error)
        script.acts.put_nowait(error)
        plain, streamed = await post(api, path, **body), await post(api, path, stream=True, **body)
    assert plain.status_code == error.http_status
    if path == "/v1/responses":  # it has announced the response: the job was submitted
        assert streamed.status_code == 200
        assert "response.created" in streamed.text
        assert error.message in streamed.text
        code = '"code": "invalid_request"' if isinstance(error, InvalidRequest) else '"code": "overloaded"'
        assert code in streamed.text
    elif isinstance(error, Overloaded):
        assert (streamed.status_code, streamed.headers["retry-after"]) == (429, "3")
    else:
        assert (streamed.status_code, streamed.json()) == (plain.status_code, plain.json())


async def test_a_response_is_announced_once_its_job_is_submitted(api: Api) -> None:
    script = Script()
    with api.running_jobs(script):
        body = {"model": "demo", "input": "x", "stream": True}
        async with api.client.stream("POST", "/v1/responses", json=body) as response:
            events = response.aiter_lines()
            assert await anext(events) == "event: response.created"
            assert len(script.jobs) == 1
            script.acts.put_nowait(InvalidRequest("it cannot be"))
            rest = [line async for line in events]
    assert any("it cannot be" in line for line in rest)


@pytest.mark.parametrize("name", [b"uuid/suffix", b"a, b", b"x" * 300, "\u00fc".encode(), b"\xfc", b"#{};|"])
async def test_a_server_that_returns_request_ids_does_so_for_any_and_in_refusals_too(
    api: Api, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    """`enable_request_id_headers` adds this middleware of vLLM's."""
    from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware

    monkeypatch.setattr(api.edge, "app", XRequestIdMiddleware(api.app))
    monkeypatch.setattr(api.edge, "short", None)
    refused = {"messages": SAID, "response_format": FORMAT}
    for body, status in (({"messages": SAID}, 200), (refused, 400)):
        for stream in (False, True):
            full = {"model": "demo", "max_tokens": 6, "stream": stream, **body}
            headers = {b"X-Request-Id": name}
            response = await api.client.post("/v1/chat/completions", json=full, headers=headers)
            assert response.status_code == status
            assert [value for key, value in response.headers.raw if key.lower() == b"x-request-id"] == [name]
