"""What of vLLM's API is served, and what of a client's wishes reaches the cluster."""

import asyncio
from typing import Any

import msgspec
import pytest

from tests.gateway.api import Api
from tests.gateway.worker import answer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
PROMPT = [400, 401, 402, 403]
ROUTES = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
}
GONE = [
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/generative_scoring",
    "/invocations",
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
    "/v1/systemone",
    "/v1/responses/resp_1/cancel",
    "/v1/embeddings",
    "/v1/load_lora_adapter",
    "/sleep",
    "/wake_up",
    "/start_profile",
    "/update_weights",
    "/reset_prefix_cache",
    "/abort_requests",
    "/collective_rpc",
    "/no/such/path",
]


def is_an_error(body: dict[str, Any], code: str) -> bool:
    error = body["error"]
    return error["code"] == code and bool(error["message"]) and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("asked", "served"), [("flex", "flex"), ("auto", "default"), (None, None)])
async def test_the_answer_names_the_tier_that_was_served(api: Api, asked: str | None, served: str | None) -> None:
    tier = {"service_tier": asked} if asked else {}
    for answered in (await api.complete(**tier), await api.chat(**tier)):
        assert answered.json()["service_tier"] == served
    body = {"model": "demo", "input": "Hello", "max_output_tokens": 4, **tier}
    response = await api.client.post("/v1/responses", json=body)
    assert response.json()["service_tier"] == (served or "auto")
    reports = await api.final_reports(3)
    assert {report.slo for report in reports} == {"batch" if asked == "flex" else "default"}
    assert (await api.complete(stream=True, **tier)).status_code == 200


async def test_every_route_is_one_that_we_serve(api: Api) -> None:
    found = {
        (method, route.path)
        for route in api.app.routes
        for method in (getattr(route, "methods", None) or {"GET"}) - {"HEAD"}
    }
    assert found == ROUTES


@pytest.mark.parametrize("path", GONE)
async def test_all_others_are_a_404_in_openai_s_shape(api: Api, path: str) -> None:
    response = await api.client.post(path, json={"model": "demo", "prompt": PROMPT, "messages": []})
    assert response.status_code == 404
    assert is_an_error(response.json(), "not_found")
    assert path in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/load", "/kv_event_sources", "/redoc", "/v1/responses/resp_1", "/server_info"])
async def test_so_is_what_could_be_read(api: Api, path: str) -> None:
    response = await api.client.get(path)
    assert (response.status_code, is_an_error(response.json(), "not_found")) == (404, True)


async def test_another_method_is_a_405_in_openai_s_shape(api: Api) -> None:
    response = await api.client.get("/v1/completions")
    assert (response.status_code, is_an_error(response.json(), "method_not_allowed")) == (405, True)


@pytest.mark.parametrize("path", ["chat", "completions", "responses"])
@pytest.mark.parametrize(
    "wish",
    [
        {"vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": "y", "mine": 1}},
        {"vllm_xargs": {"kv_transfer_params": ["x"], "mine": 1}},
        {"kv_transfer_params": {"import": {"transfer_id": "x"}}, "vllm_xargs": {"mine": 1}},
        {"kv_transfer_params": {"do_remote_prefill": True}, "vllm_xargs": {"mine": 1}},
        {"vllm_xargs": {"kv_cache_report_mode": "full", "mine": 1}},
    ],
)
async def test_how_kv_moves_is_not_for_clients_to_say(api: Api, path: str, wish: dict[str, Any]) -> None:
    if path == "responses":
        response = await api.client.post("/v1/responses", json={"model": "demo", "input": "Hello", **wish})
    else:
        response = await (api.chat(**wish) if path == "chat" else api.complete(**wish))
    assert response.status_code == 200, response.text
    for request in (*api.cluster.prefill.prefills, *api.cluster.decodes[0].decodes):
        assert msgspec.msgpack.decode(request.generation.sampling)["extra_args"] == {"mine": 1}


async def test_a_refused_request_that_speaks_of_kv_makes_no_job(api: Api) -> None:
    wish = {"kv_transfer_params": {"do_remote_prefill": True}}
    assert (await api.complete(model="other", **wish)).status_code == 404
    assert (await api.complete(max_tokens=10**9, **wish)).status_code == 400
    assert not api.cluster.prefill.prefills


async def test_a_session_is_a_hint_without_effect(api: Api) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    response = await api.client.post("/v1/completions", json={**body, "priority": 0}, headers={"X-Session-Id": "s"})
    assert response.json()["choices"][0]["token_ids"] == answer(PROMPT, 6)


@pytest.mark.parametrize("name", ["a/b", "a b", "x" * 500, "a?b", "a\u00fcb"])
async def test_an_odd_request_id_is_a_400(api: Api, name: str) -> None:
    response = await api.complete(request_id=name)
    assert response.status_code == 400
    assert "request id" in response.json()["error"]["message"]
    assert not api.cluster.prefill.prefills


async def test_a_request_id_is_kept(api: Api) -> None:
    assert (await api.complete(request_id="team-7:42")).json()["id"] == "cmpl-team-7:42"
    (report,) = await api.final_reports(1)
    assert report.job_id.startswith("cmpl-team-7:42-0-")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_says_nothing_of_our_insides(api: Api, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    async def broken(_: object) -> None:
        raise AttributeError("'Secret' object has no attribute 'inside'")

    monkeypatch.setattr(api.app.state.engine_client.engine_core, "add_request_async", broken)
    response = await api.complete(stream=stream)
    assert "Secret" not in response.text
    if not stream:
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
    await asyncio.sleep(0)
    assert api.admission.jobs == 0


async def test_an_endless_head_is_refused_before_the_key_is_looked_at(api: Api) -> None:
    host, port = api.client.base_url.host, api.client.base_url.port
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Filler: ")
    for _ in range(40):
        writer.write(b"x" * 4096)
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 431")
    writer.close()
