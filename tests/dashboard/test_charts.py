"""Charts over time."""

import io
import re
from base64 import b64decode

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from dashboard import charts, overview_page
from dashboard.charts import Line, Panel
from dashboard.instance_page import history_charts
from shared.domain.instance import Role
from shared.wire.api.monitor import History, InstanceHistory, Mark
from tests.dashboard.pages import drawings
from tests.dashboard.sample_data import T0, history, instance, instance_history


@pytest.fixture
def known() -> History:
    return msgspec.convert(history(60, 120, T0), History)


def fleet(count: int, points: int = 40) -> InstanceHistory:
    rows = [instance(f"p{n}" if n % 2 else f"d{n}", Role.PREFILL if n % 2 else Role.DECODE) for n in range(count)]
    return msgspec.convert(instance_history(rows, 60, points, T0), InstanceHistory)


def pictures(page: str) -> list[NDArray[np.uint8]]:
    """The pixels of each map."""
    found = re.findall(r"data:image/png;base64,([^\"]+)", page)
    return [np.asarray(Image.open(io.BytesIO(b64decode(data)))) for data in found]


def one_panel(panel: Panel) -> str:
    return drawings(charts.panel_grid([0, 10, 20, 30], (0, 30), [panel], "UTC"))[0]


def test_latencies_have_their_targets(known: History) -> None:
    page = overview_page.history_charts(known, "UTC", 0.9)
    assert len(drawings(page)) == len(overview_page.PANELS)
    assert {target for target in ("goal 0.9", "target 2", "target 0.06", "target 0.25") if target in page} == {
        "goal 0.9", "target 2", "target 0.06", "target 0.25"
    }  # fmt: skip


def test_unknown_values_are_gaps_and_a_value_alone_is_a_dot() -> None:
    drawn = one_panel(Panel("", [Line([10.0, 5.0, None, 0.0], "", "#000000")]))
    assert 'd="M0.0 0.00L333.3 50.00M1000.0 100.00h0"' in drawn


def test_stacked_values_stand_on_each_other() -> None:
    lines = [Line([1.0, 0.0, 0.0, 0.0], "", "#000000"), Line([3.0, 0.0, 0.0, 0.0], "", "#ffffff")]
    lower, upper = re.findall(r'd="M(.+?) (.+?)h(.+?)v(.+?)h', one_panel(Panel("", lines, stacked=True)))
    assert (lower[1], lower[3]) == ("100.00", "-25.00")
    assert (upper[1], upper[3]) == ("75.00", "-75.00")


def test_events_are_marked_with_their_text(known: History) -> None:
    assert "d1 connection lost" in overview_page.history_charts(known, "UTC", 0.9)
    hostile = msgspec.structs.replace(known, marks=[Mark(T0 - 5, "death", "", "<b>x</b>")])
    page = overview_page.history_charts(hostile, "UTC", 0.9)
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "<b>x" not in page


def test_values_and_times_appear_at_the_mouse_in_the_readers_zone() -> None:
    panel = Panel("", [Line([1.0, 2.5, None, 4.0], "jobs", "#000000")])
    utc, tokyo = (charts.panel_grid([0, 10, 20, 30], (0, 30), [panel], zone) for zone in ("UTC", "Asia/Tokyo"))
    assert 'title="01 Jan 00:00:10\njobs 2.5"' in utc
    assert 'title="01 Jan 09:00:10\njobs 2.5"' in tokyo
    assert utc.count("<i ") == 3, "where no value is known, no stripe has words"


def test_maps_have_a_line_for_each_instance_and_a_colour_for_each_role() -> None:
    page = charts.instance_maps(fleet(30), "UTC")
    role, jobs, kv = pictures(page)
    assert role.shape == jobs.shape == kv.shape == (30, 40, 4)
    names = re.findall(r'title="([pd]\d+):', page)
    assert (names[:2], names[-1]) == (["p1", "p3"], "d28")
    colours = {tuple(int(channel) for channel in pixel[:3]) for pixel in role.reshape(-1, 4) if pixel[3]}
    assert colours == {(0x5B, 0x74, 0xEC), (0x17, 0xA0, 0x8C), (0x8C, 0x94, 0xA3)}, "prefill, decode, gone for a while"


def test_charts_of_two_hundred_instances_stay_small() -> None:
    page = charts.instance_maps(fleet(200, 60), "UTC")
    assert len(page) < 150_000
    assert page.count("<span style") < 60, "labels without room are left out"


def test_the_history_of_one_instance() -> None:
    found = fleet(2)
    page = history_charts(found, found.instances["p1"], "UTC")
    assert len(drawings(page)) == 6
    assert "\nprefill, ready" in page


@pytest.mark.parametrize(
    ("largest", "top"), [(0.0, 1.0), (0.9, 1.0), (1.2, 2.0), (7.0, 8.0), (9.1, 10.0), (230.0, 300.0)]
)
def test_an_axis_ends_at_a_round_value(largest: float, top: float) -> None:
    assert charts._round_top(largest) == pytest.approx(top)


def test_points_against_expected_values() -> None:
    page = charts.against_expected({"prefill": ("#000000", [5.0], [10.0])}, ("expected", "measured"), 200)
    assert "M500.0 0.00h0" in drawings(page)[0]
    assert "● prefill" in page
