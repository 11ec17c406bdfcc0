"""The first page."""

from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import look
from shared.domain.instance import InstanceState, Role
from shared.domain.verdict import Level
from tests.dashboard.pages import html, links


def test_a_good_day(page: AppTest) -> None:
    page.run()
    assert not page.exception
    assert not page.error
    shown = html(page)
    for said in ("polyphase-demo", "Good: SLO met by 97 %", "120 requests ended in the last 60 s", "2 of 2", "✓"):
        assert said in shown, said
    for said in ("Queue", "Prefill", "Transfer", "Decode queue", "Decode", "81 % of time", "p99"):
        assert said in shown, said
    assert "of requests: TTFT 2 s, TPOT 200 ms" in shown
    assert "60 ms / 110 ms / 900 ms" in shown
    assert links(page) == []  # nothing is wrong


def test_trouble_is_said_in_words_with_a_sign_and_leads_to_what_it_concerns(page: AppTest, cluster: Any) -> None:
    cluster.level = Level.DEGRADED
    cluster.add("x0", Role.DECODE, InstanceState.DEAD)
    page.run()
    assert not page.exception
    shown = html(page)
    for said in ("Degraded: TPOT met by 26 % (target 60 ms)", "▲", "344 requests wait for room", "2 of 3", "1 dead"):
        assert said in shown, said
    found = links(page)
    assert ("x0", "instances?instance=x0") in found
    assert ("requests", "requests?missed=true&order=slowest_tpot") in found


def test_the_past_is_drawn_as_two_figures(page: AppTest) -> None:
    page.run()
    assert len(page.get("plotly_chart")) == 2
    page.button_group(key="range").set_value("24 h").run()
    assert not page.exception
    assert len(page.get("plotly_chart")) == 2


@pytest.mark.parametrize("name", ["MONITOR", "SCHEDULER", "GATEWAY", "PREDICTOR"])
def test_one_service_unreachable(page: AppTest, monkeypatch: pytest.MonkeyPatch, nobody: str, name: str) -> None:
    monkeypatch.setenv(f"POLYPHASE_DASHBOARD_{name}_URL", nobody)
    page.run()
    assert not page.exception
    assert len(page.error) == 1
    assert nobody in page.error[0].value
    assert name.lower() in page.error[0].value
    assert ("Good: SLO met" in html(page)) is (name != "MONITOR")


def test_all_services_unreachable(page: AppTest, monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    for name in ("MONITOR", "SCHEDULER", "GATEWAY", "PREDICTOR"):
        monkeypatch.setenv(f"POLYPHASE_DASHBOARD_{name}_URL", nobody)
    page.run()
    assert not page.exception
    assert len(page.error) == 4
    assert "Nothing to show while the cluster monitor does not answer" in html(page)


def test_what_is_known_stays_in_grey_with_its_age(page: AppTest, cluster: Any) -> None:
    cluster.level = Level.DEGRADED
    page.run()
    cluster.monitor_broken = True
    page.run()
    assert not page.exception
    assert "In grey: what it said" in page.error[0].value
    shown = html(page)
    for said in ("2 of 2", "Degraded: TPOT", "as of 0 s ago", "monitor ✕", 'class="pp pp-stale"'):
        assert said in shown, said
    assert f'pp-verdict" style="--c:{look.IDLE}"' in shown
    assert len(page.get("plotly_chart")) == 2
    cluster.monitor_broken = False
    page.run()
    assert not page.error
    assert 'class="pp pp-stale"' not in html(page)


def test_attainment_below_the_goal_has_a_sign(page: AppTest, cluster: Any) -> None:
    for row in cluster.slo:
        row["attainment"] = row["tpot_attainment"] = 0.02
    shown = html(page.run())
    assert "All met (goal 90 %)" in shown
    assert "✕ 2 %" in shown
    assert f"--c:{look.BAD};background" in shown


def test_answers_that_make_no_sense(page: AppTest, cluster: Any) -> None:
    cluster.slo = [{"slo": 5}]
    page.run()
    assert not page.exception
    assert len(page.error) == 1
    assert "its answer was not understood" in page.error[0].value


def test_settings_that_cannot_work(page: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHASE_DASHBOARD_MONITER_URL", "http://127.0.0.1:1")
    page.run()
    assert not page.exception
    assert "POLYPHASE_DASHBOARD_MONITER_URL" in page.error[0].value


def test_every_refresh_starts_the_browsers_clock_again(page: AppTest) -> None:
    first = html(page.run())
    second = html(page.run())
    assert "This page no longer refreshes" in first
    assert "--late:6s" in first
    assert first.split('data-at="')[1][:13] != second.split('data-at="')[1][:13]


def test_an_empty_cluster(page: AppTest, cluster: Any) -> None:
    cluster.instances, cluster.jobs, cluster.slo = [], [], []
    page.run()
    assert not page.exception
    assert "0 of 0" in html(page)
    assert "No request has ended within the windows" in html(page)
