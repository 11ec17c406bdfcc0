"""The cluster's secret: every route of every service that is not a GET wants it, and nothing tells it."""

import ast
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Mount, Route

from shared.errors import InvalidRequest
from shared.runtime.keys import OPEN, READING, new_token
from tests.services.all_apps import NAMES, ROOT, all_apps

TOKEN = new_token()
OURS = {"Authorization": f"Bearer {TOKEN}"}


def changing(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path of each route that is not for reading, with something for each parameter of the path."""
    return [(method, re.sub(r"\{[^}]+\}", "x", path)) for path, methods in routes(app) for method in methods - READING]


def routes(app: FastAPI) -> list[tuple[str, set[str]]]:
    return [(route.path, set(route.methods or ())) for route in app.routes if isinstance(route, Route)]


async def ask(app: FastAPI, method: str, path: str, headers: dict[str, str], content: bytes = b"{}") -> httpx.Response:
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return await client.request(method, path, content=content, headers=headers)


def test_all_services_are_here() -> None:
    folders = ("services", "predictor", "gateway", "dashboard", "shared")
    makers = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if makes_apps(file)]
    found = sorted(file.relative_to(ROOT).as_posix() for file in makers)
    made = [f"services/{name}/app.py" for name in ("cluster_monitor", "global_scheduler", "planner", "worker")]
    assert found == sorted([*made, "predictor/app.py", "shared/runtime/http.py"])


def makes_apps(file: Path) -> bool:
    calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func) in ("service_app", "FastAPI") for call in calls)


@pytest.mark.parametrize("name", NAMES)
async def test_what_changes_something_wants_the_secret(name: str) -> None:
    app = all_apps(cluster_token=TOKEN)[name]
    assert all(isinstance(route, Route) for route in app.routes), "mounts and sockets would have to be walked, too"
    for method, path in [*changing(app), ("POST", "/nowhere"), ("PATCH", "/health")]:
        missing = await ask(app, method, path, {})
        assert (missing.status_code, missing.json()["error"]["code"]) == (401, "cluster_token_missing"), path
        assert f"{method} {path}" in missing.json()["error"]["message"]
        assert missing.headers["www-authenticate"] == "Bearer"
        for said in ("Bearer " + new_token(), f"Bearer {TOKEN[:-1]}", f"bearer {TOKEN}x", "Bearer \xfc\xe9"):
            wrong = await ask(app, method, path, {"Authorization": said.encode("latin-1")})  # type: ignore[dict-item]
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (403, "cluster_token_wrong"), path
            assert TOKEN not in wrong.text
            assert said.removeprefix("Bearer ") not in wrong.text
        basic = await ask(app, method, path, {"Authorization": f"Basic {TOKEN}"})
        assert basic.status_code == 401


@pytest.mark.parametrize("name", NAMES)
async def test_who_shows_it_gets_past_the_guard(name: str) -> None:
    app = all_apps(cluster_token=TOKEN)[name]
    for method, path in [*changing(app), ("POST", "/nowhere")]:
        answer = await ask(app, method, path, OURS, b"not json")  # the service is not started: no state behind it
        assert answer.status_code not in (401, 403), (method, path)


@pytest.mark.parametrize("name", NAMES)
async def test_reading_is_open_and_tells_nothing_of_it(name: str) -> None:
    app = all_apps(cluster_token=TOKEN)[name]
    for path in ("/metrics", "/openapi.json"):
        answer = await ask(app, "GET", path, {})
        assert answer.status_code == 200
        assert TOKEN not in answer.text


def test_the_monitor_planner_and_predictor_have_something_to_guard() -> None:
    apps = all_apps(cluster_token=TOKEN)
    counts = {name: len(changing(app)) for name, app in apps.items()}
    assert counts["monitor"] >= 8
    assert counts["planner"] >= 7
    assert counts["predictor"] >= 4


@pytest.mark.parametrize("name", NAMES)
async def test_a_service_without_one_refuses_everybody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in NAMES:
        monkeypatch.delenv(f"POLYPHASE_{each.upper()}_CLUSTER_TOKEN")
    app = all_apps()[name]
    for method, path in [*changing(app), ("POST", "/nowhere")]:
        for headers in ({}, OURS, {"Authorization": "Bearer "}):
            answer = await ask(app, method, path, headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cluster_token_unset")
            assert "cluster_token_file" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", NAMES)
async def test_open_has_to_be_said(name: str) -> None:
    app = all_apps(cluster_token=OPEN)[name]
    assert (await ask(app, "POST", "/nowhere", {})).status_code == 404


async def test_two_headers_are_not_taken_for_one() -> None:
    app = all_apps(cluster_token=TOKEN)["monitor"]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        both = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer another-one-of-them")]
        assert (await client.post("/nowhere", headers=both)).status_code == 403


def test_a_mount_would_be_seen() -> None:
    found: list[BaseRoute] = [Mount("/x", routes=[])]
    assert not all(isinstance(route, Route) for route in found)
    assert issubclass(APIRoute, Route)


@pytest.mark.parametrize("bad", ["short", "with spaces in it, and long", "ünsäfe-but-long-enough"])
def test_what_can_be_none_is_refused_without_being_told(bad: str) -> None:
    with pytest.raises(InvalidRequest, match="polyphase keys token") as refused:
        all_apps(cluster_token=bad)
    assert bad not in refused.value.message
