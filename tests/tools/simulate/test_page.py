"""The report page: whole, self-contained, in both lights; looked at by a browser."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from playwright.sync_api import Browser, sync_playwright

from shared import palette
from shared.errors import InvalidRequest
from shared.sim.metrics import Goodput
from shared.sim.outcomes import LoadTimeline, Outcomes, Status
from tests.tools.simulate.test_report import WORKLOAD, run
from tools.simulate.deployment import Deployment, load_deployment
from tools.simulate.page import course_figure, goodput_figure, latency_figure, load_plot, page, plots_of, write_page
from tools.simulate.report import Run

CHROMIUM = Path("/usr/bin/chromium")
TIMELINE = LoadTimeline(
    np.array([0.0, 1.0]),
    np.array([[0, 1], [0, -1]], dtype=np.int8),
    np.array([[0, 3], [0, 0]], dtype=np.int32),
    np.array([[70, 0], [0, 0]]),
    np.array([[0.1, 0.2], [0.1, 1.0]], dtype=np.float32),
)


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    return load_deployment(Path("emulated-mixed"))


def runs() -> tuple[Run, ...]:
    tried = Goodput(8.0, 0.9, True, ((4.0, 1.0), (16.0, 0.2)))
    return (run("a+b </script>", timeline=TIMELINE), replace(run("c"), goodput=tried))


def test_every_plot_is_there() -> None:
    assert [plot.name for plot in plots_of(runs())] == ["latency", "course", "goodput", "load-a+b-script"]
    assert [plot.name for plot in plots_of((run("c"),))] == ["latency", "course"]


def test_a_line_for_each_policy_in_its_own_colour_and_a_legend_only_for_several() -> None:
    figure = latency_figure(runs())
    assert [trace.line.color for trace in figure.data[:6:3]] == list(palette.SERIES[:2])
    assert figure.layout.showlegend
    assert not latency_figure(runs()[:1]).layout.showlegend
    assert len(goodput_figure(runs()).data[1].x) == 2


def test_the_course_has_a_point_only_where_there_are_enough_requests() -> None:
    figure = course_figure(runs())
    assert all(len(trace.x) == 0 for trace in figure.data)  # two requests that completed
    count = 600
    outcomes = replace(
        Outcomes.empty(WORKLOAD),
        arrival_s=np.linspace(0.0, 60.0, count),
        first_token_s=np.linspace(0.0, 60.0, count) + 0.5,
        last_token_s=np.linspace(0.0, 60.0, count) + 1.5,
        output_tokens=np.full(count, 11),
        status=np.full(count, int(Status.COMPLETED), dtype=np.int8),
    )
    one = replace(run(), result=replace(run().result, outcomes=outcomes))
    ttft = course_figure((one,)).data[0]
    assert len(ttft.x) == 60
    assert ttft.y == pytest.approx([0.5] * 60)


def test_roles_and_load_are_in_the_palettes_colours_on_both_grounds() -> None:
    plot = load_plot(run().result, TIMELINE, "x")
    role, _, _, kv = plot.figure.data
    assert role.z.tolist() == [[0, 0], [1, -1]]
    assert np.isnan(kv.z[1][1])  # gone: it has no load
    for scales in (plot.light, plot.dark):
        assert [colour for _, colour in scales[0]][2:] == [palette.PREFILL] * 2 + [palette.DECODE] * 2
        assert scales[1][-1][1] == palette.DECODE
    assert plot.light[0][0][1] == palette.LIGHT.line
    assert plot.dark[0][0][1] == palette.DARK.line


def test_the_page_needs_nothing_else_and_holds_plotly_once(deployment: Deployment) -> None:
    text = page(deployment, WORKLOAD, runs())
    assert text.count("* plotly.js v") == 1
    ours = text.partition("<script>")[0] + text.partition("</script>")[2]
    assert not re.search(r"(?:src|href)=|https?://", ours)
    assert "a+b &lt;/script&gt;" in text
    assert "</script>" not in text[text.index("const PLOTS = ") : text.index("const wantsDark")]
    listed = re.search(r"const GROUNDS = (\{.*\});", text)
    assert listed is not None
    assert json.loads(listed[1])["dark"]["page"] == palette.DARK.page


def test_a_folder_that_cannot_be_written(tmp_path: Path, deployment: Deployment) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot write"):
        write_page(tmp_path / "file" / "x", deployment, WORKLOAD, runs())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip("no Chromium here")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "ground"), [("light", palette.LIGHT), ("dark", palette.DARK)])
def test_a_browser_draws_it_in_the_light_it_is_in(
    tmp_path: Path, deployment: Deployment, browser: Browser, scheme: Literal["light", "dark"], ground: palette.Ground
) -> None:
    file = write_page(tmp_path, deployment, WORKLOAD, runs())
    faults: list[str] = []
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1024, "height": 800}, offline=True)
    seen = context.new_page()
    seen.on("pageerror", lambda error: faults.append(str(error)))
    seen.goto(file.as_uri())
    seen.wait_for_function("document.querySelectorAll('.main-svg').length >= 8", timeout=60_000)
    assert faults == []
    assert _rgb(seen, "getComputedStyle(document.body).backgroundColor") == ground.page
    assert _rgb(seen, "getComputedStyle(document.querySelector('.xtick text')).fill") == ground.soft
    assert seen.evaluate("document.documentElement.scrollWidth") <= 1024, "nothing sticks out"
    other: Literal["light", "dark"] = "dark" if scheme == "light" else "light"
    seen.emulate_media(color_scheme=other)
    opposite = palette.DARK if scheme == "light" else palette.LIGHT
    seen.wait_for_function(
        "colour => getComputedStyle(document.querySelector('.xtick text')).fill === colour", arg=_css(opposite.soft)
    )
    context.close()


def _css(colour: str) -> str:
    return f"rgb({int(colour[1:3], 16)}, {int(colour[3:5], 16)}, {int(colour[5:7], 16)})"


def _rgb(seen: Any, expression: str) -> str:
    red, green, blue = re.findall(r"\d+", seen.evaluate(expression))[:3]
    return f"#{int(red):02x}{int(green):02x}{int(blue):02x}"
