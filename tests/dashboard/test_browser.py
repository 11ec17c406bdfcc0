"""The page in a real browser, served by Streamlit as users start it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.serving import CHROMIUM, SHOWN_MS, dashboard, tab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: apt-get install -y chromium"),
]


@pytest.fixture
def served(environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    with dashboard(environment, tmp_path) as url:
        yield url


@pytest.fixture
def browser_page() -> Iterator[Page]:
    with tab() as page:
        yield page


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
