"""Figures over time."""

from datetime import datetime

import msgspec

from dashboard import overview_graphs
from dashboard.instance_details import past
from dashboard.records import History, InstanceHistory, Mark
from shared import palette
from shared.domain.instance import Role
from tests.dashboard.past import history, instance_history
from tests.dashboard.rows import T0, instance


def known(minutes: int = 60, points: int = 120) -> History:
    return msgspec.convert(history(minutes, points, T0), History)


def fleet(count: int, points: int = 40) -> InstanceHistory:
    rows = [instance(f"p{n}" if n % 2 else f"d{n}", Role.PREFILL if n % 2 else Role.DECODE) for n in range(count)]
    return msgspec.convert(instance_history(rows, 60, points, T0), InstanceHistory)


def test_latencies_stand_beside_their_targets() -> None:
    figure = overview_graphs.graphs_figure(known(), "UTC", 0.9)
    targets = {shape.y0 for shape in figure.layout.shapes if shape.y0 == shape.y1}
    assert targets == {0.9, 2.0, 0.06, 0.25}
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert len(titles) == len(overview_graphs.PANELS)
    assert any("TTFT" in title and "target 2" in title and "p99" in title for title in titles)


def test_what_is_not_known_is_a_gap() -> None:
    figure = overview_graphs.graphs_figure(known(), "UTC", 0.9)
    assert any(value is None for value in figure.data[0].y)


def test_what_happened_is_marked_with_its_words() -> None:
    figure = overview_graphs.graphs_figure(known(), "UTC", 0.9)
    words = {text for trace in figure.data if trace.mode == "markers" for text in trace.text}
    assert "d1 connection lost" in words
    hostile = msgspec.structs.replace(known(), marks=[Mark(T0 - 5, "death", "<b>x</b>")])
    figure = overview_graphs.graphs_figure(hostile, "UTC", 0.9)
    assert {text for trace in figure.data if trace.mode == "markers" for text in trace.text} == {"&lt;b&gt;x&lt;/b&gt;"}


def test_times_are_the_readers_own() -> None:
    utc, there = (overview_graphs.graphs_figure(known(), zone, 0.9).data[0].x[0] for zone in ("UTC", "Asia/Tokyo"))
    assert isinstance(utc, datetime)
    assert (there - utc).total_seconds() == 9 * 3600


def test_a_map_has_a_line_an_instance_and_a_colour_a_role() -> None:
    found = fleet(30)
    figure = overview_graphs.heat_figure(found, "UTC")
    role, jobs, kv = figure.data
    assert list(role.y)[:2] == ["p1", "p3"]
    assert list(role.y)[-1] == "d28"
    assert [tuple(one) for one in role.colorscale] == palette.ROLES
    assert role.z.shape == jobs.z.shape == kv.z.shape == (30, 40)
    assert (role.z == -1).any()  # one was dead for a while


def test_two_hundred_instances_stay_a_small_figure() -> None:
    figure = overview_graphs.heat_figure(fleet(200, 60), "UTC")
    assert figure.layout.height < 420
    assert len(figure.to_json()) < 400_000


def test_one_instance() -> None:
    found = fleet(2)
    figure = past(found, found.instances["p1"], "UTC")
    assert len(figure.data) == 7
    assert figure.data[-1].text[0][0] == "prefill, ready"
