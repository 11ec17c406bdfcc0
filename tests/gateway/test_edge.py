"""The layer before vLLM's handlers, over a trivial application; and how a gateway ends."""

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
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings, SloClass
from gateway.table import LocalTable
from shared.errors import Overloaded
from tests.gateway.api import listening
from tests.gateway.cluster import until
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


async def test_paths_for_operators_need_a_key_with_that_role() -> None:
    (secret, key), (operator_secret, operator) = create_key("team", role="look"), create_key("ops", role="operate")
    async with Client(App(), key, operator) as client:
        assert (await client.ask("/v1/load", headers=bearer(secret))).status_code == 200
        client.edge.operators_only = {"/v1/load"}
        refused = await client.ask("/v1/load", headers=bearer(secret))
        assert error_of(refused) == (403, "operators_only")
        assert "/v1/load is for operators: key 'team' has not the role operate" in refused.text
        assert (await client.ask("/v1/load", headers=bearer(operator_secret))).status_code == 200
        assert (await client.ask(headers=bearer(secret))).status_code == 200
        assert error_of(await client.ask("/v1/load")) == (401, "invalid_api_key")
    async with Client(App()) as client:  # without keys it listens on loopback only
        client.edge.operators_only = {"/v1/load"}
        assert (await client.ask("/v1/load")).status_code == 200


async def test_a_header_names_the_class() -> None:
    async with Client(App()) as client:
        response = await client.ask(content=b"x" * 500, headers={"X-Polyphase-Slo": "chat"})
        assert response.text == " chat   500"
        response = await client.ask(headers={"X-Polyphase-Slo": "nope"})
        assert response.status_code == 400
        assert "nope" in response.json()["error"]["message"]


@pytest.mark.parametrize(("said", "expected"), [(None, "False"), ("true", "False"), ("False", "True"), ("no", "")])
async def test_a_header_forbids_mixed_precision(said: str | None, expected: str) -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        await respond(send, str(current_request.get().one_precision).encode())

    async with Client(app) as client:
        response = await client.ask(headers={} if said is None else {"X-Polyphase-Mixed-Precision": said})
        if expected:
            assert (response.status_code, response.text) == (200, expected)
        else:
            assert response.status_code == 400
            assert "must be true or false, not 'no'" in response.json()["error"]["message"]


async def test_a_key_over_its_rate_gets_a_429_with_a_time() -> None:
    secret, key = create_key("team", requests_per_s=0.01, burst=2)
    async with Client(App(), key) as client:
        responses = [await client.get("/v1/models", headers=bearer(secret)) for _ in range(3)]
        assert [response.status_code for response in responses] == [200, 200, 429]
        assert 50 <= int(responses[-1].headers["retry-after"]) <= 100
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

    async with Client(App(), max_queued_jobs=1, body_timeout_s=0.5) as client:
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
    async with listening(app, lifespan="off", write_timeout_s=1.0) as server:
        with await connected(server.port) as raw:
            size = 0
            while size < 6 * len(PART):
                part = await asyncio.get_running_loop().sock_recv(raw, 16_384)
                assert part, "the connection was closed"
                size += len(part)
                await asyncio.sleep(0.05)  # longer than the timeout in all
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


async def test_all_responses_of_the_edge_are_counted() -> None:
    registry = CollectorRegistry()
    async with Client(App(), metrics=GatewayMetrics("m", registry)) as client:
        await client.ask(content=b"x")
        await client.ask(content=b"x" * 5000)
        await client.get("/v1/completions/../../etc/passwd")
        await client.request("BREW", "/v1/models")
        await client.get("/health")

    def count(method: str, status: str, handler: str) -> float | None:
        labels = {"method": method, "status": status, "handler": handler}
        return registry.get_sample_value("http_requests_total", labels)

    assert count("POST", "2xx", COMPLETIONS) == count("POST", "4xx", COMPLETIONS) == 1
    assert count("GET", "2xx", "none") == count("other", "2xx", "/v1/models") == 1
    assert registry.get_sample_value("http_request_duration_highr_seconds_count") == 4
