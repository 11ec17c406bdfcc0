"""What of vLLM's API is served, and what of a client's wishes reaches the cluster."""

import asyncio
import copy
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from gateway.vllm_patches import UNSERVED
from shared.domain.job import job_name
from shared.errors import InvalidRequest
from tests.gateway.api import Api, until
from tests.gateway.scripted import Script
from tests.gateway.worker import answer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

PROMPT = [400, 401, 402, 403]
DOCS = Path(__file__).parents[2] / "docs" / "api.md"
# What makes vLLM mount every route of a server that generates. Its Cohere API needs a package that is not installed.
ALL_ROUTES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
OPTIONS = ("enable_scale_out", "enable_fault_tolerance", "enable_tokenizer_info_endpoint", "tokens_only")


def documented(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of the page, without the quotes around paths."""
    section = DOCS.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip("`") if cell.startswith("`/") else cell for cell in row] for row in rows]


def routes(app: Any) -> set[tuple[str, str]]:
    return {
        (method, route.path)
        for route in app.routes
        for method in (getattr(route, "methods", None) or {"GET"}) - {"HEAD"}
    }


@pytest.fixture
def everything(api: Api, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """vLLM's application with every route that any of its options mounts."""
    from vllm.config import ProfilerConfig
    from vllm.entrypoints.launchers.app import build_app

    for name, value in ALL_ROUTES.items():
        monkeypatch.setenv(name, value)
    args = copy.copy(api.app.state.args)
    for option in OPTIONS:
        setattr(args, option, True)
    args.profiler_config = ProfilerConfig(profiler="cuda")
    app: FastAPI = build_app(args, ("generate",), api.app.state.vllm_config.model_config)
    return app


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


async def test_the_page_names_every_route_that_is_served_and_no_other(everything: FastAPI) -> None:
    """A route that a new vLLM adds fails here until the page or `gateway.vllm_patches` names it."""
    from gateway.vllm_patches import trim

    assert {path for _, path in routes(everything)} >= UNSERVED.keys()
    trim(everything)
    assert routes(everything) == {
        (method, path) for methods, path, *_ in documented("Served") for method in methods.split(", ")
    }
    assert {path: why for paths, why in documented("Not served") for path in paths.split("`, `")} == UNSERVED


async def test_by_default_the_same_routes_are_served_but_those_of_options(api: Api) -> None:
    page = {(method, path) for methods, path, *_ in documented("Served") for method in methods.split(", ")}
    assert routes(api.app) == page - {("GET", "/tokenizer_info")}
    assert api.edge.served == {path for _, path in routes(api.app)}


@pytest.mark.parametrize("path", UNSERVED)
async def test_what_is_not_served_is_a_404_with_the_reason(api: Api, path: str) -> None:
    url = path.replace("{response_id}", "resp_1").replace("{adapter_name}", "a")
    for response in (await api.client.post(url, json={"model": "demo"}), await api.client.get(url)):
        assert response.status_code == 404
        assert is_an_error(response.json(), "not_found")
        assert f"{url} is not served: {UNSERVED[path]}" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/no/such/path", "/v1/responses/a/b"])
async def test_all_others_are_a_404_in_openai_s_shape(api: Api, path: str) -> None:
    response = await api.client.post(path, json={"model": "demo", "prompt": PROMPT, "messages": []})
    assert response.status_code == 404
    assert is_an_error(response.json(), "not_found")
    assert f"there is no route POST {path}" in response.json()["error"]["message"]


CONVERSATIONS = [[{"role": "user", "content": text}] for text in ("Hello", "How are you?", "Bye")]


async def batch(api: Api, **body: Any) -> Any:
    full = {"model": "demo", "messages": CONVERSATIONS, "max_tokens": 6, "temperature": 0, **body}
    return await api.client.post("/v1/chat/completions/batch", json=full)


async def test_each_conversation_of_a_batch_is_a_request_of_its_own(api: Api) -> None:
    response = await batch(api)
    assert response.status_code == 200, response.text
    alone = [await api.chat(messages=messages) for messages in CONVERSATIONS]
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["message"] for choice in choices] == [each.json()["choices"][0]["message"] for each in alone]
    tokens = sum(each.json()["usage"]["total_tokens"] for each in alone)
    assert response.json()["usage"]["total_tokens"] == tokens
    reports = await api.final_reports(6)
    assert len({report.job_id for report in reports}) == 6
    assert api.admission.jobs == 0


