"""What stands before vLLM's handlers, over a trivial application."""

from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from gateway.auth import ApiKey, KeyRing, create_key
from gateway.context import caller
from gateway.limits import Limits, TokenBucket
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings, SloTarget


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
        body = f"{caller.get().key_name}/{caller.get().slo}/{size}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def limits(app: App, *, keys: tuple[ApiKey, ...] = (), queued: int = 0, healthy: bool = True) -> httpx.AsyncClient:
    settings = GatewaySettings(
        schedulers=("tcp://127.0.0.1:1",), model="demo", max_body_bytes=1000, max_queued_jobs=10,
        slo={"default": SloTarget(), "chat": SloTarget(ttft_s=0.5)},
    )  # fmt: skip
    metrics = GatewayMetrics("demo", CollectorRegistry())
    guarded = Limits(app, settings, KeyRing(keys), metrics, lambda: queued, lambda: healthy)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=guarded), base_url="http://gateway")  # type: ignore[arg-type]


async def test_a_request_passes_with_its_slo_class() -> None:
    async with limits(App()) as client:
        answer = await client.post("/v1/completions", content=b"x" * 500, headers={"X-Polyphase-Slo": "chat"})
        assert answer.text == "/chat/500"


async def test_an_unknown_slo_class_is_named() -> None:
    async with limits(App()) as client:
        answer = await client.post("/v1/completions", headers={"X-Polyphase-Slo": "nope"})
        assert answer.status_code == 400
        assert "nope" in answer.json()["error"]["message"]


async def test_keys_are_asked_for_and_the_health_path_is_open() -> None:
    secret, key = create_key("team")
    app = App()
    async with limits(app, keys=(key,)) as client:
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
    async with limits(App(), keys=(key,)) as client:
        headers = {"Authorization": f"Bearer {secret}"}
        codes = [(await client.get("/v1/models", headers=headers)).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        last = await client.get("/v1/models", headers=headers)
        assert 1 <= int(last.headers["retry-after"]) <= 2
        assert last.json()["error"]["type"] == "rate_limit_error"


async def test_too_much_queued_work_is_busy_not_broken() -> None:
    async with limits(App(), queued=10) as client:
        answer = await client.post("/v1/completions")
        assert answer.status_code == 429
        assert "retry-after" in answer.headers
        assert (await client.get("/v1/models")).status_code == 200


async def test_without_a_scheduler_the_answer_is_broken_not_busy() -> None:
    async with limits(App(), healthy=False) as client:
        answer = await client.post("/v1/completions")
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused(declared: bool) -> None:
    async def chunks() -> Any:
        for _ in range(11):
            yield b"x" * 100

    async with limits(App()) as client:
        answer = await client.post("/v1/completions", content=b"x" * 1100 if declared else chunks())
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


async def test_a_chunked_body_within_the_limit_passes() -> None:
    async def chunks() -> Any:
        for _ in range(10):
            yield b"x" * 100

    async with limits(App()) as client:
        assert (await client.post("/v1/completions", content=chunks())).text == "/default/1000"


def test_a_token_bucket_refills_with_time() -> None:
    bucket = TokenBucket(rate=2.0, burst=2.0, level=2.0, updated_s=0.0)
    assert [bucket.take(0.0), bucket.take(0.0)] == [0.0, 0.0]
    assert bucket.take(0.0) == pytest.approx(0.5)
    assert bucket.take(0.5) == 0.0
    assert bucket.take(100.0) == 0.0
    assert bucket.level == 1.0
