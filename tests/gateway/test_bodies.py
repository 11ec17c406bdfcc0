"""Bodies of requests: what the edge reads of them is what vLLM sees, and their limits hold."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.admission import current_request
from gateway.request_hints import RESPONSES, RequestHints, hints_of, parse, require_few_items
from shared.domain.job import Phase
from shared.errors import InvalidRequest
from tests.gateway.api import PROMPT, Api
from tests.gateway.cluster import until

CHAT, COMPLETIONS, BATCH = "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/batch"

# Hints: what the edge reads


def read(body: bytes | dict[str, Any], path: str = COMPLETIONS) -> RequestHints:
    parsed = parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    return RequestHints() if parsed is None else hints_of(path, parsed.value)


@pytest.mark.parametrize(
    ("jobs", "bodies"),
    [
        (1, [b'{"messages": [{}, {}]}', b'{"prompt": "a"}', b'{"prompt": null, "n": null}', b'{"prompt": [1, 2, 3]}']),
        (1, [b'{"prompt": ["1", 2, 3]}', b'{"prompt": []}', b'{"n": NaN}', b'{"n": -3}', b'{"n": {}}', b'{"n": true}']),
        (1, [b'{"n": 1e400}', b"", b"[]", b"{", b'{"n": 7} 8', b"\xff\xfe", b'{"n": 7, "x": 1' + b"0" * 5000 + b"}"]),
        (2, [b'{"prompt": ["a", "b"]}', b'{"prompt_embeds": ["x", "y"]}']),
        (6, [b'{"prompt": [ [1], [2, 3], [4] ], "n": 2}']),
        (7, [b'{"n": 7.0}', b'{"n": "7"}', b'{"n": "7.0"}', b'{"n": " 7 "}', b'{"n": 1, "n": 7}', b'{"\\u006e": 7}']),
        (7, [b'{"n": 7, "x": NaN}', b'{"n": 7, "x": -Infinity}', b'{"n": 7, "user": "\\ud800"}']),
        (7, [b'{"n": 7, "user": "\xed\xa0\x80"}', b'\xef\xbb\xbf{"n": 7}', '{"n": 7}'.encode("utf-16")]),
        (7, ['{"n": 7}'.encode("utf-16-be"), '{"n": 7}'.encode("utf-32"), b'{"n": 7, "x": 1' + b"0" * 4000 + b"}"]),
        (7000, [b'{"n": "7_000"}']),
    ],
)
def test_jobs_of_a_body(jobs: int, bodies: list[bytes]) -> None:
    for body in bodies:
        assert read(body).jobs == jobs, body


@pytest.mark.parametrize(
    ("path", "body", "jobs"),
    [
        (BATCH, {"messages": [[{}], [{}], [{}]]}, 3),
        (BATCH, {"messages": [[{}], [{}]], "n": 4}, 8),
        (BATCH, {"messages": "x"}, 1),
        (CHAT, {"messages": [{}, {}], "n": 4, "prompt": ["a", "b"]}, 4),
        ("/generative_scoring", {"query": "q", "items": ["a", "b"], "n": 9}, 2),
        ("/invocations", {"prompt": ["a", "b"], "n": 4}, 8),
        (RESPONSES, {"n": 500}, 1),
        ("/tokenize", {"prompt": "a", "n": 500}, 1),
        ("/of/a/plugin", {"prompt": ["a", "b"], "n": 4}, 8),
    ],
)
def test_jobs_of_a_route(path: str, body: dict[str, Any], jobs: int) -> None:
    assert read(body, path).jobs == jobs


@pytest.mark.parametrize("body", [b"[" * 5000 + b"]" * 5000, b'{"n":' + b"[" * 5000 + b"]" * 5000 + b"}"])
def test_a_body_that_is_nested_too_deeply_is_refused(body: bytes) -> None:
    """How deep the parser gets depends on the stack below it, which differs between the edge and vLLM."""
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        read(body)


def test_service_tiers_of_bodies() -> None:
    for body in (b'{"service_tier": "flex", "n": {}}', '{"service_tier": "flex", "x": NaN}'.encode("utf-16")):
        assert read(body).tier == "flex"
    for body, tier in ((b'{"service_tier": 3}', 3), (b'{"prompt": "a"}', None), (b'{"service_tier": "flex"', None)):
        assert read(body).tier == tier
    assert read(b'{"service_tier": "flex", "n": 2, "prompt": ["a", "b"]}') == RequestHints(4, "flex")


def test_the_parsed_value_is_for_one_reader() -> None:
    parsed = parse(b'{"n": 7}')
    assert parsed is not None
    assert (parsed.take(), parsed.taken, parsed.value) == ({"n": 7}, True, None)


MESSAGE = {"role": "user", "content": 'a, "b" [c] \\\\'}
TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le")


def say(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("path", "body", "few"),
    [
        (CHAT, {"messages": [MESSAGE] * 60}, True),
        (CHAT, say('a,[{"' * 10_000), True),
        (CHAT, say([MESSAGE] * 60), True),
        (CHAT, {"messages": [MESSAGE], "tools": [TOOL] * 32}, True),
        (COMPLETIONS, {"prompt": [1] * 500}, True),
        (COMPLETIONS, {"prompt": [[1] * 500] * 60}, True),
        (COMPLETIONS, {"prompt": ["a"] * 60}, True),
        (COMPLETIONS, {"prompt": [1] * 501, "truncate_prompt_tokens": 400}, True),
        ("/detokenize", {"tokens": [1] * 500}, True),
        (RESPONSES, {"input": [MESSAGE] * 19}, True),
        (RESPONSES, {"input": "a" * 10_000}, True),
        (CHAT, {"messages": [MESSAGE] * 101}, False),
        (CHAT, {"messages": [1] * 101}, False),
        (CHAT, {"messages": [[]] * 101}, False),
        (CHAT, say([MESSAGE] * 101), False),
        (CHAT, {"messages": [MESSAGE], "tools": [TOOL] * 34}, False),
        (CHAT, {"messages": [MESSAGE], "logit_bias": {str(n): 1 for n in range(150)}}, False),
        (CHAT, {"messages": [MESSAGE], "response_format": {"json": {"enum": ["a"] * 101}}}, False),
        (COMPLETIONS, {"prompt": ["a"] * 101}, False),
        (COMPLETIONS, {"prompt": [[1]] * 101}, False),
        (COMPLETIONS, {"prompt": [[]] * 101}, False),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * 101}, False),
        (RESPONSES, {"input": [MESSAGE] * 21}, False),
        (RESPONSES, {"input": [{}] * 5000}, False),
    ],
)
def test_bodies_may_have_so_many_items(path: str, body: dict[str, Any], few: bool) -> None:
    odd = {**body, "x": float("nan"), "user": "\ud800 \\ud800"}
    for text in (json.dumps(body), json.dumps(body, indent=2), json.dumps(odd)):
        for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32-be"):
            if few:
                require_few_items(path, text.encode(encoding), 100, 500)
                continue
            with pytest.raises(InvalidRequest, match=r"at least [\d]+ items .*max_items_per_body allows 100"):
                require_few_items(path, text.encode(encoding), 100, 500)


@pytest.mark.parametrize("body", [{"prompt": [1] * 501}, {"prompt": [[1], [1] * 501, [1]]}, {"tokens": [1] * 501}])
def test_token_ids_are_bounded_by_the_context(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"context length is 500 tokens\. However, a prompt has 501 token ids"):
        require_few_items(COMPLETIONS, json.dumps(body).encode(), 100, 500)


@pytest.mark.parametrize("body", [b"[" * 5000, b'{"a":' + b'"",' * 5000, b'"' * 5001, b"{" * 5000, b"\\" * 5001])
def test_bytes_that_are_no_json_are_counted_without_an_error_of_their_own(body: bytes) -> None:
    with suppress(InvalidRequest):
        require_few_items(COMPLETIONS, body, 100, 500)


# What vLLM sees


class Handlers:
    """In the place of vLLM's: they keep their request, and answer an error."""

    def __init__(self, api: Api) -> None:
        transport = httpx.ASGITransport(app=api.app, raise_app_exceptions=False)
        self.clients = (api.client, httpx.AsyncClient(transport=transport, base_url="http://vllm"))
        self.requests: list[Any] = []
        self.jobs, self.tier = 0, ""

    async def handle(self, request: Any, _: Any = None) -> Any:
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

        state = current_request.get(None)
        if state is not None:
            self.jobs, self.tier = state._claimed, state.tier
        self.requests.append(request)
        return create_error_response("handled")

    async def both(self, path: str, body: bytes, content_type: str) -> list[tuple[httpx.Response, list[Any]]]:
        """The response and the handled requests, through the edge and with vLLM alone."""
        headers = {"Content-Type": content_type} if content_type else {}
        found = []
        for client in self.clients:
            self.requests = []
            found.append((await client.post(path, content=body, headers=headers), self.requests))
        return found


