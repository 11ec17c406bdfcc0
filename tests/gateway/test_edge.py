"""What stands before vLLM's handlers, over a trivial application."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from gateway.admission import Admissions, current_request
from gateway.auth import ApiKey, KeyRates, KeyRing, create_key
from gateway.edge import Edge
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings, SloClass
from gateway.table import LocalTable
from shared.errors import Busy, Overloaded
from tests.gateway.api import until


class App:
    """Answers with who it thinks is asking and how much it read."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False) and message["type"] == "http.request"
        who = current_request.get(None)
        body = f"{who.caller}/{who.slo}/{size}".encode() if who else b""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def edge(
    app: App, *, keys: tuple[ApiKey, ...] = (), metrics: GatewayMetrics | None = None, **changes: Any
) -> httpx.AsyncClient:
    settings = GatewaySettings(
        schedulers=("tcp://127.0.0.1:1",),
        model="demo",
        slo={"default": SloClass(), "chat": SloClass(ttft_s=0.5)},
        **{"max_body_bytes": 1000, "max_queued_jobs": 10, **changes},
    )
    metrics = metrics or GatewayMetrics("demo", CollectorRegistry())
    ring = KeyRing(keys)
    guarded = Edge(app, settings, ring, metrics, Admissions(settings, ring.names), KeyRates(LocalTable()))
    guarded.served = {"/v1/completions", "/v1/models"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=guarded), base_url="http://gateway")  # type: ignore[arg-type]


async def test_a_request_passes_with_its_slo_class() -> None:
    async with edge(App()) as client:
        answer = await client.post("/v1/completions", content=b"x" * 500, headers={"X-Polyphase-Slo": "chat"})
        assert answer.text == "/chat/500"


async def test_a_key_brings_its_class_and_is_kept_to_those_it_may_use() -> None:
    secret, key = create_key("team")
    kept = replace(key, slo="chat", classes=("chat",))
    headers = {"Authorization": f"Bearer {secret}"}
    async with edge(App(), keys=(kept,)) as client:
        assert (await client.post("/v1/completions", content=b"x", headers=headers)).text == "team/chat/1"
        answer = await client.post("/v1/completions", headers={**headers, "X-Polyphase-Slo": "default"})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "slo_class_not_allowed"


def test_a_key_that_is_added_brings_shares() -> None:
    settings = GatewaySettings(schedulers=("s",), model="m", max_queued_jobs=10)
    callers = {"a": 1.0}
    admission = Admissions(settings, callers).for_class("default")
    assert admission.jobs_a_body == 10
    callers["b"] = 1.0
    assert admission.jobs_a_body == 5


async def test_a_request_has_the_cache_salt_of_its_key() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(current_request.get().cache_salt)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    (secret, key), (other_secret, other) = create_key("salted"), create_key("plain")
    async with edge(app, keys=(replace(key, cache_salt="s"), other)) as client:  # type: ignore[arg-type]
        for each in (secret, other_secret):
            await client.post("/v1/completions", content=b"x", headers={"Authorization": f"Bearer {each}"})
    assert seen == ["s", ""]


