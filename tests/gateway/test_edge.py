"""The layer before vLLM's handlers, over a trivial application; the gateway's metrics; and how a gateway ends."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
from gateway.job import GAP_BOUNDS_S, Gaps, Job
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings, SloClass
from gateway.table import LocalTable
from shared.domain.job import Phase
from shared.errors import Overloaded
from shared.wire.messages import TokenStep
from tests.gateway.api import listening
from tests.gateway.cluster import make_job, until
from tests.ports import free_port

Send = Callable[[dict[str, Any]], Any]
COMPLETIONS = "/v1/completions"


async def respond(send: Send, *parts: bytes, status: int = 200, **headers: str) -> None:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class App:
    """Answers with the request's caller, SLO class, service tier and length; a POST waits for `go`."""

    def __init__(self) -> None:
        self.calls = self.open = 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        self.calls += 1
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False) and message["type"] == "http.request"
        if scope["method"] == "POST":
            self.open += 1
            await self.go.wait()
            self.open -= 1
        state = current_request.get(None)
        text = f"{state.caller} {state.slo} {state.tier} {state.cache_salt} {size}" if state else ""
        await respond(send, text.encode())


class Client(httpx.AsyncClient):
    """A client of an edge before an application."""

    def __init__(self, app: Any, *keys: ApiKey, metrics: GatewayMetrics | None = None, **changes: Any) -> None:
        settings = GatewaySettings(
            schedulers=("tcp://127.0.0.1:1",),
            model="demo",
            slo={"default": SloClass(), "chat": SloClass(ttft_s=0.5)},
            **{"max_body_bytes": 1000, "max_queued_jobs": 10, **changes},
        )
        ring = KeyRing(keys)
        admissions = Admissions(settings, ring.names)
        metrics = metrics or GatewayMetrics("demo", CollectorRegistry())
        self.edge = Edge(app, settings, ring, metrics, admissions, KeyRates(LocalTable()))
        self.edge.served = {COMPLETIONS, "/v1/models"}
        super().__init__(transport=httpx.ASGITransport(app=self.edge), base_url="http://gateway")

    async def ask(self, path: str = COMPLETIONS, **request: Any) -> httpx.Response:
        return await self.post(path, **(request if "content" in request else {"json": {}, **request}))

    def starts(self, **request: Any) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.ask(**request))


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * 100


# Keys and classes


async def test_a_request_gets_the_caller_the_class_and_the_salt_of_its_key() -> None:
    (secret, key), (plain_secret, plain) = create_key("team"), create_key("plain")
    restricted = replace(key, slo="chat", classes=("chat",), cache_salt="s")
    app = App()
    async with Client(app, restricted, plain) as client:
        refused = await client.ask()
        assert (error_of(refused), refused.headers["www-authenticate"]) == ((401, "invalid_api_key"), "Bearer")
        assert app.calls == 0
        assert (await client.get("/health")).status_code == 200
        assert (await client.ask(content=b"x", headers=bearer(secret))).text == "team chat  s 1"
        assert (await client.ask(content=b"x", headers=bearer(plain_secret))).text == "plain default   1"
        usual = await client.ask(json={"service_tier": "auto"}, headers=bearer(secret))
        assert usual.text.startswith("team chat ")
        flex = await client.ask(json={"service_tier": "flex"}, headers=bearer(secret))
        default = await client.ask(headers={**bearer(secret), "X-Polyphase-Slo": "default"})
        assert error_of(flex) == error_of(default) == (403, "slo_class_not_allowed")


async def test_a_header_names_the_class() -> None:
    async with Client(App()) as client:
        response = await client.ask(content=b"x" * 500, headers={"X-Polyphase-Slo": "chat"})
        assert response.text == " chat   500"
        response = await client.ask(headers={"X-Polyphase-Slo": "nope"})
        assert response.status_code == 400
        assert "nope" in response.json()["error"]["message"]