@pytest_asyncio.fixture(loop_scope="session")
async def handlers(api: Api, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Handlers]:
    handlers = Handlers(api)
    for serving, method in (
        (api.state.openai_serving_chat, "create_chat_completion"),
        (api.state.openai_serving_chat_batch, "create_batch_chat_completion"),
        (api.state.openai_serving_completion, "create_completion"),
    ):
        monkeypatch.setattr(serving, method, handlers.handle)
    yield handlers
    await handlers.clients[1].aclose()


JSON = "application/json"
TYPES = [*[JSON] * 10, f"{JSON}; charset=utf-16", JSON.upper(), "text/plain", "application/x+json", ""]
WORDS = st.sampled_from(["a", "", "\ud800", "\udc00\ud800", "é", "\U0001f600", "\x00", "{", '"n":500', "\\", "\ufeff"])
SPECIAL = [float("nan"), float("inf"), -float("inf"), 1e400, 10**30, -0.0, 25.0, 24.5, True, "25", "25.0", " 9 ", None]
NUMBERS = st.one_of(st.integers(-2, 40), st.sampled_from(SPECIAL))
VALUES = st.recursive(
    st.one_of(WORDS, NUMBERS),
    lambda part: st.one_of(st.lists(part, max_size=3), st.dictionaries(WORDS, part, max_size=3)),
    max_leaves=6,
)
SAID = st.fixed_dictionaries({"role": st.just("user"), "content": WORDS})
TEXTS = ["a", "\ud800", [1, 2], [[1], [2, 3]], ["a"] * 24, ["a"] * 25, [[1]] * 13, ["1", 2.0], [True]]
PROMPTS = st.one_of(st.sampled_from(TEXTS), st.lists(WORDS, max_size=30), VALUES)
COUNT = st.one_of(st.sampled_from([1, 2, 12, 24, 25, 500, 2.0, "2", "2.0", " 2 ", True, None]), NUMBERS)
TIER = st.one_of(st.sampled_from(["flex", "auto", "default", "scale", "nope", "\ud800", None]), VALUES)
NAMES = st.sampled_from(["x", "user", "n", "service_tier", "request_id", "prompt", "stream"])
CONVERSATION = st.lists(SAID, min_size=1, max_size=2)
FIRST = {
    COMPLETIONS: ("prompt", PROMPTS),
    CHAT: ("messages", CONVERSATION),
    BATCH: ("messages", st.lists(CONVERSATION, min_size=1, max_size=26)),
    "/invocations": ("prompt", PROMPTS),
}
ODDITIES = st.sampled_from(["n", "tier", "field", "twice", "escape", "deep", "long", "ends", "bytes"])


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """The bytes of a request for `path`, most of them legal, with something odd about many."""
    name, values = FIRST[path]
    fields: list[tuple[str, Any]] = [("model", "demo"), (name, draw(values))]
    odd = draw(st.sets(ODDITIES, max_size=4))
    if "n" in odd:
        fields.append(("n", draw(COUNT)))
    if "tier" in odd:
        fields.append(("service_tier", draw(TIER)))
    if "field" in odd:
        fields.append(draw(st.tuples(NAMES, VALUES)))
    fields = draw(st.permutations(fields))
    if "twice" in odd:
        fields.append((fields[0][0], draw(st.one_of(COUNT, TIER, PROMPTS))))
    if "deep" in odd:
        fields.append(("deep", json.loads("[" * 50 + "]" * 50)))
    escaped = draw(st.booleans())
    text = "{" + ",".join(f"{json.dumps(key)}:{json.dumps(each, ensure_ascii=escaped)}" for key, each in fields) + "}"
    if "escape" in odd:
        text = text.replace('"n"', '"\\u006e"').replace('"service', '"\\u0073ervice')
    if "deep" in odd:
        depth = draw(st.sampled_from([50, 400, 3000]))
        text = text.replace("[" * 50 + "]" * 50, "[" * depth + "]" * depth)
    if "long" in odd:
        text = text[:-1] + ',"long":1' + "0" * draw(st.sampled_from([400, 4290, 4400])) + "}"
    if "ends" in odd:
        ends = [text[:-1], f"{text}}}", f" {text}\n", f"[{text}]", f"{text} 1", "\ufeff" + text, ""]
        text = draw(st.sampled_from(ends))
    body = text.encode(draw(st.sampled_from(ENCODINGS)), "surrogatepass")
    if "bytes" in odd and body:
        at = draw(st.integers(0, len(body) - 1))
        body = body[:at] + draw(st.binary(max_size=2)) + body[at + draw(st.integers(0, 1)) :]
    return body


