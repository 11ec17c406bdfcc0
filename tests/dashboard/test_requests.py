"""The Requests page, and the page of one request."""

import re
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.requests_page import search_params, span_label, waterfall
from services.cluster_monitor.edge import MoveIn
from shared.errors import Conflict
from shared.timeline import RequestTimeline, Span, SpanRecord
from tests.dashboard.pages import button, confirm, has, html, links, opened, shows
from tests.dashboard.sample_data import T0


@pytest.fixture
def recent(cluster: Any) -> Any:
    """The cluster, whose requests have just arrived."""
    for job in cluster.jobs:
        job["arrived_s"] = 4e9
    return cluster


def test_the_slowest_come_first(page: AppTest, recent: Any) -> None:
    recent.jobs[0]["ttft_s"], recent.jobs[1]["ttft_s"] = 0.1, 3.0
    found = opened(page, "requests").run()
    assert not found.exception
    table = found.dataframe[0].value
    assert list(table["request"]) == ["job-1", "job-2"]
    assert (table["key"][0], table["SLO"][0]) == ("team-a", "default ✓ met")
    assert recent.searches[-1]["order"] == "slowest_ttft"
    assert float(recent.searches[-1]["since"]) % 60.0 == 0.0
    recent.broken.add("scheduler")
    found.run()
    assert "Greyed-out data" in found.error[0].value
    assert len(found.dataframe[0].value) == 2


def test_an_address_fills_the_form(page: AppTest, cluster: Any) -> None:
    opened(page, "requests", missed="true", order="slowest_tpot", instance="d1").run()
    params = cluster.searches[-1]
    assert (params["missed"], params["order"], params["instance"]) == ("true", "slowest_tpot", "d1")


def test_a_search_by_id_has_no_time_range(page: AppTest, cluster: Any) -> None:
    found = opened(page, "requests").run()
    found.text_input[0].set_value(" job-2 ").run()
    assert cluster.searches[-1]["job"] == "job-2"
    assert "since" not in cluster.searches[-1]
    assert list(found.dataframe[0].value["request"]) == ["job-2"]


def test_paging_and_a_changed_search_starts_at_the_first_page(page: AppTest, recent: Any) -> None:
    recent.jobs = [{**recent.jobs[1], "job_id": f"j{n}"} for n in range(150)]
    found = opened(page, "requests").run()
    assert "1 to 100" in found.caption[0].value
    found.button(key="page-after").click().run()
    assert "101 to 150" in found.caption[0].value
    assert recent.searches[-1]["offset"] == "100"
    found.text_input[1].set_value("team-a").run()
    assert recent.searches[-1]["offset"] == "0"


def test_the_parameters_of_a_search() -> None:
    fields = {"job": "", "slo": "chat", "phase": "any", "missed": "missed", "within": "all", "order": "newest"}
    wanted = {"slo": "chat", "missed": "true", "order": "newest", "limit": 5, "offset": 0}
    assert search_params(fields, T0, 5) == wanted


def test_an_ended_request(page: AppTest) -> None:
    one = opened(page, "requests", request="job-1").run()
    assert not one.error
    assert html(one).count('class="pp-waterfall"') == 1
    assert shows(one, "p0 computed its prompt in 48 ms", "✓ SLO met", "score 0.0123", "final, no more refreshes")
    assert shows(one, "&lt;i&gt;p1&lt;/i&gt;")
    assert "<i>p1</i>" not in html(one)
    assert ("d0", "instances?instance=d0") in links(one)


def test_a_running_request(page: AppTest) -> None:
    one = opened(page, "requests", request="job-2").run()
    assert shows(one, "Under way")
    assert html(one).count('class="pp-waterfall"') == 1
    assert "final, no more refreshes" not in html(one)