async def test_a_batch_has_the_limits_of_a_body(api: Api) -> None:
    many = CONVERSATIONS * 9
    response = await batch(api, messages=many)
    assert response.status_code == 400
    assert "requests 27 answers (prompts, conversations or items, times n)" in response.json()["error"]["message"]
    long = [{"role": "user", "content": "a"}] * 1500
    response = await batch(api, messages=[long, long, long])
    assert response.status_code == 400
    assert "max_items_per_body allows 4096" in response.json()["error"]["message"]
    assert (await batch(api, messages=[[], []])).status_code == 400
    assert not api.cluster.prefill.prefills


async def test_a_batch_is_refused_for_load_as_a_whole(api: Api) -> None:
    """20 of 64 jobs wait already, for a key with room for them."""
    with api.admission.for_class("default").admit("other") as ticket:
        ticket.claim(20)
        with api.admission.for_class("default").admit("another") as second:
            second.claim(22)
            response = await batch(api, messages=CONVERSATIONS * 8)
    assert response.status_code == 429
    assert not api.cluster.prefill.prefills
    assert api.admission.jobs == 0


async def test_a_batch_names_its_tier_and_is_served_as_it(api: Api) -> None:
    assert (await batch(api, service_tier="flex")).json()["service_tier"] == "flex"
    assert {report.slo for report in await api.final_reports(3)} == {"batch"}
    assert (await batch(api, service_tier="nope")).status_code == 400


async def test_a_client_that_leaves_ends_every_conversation_of_its_batch(api: Api) -> None:
    script = Script()
    with api.running_jobs(script):
        asking = asyncio.create_task(batch(api))
        await until(lambda: len(script.jobs) == 3)
        asking.cancel()
        await until(lambda: api.admission.jobs == 0 and not api.app.state.engine_client._core._jobs)


async def test_a_conversation_that_fails_ends_its_batch_with_the_reason(api: Api) -> None:
    script = Script()
    with api.running_jobs(script):
        script.acts.put_nowait(InvalidRequest("it cannot be"))
        response = await batch(api)
    assert response.status_code == 400
    assert "it cannot be" in response.text
    await until(lambda: api.admission.jobs == 0 and not api.app.state.engine_client._core._jobs)


async def test_items_are_scored_each_by_a_request(api: Api) -> None:
    body = {"model": "demo", "query": "Is it?", "items": ["yes", "no"], "label_token_ids": [300, 301]}
    response = await api.client.post("/generative_scoring", json=body)
    prompts = [request.job.prompt_tokens for request in api.cluster.prefill.prefills]
    assert len(prompts) == 2, response.text
    many = await api.client.post("/generative_scoring", json={**body, "items": ["yes"] * 25})
    assert many.status_code == 400
    assert "requests 25 answers" in many.json()["error"]["message"]


async def test_texts_to_score_are_tokenised_in_a_thread() -> None:
    from gateway.vllm_patches import score_in_threads

    class Scoring:
        async def _build_prompts(self, waits: bool) -> int:
            if waits:
                await asyncio.sleep(0)
            return threading.get_ident()

    scoring = Scoring()
    with ThreadPoolExecutor(1) as executor:
        score_in_threads(scoring, SimpleNamespace(_executor=executor))
        assert await scoring._build_prompts(False) != threading.get_ident()
        with pytest.raises(RuntimeError, match="awaits something"):
            await scoring._build_prompts(True)


