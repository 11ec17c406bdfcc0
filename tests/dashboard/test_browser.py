"""The dashboard as users start it, in a real browser.

An element that is drawn anew may be there twice for a moment: what is looked for is the first one.
"""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from services.launcher.cluster_keys import add_key
from shared.domain.verdict import Level
from shared.errors import Conflict
from shared.runtime.keys import LOOK, OPERATE
from tests.dashboard.conftest import settings_of
from tests.dashboard.fake_services import FakeServices
from tests.dashboard.sample_data import CLUSTER_FILE, bad_day, proposal, report, search
from tests.dashboard.serving import CHROMIUM, SHOWN_MS, application, dashboard, tab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: apt-get install -y chromium"),
]
ROW_Y, HEAD_Y = 35, 38  # pixels of a table
expect.set_options(timeout=SHOWN_MS)


@pytest.fixture
def browser() -> Iterator[Page]:
    with tab() as page:
        yield page
        assert page.locator("[data-testid=stException]").count() == 0


@pytest.fixture(scope="module")
def busy() -> Iterator[FakeServices]:
    """32 instances on a bad day."""
    cluster = FakeServices(**bad_day(32, time.time()))
    with application(cluster.app()) as cluster.url:
        yield cluster


@pytest.fixture(scope="module")
def console(busy: FakeServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with dashboard(settings_of(busy), tmp_path_factory.mktemp("console")) as (url, _):
        yield url


def click_row(table: Locator, row: int, opened: Locator) -> None:
    """A click into a row of a table, which is one drawing; again while it has `opened` nothing, as in `choose`."""
    grid = table.locator(".dvn-scroller")
    for _ in range(5):
        expect(grid.or_(opened).first).to_be_visible()
        if opened.count():
            break
        with suppress(PlaywrightTimeoutError):
            grid.click(position={"x": 60, "y": HEAD_Y + ROW_Y * row + ROW_Y // 2}, timeout=5_000)
        with suppress(AssertionError):
            expect(opened).to_be_visible(timeout=20_000)
            return
    expect(opened).to_be_visible()


def has_rows(table: Locator, count: int) -> None:
    """A table, which the browser's tree of accessible elements describes, has so many rows beside its head."""
    expect(table.locator("[role=grid]")).to_have_attribute("aria-rowcount", str(count + 1))


def choose(browser: Page, name: str) -> None:
    """A click may be lost where the page is drawn anew at that moment: then a user clicks again."""
    radio = browser.get_by_role("radio", name=name)
    for _ in range(5):
        radio.click()
        with suppress(AssertionError):
            expect(radio).to_be_checked(timeout=5_000)
            return
    expect(radio).to_be_checked()


@pytest.mark.parametrize(
    ("path", "selectors"),
    [
        ("", [".pp-verdict", ".pp-chain", ".st-key-over-time .pp-plot", ".st-key-heat .pp-map"]),
        ("instances", [".st-key-instances-table [data-testid=stDataFrame]"]),
        ("requests", [".st-key-requests-box [data-testid=stDataFrame]"]),
        ("events", [".st-key-events-box [data-testid=stDataFrame]", ".st-key-audit-box [data-testid=stDataFrame]"]),
        ("policies", [".st-key-policy-form", ".pp table"]),
        ("predictor", [".pp-tiles", ".pp-plot"]),
        ("plan", [".pp-empty"]),
        ("try", [".pp-empty", ".st-key-talk-input input"]),
    ],
)
def test_each_page_shows_its_parts(console: str, browser: Page, path: str, selectors: list[str]) -> None:
    browser.set_viewport_size({"width": 1440, "height": 900})
    browser.goto(f"{console}/{path}")
    for selector in selectors:
        expect(browser.locator(f"#root {selector}").first).to_be_visible()
    expect(browser.locator("#pp-first")).to_have_count(0)
    if path == "requests":
        grid = browser.get_by_test_id("stDataFrame").locator(".dvn-scroller")
        scrolled, visible = grid.evaluate("grid => [grid.scrollWidth, grid.clientWidth]")
        assert scrolled <= visible, "whole rows fit on a laptop's screen"


def test_a_flip_is_posted_once_after_the_confirmation(
    environment: dict[str, str], tmp_path: Path, browser: Page, cluster: Any
) -> None:
    with dashboard(environment, tmp_path) as (url, _):
        browser.goto(f"{url}/instances")
        card, dialog = browser.locator(".st-key-card-p0"), browser.get_by_role("dialog")
        card.get_by_role("button", name="Flip to decode").click()
        expect(dialog).to_contain_text("Flip p0 from prefill to decode?")
        expect(dialog).to_contain_text("The instance first drains 3 jobs")
        cluster.refreshed(times=2)
        expect(dialog).to_be_visible()
        assert cluster.posts == []
        cluster.go.clear()
        dialog.get_by_role("button", name="Confirm").dblclick()
        expect(browser.get_by_text("3 jobs left to drain")).to_be_visible()
        cluster.go.set()
        expect(browser.get_by_text("p0 is now decode (was prefill). Drain 1.24 s, flip 0.4 ms.")).to_be_visible()
        expect(dialog).to_have_count(0)
        expect(card).to_contain_text("Flip to prefill")
        assert [post[:2] for post in cluster.posts] == [("p0", "flip")]
        browser.get_by_role("link", name=re.compile("operation ")).click()
        expect(browser.locator(".pp-sentence").first).to_contain_text("flip prefill → decode of p0")
        assert f"operation={cluster.posts[0][2]['operation_id']}" in browser.url


def test_the_links_of_a_problem(console: str, browser: Page) -> None:
    browser.goto(console)
    expect(browser.locator(".pp-verdict").first).to_contain_text("Degraded: TPOT met by 26 % (target 60 ms)")
    expect(browser.locator(".pp-verdict .pp-sign").first).to_have_text("▲")
    expect(browser.locator(".pp-chain .pp-link")).to_have_count(5)
    choose(browser, "24 h")
    day_ago = time.strftime("%d %b", time.gmtime(time.time() - 23 * 3600))  # at the left end of the chosen range
    stripe = browser.locator(f".st-key-over-time .pp-plot > i[title^='{day_ago}']").first
    expect(stripe).to_be_attached()
    problem = browser.locator(".st-key-problem-0")
    problem.get_by_role("link", name="requests").click()
    expect(browser.get_by_role("radio", name="missed")).to_be_checked()
    browser.go_back()
    problem.get_by_role("link", name="d1").click()
    expect(browser.locator(".st-key-instance-d1").first).to_contain_text("RTX-3090Ti")
    assert browser.url.endswith("/instances?instance=d1")
    expect(browser.locator(".st-key-past .pp-plot").first).to_be_visible()
    expect(browser.get_by_text("d1 step 59")).to_be_attached()


def test_clicks_in_tables_open_pages(console: str, browser: Page, busy: FakeServices) -> None:
    browser.goto(f"{console}/instances")
    dead = browser.locator(".st-key-instance-d6").first
    click_row(browser.get_by_test_id("stDataFrame").first, 0, dead)
    expect(dead).to_contain_text("dead")
    browser.get_by_role("link", name="All instances").click()
    expect(browser.get_by_text("32 of 32")).to_be_visible()
    browser.goto(f"{console}/events")
    browser.get_by_label("Instance").fill("p0")
    browser.get_by_label("Instance").press("Enter")
    table = browser.locator(".st-key-events-box").get_by_test_id("stDataFrame").first
    has_rows(table, sum(event["instance_id"] == "p0" for event in busy.events))
    click_row(table, 0, browser.locator(".st-key-instance-p0").first)
    browser.goto(f"{console}/events")
    audit = browser.locator(".st-key-audit-box").get_by_test_id("stDataFrame").first
    click_row(audit, 1, browser.locator(".pp-sentence").first)
    expect(browser.locator(".pp-sentence").first).to_contain_text("anna")


def test_a_request_is_found_and_its_link_works_in_another_tab(console: str, browser: Page, busy: FakeServices) -> None:
    browser.goto(f"{console}/requests")
    browser.get_by_label("Key").fill("nightly")
    browser.get_by_label("Key").press("Enter")
    expect(browser.get_by_text(re.compile("1 to (?!100)"))).to_be_visible()
    assert any(search.get("caller") == "nightly" for search in busy.searches)
    nightly = [job for job in busy.jobs if job["caller"] == "nightly"]
    slowest = max(nightly, key=lambda job: job["ttft_s"])
    table = browser.get_by_test_id("stDataFrame").first
    has_rows(table, len(nightly))
    click_row(table, 0, browser.locator(".pp-sentence").first)
    expect(browser.get_by_text(slowest["job_id"]).first).to_be_visible()
    expect(browser.locator(".pp-waterfall").first).to_be_visible()
    browser.locator(".pp-sentence summary").first.click()
    expect(browser.locator(".pp-sentence details[open] code").first).to_be_visible()
    other = browser.context.new_page()
    other.goto(browser.url)
    expect(other.get_by_text(slowest["job_id"]).first).to_be_visible()


def test_a_policy_is_changed(console: str, browser: Page, busy: FakeServices) -> None:
    browser.goto(f"{console}/policies")
    field = browser.get_by_role("textbox", name="Parameters")
    field.fill("fraction: 0.25")
    field.press("Enter")
    browser.get_by_role("button", name="Change …").click()
    dialog = browser.get_by_role("dialog")
    expect(dialog).to_contain_text("fraction (fraction = 0.25)")
    dialog.get_by_role("button", name="Confirm").dblclick()
    expect(browser.get_by_text("The split policy has been changed")).to_be_visible()
    assert busy.policy_changes == [({"split": {"name": "fraction", "parameters": {"fraction": 0.25}}}, "dashboard")]


def test_an_answer_is_streamed_and_has_its_waterfall(console: str, browser: Page, busy: FakeServices) -> None:
    browser.goto(f"{console}/try")
    busy.chat_go.clear()
    browser.get_by_label("Ask the model").fill("What is it?")
    browser.get_by_label("Ask the model").press("Enter")
    expect(browser.get_by_text("Prefill and", exact=True)).to_be_visible()
    expect(browser.get_by_role("button", name="Stop")).to_be_visible()
    busy.jobs.insert(0, report(f"chatcmpl-{busy.chats[0][1]['x-request-id']}-0"))
    busy.chat_go.set()
    expect(browser.get_by_text("Prefill and decode part ways.")).to_be_visible()
    expect(browser.locator(".st-key-talk-record-0 .pp-waterfall").first).to_be_visible()


def test_stale_data_and_a_lost_connection(
    cluster: Any, environment: dict[str, str], tmp_path: Path, browser: Page
) -> None:
    cluster.level = Level.DEGRADED
    with dashboard(environment, tmp_path) as (url, process):
        browser.goto(url)
        expect(browser.locator(".pp-verdict").first).to_contain_text("Degraded")
        late = browser.locator(".pp-late").first
        expect(late).to_be_hidden()
        cluster.broken.add("monitor")
        expect(browser.get_by_text("Greyed-out data")).to_be_visible()
        expect(browser.locator(".pp-stale .pp-verdict").first).to_contain_text(re.compile(r"as of \d+ s ago"))
        cluster.broken.clear()
        expect(browser.locator(".pp-stale")).to_have_count(0)
        process.send_signal(signal.SIGSTOP)
        expect(late).to_be_visible()
        expect(late).to_contain_text("The connection to the dashboard is lost")
        process.send_signal(signal.SIGCONT)
        expect(late).to_be_hidden()


def test_a_login(cluster: Any, environment: dict[str, str], tmp_path: Path, browser: Page) -> None:
    file = tmp_path / "keys.yaml"
    ann, ben = add_key(file, "ann", role=LOOK), add_key(file, "ben", role=OPERATE)
    flip = browser.get_by_role("button", name="Flip to decode")
    with dashboard({**environment, "POLYPHASE_DASHBOARD_API_KEYS_FILE": str(file)}, tmp_path) as (url, _):
        browser.goto(f"{url}/instances")
        log_in(browser, "pp-wrong")
        expect(browser.get_by_text("Unknown API key.")).to_be_visible()
        log_in(browser, ann)
        expect(browser.locator(".st-key-card-p0").first).to_be_visible()  # the requested page
        expect(flip).to_have_count(0)
        log_out(browser, "ann (look)")
        log_in(browser, ben)
        expect(flip.first).to_be_visible()
        browser.reload()
        expect(flip.first).to_be_visible()
        kept = browser.evaluate("document.cookie + JSON.stringify(localStorage) + location.href")
        assert ben not in kept, "the browser keeps a ticket, not the key"
        assert "polyphase_dashboard_" in kept
        browser.locator(".st-key-card-p1").get_by_role("button", name="Drain").click()
        browser.get_by_role("dialog").get_by_role("button", name="Confirm").click()
        expect(browser.get_by_text("p1 is drained")).to_be_visible()
        assert cluster.posts[0][3] == "ben"
        log_out(browser, "ben (operate)")
        expect(browser.get_by_label("API key")).to_be_visible()
        browser.reload()
        expect(browser.get_by_label("API key")).to_be_visible()


def log_in(page: Page, secret: str) -> None:
    expect(page.get_by_label("API key")).to_be_visible()
    page.get_by_label("API key").fill(secret)
    page.get_by_role("button", name="Log in").click()


def log_out(page: Page, account: str) -> None:
    page.get_by_role("button", name=account).click()
    page.get_by_role("button", name="Log out").click()


@pytest.fixture
def plan(planner: FakeServices, environment: dict[str, str], tmp_path: Path, browser: Page) -> Iterator[Page]:
    """The Plan page with two open proposals and a running search."""
    planner.proposals = [proposal("pr-2"), proposal("pr-1", cause="review")]
    planner.plans = [search("plan-1", "running"), search("plan-0")]
    with dashboard(environment, tmp_path) as (url, _):
        browser.goto(f"{url}/plan")
        yield browser


def confirmed(page: Page, button: Locator, question: str, planner: FakeServices) -> None:
    """Click twice, read the question while the page refreshes, confirm twice, and see the dialog close."""
    before, dialog = len(planner.planned), page.get_by_role("dialog")
    button.dblclick()
    expect(dialog).to_contain_text(question)
    planner.refreshed(times=2)
    expect(dialog).to_be_visible()
    assert len(planner.planned) == before
    dialog.get_by_role("button", name="Confirm").dblclick()
    expect(dialog).to_have_count(0)


def test_each_action_of_the_plan_happens_once(plan: Page, planner: FakeServices) -> None:
    first, second = (plan.locator(f".st-key-proposal-{name}") for name in ("pr-2", "pr-1"))
    confirmed(plan, first.get_by_role("button", name="Accept"), "d1 from decode to prefill; new routes", planner)
    expect(plan.get_by_text("The proposal is accepted")).to_be_visible()
    expect(first).to_have_count(0)
    confirmed(plan, second.get_by_role("button", name="Refuse"), "Refuse this proposal?", planner)
    expect(plan.get_by_text("The proposal is refused.")).to_be_visible()
    confirmed(plan, plan.get_by_role("button", name="Turn on"), "Turn automatic mode on?", planner)
    expect(plan.get_by_text("Automatic mode is on:")).to_be_visible()
    cancel = plan.locator(".st-key-search-plan-1").get_by_role("button", name="Cancel")
    confirmed(plan, cancel, "Cancel this search?", planner)
    expect(plan.get_by_text("The search is being cancelled.")).to_be_visible()
    planner.refreshed(times=1)
    calls = [(what, target) for what, target, *_ in planner.planned]
    assert calls == [("accept", "pr-2"), ("refuse", "pr-1"), ("mode", ""), ("cancel", "plan-1")]


def test_the_what_if_form_keeps_its_fields_while_the_page_refreshes(plan: Page, planner: FakeServices) -> None:
    option = plan.get_by_role("option", name="p0")
    for _ in range(10):  # a refresh of the page may close the list
        plan.get_by_label("Lost instances").click()
        with suppress(PlaywrightTimeoutError):
            option.click(timeout=2_000)
            break
    plan.keyboard.press("Escape")
    plan.get_by_label("Request rate ×").fill("2.5")
    planner.refreshed(times=3)
    plan.get_by_role("button", name="Compute").dblclick()
    answer = plan.locator(".st-key-what-if-answer")
    expect(answer).to_contain_text("Without p0; request rate × 2.5")
    expect(answer).to_contain_text("Then, with the best flips")
    assert {tuple(body["lost"]) for _, _, body, _ in planner.planned} == {("p0",)}


def test_a_refusal_an_outage_and_a_downloaded_result(plan: Page, planner: FakeServices, tmp_path: Path) -> None:
    with plan.expect_download() as download:
        plan.get_by_role("button", name="Cluster file").click()
    download.value.save_as(tmp_path / "plan.yaml")
    assert (tmp_path / "plan.yaml").read_text() == CLUSTER_FILE
    planner.refusal = Conflict("it was withdrawn a second ago")
    accept = plan.locator(".st-key-proposal-pr-2").get_by_role("button", name="Accept")
    confirmed(plan, accept, "Accept this proposal?", planner)
    expect(plan.get_by_text("was refused: it was withdrawn")).to_be_visible()
    planner.broken.add("planner")
    expect(plan.get_by_text("Greyed-out data")).to_be_visible()
    expect(accept).to_be_disabled()
    expect(plan.locator(".st-key-plan-picture-stale").first).to_be_visible()
    planner.broken.clear()
    expect(accept).to_be_enabled()
