"""The console in a real browser, served by Streamlit as users start it, and clicked as a person would."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from services.launcher.cluster_keys import add_key
from shared.domain.verdict import Level
from shared.runtime.keys import LOOK, OPERATE
from tests.dashboard.cluster import FakeCluster
from tests.dashboard.lively import lively
from tests.dashboard.rows import report
from tests.dashboard.serving import CHROMIUM, SHOWN_MS, application, dashboard, dashboard_process, tab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: apt-get install -y chromium"),
]
ROW_Y, HEAD_Y = 35, 38  # pixels of a table


@pytest.fixture
def served(environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    with dashboard(environment, tmp_path) as url:
        yield url


@pytest.fixture
def browser_page() -> Iterator[Page]:
    with tab() as page:
        yield page
        assert page.locator("[data-testid=stException]").count() == 0


@pytest.fixture(scope="module")
def busy() -> Iterator[FakeCluster]:
    """32 instances on a bad day."""
    cluster = lively(32)
    with application(cluster.app()) as cluster.url:
        yield cluster


@pytest.fixture(scope="module")
def console(busy: FakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with dashboard(environment_of(busy), tmp_path_factory.mktemp("console")) as url:
        yield url


def environment_of(cluster: FakeCluster) -> dict[str, str]:
    names = ("MONITOR", "SCHEDULER", "GATEWAY", "PREDICTOR")
    urls = {f"POLYPHASE_DASHBOARD_{name}_URL": cluster.url for name in names}
    return {**urls, "POLYPHASE_DASHBOARD_READ_TIMEOUT_S": "15"}


def click_row(table: Locator, row: int, x: int = 60) -> None:
    """A click into a row of a table, which is one drawing."""
    grid = table.locator(".dvn-scroller")
    expect(grid).to_be_visible(timeout=SHOWN_MS)
    grid.click(position={"x": x, "y": HEAD_Y + ROW_Y * row + ROW_Y // 2})


def test_a_flip_is_posted_once_after_confirmation(served: str, browser_page: Page, cluster: Any) -> None:
    page = browser_page
    page.goto(f"{served}/instances")
    card = page.locator(".st-key-card-p0")
    card.get_by_role("button", name="Flip to decode").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Flip p0 from prefill to decode?", timeout=SHOWN_MS)
    expect(dialog).to_contain_text("It first drains 3 jobs", timeout=SHOWN_MS)
    cluster.refreshed(times=2)
    expect(dialog).to_be_visible()
    assert cluster.posts == []

    cluster.go.clear()
    dialog.get_by_role("button", name="Confirm").dblclick()
    expect(page.get_by_text("3 jobs left to drain")).to_be_visible(timeout=SHOWN_MS)
    cluster.go.set()
    told = page.get_by_text("p0 is now decode (was prefill). Drain 1.24 s, flip 0.4 ms.")
    expect(told).to_be_visible(timeout=SHOWN_MS)
    expect(dialog).to_have_count(0)
    expect(card).to_contain_text("Flip to prefill", timeout=SHOWN_MS)
    assert [(post[0], post[1]) for post in cluster.posts] == [("p0", "flip")]

    page.get_by_role("link", name=re.compile("operation ")).click()  # it can be asked for later
    expect(page.locator(".pp-sentence")).to_contain_text("flip prefill → decode of p0", timeout=SHOWN_MS)
    assert f"operation={cluster.posts[0][2]['operation_id']}" in page.url


def test_from_the_verdict_to_what_it_concerns(console: str, browser_page: Page) -> None:
    page = browser_page
    page.goto(console)
    banner = page.locator(".pp-verdict")
    expect(banner).to_contain_text("Degraded: TPOT met by 26 % (target 60 ms)", timeout=SHOWN_MS)
    expect(banner.locator(".pp-sign")).to_have_text("▲")
    expect(page.locator(".pp-chain .pp-link")).to_have_count(5)
    expect(page.locator(".st-key-over-time .js-plotly-plot")).to_be_visible(timeout=SHOWN_MS)
    expect(page.locator(".st-key-heat .js-plotly-plot")).to_be_visible(timeout=SHOWN_MS)
    page.get_by_role("radio", name="24 h").click()
    expect(page.locator(".st-key-over-time .js-plotly-plot")).to_be_visible(timeout=SHOWN_MS)
    page.locator(".st-key-problem-0").get_by_role("link", name="requests").click()
    expect(page.get_by_role("radio", name="missed")).to_be_checked(timeout=SHOWN_MS)
    page.go_back()
    page.locator(".st-key-problem-0").get_by_role("link", name="d1").click()
    expect(page.locator(".st-key-one-d1")).to_contain_text("RTX-3090Ti", timeout=SHOWN_MS)
    assert page.url.endswith("/instances?instance=d1")
    expect(page.locator(".st-key-past .js-plotly-plot")).to_be_visible(timeout=SHOWN_MS)
    expect(page.get_by_text("d1 step 59")).to_be_attached(timeout=SHOWN_MS)


def test_a_click_in_the_table_opens_an_instance(console: str, browser_page: Page) -> None:
    page = browser_page
    page.goto(f"{console}/instances")
    click_row(page.get_by_test_id("stDataFrame"), 0)
    expect(page.locator(".st-key-one-d6")).to_contain_text("dead", timeout=SHOWN_MS)
    page.get_by_role("link", name="All instances").click()
    expect(page.get_by_text("32 of 32")).to_be_visible(timeout=SHOWN_MS)


def test_a_request_is_found_opened_and_its_link_sent(console: str, browser_page: Page, busy: FakeCluster) -> None:
    page = browser_page
    page.goto(f"{console}/requests")
    key = page.get_by_label("Key")
    key.fill("nightly")
    key.press("Enter")
    expect(page.get_by_text(re.compile("1 to (?!100)"))).to_be_visible(timeout=SHOWN_MS)
    assert busy.searches[-1]["caller"] == "nightly"
    wanted = sorted((job for job in busy.jobs if job["caller"] == "nightly"), key=lambda job: -job["ttft_s"])[0]
    click_row(page.get_by_test_id("stDataFrame"), 0)
    expect(page.get_by_text(wanted["job_id"]).first).to_be_visible(timeout=SHOWN_MS)
    expect(page.locator(".js-plotly-plot")).to_be_visible(timeout=SHOWN_MS)
    page.locator(".pp-sentence summary").first.click()
    expect(page.locator(".pp-sentence details[open] code").first).to_be_visible()
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.get_by_text(wanted["job_id"]).first).to_be_visible(timeout=SHOWN_MS)


def test_events_are_filtered_and_lead_on(console: str, browser_page: Page, busy: FakeCluster) -> None:
    page = browser_page
    page.goto(f"{console}/events")
    field = page.get_by_label("Instance")
    field.fill("p0")
    field.press("Enter")
    table = page.locator(".st-key-events-box").get_by_test_id("stDataFrame")
    expect(table.locator("td", has_text="p1")).to_have_count(0, timeout=SHOWN_MS)
    click_row(table, 0)
    expect(page.locator(".st-key-one-p0")).to_be_visible(timeout=SHOWN_MS)
    page.goto(f"{console}/events")
    click_row(page.locator(".st-key-audit-box").get_by_test_id("stDataFrame"), 1)
    expect(page.locator(".pp-sentence")).to_contain_text("anna", timeout=SHOWN_MS)


def test_a_policy_is_changed(console: str, browser_page: Page, busy: FakeCluster) -> None:
    page = browser_page
    page.goto(f"{console}/policies")
    field = page.get_by_role("textbox", name="Parameters")
    field.fill("fraction: 0.25")
    field.press("Enter")
    page.get_by_role("button", name="Change …").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("fraction (fraction = 0.25)", timeout=SHOWN_MS)
    dialog.get_by_role("button", name="Confirm").dblclick()
    expect(page.get_by_text("Changed split")).to_be_visible(timeout=SHOWN_MS)
    assert busy.policy_changes == [({"split": {"name": "fraction", "parameters": {"fraction": 0.25}}}, "dashboard")]


def test_an_answer_streams_and_has_its_waterfall(console: str, browser_page: Page, busy: FakeCluster) -> None:
    page = browser_page
    page.goto(f"{console}/try")
    busy.answers.go.clear()
    asked = page.get_by_placeholder("Ask the model")
    asked.fill("What is it?")
    asked.press("Enter")
    expect(page.get_by_text("Prefill and", exact=True)).to_be_visible(timeout=SHOWN_MS)
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    busy.jobs.insert(0, report(f"chatcmpl-{busy.answers.asked[0][1]['x-request-id']}-0"))
    busy.answers.go.set()
    expect(page.get_by_text("Prefill and decode part ways.")).to_be_visible(timeout=SHOWN_MS)
    expect(page.get_by_text("TTFT here")).to_be_visible()
    expect(page.locator(".st-key-talk-record-0 .js-plotly-plot")).to_be_visible(timeout=SHOWN_MS)


def test_lengths_are_compared(console: str, browser_page: Page) -> None:
    browser_page.goto(f"{console}/predictor")
    expect(browser_page.get_by_text("of 1 234 answers that it predicted")).to_be_visible(timeout=SHOWN_MS)
    expect(browser_page.locator(".js-plotly-plot")).to_be_visible(timeout=SHOWN_MS)


def test_a_laptops_screen_shows_whole_rows_of_requests(console: str, browser_page: Page) -> None:
    page = browser_page
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{console}/requests")
    grid = page.get_by_test_id("stDataFrame").locator(".dvn-scroller")
    expect(grid).to_be_visible(timeout=SHOWN_MS)
    widths = grid.evaluate("grid => [grid.scrollWidth, grid.clientWidth]")
    assert widths[0] <= widths[1]


def test_what_is_old_says_so(cluster: Any, environment: dict[str, str], tmp_path: Path, browser_page: Page) -> None:
    cluster.level = Level.DEGRADED
    page = browser_page
    with dashboard_process(environment, tmp_path) as (url, process):
        page.goto(url)
        expect(page.locator(".pp-verdict")).to_contain_text("Degraded", timeout=SHOWN_MS)
        late = page.locator(".pp-late")
        expect(late).to_be_hidden()
        cluster.monitor_broken = True  # what is known stays, in grey, with its age
        expect(page.get_by_text("In grey: what it said")).to_be_visible(timeout=SHOWN_MS)
        expect(page.locator(".pp-stale .pp-verdict")).to_contain_text(re.compile(r"as of \d+ s ago"), timeout=SHOWN_MS)
        cluster.monitor_broken = False
        expect(page.locator(".pp-stale")).to_have_count(0, timeout=SHOWN_MS)
        process.send_signal(signal.SIGSTOP)  # the browser alone notices
        expect(late).to_be_visible(timeout=SHOWN_MS)
        expect(late).to_contain_text("This page no longer refreshes")
        process.send_signal(signal.SIGCONT)
        expect(late).to_be_hidden(timeout=SHOWN_MS)


def test_a_login(cluster: Any, environment: dict[str, str], tmp_path: Path, browser_page: Page) -> None:
    file = tmp_path / "keys.yaml"
    ann, ben = add_key(file, "ann", role=LOOK), add_key(file, "ben", role=OPERATE)
    page = browser_page
    with dashboard({**environment, "POLYPHASE_DASHBOARD_API_KEYS_FILE": str(file)}, tmp_path) as url:
        page.goto(f"{url}/instances")
        enter(page, "pp-wrong")
        expect(page.get_by_text("This key is not known here.")).to_be_visible(timeout=SHOWN_MS)
        enter(page, ann)
        expect(page.locator(".st-key-card-p0")).to_be_visible(timeout=SHOWN_MS)  # the page that was asked for
        expect(page.get_by_role("button", name="Flip to decode")).to_have_count(0)
        page.get_by_role("button", name="ann (look)").click()
        page.get_by_role("button", name="Log out").click()
        enter(page, ben)
        expect(page.get_by_role("button", name="Flip to decode").first).to_be_visible(timeout=SHOWN_MS)
        page.reload()  # a ticket is kept, the key is not
        expect(page.get_by_role("button", name="Flip to decode").first).to_be_visible(timeout=SHOWN_MS)
        kept = page.evaluate("document.cookie + JSON.stringify(localStorage) + location.href")
        assert ben not in kept
        assert "polyphase_dashboard_" in kept
        page.locator(".st-key-card-p1").get_by_role("button", name="Drain").click()
        page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
        expect(page.get_by_text("p1 is drained")).to_be_visible(timeout=SHOWN_MS)
        assert cluster.posts[0][3] == "ben"
        page.get_by_role("button", name="ben (operate)").click()
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("API key")).to_be_visible(timeout=SHOWN_MS)
        page.reload()
        expect(page.get_by_label("API key")).to_be_visible(timeout=SHOWN_MS)


def enter(page: Page, secret: str) -> None:
    field = page.get_by_label("API key")
    expect(field).to_be_visible(timeout=SHOWN_MS)
    field.fill(secret)
    page.get_by_role("button", name="Log in").click()
