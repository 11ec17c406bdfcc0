"""The page Requests, and the page of one."""

from typing import Any

from streamlit.testing.v1 import AppTest

from dashboard.requests_page import params_of
from tests.dashboard.pages import html, links, opened
from tests.dashboard.rows import T0


def test_the_worst_come_first(page: AppTest, cluster: Any) -> None:
    cluster.jobs[0]["ttft_s"], cluster.jobs[1]["ttft_s"] = 0.1, 3.0
    for job in cluster.jobs:
        job["arrived_s"] = cluster.time_s - 10.0
    found = opened(page, "requests").run()
    assert not found.exception
    assert list(found.dataframe[0].value["request"]) == ["job-1", "job-2"]
    assert found.dataframe[0].value["key"][0] == "team-a"
    assert found.dataframe[0].value["SLO"][0] == "default ✓ met"
    assert cluster.searches[-1]["order"] == "slowest_ttft"
    assert float(cluster.searches[-1]["since"]) % 60.0 == 0.0


def test_an_address_fills_the_form(page: AppTest, cluster: Any) -> None:
    opened(page, "requests", missed="true", order="slowest_tpot", instance="d1").run()
    asked = cluster.searches[-1]
    assert (asked["missed"], asked["order"], asked["instance"]) == ("true", "slowest_tpot", "d1")


def test_an_id_is_looked_for_at_any_time(page: AppTest, cluster: Any) -> None:
    found = opened(page, "requests").run()
    found.text_input[0].set_value(" job-2 ").run()
    assert cluster.searches[-1]["job"] == "job-2"
    assert "since" not in cluster.searches[-1]
    assert list(found.dataframe[0].value["request"]) == ["job-2"]


def test_pages_are_turned_and_another_search_begins_at_its_first(page: AppTest, cluster: Any) -> None:
    cluster.jobs = [{**cluster.jobs[1], "job_id": f"j{n}", "arrived_s": cluster.time_s} for n in range(150)]
    found = opened(page, "requests").run()
    assert "1 to 100" in found.caption[0].value
    found.button(key="page-after").click().run()
    assert "101 to 150" in found.caption[0].value
    assert cluster.searches[-1]["offset"] == "100"
    found.text_input[1].set_value("team-a").run()
    assert cluster.searches[-1]["offset"] == "0"


def test_what_is_asked_of_the_scheduler() -> None:
    state = {"job": "", "slo": "chat", "phase": "any", "missed": "missed", "within": "ever", "order": "newest"}
    wanted = {"slo": "chat", "missed": "true", "order": "newest", "limit": 5, "offset": 0}
    assert params_of(state, T0, 5) == wanted


def test_one_in_sentences_with_its_waterfall(page: AppTest) -> None:
    one = opened(page, "requests", request="job-1").run()
    assert not one.exception
    assert not one.error
    assert len(one.get("plotly_chart")) == 1
    shown = html(one)
    for said in ("p0 computed its prompt in 48 ms", "✓ SLO met", "score 0.0123", "this will not change any more"):
        assert said in shown, said
    assert "&lt;i&gt;p1&lt;/i&gt;" in shown
    assert "<i>p1</i>" not in shown
    assert ("d0", "instances?instance=d0") in links(one)


def test_one_under_way_has_a_waterfall_too(page: AppTest) -> None:
    one = opened(page, "requests", request="job-2").run()
    assert not one.exception
    assert len(one.get("plotly_chart")) == 1
    assert "Under way" in html(one)
    assert "this will not change any more" not in html(one)


def test_one_that_is_not_known(page: AppTest) -> None:
    one = opened(page, "requests", request="<i>").run()
    assert not one.exception
    assert "no timeline of job" in html(one)
    assert "<i>" not in html(one).replace("<i ", "").replace("<i></i>", "")


def test_the_last_search_stays_when_the_scheduler_goes(page: AppTest, cluster: Any) -> None:
    for job in cluster.jobs:
        job["arrived_s"] = cluster.time_s
    found = opened(page, "requests").run()
    cluster.scheduler_broken = True
    found.run()
    assert "In grey: what it said" in found.error[0].value
    assert len(found.dataframe[0].value) == 2
