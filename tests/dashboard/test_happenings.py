"""The page Events."""

from typing import Any

from streamlit.testing.v1 import AppTest

from dashboard.events_page import kind_words, moment, target
from dashboard.records import EventRow
from tests.dashboard.pages import html, links, opened


def happened(cluster: Any) -> None:
    for kind, text in (("operation_refused", "drain of d0: the last ready one"), ("death", "connection <lost>")):
        cluster.events.insert(0, {"time_s": 1.0, "kind": kind, "instance_id": "d0", "role": "decode", "text": text})


def test_deaths_and_refusals_leave_a_trace(page: AppTest, cluster: Any) -> None:
    happened(cluster)
    events = opened(page, "events").run()
    assert not events.exception
    table = events.dataframe[0].value
    assert list(table["what"]) == ["✕ death", "▲ operation refused"]
    assert list(table["text"]) == ["connection <lost>", "drain of d0: the last ready one"]


def test_they_are_filtered_by_kind_instance_and_time(page: AppTest, cluster: Any) -> None:
    happened(cluster)
    events = opened(page, "events", instance="d0").run()
    assert cluster.filters[-1]["instance"] == "d0"
    events.selectbox[0].select("death").run()
    assert cluster.filters[-1]["kind"] == "death"
    assert len(events.dataframe[0].value) == 1
    events.button_group[0].set_value("ever").run()
    assert cluster.filters[-1]["since"] == 0.0


def test_an_operation_by_its_id(page: AppTest, cluster: Any) -> None:
    cluster.operate("p0", "flip", {"operation_id": "4f"}, "anna")
    events = opened(page, "events", operation="4f").run()
    assert not events.exception
    shown = html(events)
    for said in ("succeeded", "flip prefill → decode", "anna", "1.24 s"):
        assert said in shown, said
    assert ("p0", "instances?instance=p0") in links(events)
    assert list(events.dataframe[-1].value["by"]) == ["anna"]
    events.text_input[-1].set_value("5a").run()
    assert "no operation &#x27;5a&#x27;" in html(events)


def test_what_a_click_leads_to() -> None:
    event = EventRow(1.0, "death", "lost", instance_id="d0")
    assert target(event) == "instance:d0"
    assert target(EventRow(1.0, "x", "", instance_id="d0", operation_id="4f")) == "operation:4f"
    assert target(EventRow(1.0, "x", "")) == ""
    assert kind_words("gateway_gone") == "✕ gateway gone"


def test_moments_are_told_in_the_readers_own_time() -> None:
    assert moment(1_790_000_000.0, 1_790_000_060.0, "UTC") == "14:13:20 (1 min ago)"
    assert moment(1_790_000_000.0, 1_790_100_000.0, "Europe/Zurich") == "21 Sep 16:13 (1 d ago)"
