"""OpenAI's `service_tier` as an SLO class: whose it is, what it may use, and where it waits."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.admission import current_request
from gateway.auth import create_key
from gateway.settings import GatewaySettings, SloClass
from tests.gateway.api import until
from tests.gateway.test_edge import App, edge


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
