"""vLLM's API layer over a cluster without engines: routes, answers, errors, batches and request ids."""

import asyncio
import copy
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from vllm.lora.request import LoRARequest

from gateway.sessions import WARM_PATH
from gateway.vllm_patches import UNSERVED
from shared.domain.job import job_name
from shared.errors import Busy, EngineFailed, InvalidRequest
from tests.gateway.api import HELLO, PATHS, PROMPT, Api, Engine, events
from tests.gateway.cluster import answer, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
DOCS = Path(__file__).parents[2] / "docs" / "api.md"
BATCH = "/v1/chat/completions/batch"
SHORT: dict[str, dict[str, Any]] = {  # a request of each API
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
}


def openai_error(response: httpx.Response, status: int, code: str) -> str:
    """The message of an error in OpenAI's shape."""
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    return str(error["message"])


# Routes


def documented(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of the page, without the quotes around paths."""
    section = DOCS.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip("`") if cell.startswith("`/") else cell for cell in row] for row in rows]


def routes(app: Any) -> set[tuple[str, str]]:
    return {(m, route.path) for route in app.routes for m in (getattr(route, "methods", None) or {"GET"}) - {"HEAD"}}


async def test_the_page_names_the_routes_that_are_served(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route that a new vLLM adds fails here until the page or `gateway.vllm_patches` names it."""
    from vllm.config import ProfilerConfig
    from vllm.entrypoints.launchers.app import build_app

    from gateway.vllm_patches import trim

    page = {(method, path) for methods, path, *_ in documented("Served") for method in methods.split(", ")}
    assert {path: why for paths, why in documented("Not served") for path in paths.split("`, `")} == UNSERVED
    assert routes(api.app) == page - {("GET", "/tokenizer_info")}
    assert api.edge.served == {path for _, path in routes(api.app)}
    # All that makes vLLM mount routes. Its Cohere API needs a package that is not installed.
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(name, "1")
    args = copy.copy(api.state.args)
    for option in ("enable_scale_out", "enable_fault_tolerance", "enable_tokenizer_info_endpoint", "tokens_only"):
        setattr(args, option, True)
    args.profiler_config = ProfilerConfig(profiler="cuda")
    app: FastAPI = build_app(args, ("generate",), api.state.vllm_config.model_config)
    assert {path for _, path in routes(app)} >= UNSERVED.keys()
    trim(app)
    assert routes(app) == page - {("POST", WARM_PATH)}


async def test_other_routes_and_methods_are_errors_with_the_reason(api: Api) -> None:
    for path, why in UNSERVED.items():
        url = path.replace("{response_id}", "resp_1").replace("{adapter_name}", "a")
        for response in (await api.post(url, {}), await api.client.get(url)):
            assert f"{url} is not served: {why}" in openai_error(response, 404, "not_found")
    for path in ("/v1/embeddings", "/no/such/path", "/v1/responses/a/b"):
        message = openai_error(await api.post(path, {"prompt": PROMPT}), 404, "not_found")
        assert f"there is no route POST {path}" in message
    openai_error(await api.client.get("/v1/completions"), 405, "method_not_allowed")
    assert (await api.client.get("/v1/models")).json()["data"][0]["id"] == "demo"


async def test_health_depends_on_the_engine_client(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    response = await api.client.get("/health")
    assert (response.status_code, response.content) == (200, b"")
    monkeypatch.setattr(api.state.engine_client.engine_core, "resources", SimpleNamespace(engine_dead=True))
    assert (await api.client.get("/health")).status_code == 503


# Adapters


async def test_adapters_are_models(api: Api) -> None:
    models = {card["id"]: card for card in (await api.client.get("/v1/models")).json()["data"]}
    assert {name: card["parent"] for name, card in models.items()} == {"demo": None, "sql": "demo", "org/poems": "demo"}
    assert models["sql"]["root"] == "/adapters/sql"
    assert (await api.complete(model="other")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("adapter", ["sql", "org/poems", ""])
async def test_the_adapter_of_a_request_reaches_placement_and_instances(api: Api, adapter: str, stream: bool) -> None:
    model = adapter or "demo"
    for response in (await api.complete(model=model, stream=stream), await api.chat(model=model, stream=stream)):
        answers = events(response) if stream else [response.json()]
        assert {each["model"] for each in answers} == {model}
    requests = [each for worker in api.cluster.workers for each in (*worker.prefills, *worker.decodes)]
    assert len(requests) >= 4
    assert {(each.generation.adapter, each.job.adapter) for each in requests} == {(adapter, adapter)}


async def test_an_adapter_that_is_not_in_the_file_is_refused(api: Api) -> None:
    """Such as one that a resolver of vLLM's finds: no instance has it."""
    with pytest.raises(InvalidRequest, match="adapter new is not in the cluster file"):
        await api.core.add_lora_async(LoRARequest("new", 9, "/new"))


# Answers


async def test_an_answer_has_the_clusters_tokens_and_their_counts(api: Api) -> None:
    body = (await api.complete(return_token_ids=True)).json()
    assert (body["choices"][0]["token_ids"], body["choices"][0]["finish_reason"]) == (answer(PROMPT, 6), "length")
    counts = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert {name: count for name, count in body["usage"].items() if count is not None} == counts
    chunks = events(await api.complete(stream=True, return_token_ids=True))
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"] or ()] == answer(PROMPT, 6)
    body = (await api.complete(n=3, temperature=0.7, return_token_ids=True)).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [answer(PROMPT, 6)] * 3
    assert (body["usage"]["completion_tokens"], len(api.cluster.prefill.prefills)) == (18, 5)


@pytest.mark.parametrize(
    "body",
    [
        {"seed": 5},
        {"presence_penalty": 0.5},
        {"min_tokens": 3},
        {"repetition_penalty": 1.2},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"vllm_xargs": {"mine": 1}},
    ],
)
async def test_an_answer_that_depends_on_earlier_tokens_is_not_carried(api: Api, body: dict[str, Any]) -> None:
    assert (await api.complete(**body)).status_code == 200
    assert not api.cluster.prefill.prefills[0].want_token


async def test_prompt_logprobs_stay_on_one_instance(api: Api) -> None:
    await api.complete(prompt_logprobs=1)
    assert (len(api.cluster.decodes[0].decodes), api.cluster.prefill.prefills) == (1, [])


@pytest.mark.parametrize("path", SHORT)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("carry", [True, False])
async def test_each_api_reports_cached_tokens(
    api: Api, path: str, stream: bool, carry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a loss of the decode instance: the second attempt counts as the first."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    chat = api.state.openai_serving_chat
    for serving in (chat, api.state.openai_serving_completion, api.state.anthropic_serving_messages):
        monkeypatch.setattr(serving, "enable_prompt_tokens_details", True)
    # The plain streams of this gateway were chosen without that option.
    generator = OpenAIServingChat.chat_completion_stream_generator.__get__(chat)
    monkeypatch.setattr(chat, "chat_completion_stream_generator", generator)
    body = {**SHORT[path], "stream": stream, "temperature": 0 if carry else 1}
    if path in PATHS.values():
        body |= {} if carry else {"seed": 1}
        body |= {"stream_options": {"include_usage": True}, "return_token_ids": True} if stream else {}
    for worker in api.cluster.workers:
        worker.held = 3 if worker is api.cluster.prefill else 0  # of the four tokens of the prompt
    if not stream:

        def lost(count: int) -> None:
            if count == 2:
                api.cluster.decodes[0].before_token = None
                api.cluster.prefill.held = 0
                raise EngineFailed("the instance died")

        api.cluster.decodes[0].before_token = lost
    response = await api.post(path, body)
    assert response.status_code == 200, response.text
    cached = re.findall(r'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d+)', response.text)
    assert {"3"} <= set(cached) <= {"0", "3"}


@pytest.mark.parametrize(("tier", "served"), [("flex", "flex"), ("auto", "default"), (None, None)])
async def test_an_answer_names_the_tier_that_was_served(api: Api, tier: str | None, served: str | None) -> None:
    more = {"service_tier": tier} if tier else {}
    for response in (await api.complete(**more), await api.chat(**more)):
        assert response.json()["service_tier"] == served
    response = await api.post("/v1/responses", {**SHORT["/v1/responses"], **more})
    assert response.json()["service_tier"] == (served or "auto")
    assert {report.slo for report in await api.final_reports(3)} == {"batch" if tier == "flex" else "default"}
    assert (await api.complete(stream=True, **more)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_parameters_of_kv_transfers_are_dropped(api: Api, path: str) -> None:
    more: list[dict[str, Any]] = [
        {"vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": "y", "mine": 1}},
        {"vllm_xargs": {"kv_transfer_params": ["x"], "kv_cache_report_mode": "full", "mine": 1}},
        {"kv_transfer_params": {"import": {"transfer_id": "x"}}, "vllm_xargs": {"mine": 1}},
        {"kv_transfer_params": {"do_remote_prefill": True}, "vllm_xargs": {"mine": 1}},
    ]
    for each in more:
        response = await api.post(path, {**SHORT[path], **each}, **{"X-Session-Id": "without effect"})
        assert response.status_code == 200, response.text
    for request in (*api.cluster.prefill.prefills, *api.cluster.decodes[0].decodes):
        assert msgspec.msgpack.decode(request.generation.sampling)["extra_args"] == {"mine": 1}


# Errors

PICTURE = "data:image/png;base64,aGVsbG8="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}
INPUT_IMAGE = {"type": "input_image", "image_url": PICTURE, "detail": "auto"}
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "image_url", "image_url": {"url": PICTURE}}, "processes only text"),
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}, "processes only text"),
    ({"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}}, "processes only text"),
    ({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:9/a.wav"}}, "processes only text"),
    ({"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/a.mp4"}}, "processes only text"),
    ({"type": "image_embeds", "image_embeds": "aGVsbG8="}, ""),  # vLLM has reasons of its own for these
    ({"type": "prompt_embeds", "data": "aGVsbG8="}, ""),
    ({"type": "file", "file": {"file_data": "aGVsbG8="}}, ""),
]
SCHEMA = {"type": "strng"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CANNOT = "cannot be served"


def say(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [  # path, body, status, message
    *(
        ("/v1/completions", body, 400, "")
        for body in (
            {"max_tokens": -1},
            {"max_tokens": 10**9, "kv_transfer_params": {"do_remote_prefill": True}},
            {"temperature": "hot"},
            {"prompt": list(range(300, 3000))},
            {"prompt": None},
            {"prompt": [10**9]},
            {"n": 0},
            {"logprobs": 10**6},
            {"top_p": 7},
            {"prompt": None, "prompt_embeds": "aGVsbG8="},
        )
    ),
    ("/v1/completions", {"model": "other", "kv_transfer_params": {"do_remote_prefill": True}}, 404, ""),
    ("/v1/completions", {"request_id": "\ud800"}, 400, "surrogate"),
    ("/v1/completions", {"temperature": float("nan")}, 400, "temperature must be a finite number"),
    ("/v1/completions", {"structured_outputs": {"grammar": "root ::= ("}}, 400, "grammar"),
    ("/v1/completions", {"prompt": ["a", "b"], "structured_outputs": {"json": SCHEMA}}, 400, "strng"),
    *(
        (path, body, 400, CANNOT)
        for path in PATHS.values()
        for body in ({"priority": -9}, {"routed_experts_prompt_start": 1}, {"watermarking": True})
    ),
    ("/v1/chat/completions", {"response_format": FORMAT}, 400, "strng"),
    ("/v1/chat/completions", {"response_format": FORMAT, "n": 2}, 400, "strng"),
    ("/v1/chat/completions", {"response_format": FORMAT, "logprobs": True}, 400, "strng"),
    *(("/v1/chat/completions", {"messages": say(part)}, 400, message) for part, message in PARTS),
    ("/invocations", {"messages": HELLO, "response_format": FORMAT}, 400, "strng"),
    ("/invocations", {"prompt": PROMPT, "n": 25}, 400, "requests 25 answers"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, 400, "strng"),
    ("/v1/responses", {"priority": 3}, 400, CANNOT),
    ("/v1/responses", {"structured_outputs": {"regex": "(a"}}, 400, "regex"),
    ("/v1/responses", {"input": say(INPUT_IMAGE)}, 400, "processes only text"),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, 400, "strng"),
    ("/v1/messages", {"messages": say(IMAGE)}, 400, "processes only text"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
async def test_a_bad_request_gets_the_same_error_with_and_without_a_stream(
    api: Api, path: str, body: dict[str, Any], status: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    full = {**SHORT.get(path, {}), **body}
    plain = await api.post(path, full)
    assert (plain.status_code, message in plain.text) == (status, True), plain.text
    assert plain.json()["error"]["message"]
    capfd.readouterr()
    streamed = await api.post(path, {**full, "stream": True})
    assert (streamed.status_code, streamed.json()) == (status, plain.json())
    assert streamed.headers["content-type"] == plain.headers["content-type"]
    assert "Traceback" not in "".join(capfd.readouterr())
    assert not api.cluster.prefill.prefills
    await api.idle()


@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize("header", [{"X-Vllm-Priority": "-9"}, {"X-Data-Parallel-Rank": "0"}])
async def test_a_header_that_the_cluster_cannot_follow_is_a_400(api: Api, path: str, header: dict[str, str]) -> None:
    response = await api.post(path, SHORT[path], **header)
    assert (response.status_code, CANNOT in response.text) == (400, True), response.text


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"\xff\xfe", b'{"model": 5'])
async def test_malformed_json_is_a_400(api: Api, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = await api.client.post("/v1/completions", content=content, headers=headers)
    assert (response.status_code, bool(response.json()["error"]["message"])) == (400, True)


async def test_all_lists_of_all_models_stop_at_their_first_bad_element(api: Api) -> None:
    from pydantic import ValidationError

    from gateway.vllm_patches import REQUEST_MODELS

    for model in REQUEST_MODELS:
        name = next(name for name in ("messages", "input", "tokens", "prompt") if name in model.model_fields)
        with pytest.raises(ValidationError) as wrong:
            model.model_validate({"model": "demo", name: [object()] * 50})
        places = {error["loc"][-1] for error in wrong.value.errors() if isinstance(error["loc"][-1], int)}
        assert places <= {0}, model


async def test_a_text_that_cannot_fit_the_model_is_not_tokenised(api: Api) -> None:
    for repeats, fits in ((1, True), (3000, False)):
        response = await api.post("/tokenize", {"prompt": "Hello" * repeats})
        assert (response.status_code, response.json()["count"] <= 2048) == (200, fits)
    chars = 2048 * api.state.engine_client.renderer.tokenizer.max_chars_per_token + 1
    for body in ({"prompt": "a" * chars}, {"messages": [{"role": "user", "content": "a" * chars}]}):
        response = await api.post("/tokenize", body)
        assert (response.status_code, f"the text has {chars} characters" in response.text) == (400, True)
    response = await api.post("/detokenize", {"tokens": [5] * 2049})
    message = "maximum context length is 2048 tokens. However, a prompt has 2049 token ids"
    assert (response.status_code, message in response.text) == (400, True)


def last_error(response: httpx.Response) -> dict[str, Any]:
    """The error that a stream ends with, in any API's shape."""
    lines = [line for line in response.text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    error: dict[str, Any] = msgspec.json.decode(lines[-1].removeprefix("data: "))["error"]
    assert error["type"]
    return error


@pytest.fixture
def decodes(api: Api) -> Iterator[list[Any]]:
    """The decode instances; a test may clear the cluster's list."""
    workers = list(api.cluster.decodes)
    yield workers
    api.cluster.decodes[:] = workers


@pytest.mark.parametrize("path", SHORT)
async def test_a_job_without_an_instance_is_a_503_and_a_typed_error_of_a_stream(
    api: Api, decodes: list[Any], path: str
) -> None:
    api.cluster.decodes.clear()
    api.cluster.no_route = Busy("one is starting")  # also where a scheduler calls it a matter of load
    placed = len(api.cluster.places)
    response = await api.post(path, SHORT[path])
    assert (response.status_code, int(response.headers["retry-after"]) >= 1) == (503, True), response.text
    assert "no instance took the job for 0.5 s" in response.json()["error"]["message"]
    assert len(api.cluster.places) - placed < 8, "it has spent its patience of 0.5 s more than once"
    streamed = await api.post(path, {**SHORT[path], "stream": True})
    assert last_error(streamed)["message"].startswith("no instance took the job for 0.5 s")


@pytest.mark.parametrize("path", SHORT)
async def test_a_stream_that_fails_after_tokens_ends_in_a_typed_error(api: Api, decodes: list[Any], path: str) -> None:
    def lose_all(count: int) -> None:
        if count == 2:
            api.cluster.decodes.clear()
            raise RuntimeError("a bug in the engine")

    for worker in decodes:
        worker.before_token = lose_all
    response = await api.post(path, {**SHORT[path], "stream": True, "temperature": 0})
    assert response.text.count("data: ") >= 3
    assert "validation" not in last_error(response)["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_reveals_nothing_of_our_insides(api: Api, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    async def broken(_: object) -> None:
        raise AttributeError("'Secret' object has no attribute 'inside'")

    monkeypatch.setattr(api.core, "add_request_async", broken)
    response = await api.complete(stream=stream)
    assert "Secret" not in response.text
    if not stream:
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    await api.idle()


# Batches

CONVERSATIONS = [[{"role": "user", "content": text}] for text in ("Hello", "How are you?", "Bye")]


async def batch(api: Api, **body: Any) -> httpx.Response:
    return await api.post(BATCH, {"messages": CONVERSATIONS, "max_tokens": 6, "temperature": 0, **body})


async def test_each_conversation_of_a_batch_is_a_request(api: Api) -> None:
    response = await batch(api, service_tier="flex")
    assert (response.status_code, response.json()["service_tier"]) == (200, "flex")
    assert {report.slo for report in await api.final_reports(3)} == {"batch"}
    alone = [(await api.chat(messages=messages)).json() for messages in CONVERSATIONS]
    choices = response.json()["choices"]
    expected = [(index, each["choices"][0]["message"]) for index, each in enumerate(alone)]
    assert [(choice["index"], choice["message"]) for choice in choices] == expected
    total = sum(each["usage"]["total_tokens"] for each in alone)
    assert response.json()["usage"]["total_tokens"] == total
    assert len({report.job_id for report in await api.final_reports(6)}) == 6


async def test_a_batch_is_refused_as_a_whole(api: Api) -> None:
    response = await batch(api, messages=CONVERSATIONS * 9)
    assert response.status_code == 400
    assert "requests 27 answers (prompts, conversations or items, times n)" in response.json()["error"]["message"]
    response = await batch(api, messages=[[{"role": "user", "content": "a"}] * 1500] * 3)
    assert (response.status_code, "max_items_per_body allows 4096" in response.text) == (400, True)
    assert (await batch(api, messages=[[], []])).status_code == 400
    assert (await batch(api, service_tier="nope")).status_code == 400
    admission = api.admission.for_class("default")
    with admission.admit("other") as first, admission.admit("another") as second:  # 42 of 64 jobs wait already
        first.claim(20)
        second.claim(22)
        assert (await batch(api, messages=CONVERSATIONS * 8)).status_code == 429
    assert not api.cluster.prefill.prefills
    await api.idle()


async def test_a_batch_ends_with_its_client_or_its_first_failure(api: Api) -> None:
    engine = Engine()
    hang = asyncio.Event()

    async def before(_: object) -> None:
        if hang.is_set():
            await asyncio.Event().wait()
        raise InvalidRequest("it cannot be")

    engine.before = before
    with api.running_jobs(engine):
        response = await batch(api)
        assert (response.status_code, "it cannot be" in response.text) == (400, True)
        await api.idle()
        engine.jobs.clear()
        hang.set()
        running = asyncio.create_task(batch(api))
        await until(lambda: len(engine.jobs) == 3)
        running.cancel()
        await api.idle()


async def test_items_to_score_and_sagemakers_route_are_requests(api: Api) -> None:
    body = {"query": "Is it?", "items": ["yes", "no"], "label_token_ids": [300, 301]}
    response = await api.post("/generative_scoring", body)
    assert len(api.cluster.prefill.prefills) == 2, response.text
    many = await api.post("/generative_scoring", {**body, "items": ["yes"] * 25})
    assert (many.status_code, "requests 25 answers" in many.text) == (400, True)
    chat = {"messages": HELLO, "max_tokens": 6, "temperature": 0, "service_tier": "flex"}
    response = await api.post("/invocations", chat)
    assert response.json()["choices"][0]["message"] == (await api.chat()).json()["choices"][0]["message"]
    assert response.json()["service_tier"] == "flex"


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


# Request ids

ODD_IDS = [  # as proxies and gateways make them
    "4257d51f-61c7-49d4-b78d-773e19a2c461/g6hr",
    "7f1a2f2b-0d1f-4c60-9a53-1a3a1c0f5f2e#17",
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
    ("/v1/chat/completions", "chatcmpl-", {"messages": HELLO}),
    (BATCH, "chatcmpl-", {"messages": [HELLO]}),
    ("/v1/messages", "chatcmpl-", {"messages": HELLO}),
]


def ids_in(response: httpx.Response) -> set[str]:
    """All ids in an answer, or in the events of a stream."""
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
    messages = [msgspec.json.decode(line) for line in lines] if lines else [response.json()]
    assert not any("error" in each for each in messages), response.text
    return {each for each in ((each.get("message") or each).get("id") for each in messages) if each is not None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prefix", "body"), WITH_IDS)
async def test_any_request_id_comes_back_as_it_was_sent(
    api: Api, path: str, prefix: str, body: dict[str, Any], stream: bool
) -> None:
    """A header's bytes are read as Latin-1, as HTTP says."""
    full = {"max_tokens": 2, "temperature": 0, "stream": stream, **body}
    sent = 0
    for name in ODD_IDS:
        for encoding in ("latin-1", "utf-8"):
            raw = name.encode(encoding)
            response = await api.client.post(path, json={"model": "demo", **full}, headers={b"X-Request-Id": raw})
            assert ids_in(response) == {prefix + raw.decode("latin-1")}
            sent += 1
    for name in [*ODD_IDS, *IN_BODIES] if path != "/v1/messages" else []:
        response = await api.post(path, {**full, "request_id": name})
        assert ids_in(response) == {prefix + name}
        assert "x-evil" not in response.headers
        sent += 1
    jobs = [report.job_id for report in await api.final_reports(sent)]
    assert all(re.fullmatch(r"[\w.:=+@-]{1,160}", job, re.ASCII) for job in jobs)
    assert all(any(job_name(name)[:100] in job for job in jobs) for name in ODD_IDS)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_id_of_a_request_is_a_part_of_its_jobs(api: Api, stream: bool) -> None:
    await api.complete(request_id="team-7:42")
    body = {**SHORT["/v1/responses"], "stream": stream, "request_id": "a/b#17"}
    response = await api.post("/v1/responses", body, **{"X-Request-Id": "c, d"})
    assert (response.status_code, "a/b#17" in response.text) == (200, True)
    first, second = (report.job_id for report in await api.final_reports(2))
    assert first.startswith("cmpl-team-7:42-0-")
    assert second.startswith("a=2Fb=2317")


async def test_requests_with_one_id_do_not_meet(api: Api) -> None:
    prompts = [[400 + n, 401, 402] for n in range(12)]
    name = "host/" + "x" * 300
    sent = [api.complete(prompt=each, return_token_ids=True, request_id=name) for each in prompts]
    answers = [response.json()["choices"][0]["token_ids"] for response in await asyncio.gather(*sent)]
    assert answers == [answer(prompt, 6) for prompt in prompts]
    assert len({report.job_id for report in await api.final_reports(12)}) == 12


@pytest.mark.parametrize("name", [b"uuid/suffix", b"a, b", b"x" * 300, "\u00fc".encode(), b"\xfc", b"#{};|"])
async def test_vllms_request_id_header_works_for_any_id_and_in_refusals(
    api: Api, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    """`enable_request_id_headers` adds this middleware of vLLM's."""
    from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware

    monkeypatch.setattr(api.edge, "app", XRequestIdMiddleware(api.app))
    monkeypatch.setattr(api.edge, "fast_path", None)
    for more, status in (({}, 200), ({"response_format": FORMAT}, 400)):
        for stream in (False, True):
            body = {"model": "demo", "messages": HELLO, "max_tokens": 6, "stream": stream, **more}
            response = await api.client.post(PATHS["chat"], json=body, headers={b"X-Request-Id": name})
            assert response.status_code == status
            assert [value for key, value in response.headers.raw if key.lower() == b"x-request-id"] == [name]
