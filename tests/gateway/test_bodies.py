"""What the edge has decided about is what vLLM sees, whatever body a client sends."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.admission import current_request
from shared.domain.job import Phase
from shared.errors import InvalidRequest
from tests.gateway.api import PROMPT, Api, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations")
# With which the edge itself refuses a body.
OWN = ("the body requests", "unknown service_tier", "nested too deeply", "max_items_per_body")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le")
TYPES = (
    "application/json",
    "application/json; charset=utf-16",
    "APPLICATION/JSON",
    "text/plain",
    "application/x+json",
    "",
)


@dataclass
class Seen:
    """What vLLM's handlers got, and the edge had settled."""

    requests: list[Any] = field(default_factory=list)
    jobs: int = 0
    tier: str = ""


class Handlers:
    """In the place of vLLM's: they take a request, and answer an error that says so."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.seen = Seen()
        self.direct = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=api.app, raise_app_exceptions=False), base_url="http://vllm"
        )

    async def take(self, request: Any, _: Any = None) -> Any:
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

        who = current_request.get(None)
        if who is not None:
            self.seen.jobs, self.seen.tier = who._claimed, who.tier
        self.seen.requests.append(request)
        return create_error_response("taken")

    async def both(self, path: str, body: bytes, content_type: str) -> tuple[Any, Seen, Any, Seen]:
        """The answer through the edge and vLLM's alone, each with what was seen."""
        headers = {"Content-Type": content_type} if content_type else {}
        answers: list[Any] = []
        for client in (self.api.client, self.direct):
            self.seen = Seen()
            answers += [await client.post(path, content=body, headers=headers), self.seen]
        return answers[0], answers[1], answers[2], answers[3]


@pytest_asyncio.fixture(loop_scope="session")
async def handlers(api: Api, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Handlers]:
    made = Handlers(api)
    state = api.app.state
    for serving, method in (
        (state.openai_serving_chat, "create_chat_completion"),
        (state.openai_serving_chat_batch, "create_batch_chat_completion"),
        (state.openai_serving_completion, "create_completion"),
    ):
        monkeypatch.setattr(serving, method, made.take)
    yield made
    await made.direct.aclose()


