"""The Overview page."""

import time
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import markup
from dashboard.overview_page import PANELS
from shared.domain.instance import InstanceState, Role
from shared.domain.verdict import Level
from tests.dashboard.pages import charts, html, links, shows
from tests.dashboard.sample_data import demand

CHARTS = len(PANELS) + 3  # panels and maps
SERVICES = ("MONITOR", "SCHEDULER", "GATEWAY", "PREDICTOR")


def test_a_good_day(page: AppTest) -> None:
    page.run()
    assert not page.error
    assert shows(page, "polyphase-demo", "Good: SLO met by 97 %", "120 requests ended in the last 60 s", "2 of 2", "✓")
    assert shows(page, "Queue", "Prefill", "Transfer", "Decode queue", "Decode", "81 % of time", "p99")
    assert shows(page, "of requests: TTFT 2 s, TPOT 200 ms", "60 ms / 110 ms / 900 ms")
    assert links(page) == []
    assert charts(page) == CHARTS
    page.button_group(key="range").set_value("24 h").run()
    assert not page.exception
    assert charts(page) == CHARTS


def test_problems_have_words_a_sign_and_links(page: AppTest, cluster: Any) -> None:
    cluster.level = Level.DEGRADED
    cluster.add("x0", Role.DECODE, InstanceState.DEAD)
    page.run()
    assert shows(page, "Degraded: TPOT met by 26 % (target 60 ms)", "▲", "344 requests wait for room", "2 of 3")
    assert shows(page, "1 dead")
    assert ("x0", "instances?instance=x0") in links(page)
    assert ("requests", "requests?missed=true&order=slowest_tpot") in links(page)


@pytest.mark.parametrize("names", [*((name,) for name in SERVICES), SERVICES])
def test_services_that_do_not_answer(
    page: AppTest, monkeypatch: pytest.MonkeyPatch, refusing_url: str, names: tuple[str, ...]
) -> None:
    for name in names:
        monkeypatch.setenv(f"POLYPHASE_DASHBOARD_{name}_URL", refusing_url)
    page.run()
    assert not page.exception
    assert len(page.error) == len(names)
    for name, error in zip(names, page.error, strict=True):
        assert refusing_url in error.value
        assert name.lower() in error.value
    assert ("Good: SLO met" in html(page)) is ("MONITOR" not in names)
    assert ("the cluster monitor does not answer" in html(page)) is ("MONITOR" in names)


def test_stale_data_stays_in_grey_with_its_age(page: AppTest, cluster: Any) -> None:
    cluster.level, cluster.demand = Level.DEGRADED, demand(time.time())
    page.run()
    cluster.broken.add("monitor")
    page.run()
    assert "Greyed-out data is from" in page.error[0].value
    assert shows(page, "2 of 2", "Degraded: TPOT", "as of ", "monitor ✕", 'class="pp pp-stale"')
    assert shows(page, f'pp-verdict" style="--c:{markup.IDLE}"', "12.5 requests/s")
    assert charts(page) == CHARTS + 2, "with those of the demand"
    cluster.broken.clear()
    page.run()
    assert not page.error
    assert 'class="pp pp-stale"' not in html(page)


def test_attainment_below_the_goal_has_a_sign(page: AppTest, cluster: Any) -> None:
    for row in cluster.slo:
        row["attainment"] = row["tpot_attainment"] = 0.02
    assert shows(page.run(), "All met (goal 90 %)", "✕ 2 %", f"--c:{markup.BAD};background")


def test_answers_that_cannot_be_decoded(page: AppTest, cluster: Any) -> None:
    cluster.slo = [{"slo": 5}]
    page.run()
    assert not page.exception
    assert len(page.error) == 1
    assert "unexpected answer: Expected" in page.error[0].value


def test_an_unknown_setting_is_named(page: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHASE_DASHBOARD_MONITER_URL", "http://127.0.0.1:1")
    page.run()
    assert not page.exception
    assert "POLYPHASE_DASHBOARD_MONITER_URL" in page.error[0].value


def test_each_refresh_restarts_the_browsers_clock(page: AppTest) -> None:
    first, second = html(page.run()), html(page.run())
    assert "The connection to the dashboard is lost" in first
    assert "--late:6s" in first
    assert first.split('data-at="')[1][:13] != second.split('data-at="')[1][:13]


def test_an_empty_cluster(page: AppTest, cluster: Any) -> None:
    cluster.instances, cluster.jobs, cluster.slo = [], [], []
    assert shows(page.run(), "0 of 0", "No request has ended within these windows", "No requests in the last minutes.")
    assert "Requests in each second" not in html(page)


@pytest.mark.parametrize(
    ("roles", "parts"),
    [
        ({"prefill": 3, "decode": 1, "harm": 0.31, "harm_then": 0.02}, ["3 : 1 would be better: SLO cost 0.02"]),
        ({"prefill": 2, "decode": 2, "harm": 0.04, "harm_then": 0.04}, ["no other numbers are clearly better"]),
        (None, ["the best numbers are not known"]),
    ],
)
def test_the_demand_and_the_roles_for_it(page: AppTest, cluster: Any, roles: Any, parts: list[str]) -> None:
    cluster.demand = demand(time.time(), roles=roles)
    page.run()
    profile = ("12.5 requests/s", "1 500 prompt tokens, 40 expected output tokens", "30 s")
    assert shows(page, *profile, "prompts: 400 → 1 500", "detected after 4 s", "2 : 2", *parts)
    assert shows(page, "Requests in each second", "Mean prompt tokens of the requests of each second")
    cluster.demand |= {"demand": None, "shifts": []}
    assert shows(page.run(), "too few requests for a profile", "in the last minutes")


def test_requests_that_the_gateway_delays_and_refuses(page: AppTest, cluster: Any) -> None:
    assert "Delayed" not in html(page.run())
    cluster.metrics = (
        'polyphase_refused_total{cause="overloaded",slo="chat"} 41.0\n'
        'polyphase_delayed_total{slo="batch"} 1234.0\n'
        'polyphase_gateway_delayed_jobs{slo="batch"} 77.0\n'
        'vllm:prompt_tokens_total{model_name="demo"} 3.0\n'
    )
    assert shows(page.run(), "Delayed", "<b>batch</b>", "77", "1 234", "<b>chat</b>", "41", "2 s / 200 ms")