def without_drawn_id(request: Any) -> str:
    own = request.request_id if "request_id" in request.model_fields_set else ""
    return repr(request.model_copy(update={"request_id": own}))


def jobs_of(request: Any) -> int:
    """Answers of a request of vLLM's."""
    prompt, messages = getattr(request, "prompt", None), getattr(request, "messages", None)
    count = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    if messages and isinstance(messages[0], list):
        count = len(messages)
    return count * max(1, request.n or 1)


class TestThroughTheApi:
    pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

    @settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    @given(data=st.data())
    async def test_the_edge_and_vllm_see_the_same_body(self, handlers: Handlers, api: Api, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from([*FIRST]))
        body, content_type = data.draw(bodies(path)), data.draw(st.sampled_from(TYPES))
        (response, requests), (reference, alone) = await handlers.both(path, body, content_type)
        assert response.status_code == 400, response.text
        # With which the edge itself refuses a body.
        own = ("the body requests", "unknown service_tier", "nested too deeply", "max_items_per_body")
        if any(text in response.text for text in own):
            assert not requests
            return
        if reference.status_code == 500:  # SageMaker's wrapper in vLLM, of what is nested too deeply for its stack
            assert path == "/invocations"
            return
        assert (reference.status_code, reference.text) == (400, response.text)
        assert [*map(without_drawn_id, requests)] == [*map(without_drawn_id, alone)]
        for request in requests:
            assert handlers.jobs == jobs_of(request) <= api.settings.max_jobs_a_body
            tier = getattr(request, "service_tier", None)
            assert handlers.tier == ("default" if tier == "auto" else tier or "")
        assert api.admission.jobs == 0

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize(
        ("odd", "encoding"),
        [
            ({"x": float("nan")}, "utf-8"),
            ({"user": "\ud800"}, "utf-8"),
            ({}, "utf-8-sig"),
            ({"x": float("nan")}, "utf-16"),
            ({}, "utf-32-be"),
        ],
    )
    async def test_limits_hold_for_odd_json(self, api: Api, odd: dict[str, Any], encoding: str, stream: bool) -> None:
        async def post(**body: Any) -> httpx.Response:
            full = {"model": "demo", "prompt": "a", "max_tokens": 4, "stream": stream, **body, **odd}
            text = json.dumps(full).encode(encoding)
            return await api.client.post(COMPLETIONS, content=text, headers={"Content-Type": JSON})

        for body, message in (
            ({"n": 25, "temperature": 1}, "requests 25 answers"),
            ({"service_tier": "nope"}, "unknown service_tier"),
            ({"stop": [""] * 5000}, "max_items_per_body"),
            ({"prompt": [1] * 3000}, "context length"),
        ):
            response = await post(**body)
            assert (response.status_code, message in response.text) == (400, True), response.text
        assert not api.cluster.prefill.prefills
        assert (await post(service_tier="flex")).status_code == 200
        assert {report.slo for report in await api.final_reports(1)} == {"batch"}
        await api.idle()

    @pytest.mark.parametrize("body", [{"n": 24, "temperature": 1}, {"prompt": [PROMPT] * 24}])
    async def test_jobs_of_one_body_take_turns_and_others_need_not_wait(self, api: Api, body: dict[str, Any]) -> None:
        held = Held(api)
        large = asyncio.create_task(api.complete(**body, return_token_ids=True))
        assert await settled(lambda: len(held.prefills), 4) == 4
        small = asyncio.create_task(api.complete())
        assert await settled(lambda: len(held.prefills), 5) == 5
        held.go.set()
        assert (await small).status_code == 200
        assert (len((await large).json()["choices"]), len(held.prefills)) == (24, 25)
        await api.idle()
        await api.cluster.prefill.releases(25)  # else the next test would count them

    async def test_jobs_end_with_their_client(self, api: Api) -> None:
        held = Held(api)
        for send in (api.complete, api.chat):
            count = len(held.prefills) + 4
            running = asyncio.create_task(send(n=24, temperature=1))
            assert await settled(lambda count=count: len(held.prefills), count) == count
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await api.idle()
        held.go.set()
        assert await settled(lambda: len(api.cluster.prefill.released), 8) == 8
        assert {each.transfer_id for each in held.prefills} == {*api.cluster.prefill.released}

    @pytest.mark.parametrize("stream", [False, True])
    async def test_waiting_prompt_tokens_are_limited(
        self, api: Api, stream: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held, refusals = Held(api), list[tuple[str, str]]()
        monkeypatch.setattr(api.core, "on_refused", lambda slo, code: refusals.append((slo, code)))
        long = [400 + number % 50 for number in range(2000)]
        running = [asyncio.create_task(api.complete(prompt=long)) for _ in range(4)]
        assert await settled(lambda: len(held.prefills), 4) == 4
        refused = await api.complete(prompt=[long, long], stream=stream)  # one of them would fit
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert "10000" in refused.json()["error"]["message"]
        assert refusals == [("default", "busy")]
        held.go.set()
        assert {(await task).status_code for task in running} == {200}
        await api.idle()

    async def test_one_failed_job_of_a_body_ends_the_others(self, api: Api) -> None:
        decode, jobs = api.cluster.decodes[0], iter((1, 2, 3))

        def second_fails(number: int) -> Any:
            if number == 0 and next(jobs) == 2:
                raise InvalidRequest("this one cannot be computed")
            return asyncio.Event().wait()

        decode.before_token = second_fails
        response = await api.complete(n=3, temperature=1)
        assert (response.status_code, "cannot be computed" in response.json()["error"]["message"]) == (400, True)
        phases = Counter(report.phase for report in await api.final_reports(3))
        assert phases == {Phase.FAILED: 1, Phase.CANCELLED: 2}

    async def test_a_job_whose_turn_does_not_come_ends_with_its_deadline(
        self, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(api.core, "_settings", api.core._settings.model_copy(update={"job_timeout_s": 0.3}))
        held = Held(api)
        response = await api.complete(n=6, temperature=1)
        assert response.status_code == 504
        assert len(held.prefills) <= 4  # fewer where a busy machine had the time pass before they were there
        await api.idle()


class Held:
    """Prefills that wait for `go`."""

    def __init__(self, api: Api) -> None:
        self.go = asyncio.Event()
        self.prefills = api.cluster.prefill.prefills
        api.cluster.prefill.before_token = lambda _: self.go.wait()


async def settled(count: Callable[[], int], expected: int) -> int:
    """The count when it has reached `expected` and other requests have had their turn on the loop."""
    await until(lambda: count() >= expected)
    for _ in range(50):
        await asyncio.sleep(0)
    return count()
