"""What stands before vLLM's handlers, over a trivial application."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from gateway.admission import Admissions, current_request
from gateway.auth import ApiKey, KeyRates, KeyRing, create_key
from gateway.edge import Edge
from gateway.job import GAP_BOUNDS_S, Gaps
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings, SloClass
from gateway.table import LocalTable
from shared.domain.job import Phase
from shared.errors import Busy, Overloaded
from shared.wire.messages import TokenStep
from tests.gateway.api import until
from tests.services.global_scheduler.gateways import make_job


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


@pytest.mark.parametrize(
    ("tier", "headers", "slo"),
    [
        ("flex", {}, "batch/flex"),
        ("priority", {}, "chat/priority"),
        ("auto", {}, "default/default"),
        ("default", {}, "default/default"),
        (None, {}, "default/"),
        ("flex", {"X-Polyphase-Slo": "chat"}, "chat/"),
        ("nonsense", {"X-Polyphase-Slo": "chat"}, "chat/"),
    ],
)
async def test_a_service_tier_names_a_class_unless_a_header_does(tier: Any, headers: dict[str, str], slo: str) -> None:
    async def named(scope: Any, receive: Any, send: Any) -> None:
        who = current_request.get()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": f"{who.slo}/{who.tier}".encode()})

    async with edge(named, service_tiers={"priority": "chat"}) as client:  # type: ignore[arg-type]
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            answer = await client.post(path, json={"service_tier": tier}, headers=headers)
            assert (answer.status_code, answer.text) == (200, slo)
        anthropic = {"service_tier": "standard_only"}  # another API's tiers
        assert (await client.post("/v1/messages", json=anthropic)).text == "default/"


async def test_a_service_tier_that_stands_for_no_class_is_named() -> None:
    async with edge(App()) as client:
        for tier in ("priority", "turbo", 3, ["flex"]):
            answer = await client.post("/v1/completions", json={"service_tier": tier})
            assert answer.status_code == 400
            said = answer.json()["error"]["message"]
            assert said == f"unknown service_tier {tier!r}; known: auto, default, flex"
        huge = await client.post("/v1/completions", json={"service_tier": "x" * 500})
        assert len(huge.json()["error"]["message"]) < 150


async def test_a_key_has_its_own_class_by_the_usual_tiers_and_no_class_that_it_may_not_use() -> None:
    secret, key = create_key("team")
    headers = {"Authorization": f"Bearer {secret}"}
    async with edge(App(), keys=(replace(key, slo="chat", classes=("chat",)),)) as client:
        usual = await client.post("/v1/completions", json={"service_tier": "auto"}, headers=headers)
        assert usual.text.startswith("team/chat/")
        answer = await client.post("/v1/completions", json={"service_tier": "flex"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "slo_class_not_allowed")


async def test_what_a_tier_lets_wait_takes_no_room_of_others() -> None:
    room = asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await room.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with edge(waits, max_queued_jobs=1, max_delayed_jobs=2) as client:  # type: ignore[arg-type]
        flexible = [asyncio.create_task(client.post("/v1/completions", json={"service_tier": "flex"})) for _ in "ab"]
        guarded = client._transport.app  # type: ignore[attr-defined]
        await until(lambda: guarded.admission.for_class("batch").counts.jobs == 2)
        usual = asyncio.create_task(client.post("/v1/completions", json={}))
        await until(lambda: guarded.admission.for_class("default").counts.jobs == 1)
        assert guarded.admission.for_class("batch") is not guarded.admission.for_class("default")
        room.set()
        assert [(await task).status_code for task in (*flexible, usual)] == [200, 200, 200]
        assert guarded.admission.jobs == 0
    async with edge(waits, max_queued_jobs=2, max_delayed_jobs=1) as client:  # type: ignore[arg-type]
        assert (await client.post("/v1/completions", json={"service_tier": "flex", "n": 2})).status_code == 400
        assert client._transport.app.admission.jobs == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tiers", "error"),
    [
        ({"priority": "chat"}, "service_tiers: priority: unknown SLO class 'chat'; known: batch, default"),
        ({"default": "batch"}, "unknown tier 'default'; expected one of flex, priority, scale"),
    ],
)
def test_what_the_settings_may_not_say(tiers: dict[str, str], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="demo", service_tiers=tiers)


def test_flex_is_batch_unless_the_settings_say_else() -> None:
    def tiers(**said: str) -> dict[str, str]:
        slo = {"chat": SloClass()}
        return GatewaySettings(schedulers=("a",), model="demo", slo=slo, service_tiers=said).service_tiers

    assert tiers() == {"flex": "batch"}
    assert tiers(priority="chat") == {"flex": "batch", "priority": "chat"}
    assert tiers(flex="chat") == {"flex": "chat"}


VLLM = {"model_name": "m", "engine": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_gaps_are_counted_at_their_bound() -> None:
    gaps = Gaps()
    for gap_s in (0.0, 0.01, 0.0100001, 80.0, 81.0, -1.0):
        gaps.add(gap_s)
    found = dict(gaps.cumulative())
    assert (found["0.01"], found["0.025"], found["80.0"], found["+Inf"]) == (3, 4, 5, 6)
    assert len(found) == len(GAP_BOUNDS_S) + 1


def test_tokens_count_when_they_come_and_once_at_the_end(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, job, waiting = GatewayMetrics("m", registry), make_job("j"), make_job("k")
    job.gaps = metrics.requests.gaps
    metrics.requests.open = lambda: [job, waiting]

    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {**VLLM, **labels})

    def figures() -> tuple[float | None, ...]:
        gaps = "vllm:inter_token_latency_seconds"
        counts = [read(f"vllm:{name}_tokens_total") for name in ("prompt", "generation")]
        return (*counts, read(f"{gaps}_count"), read(f"{gaps}_sum"))

    assert figures() == (0, 0, 0, 0)
    for now, tokens in ((100.0, [1]), (100.5, [2, 3]), (100.75, [4])):
        monkeypatch.setattr("gateway.job.time", SimpleNamespace(time=lambda now=now: now))
        job.accept(TokenStep(tokens))
    assert figures() == (100, 4, 2, 0.75)
    job.phase = Phase.COMPLETED
    metrics.requests.open = lambda: [waiting]
    metrics.ended(job, job.report("stop"))
    assert figures() == (100, 4, 2, 0.75)
    assert read("vllm:inter_token_latency_seconds_bucket", le="0.3") == 1
    assert read("vllm:request_decode_time_seconds_sum") == 0.75
    assert read("vllm:request_generation_tokens_sum") == 4
    slo = {"slo": "default"}
    assert registry.get_sample_value("polyphase_longest_gap_seconds_sum", slo) == 0.5
    assert registry.get_sample_value("polyphase_slo_missed_total", {**slo, "target": "itl"}) == 1


def test_gaps_between_deliveries_are_counted_against_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("j")
    for now, tokens in ((100.0, [1]), (100.125, [2, 3]), (100.625, [4]), (100.75, [5]), (101.125, [6])):
        monkeypatch.setattr("gateway.job.time", SimpleNamespace(time=lambda now=now: now))
        job.accept(TokenStep(tokens))
    timeline = job.timeline
    assert (timeline.itl_s, timeline.gaps, timeline.gaps_over) == (0.25, 4, 2)
    assert (timeline.longest_gap_s, timeline.longest_gap_at_s, timeline.longest_gap_after) == (0.5, 100.625, 3)
    job.finish_reason = "stop"
    job.ended("stop")
    report = job.report("stop")
    assert (report.longest_gap_s, report.gaps, report.gaps_over, report.slo_met) == (0.5, 4, 2, False)


def test_tokens_that_wait_for_an_event_share_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("j")
    job.streamed = True
    for now, leaves in ((100.0, 1), (100.125, 0), (100.25, 2), (100.75, 1)):
        monkeypatch.setattr("gateway.job.time", SimpleNamespace(time=lambda now=now: now))
        job.accept(TokenStep([1]))
        if leaves:
            job.delivered(leaves)
    assert (job.timeline.gaps, job.timeline.gaps_over) == (2, 1)
    assert (job.timeline.longest_gap_s, job.timeline.longest_gap_after) == (0.5, 3)


def test_of_several_answers_the_longest_is_counted_when_all_have_ended(registry: CollectorRegistry) -> None:
    class Parent:
        n = 3

    metrics, parent, name = GatewayMetrics("m", registry), Parent(), "vllm:request_max_num_generation_tokens"
    for tokens, counted in ((5, 0), (9, 0), (2, 1)):
        job = make_job(str(tokens))
        job.siblings, job.phase = parent, Phase.COMPLETED
        job.accept(TokenStep([1] * tokens, "stop"))
        metrics.ended(job, job.report("stop"))
        assert registry.get_sample_value(f"{name}_count", VLLM) == counted
    assert registry.get_sample_value(f"{name}_sum", VLLM) == 9
    assert registry.get_sample_value("vllm:request_params_n_sum", VLLM) == 3
    assert registry.get_sample_value("vllm:request_generation_tokens_count", VLLM) == 3


def test_what_a_job_missed_is_told_by_target(registry: CollectorRegistry) -> None:
    metrics = GatewayMetrics("m", registry)
    metrics.begin_classes(["default"])
    late, slow, fine, failed = (make_job(name) for name in ("late", "slow", "fine", "failed"))
    for job, first_s, last_s in ((late, 3.0, 3.1), (slow, 1.0, 9.0), (fine, 1.0, 1.1), (failed, 1.0, 1.1)):
        job.tokens = [1, 2]
        job.timeline.first_token_s = job.timeline.arrived_s + first_s
        job.timeline.last_token_s = job.timeline.arrived_s + last_s
        job.phase = Phase.FAILED if job is failed else Phase.COMPLETED
        metrics.ended(job, job.report("peer_lost" if job is failed else "stop"))
    missed = {
        target: registry.get_sample_value("polyphase_slo_missed_total", {"slo": "default", "target": target})
        for target in ("ttft", "tpot", "answer")
    }
    assert missed == {"ttft": 1, "tpot": 1, "answer": 1}
    met = [
        registry.get_sample_value("polyphase_slo_requests_total", {"slo": "default", "met": m}) for m in ("yes", "no")
    ]
    assert met == [1, 3]


async def test_every_answer_is_counted_at_the_edge_refusals_too(registry: CollectorRegistry) -> None:
    metrics = GatewayMetrics("m", registry)
    async with edge(App(), metrics=metrics) as client:
        await client.post("/v1/completions", content=b"x")
        await client.post("/v1/completions", content=b"x" * 5000)
        await client.get("/v1/completions/../../etc/passwd")
        await client.request("BREW", "/v1/models")
        await client.get("/health")

    def count(method: str, status: str, handler: str) -> float | None:
        return registry.get_sample_value(
            "http_requests_total", {"method": method, "status": status, "handler": handler}
        )

    assert count("POST", "2xx", "/v1/completions") == count("POST", "4xx", "/v1/completions") == 1
    assert count("GET", "2xx", "none") == count("other", "2xx", "/v1/models") == 1
    assert registry.get_sample_value("http_request_duration_highr_seconds_count") == 4