async def test_a_key_over_its_rate_gets_a_429_with_a_time() -> None:
    secret, key = create_key("team", requests_per_s=0.5, burst=2)
    async with Client(App(), key) as client:
        responses = [await client.get("/v1/models", headers=bearer(secret)) for _ in range(3)]
        assert [response.status_code for response in responses] == [200, 200, 429]
        assert 1 <= int(responses[-1].headers["retry-after"]) <= 2
        assert responses[-1].json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("tier", "headers", "expected"),
    [
        ("flex", {}, " batch flex "),
        ("priority", {}, " chat priority "),
        ("auto", {}, " default default "),
        ("default", {}, " default default "),
        (None, {}, " default  "),
        ("flex", {"X-Polyphase-Slo": "chat"}, " chat  "),
        ("nonsense", {"X-Polyphase-Slo": "chat"}, " chat  "),
    ],
)
async def test_a_service_tier_names_a_class_unless_a_header_does(
    tier: Any, headers: dict[str, str], expected: str
) -> None:
    async with Client(App(), service_tiers={"priority": "chat"}) as client:
        for path in (COMPLETIONS, "/v1/chat/completions", "/v1/responses"):
            response = await client.ask(path, json={"service_tier": tier}, headers=headers)
            assert (response.status_code, response.text[: len(expected)]) == (200, expected)
        response = await client.ask("/v1/messages", json={"service_tier": "standard_only"})  # another API's tiers
        assert response.text.startswith(" default  ")


async def test_an_unknown_service_tier_is_named() -> None:
    async with Client(App()) as client:
        for tier in ("priority", "turbo", 3, ["flex"]):
            response = await client.ask(json={"service_tier": tier})
            assert response.status_code == 400
            message = response.json()["error"]["message"]
            assert message == f"unknown service_tier {tier!r}; known: auto, default, flex"
        huge = await client.ask(json={"service_tier": "x" * 500})
        assert len(huge.json()["error"]["message"]) < 150


def test_service_tiers_of_the_settings() -> None:
    def tiers(**tiers: str) -> dict[str, str]:
        return GatewaySettings(
            schedulers=("a",), model="m", slo={"chat": SloClass()}, service_tiers=tiers
        ).service_tiers

    assert tiers() == {"flex": "batch"}
    assert tiers(priority="chat") == {"flex": "batch", "priority": "chat"}
    assert tiers(flex="chat") == {"flex": "chat"}
    with pytest.raises(ValidationError, match="service_tiers: priority: unknown SLO class 'x'; known: batch, chat"):
        tiers(priority="x")
    with pytest.raises(ValidationError, match="unknown tier 'default'; expected one of flex, priority, scale"):
        tiers(default="batch")


# Limits


@pytest.mark.parametrize("declared", [True, False])
async def test_the_length_of_a_body_is_limited(declared: bool) -> None:
    async with Client(App()) as client:
        response = await client.ask(content=b"x" * 1100 if declared else chunks(11))
        assert error_of(response) == (413, "body_too_large")
        assert (await client.ask(content=chunks(10))).text.endswith(" 1000")


async def test_of_a_burst_as_many_pass_as_may_wait_and_the_others_are_refused_at_once() -> None:
    app = App()
    app.go.clear()
    async with Client(app, max_queued_jobs=64) as client:
        running = [client.starts() for _ in range(200)]
        await until(lambda: sum(task.done() for task in running) == 136, 30)
        assert app.open == 64
        refused = [task.result() for task in running if task.done()]
        assert {response.status_code for response in refused} == {429}
        assert all("retry-after" in response.headers for response in refused)
        assert (await client.get("/v1/models")).status_code == 200
        app.go.set()
        assert {(await task).status_code for task in running} == {200, 429}
        assert (await client.ask()).status_code == 200