async def test_sagemakers_name_serves_chats_and_completions_with_their_limits(api: Api) -> None:
    body = {"model": "demo", "max_tokens": 6, "temperature": 0}
    chat = await api.client.post("/invocations", json={**body, "messages": CONVERSATIONS[0], "service_tier": "flex"})
    assert chat.json()["choices"][0]["message"] == (await api.chat()).json()["choices"][0]["message"]
    assert chat.json()["service_tier"] == "flex"
    completion = await api.client.post("/invocations", json={**body, "prompt": PROMPT, "n": 25})
    assert completion.status_code == 400
    assert "requests 25 answers" in completion.json()["error"]["message"]


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


# As proxies and gateways make them; `é` is UTF-8, a header's bytes, which HTTP reads as Latin-1.
ODD_IDS = [
    "4257d51f-61c7-49d4-b78d-773e19a2c461/g6hr",
    "7f1a2f2b-0d1f-4c60-9a53-1a3a1c0f5f2e#17",
    "host.example.com/Zx81-000001",
    "a, b",
    "{3F2504E0-4F89-11D3-9A0C-0305E82C3301}",
    "Root=1-67891233-abcdef;Sampled=1",
    "x" * 500,
    "a?b %41 'c' \"d\" \\e",
    "\u00fc",
    "",
]
IN_BODIES = ["\u0437\u0430\u043f\u0440\u043e\u0441", "a\r\nX-Evil: 1", "\x00\x1b[31m", "\u2028\u0085", "\U0001f600"]
WITH_IDS = [
    ("/v1/completions", "cmpl-", {"prompt": PROMPT}),
    ("/v1/chat/completions", "chatcmpl-", {"messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/chat/completions/batch", "chatcmpl-", {"messages": [[{"role": "user", "content": "Hello"}]]}),
    ("/v1/messages", "chatcmpl-", {"messages": [{"role": "user", "content": "Hello"}]}),
]


def ids_in(response: httpx.Response) -> set[str]:
    """Every id in an answer, or in the events of a stream."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
    said = [json.loads(line) for line in lines] if lines else [response.json()]
    assert not any("error" in each for each in said), response.text
    found = {(each.get("message") or each).get("id") for each in said}
    return {each for each in found if each is not None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ODD_IDS)
@pytest.mark.parametrize(("path", "begin", "body"), WITH_IDS)
async def test_the_request_id_of_a_header_comes_back_as_it_was_sent(
    api: Api, path: str, begin: str, body: dict[str, Any], name: str, stream: bool
) -> None:
    full = {"model": "demo", "max_tokens": 6, "temperature": 0, "stream": stream, **body}
    for encoding in ("latin-1", "utf-8"):
        sent = name.encode(encoding)
        response = await api.client.post(path, json=full, headers={b"X-Request-Id": sent})
        assert response.status_code == 200, response.text
        assert ids_in(response) == {begin + sent.decode("latin-1")}
    for report in await api.final_reports(2):
        assert re.fullmatch(r"[\w.:=+@-]{1,160}", report.job_id, re.ASCII)
        assert job_name(name)[:100] in report.job_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [*ODD_IDS, *IN_BODIES])
@pytest.mark.parametrize(("path", "begin", "body"), WITH_IDS[:3])
async def test_so_does_that_of_a_body(
    api: Api, path: str, begin: str, body: dict[str, Any], name: str, stream: bool
) -> None:
    full = {"model": "demo", "max_tokens": 6, "temperature": 0, "stream": stream, "request_id": name, **body}
    response = await api.client.post(path, json=full)
    assert response.status_code == 200, response.text
    assert ids_in(response) == {begin + name}
    assert "x-evil" not in response.headers
    (report,) = await api.final_reports(1)
    assert re.fullmatch(r"[\w.:=+@-]{1,160}", report.job_id, re.ASCII)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_responses_request_may_have_any_id(api: Api, stream: bool) -> None:
    body = {"model": "demo", "input": "Hello", "max_output_tokens": 4, "stream": stream, "request_id": "a/b#17"}
    response = await api.client.post("/v1/responses", json=body, headers={"X-Request-Id": "c, d"})
    assert response.status_code == 200
    assert "a/b#17" in response.text
    (report,) = await api.final_reports(1)
    assert report.job_id.startswith("a=2Fb=2317")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_that_no_answer_could_repeat_is_a_400(api: Api, stream: bool) -> None:
    body = json.dumps({"model": "demo", "prompt": PROMPT, "request_id": "\ud800", "stream": stream})
    response = await api.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "surrogate" in response.json()["error"]["message"]
    assert not api.cluster.prefill.prefills


async def test_requests_of_one_id_do_not_meet(api: Api) -> None:
    headers = {"X-Request-Id": "host/" + "x" * 300}
    body = {"model": "demo", "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    prompts = [[400 + n, 401, 402] for n in range(12)]
    sent = [api.client.post("/v1/completions", json={**body, "prompt": each}, headers=headers) for each in prompts]
    answers = [response.json() for response in await asyncio.gather(*sent)]
    assert [each["choices"][0]["token_ids"] for each in answers] == [answer(prompt, 6) for prompt in prompts]
    assert len({report.job_id for report in await api.final_reports(12)}) == 12


async def test_a_usual_request_id_is_a_part_of_the_job_s(api: Api) -> None:
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


BAD = [{"a": 1}] * 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": BAD}),
        ("/v1/responses", {"input": "Hello", "tools": BAD}),
        ("/v1/chat/completions", {"messages": BAD}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "tools": BAD}),
        ("/v1/messages", {"messages": BAD, "max_tokens": 3}),
        ("/tokenize", {"messages": BAD}),
    ],
)
async def test_only_the_first_bad_element_is_validated(api: Api, path: str, body: dict[str, Any]) -> None:
    answer = await api.client.post(path, json={"model": "demo", **body})
    assert answer.status_code == 400, answer.text
    assert "0" in answer.text
    for later in (".1.", ", 1,", "'1'", ".999", " 999"):
        assert later not in answer.text


async def test_every_list_of_every_model_stops_at_its_first_bad_element(api: Api) -> None:
    from pydantic import ValidationError

    from gateway.vllm_patches import REQUEST_MODELS

    names = ("messages", "input", "tokens", "prompt")
    for model in REQUEST_MODELS:
        name = next(name for name in names if name in model.model_fields)
        body = {name: [object()] * 50}
        with pytest.raises(ValidationError) as wrong:
            model.model_validate({"model": "demo", **body})
        places = {error["loc"][-1] for error in wrong.value.errors() if isinstance(error["loc"][-1], int)}
        assert places <= {0}, model


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 1100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 5000}),
        ("/v1/chat/completions", {"messages": [], "tools": [{"type": "function", "function": {"name": "a"}}] * 3000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4500}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * 4500}),
    ],
)
async def test_too_many_items_are_refused_with_both_numbers(api: Api, path: str, body: dict[str, Any]) -> None:
    answer = await api.client.post(path, json={"model": "demo", **body})
    assert answer.status_code in (400, 413), answer.text
    assert "max_items_per_body allows 4096" in answer.json()["error"]["message"] or answer.status_code == 413


async def test_a_text_that_cannot_fit_the_model_is_not_tokenised(api: Api) -> None:
    fits = await api.client.post("/tokenize", json={"model": "demo", "prompt": "Hello"})
    assert fits.status_code == 200, fits.text
    longer = await api.client.post("/tokenize", json={"model": "demo", "prompt": "Hello" * 3000})
    assert (longer.status_code, longer.json()["count"] > 2048) == (200, True)
    chars = 2048 * api.app.state.engine_client.renderer.tokenizer.max_chars_per_token + 1
    for body in ({"prompt": "a" * chars}, {"messages": [{"role": "user", "content": "a" * chars}]}):
        answer = await api.client.post("/tokenize", json={"model": "demo", **body})
        assert answer.status_code == 400, answer.text
        assert f"the text has {chars} characters" in answer.text
    answer = await api.client.post("/detokenize", json={"model": "demo", "tokens": [5] * 2049})
    assert answer.status_code == 400, answer.text
    assert "maximum context length is 2048 tokens. However, a prompt has 2049 token ids" in answer.text
