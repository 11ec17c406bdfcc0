"""Figures over time."""

from datetime import datetime
from typing import Any

import msgspec
import pytest

from dashboard import charts, overview_page
from dashboard.instance_page import history_figure
from shared import palette
from shared.domain.instance import Role
from shared.wire.api.monitor import History, InstanceHistory, Mark
from tests.dashboard.sample_data import T0, history, instance, instance_history


@pytest.fixture
def known() -> History:
    return msgspec.convert(history(60, 120, T0), History)


def fleet(count: int, points: int = 40) -> InstanceHistory:
    rows = [instance(f"p{n}" if n % 2 else f"d{n}", Role.PREFILL if n % 2 else Role.DECODE) for n in range(count)]
    return msgspec.convert(instance_history(rows, 60, points, T0), InstanceHistory)


def hover_texts(figure: Any) -> set[str]:
    return {text for trace in figure.data if trace.mode == "markers" for text in trace.text}


def test_latencies_have_their_targets_and_unknown_values_are_gaps(known: History) -> None:
    figure = overview_page.history_figure(known, "UTC", 0.9)
    assert {shape.y0 for shape in figure.layout.shapes if shape.y0 == shape.y1} == {0.9, 2.0, 0.06, 0.25}
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert len(titles) == len(overview_page.PANELS)
    assert any("TTFT" in title and "target 2" in title and "p99" in title for title in titles)
    assert any(value is None for value in figure.data[0].y)


def test_events_are_marked_with_their_text(known: History) -> None:
    assert "d1 connection lost" in hover_texts(overview_page.history_figure(known, "UTC", 0.9))
    hostile = msgspec.structs.replace(known, marks=[Mark(T0 - 5, "death", "", "<b>x</b>")])
    assert hover_texts(overview_page.history_figure(hostile, "UTC", 0.9)) == {"&lt;b&gt;x&lt;/b&gt;"}


def test_times_are_in_the_readers_zone(known: History) -> None:
    utc, tokyo = (overview_page.history_figure(known, zone, 0.9).data[0].x[0] for zone in ("UTC", "Asia/Tokyo"))
    assert isinstance(utc, datetime)
    assert (tokyo - utc).total_seconds() == 9 * 3600


def test_maps_have_a_line_for_each_instance_and_a_colour_for_each_role() -> None:
    role, jobs, kv = charts.instance_maps(fleet(30), "UTC").data
    assert list(role.y)[:2] == ["p1", "p3"]
    assert list(role.y)[-1] == "d28"
    assert [tuple(stop) for stop in role.colorscale] == palette.ROLES
    assert role.z.shape == jobs.z.shape == kv.z.shape == (30, 40)
    assert (role.z == -1).any()  # one was dead for a while


def test_maps_of_two_hundred_instances_stay_small() -> None:
    figure = charts.instance_maps(fleet(200, 60), "UTC")
    assert figure.layout.height < 420
    assert len(figure.to_json()) < 400_000


def test_the_history_of_one_instance() -> None:
    found = fleet(2)
    figure = history_figure(found, found.instances["p1"], "UTC")
    assert len(figure.data) == 7
    assert figure.data[-1].text[0][0] == "prefill, ready"