@pytest.mark.parametrize(
    ("body", "jobs"),
    [({"n": 5000}, 5000), ({"prompt": ["a"] * 1000}, 1000), ({"prompt": [[1, 2]] * 40, "n": "30"}, 1200)],
)
async def test_a_body_of_too_many_jobs_is_a_400_with_both_numbers(body: dict[str, Any], jobs: int) -> None:
    app = App()
    async with Client(app, max_body_bytes=100_000, max_queued_jobs=1000) as client:
        response = await client.ask(json=body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert (f"{jobs} answers" in message, "128" in message, app.calls) == (True, True, 0)


@pytest.mark.parametrize("declared", [True, False])
async def test_bytes_of_bodies_are_bounded_until_the_answers_have_ended(declared: bool) -> None:
    app = App()
    app.go.clear()
    async with Client(app, max_held_bytes=1000) as client:

        def start() -> "asyncio.Task[httpx.Response]":
            return client.starts(content=b"x" * 400 if declared else chunks(4))

        admitted = [start() for _ in range(2)]
        await until(lambda: app.open == 2)
        refused = await start()
        assert (refused.status_code, bool(refused.headers["retry-after"])) == (429, True)
        message = refused.json()["error"]["message"]
        assert ("800 bytes are held" in message, "the limit is 1000" in message) == (True, True)
        app.go.set()
        assert [(await task).status_code for task in (*admitted, start())] == [200, 200, 200]


async def test_a_body_that_does_not_arrive_gives_its_place_back() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with Client(App(), max_queued_jobs=1, body_timeout_s=0.05) as client:
        assert error_of(await client.ask(content=endless())) == (408, "body_too_slow")
        assert (await client.ask()).status_code == 200


# Refusals


@pytest.mark.parametrize("case", ["plain", "stream", "late"])
async def test_a_refusal_for_load_is_a_429_with_a_time_unless_the_stream_has_begun(case: str) -> None:
    async def app(_: Any, __: Any, send: Send) -> None:
        if case == "late":
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        current_request.get().refusal = Overloaded("full", retry_after_s=6.2)
        if case == "late":
            await send({"type": "http.response.body", "body": b"data: error\n\n"})
            return
        kind, status = ("text/event-stream", 200) if case == "stream" else ("application/json", 429)
        await respond(send, b'data: {"error": {}}\n\n', b"data: [DONE]\n\n", status=status, content_type=kind)

    async with Client(app) as client:
        response = await client.ask()
    if case == "late":
        assert (response.status_code, response.text) == (200, "data: 1\n\ndata: error\n\n")
        return
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert case == "plain" or response.json()["error"]["code"] == "overloaded"


async def test_a_503_of_the_application_gets_a_time_to_retry_after() -> None:
    async def app(_: Any, __: Any, send: Send) -> None:
        await respond(send, status=503, x_own="1")

    async with Client(app) as client:
        response = await client.ask()
        assert int(response.headers["retry-after"]) >= 1
        assert response.headers["x-own"] == "1"


async def test_refusals_for_load_are_reported_and_clients_faults_are_not() -> None:
    reported: list[tuple[str, str]] = []
    app = App()
    app.go.clear()
    async with Client(app, max_queued_jobs=1) as client:
        client.edge.on_refused = lambda slo, code: reported.append((slo, code))
        first = client.starts()
        await until(lambda: app.open == 1)
        second = await client.ask(headers={"X-Polyphase-Slo": "chat"})
        unknown = await client.ask(headers={"X-Polyphase-Slo": "none"})
        app.go.set()
        assert ((await first).status_code, second.status_code, unknown.status_code) == (200, 429, 400)
    assert reported == [("chat", "busy")]


# Slow readers

PART = b"x" * 65_536


class Parts:
    """Answers with so many parts, as fast as the connection accepts them."""

    def __init__(self, parts: int) -> None:
        self.parts, self.began, self.ended = parts, 0, 0

    async def __call__(self, _: Any, __: Any, send: Send) -> None:
        self.began += 1
        await respond(send, *[PART] * self.parts)
        self.ended += 1


async def connected(port: int) -> socket.socket:
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", port))
    await loop.sock_sendall(raw, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    return raw


@pytest.mark.parametrize("parts", [500, 1])  # an unfinished answer, and a whole one in the buffer
async def test_the_connection_of_a_client_that_does_not_read_is_closed(parts: int) -> None:
    app = Parts(parts)
    async with listening(app, lifespan="off", write_timeout_s=0.2) as server:
        server.buffer_little(4096)
        with await connected(server.port):
            await until(lambda: app.began == 1)
            state = server.server.server_state
            await until(lambda: not state.connections and not state.tasks)


async def test_a_slow_reader_gets_its_answer() -> None:
    app = Parts(6)
    async with listening(app, lifespan="off", write_timeout_s=0.3) as server:
        with await connected(server.port) as raw:
            size = 0
            while size < 6 * len(PART):
                size += len(await asyncio.get_running_loop().sock_recv(raw, 16_384))
                await asyncio.sleep(0.015)
    assert app.ended == 1


async def test_a_gateway_leaves_before_a_signal_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import gateway.app as gateway

    order: list[str] = []

    @asynccontextmanager
    async def running(*_: Any) -> AsyncIterator[Any]:
        app = App()
        app.app = SimpleNamespace(state=SimpleNamespace())
        yield app
        order.append("leave")

    monkeypatch.setattr(gateway, "running", running)
    monkeypatch.setattr(gateway, "settle", lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: order.append("signal"))
    settings = GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="demo", port=free_port(), lean_streams=False)
    try:
        await asyncio.wait_for(gateway.serve(settings), 20)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert order == ["leave", "signal"]


# Metrics


class Metrics:
    """A gateway's metrics, with a clock for jobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = CollectorRegistry()
        self.metrics = GatewayMetrics("m", self.registry)
        self.monkeypatch = monkeypatch

    def vllm(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:{name}", {"model_name": "m", "engine": "0", **labels})

    def slo(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"polyphase_{name}", {"slo": "default", **labels})

    def step(self, job: Job, now_s: float, count: int) -> None:
        """The job gets so many tokens at that time."""
        self.monkeypatch.setattr("gateway.job.time", SimpleNamespace(time=lambda: now_s))
        job.accept(TokenStep([1] * count))

    def end(self, job: Job, outcome: str = "stop") -> None:
        job.phase = Phase.COMPLETED if outcome == "stop" else Phase.FAILED
        self.metrics.ended(job, job.report(outcome))


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    return Metrics(monkeypatch)


def new_job() -> Job:
    return make_job([1] * 100, 50)[0]


def test_a_gap_is_counted_in_the_first_bucket_that_holds_it() -> None:
    gaps = Gaps()
    for gap_s in (0.0, 0.01, 0.0100001, 80.0, 81.0, -1.0):
        gaps.add(gap_s)
    buckets = dict(gaps.cumulative())
    assert (buckets["0.01"], buckets["0.025"], buckets["80.0"], buckets["+Inf"]) == (3, 4, 5, 6)
    assert len(buckets) == len(GAP_BOUNDS_S) + 1


def test_tokens_count_when_they_arrive_and_once_at_the_end(metrics: Metrics) -> None:
    job, waiting, requests = new_job(), new_job(), metrics.metrics.requests
    job.gaps, requests.open = requests.gaps, lambda: [job, waiting]

    def figures() -> tuple[float | None, ...]:
        names = ("prompt_tokens_total", "generation_tokens_total")
        gaps = ("inter_token_latency_seconds_count", "inter_token_latency_seconds_sum")
        return tuple(metrics.vllm(name) for name in (*names, *gaps))

    assert figures() == (0, 0, 0, 0)
    for now_s, count in ((100.0, 1), (100.5, 2), (100.75, 1)):
        metrics.step(job, now_s, count)
    assert figures() == (100, 4, 2, 0.75)
    requests.open = lambda: [waiting]
    metrics.end(job)
    assert figures() == (100, 4, 2, 0.75)
    assert metrics.vllm("inter_token_latency_seconds_bucket", le="0.3") == 1
    assert metrics.vllm("request_decode_time_seconds_sum") == 0.75
    assert metrics.vllm("request_generation_tokens_sum") == 4
    assert metrics.slo("longest_gap_seconds_sum") == 0.5
    assert metrics.slo("slo_missed_total", target="itl") == 1


def test_gaps_between_deliveries_are_compared_with_the_target(metrics: Metrics) -> None:
    job = new_job()
    for now_s, count in ((100.0, 1), (100.125, 2), (100.625, 1), (100.75, 1), (101.125, 1)):
        metrics.step(job, now_s, count)
    timeline = job.timeline
    assert (timeline.itl_s, timeline.gaps, timeline.gaps_over) == (0.25, 4, 2)
    assert (timeline.longest_gap_s, timeline.longest_gap_at_s, timeline.longest_gap_after) == (0.5, 100.625, 3)
    job.finish_reason = "stop"
    job.ended("stop")
    report = job.report("stop")
    assert (report.longest_gap_s, report.gaps, report.gaps_over, report.slo_met) == (0.5, 4, 2, False)
    streamed = new_job()
    streamed.streamed = True
    for now_s, leaving in ((100.0, 1), (100.125, 0), (100.25, 2), (100.75, 1)):
        metrics.step(streamed, now_s, 1)
        if leaving:
            streamed.delivered(leaving)
    assert (streamed.timeline.gaps, streamed.timeline.gaps_over) == (2, 1), "tokens of one event share its gap"
    assert (streamed.timeline.longest_gap_s, streamed.timeline.longest_gap_after) == (0.5, 3)


def test_of_several_answers_the_longest_is_counted_when_all_have_ended(metrics: Metrics) -> None:
    class Parent:
        n = 3

    parent = Parent()
    for tokens, counted in ((5, 0), (9, 0), (2, 1)):
        job = new_job()
        job.siblings = parent
        job.accept(TokenStep([1] * tokens, "stop"))
        metrics.end(job)
        assert metrics.vllm("request_max_num_generation_tokens_count") == counted
    assert metrics.vllm("request_max_num_generation_tokens_sum") == 9
    assert metrics.vllm("request_params_n_sum") == metrics.vllm("request_generation_tokens_count") == 3


def test_missed_targets_are_counted_apart(metrics: Metrics) -> None:
    metrics.metrics.begin_classes(["default"])
    for first_s, last_s, outcome in ((3.0, 3.1, "stop"), (1.0, 9.0, "stop"), (1.0, 1.1, "stop"), (1.0, 1.1, "lost")):
        job = new_job()
        job.tokens = [1, 2]
        job.timeline.first_token_s = job.timeline.arrived_s + first_s
        job.timeline.last_token_s = job.timeline.arrived_s + last_s
        metrics.end(job, outcome)
    assert [metrics.slo("slo_missed_total", target=target) for target in ("ttft", "tpot", "answer")] == [1, 1, 1]
    assert [metrics.slo("slo_requests_total", met=met) for met in ("yes", "no")] == [1, 3]


async def test_all_responses_of_the_edge_are_counted(metrics: Metrics) -> None:
    async with Client(App(), metrics=metrics.metrics) as client:
        await client.ask(content=b"x")
        await client.ask(content=b"x" * 5000)
        await client.get("/v1/completions/../../etc/passwd")
        await client.request("BREW", "/v1/models")
        await client.get("/health")

    def count(method: str, status: str, handler: str) -> float | None:
        labels = {"method": method, "status": status, "handler": handler}
        return metrics.registry.get_sample_value("http_requests_total", labels)

    assert count("POST", "2xx", COMPLETIONS) == count("POST", "4xx", COMPLETIONS) == 1
    assert count("GET", "2xx", "none") == count("other", "2xx", "/v1/models") == 1
    assert metrics.registry.get_sample_value("http_request_duration_highr_seconds_count") == 4
