"""The Events page."""

from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.events_page import kind_label, link_of
from shared.wire.api import Event, EventKind
from tests.dashboard.pages import links, opened, shows
from tests.dashboard.sample_data import event


@pytest.fixture
def logged(cluster: Any) -> Any:
    cluster.events = [
        event("death", "connection <lost>", instance_id="d0"),
        event("operation_refused", "drain of d0: the last ready one", instance_id="d0"),
    ]
    return cluster


def test_events_are_listed_and_filtered_by_kind_instance_and_time(page: AppTest, logged: Any) -> None:
    events = opened(page, "events", instance="d0").run()
    assert not events.exception
    table = events.dataframe[0].value
    assert list(table["event"]) == ["✕ death", "▲ operation refused"]
    assert list(table["text"]) == ["connection <lost>", "drain of d0: the last ready one"]
    assert logged.filters[-1]["instance"] == "d0"
    events.selectbox[0].select("death").run()
    assert logged.filters[-1]["kind"] == "death"
    assert len(events.dataframe[0].value) == 1
    events.button_group[0].set_value("all").run()
    assert logged.filters[-1]["since"] == 0.0


def test_an_operation_by_its_id(page: AppTest, cluster: Any) -> None:
    cluster.operate("p0", "flip", {"operation_id": "4f"}, "anna")
    events = opened(page, "events", operation="4f").run()
    assert shows(events, "succeeded", "flip prefill → decode", "anna", "1.24 s")
    assert ("p0", "instances?instance=p0") in links(events)
    assert list(events.dataframe[-1].value["by"]) == ["anna"]
    events.text_input[-1].set_value("5a").run()
    assert shows(events, "no operation_id &#x27;5a&#x27;")


@pytest.mark.parametrize(
    ("fields", "link"),
    [
        ({"instance_id": "d0"}, "instance:d0"),
        ({"instance_id": "d0", "operation_id": "4f"}, "operation:4f"),
        ({"operation_id": "4f", "job_id": "job-1"}, "request:job-1"),
        ({}, ""),
    ],
)
def test_the_link_of_an_event(fields: dict[str, str], link: str) -> None:
    assert link_of(msgspec.convert(event("death", "lost", **fields), Event)) == link


def test_the_label_of_a_kind() -> None:
    assert kind_label(EventKind.GATEWAY_GONE) == "✕ gateway gone"
    assert kind_label(EventKind.REGISTERED) == "registered"
