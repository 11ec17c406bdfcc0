"""The page Plan in a real browser: each of its buttons once."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from shared.errors import Conflict
from tests.dashboard.plan.test_page import SUPPOSED
from tests.dashboard.planner import CLUSTER_FILE, FakePlanner, proposal, search
from tests.dashboard.serving import CHROMIUM, SHOWN_MS, dashboard, tab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: apt-get install -y chromium"),
]


@pytest.fixture
def opened(planner: FakePlanner, environment: dict[str, str], tmp_path: Path) -> Iterator[Page]:
    """The page by its own address, with two open proposals and a search that runs."""
    planner.proposals = [proposal("pr-2"), proposal("pr-1", cause="review")]
    planner.plans, planner.answer = [search("plan-1", "running"), search("plan-0")], SUPPOSED
    with dashboard(environment, tmp_path) as url, tab() as page:
        page.goto(f"{url}/plan")
        yield page
        assert page.locator("[data-testid=stException]").count() == 0


def confirmed(page: Page, button: Locator, asked: str, planner: FakePlanner) -> None:
    """Click twice, read the question while the page refreshes, say yes twice, and see the question go."""
    before = len(planner.done)
    button.dblclick()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(asked, timeout=SHOWN_MS)
    planner.refreshed(times=2)
    expect(dialog).to_be_visible()
    assert len(planner.done) == before
    dialog.get_by_role("button", name="Confirm").dblclick()
    expect(dialog).to_have_count(0, timeout=SHOWN_MS)


def test_every_button_acts_once(opened: Page, planner: FakePlanner) -> None:
    page = opened
    first, second = (page.locator(f".st-key-proposal-{name}") for name in ("pr-2", "pr-1"))
    confirmed(page, first.get_by_role("button", name="Accept"), "d1 from decode to prefill; new routes", planner)
    expect(page.get_by_text("The proposal is accepted")).to_be_visible(timeout=SHOWN_MS)
    expect(first).to_have_count(0, timeout=SHOWN_MS)
    confirmed(page, second.get_by_role("button", name="Refuse"), "Refuse this proposal?", planner)
    expect(page.get_by_text("The proposal is refused.")).to_be_visible(timeout=SHOWN_MS)
    confirmed(page, page.get_by_role("button", name="Turn auto on"), "Apply proposals without asking?", planner)
    expect(page.get_by_text("Auto is on: proposals are applied without asking.").first).to_be_visible(timeout=SHOWN_MS)
    cancel = page.locator(".st-key-search-plan-1").get_by_role("button", name="Cancel")
    confirmed(page, cancel, "End this search?", planner)
    expect(page.get_by_text("The search is told to end.")).to_be_visible(timeout=SHOWN_MS)
    planner.refreshed(times=1)
    assert [(what, target) for what, target, *_ in planner.done] == [
        ("accept", "pr-2"),
        ("refuse", "pr-1"),
        ("mode", ""),
        ("cancel", "plan-1"),
    ]


def choose(page: Page, label: str, option: str) -> None:
    """As a person does: open the list, again if a page that is still being drawn has closed it."""
    wanted = page.get_by_role("option", name=option)
    for _ in range(10):
        page.get_by_label(label).click(timeout=SHOWN_MS)
        with suppress(PlaywrightTimeoutError):
            wanted.click(timeout=2_000)
            break
    page.keyboard.press("Escape")


def test_what_if_keeps_what_is_typed_while_the_page_refreshes(opened: Page, planner: FakePlanner) -> None:
    page = opened
    choose(page, "Lose instances", "p0")
    page.get_by_label("Request rate ×").fill("2.5")
    planner.refreshed(times=3)
    page.get_by_role("button", name="Work it out").dblclick()
    shown = page.locator(".st-key-what-if-answer")
    expect(shown).to_contain_text("Without p0; request rate × 2.5", timeout=SHOWN_MS)
    expect(shown).to_contain_text("Then, with the best flips")
    assert {tuple(body["lost"]) for _, _, body, _ in planner.done} == {("p0",)}


def test_a_refusal_an_outage_and_the_file_of_a_result(opened: Page, planner: FakePlanner, tmp_path: Path) -> None:
    page = opened
    with page.expect_download() as download:
        page.get_by_role("button", name="Cluster file").click()
    download.value.save_as(tmp_path / "plan.yaml")
    assert (tmp_path / "plan.yaml").read_text() == CLUSTER_FILE
    planner.refusal = Conflict("it was withdrawn a second ago")
    accept = page.locator(".st-key-proposal-pr-2").get_by_role("button", name="Accept")
    confirmed(page, accept, "Carry out this proposal?", planner)
    expect(page.get_by_text("was refused by the planner: it was withdrawn")).to_be_visible(timeout=SHOWN_MS)
    planner.away = True
    expect(page.get_by_text("In grey: what it said")).to_be_visible(timeout=SHOWN_MS)
    expect(accept).to_be_disabled(timeout=SHOWN_MS)
    expect(page.locator(".st-key-plan-picture-stale")).to_be_visible()
    planner.away = False
    expect(accept).to_be_enabled(timeout=SHOWN_MS)


def test_both_pages_are_a_click_apart(opened: Page) -> None:
    page = opened
    expect(page.get_by_text("The plan in force")).to_be_visible(timeout=SHOWN_MS)
    page.get_by_role("link", name="Overview").click()
    expect(page.locator(".pp-verdict")).to_be_visible(timeout=SHOWN_MS)
    page.get_by_role("link", name="Plan").click()
    expect(page.get_by_text("The plan in force")).to_be_visible(timeout=SHOWN_MS)
    assert page.url.endswith("/plan")
