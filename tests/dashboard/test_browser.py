"""The page in a real browser, served by Streamlit as users start it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
START_S = 40.0
SHOWN_MS = 30_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: apt-get install -y chromium"),
]


@pytest.fixture
def served(environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of a dashboard process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-P",
        "-m",
        "streamlit",
        "run",
        str(ROOT / "dashboard" / "app.py"),
        "--server.port",
        str(port),
        "--server.address",
        "127.0.0.1",
        "--server.headless",
        "true",
    ]
    env = {**os.environ, **environment, "PYTHONPATH": str(ROOT), "POLYPHASE_DASHBOARD_REFRESH_S": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(START_S)


@pytest.fixture
def browser_page() -> Iterator[Page]:
    """A tab of headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 700})
        page.set_default_timeout(SHOWN_MS)
        yield page
        browser.close()


def test_a_flip_is_posted_once_after_confirmation(served: str, browser_page: Page, cluster: Any) -> None:
    page = browser_page
    page.goto(served)
    card = page.locator(".st-key-card-p0")
    card.get_by_role("button", name="Flip to decode").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Flip p0 from prefill to decode?", timeout=SHOWN_MS)
    expect(dialog).to_contain_text("It first drains 3 jobs", timeout=SHOWN_MS)
    cluster.refreshed(times=2)
    expect(dialog).to_be_visible()
    assert cluster.posts == []

    dialog.get_by_role("button", name="Confirm").dblclick()
    told = page.get_by_text("p0 is now decode (was prefill). Drain 1.24 s, flip 0.4 ms.")
    expect(told).to_be_visible(timeout=SHOWN_MS)
    expect(dialog).to_have_count(0)
    expect(card).to_contain_text("Flip to prefill", timeout=SHOWN_MS)
    cluster.refreshed(times=1)
    assert [(post[0], post[1]) for post in cluster.posts] == [("p0", "flip")]
    assert page.locator("[data-testid=stException]").count() == 0


def test_a_laptops_screen_shows_whole_rows_of_requests(served: str, browser_page: Page) -> None:
    page = browser_page
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(served)
    grid = page.get_by_test_id("stDataFrame").locator(".dvn-scroller")
    expect(grid).to_be_visible(timeout=SHOWN_MS)
    widths = grid.evaluate("grid => [grid.scrollWidth, grid.clientWidth]")
    assert widths[0] <= widths[1]


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"streamlit ended with {process.returncode}"
        try:
            if httpx.get(f"{url}/_stcore/health", timeout=1.0, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(f"{url} did not come up within {START_S} s")