WORDS = st.sampled_from(["a", "", "\ud800", "\udc00\ud800", "é", "\U0001f600", "\x00", "{", '"n":500', "\\", "\ufeff"])
SPECIAL = [float("nan"), float("inf"), -float("inf"), 1e400, 10**30, -0.0, 25.0, 24.5, True, "25", "25.0", " 9 ", None]
NUMBERS = st.one_of(st.integers(-2, 40), st.sampled_from(SPECIAL))
VALUES = st.recursive(
    st.one_of(WORDS, NUMBERS),
    lambda part: st.one_of(st.lists(part, max_size=3), st.dictionaries(WORDS, part, max_size=3)),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries({"role": st.just("user"), "content": WORDS})
PROMPTS = st.one_of(
    st.sampled_from(["a", "\ud800", [1, 2], [[1], [2, 3]], ["a"] * 24, ["a"] * 25, [[1]] * 13, ["1", 2.0], [True]]),
    st.lists(WORDS, max_size=30),
    VALUES,
)
COUNT = st.one_of(st.sampled_from([1, 2, 12, 24, 25, 500, 2.0, "2", "2.0", " 2 ", True, None]), NUMBERS)
TIER = st.one_of(st.sampled_from(["flex", "auto", "default", "scale", "nope", "\ud800", None]), VALUES)
MESSAGES = {
    "/v1/chat/completions": st.lists(MESSAGE, min_size=1, max_size=2),
    "/v1/chat/completions/batch": st.lists(st.lists(MESSAGE, min_size=1, max_size=2), min_size=1, max_size=26),
}
ODD_FIELDS = st.tuples(st.sampled_from(["x", "user", "n", "service_tier", "request_id", "prompt", "stream"]), VALUES)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """The bytes of a request for `path`, most of them legal, with something odd about many."""
    fields: list[tuple[str, Any]] = [("model", "demo")]
    if path in MESSAGES:
        fields.append(("messages", draw(MESSAGES[path])))
    else:
        fields.append(("prompt", draw(PROMPTS)))
    odd = draw(
        st.sets(st.sampled_from(["n", "tier", "field", "twice", "escape", "deep", "long", "ends", "bytes"]), max_size=4)
    )
    if "n" in odd:
        fields.append(("n", draw(COUNT)))
    if "tier" in odd:
        fields.append(("service_tier", draw(TIER)))
    if "field" in odd:
        fields.append(draw(ODD_FIELDS))
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
        text = draw(
            st.sampled_from([text[:-1], f"{text}}}", f" {text}\n", f"[{text}]", f"{text} 1", "\ufeff" + text, ""])
        )
    body = text.encode(draw(st.sampled_from(ENCODINGS)), "surrogatepass")
    if "bytes" in odd and body:
        at = draw(st.integers(0, len(body) - 1))
        body = body[:at] + draw(st.binary(max_size=2)) + body[at + draw(st.integers(0, 1)) :]
    return body


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
async def test_the_edge_and_vllm_see_the_same_body(handlers: Handlers, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(PATHS))
    body = data.draw(bodies(path))
    content_type = data.draw(st.sampled_from([TYPES[0]] * 9 + [*TYPES]))
    answer, seen, reference, alone = await handlers.both(path, body, content_type)
    assert answer.status_code == 400, answer.text
    if any(own in answer.text for own in OWN):
        assert not seen.requests
        return
    if reference.status_code == 500:  # SageMaker's wrapper in vLLM, of what is nested too deeply for its stack
        assert path == "/invocations"
        return
    assert (reference.status_code, reference.text) == (400, answer.text)
    assert [*map(told, seen.requests)] == [*map(told, alone.requests)]
    for request in seen.requests:
        assert seen.jobs == jobs_of(request) <= handlers.api.settings.max_jobs_a_body
        tier = getattr(request, "service_tier", None)
        assert seen.tier == ("default" if tier == "auto" else tier or "")
    assert handlers.api.admission.jobs == 0


def told(request: Any) -> str:
    """A request of vLLM's without what is drawn for each."""
    own = request.request_id if "request_id" in request.model_fields_set else ""
    return repr(request.model_copy(update={"request_id": own}))


def jobs_of(request: Any) -> int:
    """Answers of a request of vLLM's."""
    prompt = getattr(request, "prompt", None)
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    count = len(prompt) if several and prompt is not None else 1
    if request.messages and isinstance(request.messages[0], list) if hasattr(request, "messages") else False:
        count = len(request.messages)
    return count * max(1, request.n or 1)


ODD: list[tuple[str, dict[str, Any], str]] = [
    ("NaN", {"x": float("nan")}, "utf-8"),
    ("half a pair", {"user": "\ud800"}, "utf-8"),
    ("a mark", {}, "utf-8-sig"),
    ("UTF-16", {}, "utf-16"),
    ("UTF-32", {}, "utf-32-be"),
]


@pytest.mark.parametrize(("name", "odd", "encoding"), ODD)
async def test_every_limit_holds_for_odd_json(api: Api, name: str, odd: dict[str, Any], encoding: str) -> None:
    async def post(**body: Any) -> httpx.Response:
        full = {"model": "demo", "prompt": "a", "max_tokens": 4, **body, **odd}
        text = json.dumps(full).encode(encoding)
        return await api.client.post("/v1/completions", content=text, headers={"Content-Type": "application/json"})

    many = await post(n=25, temperature=1)
    assert (many.status_code, "requests 25 answers" in many.text) == (400, True)
    unknown = await post(service_tier="nope")
    assert (unknown.status_code, "unknown service_tier" in unknown.text) == (400, True)
    items = await post(stop=[""] * 5000)
    assert (items.status_code, "max_items_per_body" in items.text) == (400, True)
    ids = await post(prompt=[1] * 3000)
    assert (ids.status_code, "context length" in ids.text) == (400, True)
    assert not api.cluster.prefill.prefills
    flex = await post(service_tier="flex")
    assert (flex.status_code, flex.json()["service_tier"]) == (200, "flex")
    assert {report.slo for report in await api.final_reports(1)} == {"batch"}


async def test_a_stream_with_odd_json_goes_the_short_way_with_the_same_limits(api: Api) -> None:
    async def post(**body: Any) -> httpx.Response:
        full = {"model": "demo", "prompt": "a", "max_tokens": 4, "stream": True, "x": float("nan"), **body}
        text = json.dumps(full).encode("utf-16")
        return await api.client.post("/v1/completions", content=text, headers={"Content-Type": "application/json"})

    assert (await post()).status_code == 200
    assert (await post(service_tier="nope")).status_code == 400
    assert (await post(n=25, temperature=1)).status_code == 400
    assert (await post(service_tier="flex")).status_code == 200
    assert [report.slo for report in await api.final_reports(2)] == ["default", "batch"]
    await asyncio.sleep(0)
    assert api.admission.jobs == 0


class Held:
    """Prefills that wait until told to go on."""

    def __init__(self, api: Api) -> None:
        self.go = asyncio.Event()
        self.prefills = api.cluster.prefill.prefills
        api.cluster.prefill.before_token = lambda _: self.go.wait()


async def nothing_waits(api: Api) -> None:
    await until(lambda: api.admission.jobs == api.admission.tokens == 0)


async def settled(read: Callable[[], int], least: int) -> int:
    """The value once it is `least` or more and other requests have had their turn on the loop."""
    await until(lambda: read() >= least)
    for _ in range(50):
        await asyncio.sleep(0)
    return read()


@pytest.mark.parametrize("body", [{"n": 5000}, {"prompt": ["Hello"] * 1000}])
async def test_a_body_of_too_many_jobs_is_refused_before_it_is_work(api: Api, body: dict[str, Any]) -> None:
    answer = await api.complete(**{"temperature": 1, **body})
    assert answer.status_code == 400
    assert "the limit is 24" in answer.json()["error"]["message"]
    assert not api.cluster.prefill.prefills
    await nothing_waits(api)


@pytest.mark.parametrize("body", [{"n": 24, "temperature": 1}, {"prompt": [PROMPT] * 24}])
async def test_jobs_of_one_body_take_turns_and_others_need_not_wait(api: Api, body: dict[str, Any]) -> None:
    held = Held(api)
    large = asyncio.create_task(api.complete(**body, return_token_ids=True))
    assert await settled(lambda: len(held.prefills), 4) == 4
    small = asyncio.create_task(api.complete())
    assert await settled(lambda: len(held.prefills), 5) == 5
    held.go.set()
    assert (await small).status_code == 200
    assert len((await large).json()["choices"]) == 24
    assert len(held.prefills) == 25
    await nothing_waits(api)
    # Word of them comes after the answers: the next test would count it as its own.
    await api.cluster.prefill.releases(25)


@pytest.mark.parametrize("path", ["complete", "chat"])
async def test_what_a_client_that_leaves_had_asked_for_is_gone(api: Api, path: str) -> None:
    held = Held(api)
    ask = api.complete if path == "complete" else api.chat
    task = asyncio.create_task(ask(n=24, temperature=1))
    assert await settled(lambda: len(held.prefills), 4) == 4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await nothing_waits(api)
    held.go.set()
    assert await settled(lambda: len(api.cluster.prefill.released), 4) == 4
    assert len(held.prefills) == 4
    assert {each.transfer_id for each in held.prefills} == {*api.cluster.prefill.released}


async def test_of_a_burst_as_many_pass_as_may_wait(api: Api) -> None:
    held = Held(api)
    async with httpx.AsyncClient(
        base_url=api.client.base_url, timeout=30, limits=httpx.Limits(max_connections=None)
    ) as client:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 2}
        posts = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(200)]
        await until(lambda: sum(post.done() for post in posts) == 136, 30)
        refused = [post.result() for post in posts if post.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert all("retry-after" in answer.headers for answer in refused)
        assert await settled(lambda: len(held.prefills), 64) == 64
        held.go.set()
        assert [(await post).status_code for post in posts].count(200) == 64
    await nothing_waits(api)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_tokens_are_bounded_too(api: Api, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(api)
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(api.app.state.engine_client._core, "on_refused", lambda slo, code: told.append((slo, code)))
    long = [400 + number % 50 for number in range(2000)]
    first = [asyncio.create_task(api.complete(prompt=long)) for _ in range(4)]
    assert await settled(lambda: len(held.prefills), 4) == 4
    refused = await api.complete(prompt=[long, long], stream=stream)  # of two of them one would fit
    assert refused.status_code == 429
    assert "retry-after" in refused.headers
    assert "10000" in refused.json()["error"]["message"]
    assert told == [("default", "busy")]
    held.go.set()
    assert {(await task).status_code for task in first} == {200}
    await nothing_waits(api)


async def test_one_failed_job_of_a_body_ends_the_others(api: Api) -> None:
    decode, jobs = api.cluster.decodes[0], iter((1, 2, 3))

    def second_fails(number: int) -> Any:
        if number == 0 and next(jobs) == 2:
            raise InvalidRequest("this one cannot be computed")
        return asyncio.Event().wait()

    decode.before_token = second_fails
    answer = await api.complete(n=3, temperature=1)
    assert answer.status_code == 400
    assert "cannot be computed" in answer.json()["error"]["message"]
    phases = Counter(report.phase for report in await api.final_reports(3))
    assert phases == {Phase.FAILED: 1, Phase.CANCELLED: 2}


async def test_a_job_whose_turn_does_not_come_ends_with_its_deadline(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = api.app.state.engine_client.engine_core._settings
    monkeypatch.setattr(
        api.app.state.engine_client.engine_core, "_settings", settings.model_copy(update={"job_timeout_s": 0.3})
    )
    held = Held(api)
    answer = await api.complete(n=6, temperature=1)
    assert answer.status_code == 504
    assert len(held.prefills) == 4
    await nothing_waits(api)