def test_a_request_that_decodes_is_moved(page: AppTest, cluster: Any) -> None:
    one = opened(page, "requests", request="job-2").run()
    assert one.selectbox(key="move-to-job-2").options == ["another instance", "d1"]
    button(one, "move-job-2").click().run()
    assert cluster.posts == [], "nothing before the confirmation"
    button(one, "cancel").click().run()
    confirm(one, "move-job-2")
    one.selectbox(key="move-to-job-2").set_value("d1").run()
    confirm(one, "move-job-2")
    assert [(job, what, body["to"], who) for job, what, body, who in cluster.posts] == [
        ("job-2", "move", None, "dashboard"),
        ("job-2", "move", "d1", "dashboard"),
    ]
    for _, _, body, _ in cluster.posts:
        assert MoveIn.model_validate(body).deadline_s
    shown = "its explanation shows whether its gateway has moved it."
    assert [message.value for message in one.success] == [
        f"d0 lets job-2 move to d1; {shown}",
        f"d0 lets job-2 move to another instance; {shown}",
    ]


def test_a_refused_move_says_why(page: AppTest, cluster: Any) -> None:
    cluster.refusal = Conflict("job-2 stays on d0: its gateway does not migrate it")
    one = confirm(opened(page, "requests", request="job-2").run(), "move-job-2")
    assert one.warning[0].value == "Move of job-2 was refused: job-2 stays on d0: its gateway does not migrate it"


def test_requests_that_cannot_move_have_no_button(page: AppTest, cluster: Any) -> None:
    assert not has(opened(page, "requests", request="job-1").run(), "move-job-1"), "it has ended"
    cluster.instances = [row for row in cluster.instances if row["instance_id"] != "d1"]
    assert button(opened(page, "requests", request="job-2").run(), "move-job-2").disabled, "d0 alone decodes"
    cluster.jobs[0]["phase"] = "prefill"
    assert not has(opened(page, "requests", request="job-2").run(), "move-job-2")


def test_an_unknown_request(page: AppTest) -> None:
    one = opened(page, "requests", request="<i>").run()
    assert shows(one, "no job_id &#x27;&lt;i&gt;&#x27;")
    assert "<i>" not in html(one).replace("<i ", "").replace("<i></i>", "")


def bars(drawn: str) -> list[tuple[float, float]]:
    """Left end and width of each bar, in per cent."""
    return [
        (float(left), float(width)) for left, width in re.findall(r'<i style="[^"]*left:(.+?)%;width:(.+?)%', drawn)
    ]


def test_the_bars_of_a_waterfall() -> None:
    spans = [
        SpanRecord(Span.DECODE, 10.08, 10.4, "d0"),
        SpanRecord(Span.QUEUE, 10.0, 10.01, "p0"),
        SpanRecord(Span.PREFILL, 10.01, 10.08, "p0"),
    ]
    drawn = waterfall(RequestTimeline("job", 10.0, first_token_s=10.08, spans=spans))
    assert re.findall(r"<span>(.+?)</span><div", drawn) == ["queue · p0", "prefill · p0", "decode · d0"]
    assert bars(drawn) == [(0.0, 2.5), (2.5, 17.5), (20.0, 80.0)]
    assert re.findall(r'<b style="left:([0-9.]+)%"', drawn) == ["20.00"]
    every = [SpanRecord(span, 10.0, 10.1) for span in Span]
    assert len(bars(waterfall(RequestTimeline("job", 10.0, spans=every)))) == len(Span)
    assert not bars(waterfall(RequestTimeline("job", 10.0)))


def test_a_waterfall_of_clocks_that_disagree() -> None:
    ((start, width),) = bars(waterfall(RequestTimeline("job", 10.0, spans=[SpanRecord(Span.TRANSFER, 9.9, 9.8, "d0")])))
    assert (start, width) == (50.0, 0.0)


def test_the_label_of_a_later_attempt() -> None:
    span = SpanRecord(Span.DECODE_QUEUE, 0, 1, "<b>d1", 2)
    assert span_label(span) == "decode queue · <b>d1 · attempt 2"
    assert "decode queue · &lt;b&gt;d1 · attempt 2</span>" in waterfall(RequestTimeline("job", 0.0, spans=[span]))