@pytest.mark.parametrize("streams", [True, False])
async def test_a_refusal_for_load_is_a_429_that_says_when_in_streams_too(streams: bool) -> None:
    async def refused(scope: Any, receive: Any, send: Any) -> None:
        current_request.get().refusal = Overloaded("full", retry_after_s=6.2)
        kind = b"text/event-stream" if streams else b"application/json"
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": 200 if streams else 429, "headers": headers})
        await send({"type": "http.response.body", "body": b'data: {"error": {}}\n\n', "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async with edge(refused) as client:  # type: ignore[arg-type]
        answer = await client.post("/v1/completions", json={})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"
        if streams:
            assert answer.json()["error"]["code"] == "overloaded"


async def test_a_stream_that_has_begun_goes_on_to_its_end() -> None:
    async def late(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        current_request.get().refusal = Overloaded("full", retry_after_s=6.2)
        await send({"type": "http.response.body", "body": b"data: error\n\n"})

    async with edge(late) as client:  # type: ignore[arg-type]
        answer = await client.post("/v1/completions", json={})
        assert (answer.status_code, answer.text) == (200, "data: 1\n\ndata: error\n\n")


async def test_an_unknown_slo_class_is_named() -> None:
    async with edge(App()) as client:
        answer = await client.post("/v1/completions", headers={"X-Polyphase-Slo": "nope"})
        assert answer.status_code == 400
        assert "nope" in answer.json()["error"]["message"]


async def test_keys_are_asked_for_and_the_health_path_is_open() -> None:
    secret, key = create_key("team")
    app = App()
    async with edge(app, keys=(key,)) as client:
        answer = await client.post("/v1/completions")
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert app.calls == 0
        assert (await client.get("/health")).status_code == 200
        good = await client.post("/v1/completions", headers={"Authorization": f"Bearer {secret}"})
        assert good.text == "team/default/0"


async def test_a_key_over_its_rate_is_told_when_to_come_back() -> None:
    secret, key = create_key("team", requests_per_s=0.5, burst=2)
    async with edge(App(), keys=(key,)) as client:
        headers = {"Authorization": f"Bearer {secret}"}
        codes = [(await client.get("/v1/models", headers=headers)).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        last = await client.get("/v1/models", headers=headers)
        assert 1 <= int(last.headers["retry-after"]) <= 2
        assert last.json()["error"]["type"] == "rate_limit_error"


class Holding(App):
    """Answers when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            self.calls += 1
            await self.go.wait()
            self.calls -= 1
        await super().__call__(scope, receive, send)


async def test_of_a_burst_as_many_pass_as_may_wait_and_the_others_are_told_at_once() -> None:
    app = Holding()
    async with edge(app, max_queued_jobs=512) as client:
        posts = [asyncio.create_task(client.post("/v1/completions", json={})) for _ in range(2000)]
        await until(lambda: sum(post.done() for post in posts) == 1488, 30)
        assert app.calls == 512
        refused = [post.result() for post in posts if post.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert all("retry-after" in answer.headers for answer in refused)
        assert (await client.get("/v1/models")).status_code == 200
        app.go.set()
        assert {(await post).status_code for post in posts} == {200, 429}
        assert (await client.post("/v1/completions", json={})).status_code == 200


@pytest.mark.parametrize(
    ("body", "jobs"),
    [({"n": 5000}, 5000), ({"prompt": ["a"] * 1000}, 1000), ({"prompt": [[1, 2]] * 40, "n": "30"}, 1200)],
)
async def test_a_body_of_too_many_jobs_is_a_400_that_says_how_many(body: dict[str, Any], jobs: int) -> None:
    app = App()
    async with edge(app, max_body_bytes=100_000, max_queued_jobs=1000) as client:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert f"{jobs} answers" in answer.json()["error"]["message"]
        assert "128" in answer.json()["error"]["message"]
        assert app.calls == 0


async def test_a_body_counts_as_the_jobs_that_it_asks_for() -> None:
    app = Holding()
    async with edge(app, max_queued_jobs=10) as client:
        first = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 4}))
        await until(lambda: app.calls == 1)
        assert (await client.post("/v1/completions", json={"n": 3})).status_code == 429
        second = asyncio.create_task(client.post("/v1/completions", json={"n": 2}))
        await until(lambda: app.calls == 2)
        app.go.set()
        assert (await first).status_code == (await second).status_code == 200
        assert (await client.post("/v1/completions", json={"n": 10})).status_code == 200


async def test_of_several_callers_none_takes_all_the_room() -> None:
    app = Holding()
    (greedy, one), (other, two) = create_key("greedy"), create_key("other")
    async with edge(app, keys=(one, two), max_queued_jobs=10) as client:

        def ask(secret: str) -> "asyncio.Task[httpx.Response]":
            return asyncio.create_task(
                client.post("/v1/completions", json={}, headers={"Authorization": f"Bearer {secret}"})
            )

        many = [ask(greedy) for _ in range(10)]
        await until(lambda: sum(post.done() for post in many) == 5)
        refused = [post.result() for post in many if post.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert "'greedy'" in refused[0].json()["error"]["message"]
        welcome = [ask(other) for _ in range(5)]
        await until(lambda: app.calls == 10)
        app.go.set()
        assert {(await post).status_code for post in welcome} == {200}
        assert [(await post).status_code for post in many].count(200) == 5


def test_of_several_callers_none_takes_all_the_room_for_tokens() -> None:
    settings = GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="demo", max_queued_tokens=1000)
    admission = Admissions(settings, ("greedy", "modest")).for_class("default")
    seats = [admission.admit("greedy").start_job(120) for _ in range(4)]
    for _ in range(2):
        with pytest.raises(
            Busy, match="480 prompt tokens of 'greedy' are waiting and this job adds 120; its share is 500"
        ) as refused:
            admission.admit("greedy").start_job(120)
        assert refused.value.retry_after_s
    big = admission.admit("modest").start_job(515)  # its first one may be over the share
    with pytest.raises(Busy, match="995 prompt tokens are waiting"):
        admission.admit("modest").start_job(6)
    for seat in (*seats, big):
        seat.leave()
    counts = admission.counts
    assert (counts.tokens, counts.tokens_of("greedy"), counts.tokens_of("modest")) == (0, 0, 0)


@pytest.mark.parametrize("declared", [True, False])
async def test_bytes_of_bodies_are_bounded_until_the_answers_have_ended(declared: bool) -> None:
    async def chunked() -> Any:
        for _ in range(4):
            yield b"x" * 100

    app = Holding()
    async with edge(app, max_held_bytes=1000) as client:

        def ask() -> "asyncio.Task[httpx.Response]":
            return asyncio.create_task(client.post("/v1/completions", content=b"x" * 400 if declared else chunked()))

        let_in = [ask() for _ in range(2)]
        await until(lambda: app.calls == 2)
        refused = await ask()
        assert refused.status_code == 429
        assert "800 bytes are held" in refused.json()["error"]["message"]
        assert "the limit is 1000" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
        app.go.set()
        assert [(await post).status_code for post in let_in] == [200, 200]
        assert (await ask()).status_code == 200


def test_of_several_callers_none_holds_all_the_bytes() -> None:
    settings = GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="demo", max_held_bytes=1000)
    held = Admissions(settings, ("greedy", "modest")).held_bytes
    with held.charged("greedy") as first, held.charged("greedy") as second, held.charged("modest") as other:
        first(400)
        with pytest.raises(Busy, match="400 bytes of 'greedy' are held and this one has 101; its share is 500"):
            second(101)
        other(550)  # its first one
        with (
            pytest.raises(Busy, match="950 bytes are held and this one has 51; the limit is 1000"),
            held.charged("third") as third,
        ):
            third(51)
    assert held.total == 0
    with held.charged("greedy") as alone:
        alone(5000)  # nobody is before it
    assert held.total == 0


async def test_a_body_that_does_not_come_gives_its_place_back() -> None:
    async def endless() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    async with edge(App(), max_queued_jobs=1, body_timeout_s=0.05) as client:
        answer = await client.post("/v1/completions", content=endless())
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "body_too_slow"
        assert (await client.post("/v1/completions", json={})).status_code == 200


async def test_an_answer_of_the_application_gets_a_time_to_come_back_at() -> None:
    async def busy(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": [(b"x-own", b"1")]})
        await send({"type": "http.response.body", "body": b""})

    async with edge(busy) as client:  # type: ignore[arg-type]
        answer = await client.post("/v1/completions", json={})
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-own"] == "1"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused(declared: bool) -> None:
    async def chunks() -> Any:
        for _ in range(11):
            yield b"x" * 100

    async with edge(App()) as client:
        answer = await client.post("/v1/completions", content=b"x" * 1100 if declared else chunks())
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


async def test_a_chunked_body_within_the_limit_passes() -> None:
    async def chunks() -> Any:
        for _ in range(10):
            yield b"x" * 100

    async with edge(App()) as client:
        assert (await client.post("/v1/completions", content=chunks())).text == "/default/1000"


async def test_refusals_for_load_are_told_and_clients_faults_are_not() -> None:
    told: list[tuple[str, str]] = []
    app = Holding()
    async with edge(app, max_queued_jobs=1) as client:
        guarded: Any = client._transport.app  # type: ignore[attr-defined]
        guarded.on_refused = lambda slo, code: told.append((slo, code))
        first = asyncio.create_task(client.post("/v1/completions", json={}))
        await until(lambda: app.calls == 1, 10)
        second = await client.post("/v1/completions", json={}, headers={"X-Polyphase-Slo": "chat"})
        unknown = await client.post("/v1/completions", json={}, headers={"X-Polyphase-Slo": "none"})
        app.go.set()
        assert ((await first).status_code, second.status_code, unknown.status_code) == (200, 429, 400)
    assert told == [("chat", "busy")]
