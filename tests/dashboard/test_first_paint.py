"""What a browser shows before Streamlit."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from starlette.applications import Starlette
from starlette.testclient import TestClient

from dashboard import login
from dashboard.app import app
from dashboard.first_paint import PAINTED, element_files
from dashboard.pages import PAGES
from services.launcher.cluster_keys import add_key
from shared.domain.verdict import Level
from shared.runtime.keys import LOOK
from tests.dashboard.sample_data import event, report


@pytest.fixture
def browser(environment: dict[str, str], loopback: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    st.cache_resource.clear()
    monkeypatch.setattr("dashboard.first_paint.WAIT_S", 30.0)
    yield TestClient(Starlette(routes=app._user_routes), "http://127.0.0.1")
    st.cache_resource.clear()


def painted(browser: TestClient, path: str = "", **more: Any) -> str:
    """What is shown before the page; empty for nothing."""
    document = browser.get(f"/{path}", **more).text
    assert '<div id="root">' in document
    assert "BACKEND_BASE_URL" in document
    return document.partition('<div id="pp-first">')[2].partition("<script>")[0]


def test_each_page_has_a_first_request() -> None:
    assert list(PAINTED) == list(PAGES)
    assert [PAINTED[path].title for path in PAGES] == [title for _, title, _ in PAGES.values()]


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        (
            "",
            [
                "Degraded: TPOT met by 26 %",
                "344 requests wait for room",
                "Decode queue",
                "2 of 2",
                "TTFT (s)",
                "Times are",
            ],
        ),
        ("instances", ["EMULATED", "<td>d1</td>"]),
        ("requests", ["<td>job-0</td>"]),
        ("events", ["Times are in UTC", "connection &lt;lost&gt;"]),
        ("policies", ["least_load"]),
        ("predictor", ["Output lengths"]),
    ],
)
def test_a_page_shows_its_values(browser: TestClient, cluster: Any, path: str, parts: list[str]) -> None:
    cluster.level = Level.DEGRADED
    cluster.jobs.insert(0, report("job-0", arrived_s=time.time()))
    cluster.events = [event("death", "connection <lost>", instance_id="d0")]
    shown = painted(browser, path)
    assert [part for part in parts if part not in shown] == []


def test_the_browser_is_told_which_code_of_streamlit_a_page_needs(browser: TestClient) -> None:
    static = Path(st.__file__).parent / "static"
    manifest = json.loads((static / "manifest.json").read_text("utf-8"))
    for painting in PAINTED.values():
        for element in ("Html", *painting.elements):
            files = element_files(manifest, [element])
            assert files, f"this version of Streamlit has no {element}"
            assert all((static / file).is_file() for file in files)
    table = browser.get("/requests").text
    assert re.search(r'rel="modulepreload" crossorigin href="./static/js/ReadOnlyGrid', table)
    assert "PlotlyChart" not in table


def test_the_plan(browser: TestClient, planner: Any) -> None:
    assert "pp-plan" in painted(browser, "plan")


def test_texts_are_escaped(browser: TestClient, cluster: Any) -> None:
    cluster.jobs.insert(0, report("<script>x</script>", arrived_s=time.time()))
    assert "&lt;script&gt;x" in painted(browser, "requests")


@pytest.mark.parametrize("path", ["plan", "try", "events", "instances?instance=p0", "requests?request=x"])
def test_pages_that_only_streamlit_shows(browser: TestClient, path: str) -> None:
    assert painted(browser, path) == ""


def test_a_service_that_does_not_answer(browser: TestClient, cluster: Any) -> None:
    cluster.broken.add("monitor")
    assert painted(browser) == ""


def test_a_foreign_name_for_this_machine_shows_nothing(browser: TestClient) -> None:
    assert painted(browser) != ""
    assert painted(browser, headers={"Host": "attacker.example"}) == ""


def test_an_open_dashboard_for_all_machines_shows_nothing(browser: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "LOOPBACK", ())
    assert painted(browser) == ""


def test_only_a_logged_in_visitor_sees_values(
    browser: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.yaml"
    secret = add_key(keys, "anna", role=LOOK)
    monkeypatch.setenv("POLYPHASE_DASHBOARD_API_KEYS_FILE", str(keys))
    assert painted(browser) == ""
    assert painted(browser, cookies={login.cookie_name(): "wrong"}) == ""
    cookies = {login.cookie_name(): login.tickets().issue(secret)}
    assert "pp-verdict" in painted(browser, cookies=cookies)
    keys.write_text("keys: []\n")
    assert painted(browser, cookies=cookies) == ""
