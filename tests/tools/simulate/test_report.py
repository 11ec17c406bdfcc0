"""What a simulation shows: tables, CSV, and the report page, which a browser looks at, too."""

import re
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pytest
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console

from shared import palette
from shared.domain.job import Slo
from shared.errors import InvalidRequest
from shared.sim.metrics import Goodput, summary
from shared.sim.outcomes import Gaps, InstanceUse, LoadTimeline, Outcomes, SimResult, Status
from shared.sim.spec import InstanceSpec, RunSpec
from shared.sim.workload import Workload
from tests.tools.simulate.test_files import A10, A100, load
from tools.simulate import report
from tools.simulate.deployment import Deployment, load_deployment
from tools.simulate.page import course_figure, figures_of, latency_figure, load_figure, page, write_page
from tools.simulate.report import Run, file_word, outcomes_table, show, write_csv

CHROMIUM = Path("/usr/bin/chromium")
WORKLOAD = Workload("w", np.arange(3.0), np.full(3, 100), np.array([11, 11, 1]))
TIMELINE = LoadTimeline(
    np.array([0.0, 1.0]),
    np.array([[0, 1], [0, -1]], dtype=np.int8),
    np.array([[0, 3], [0, 0]], dtype=np.int32),
    np.array([[70, 0], [0, 0]]),
    np.array([[0.1, 0.2], [0.1, 1.0]], dtype=np.float32),
)


def use(name: str, flips: int = 0) -> InstanceUse:
    return InstanceUse(
        instance_id=name,
        accelerator="A10",
        accelerators=1,
        price_per_hour=1.0,
        busy_s=5.0,
        role_s={"prefill": 6.0, "decode": 4.0},
        prefill_tokens=3_000_000,
        decode_tokens=20,
        steps=9,
        preemptions=0,
        peak_kv_share=0.5,
        flips=flips,
    )


def run(label: str = "a+b", flips: int = 0, timeline: LoadTimeline | None = None) -> Run:
    outcomes = replace(
        Outcomes.empty(WORKLOAD),
        first_token_s=WORKLOAD.arrival_s + np.array([0.5, 1.0, np.nan]),
        last_token_s=WORKLOAD.arrival_s + np.array([1.5, 2.0, np.nan]),
        status=np.array([0, 0, int(Status.IMPOSSIBLE)], dtype=np.int8),
        prefill_instance=np.array([0, -1, -1], dtype=np.int32),
        decode_instance=np.array([1, 1, -1], dtype=np.int32),
    )
    result = SimResult("w", label, outcomes, (use("p-0", flips), use("p-1")), Gaps(), 10.0, 9, timeline=timeline)
    return Run(RunSpec(label=label), result, summary(result, Slo()), 0.1)


def runs() -> tuple[Run, ...]:
    tried = Goodput(8.0, 0.9, True, ((4.0, 1.0), (16.0, 0.2)))
    return (run("a+b </script>", timeline=TIMELINE), replace(run("c"), goodput=tried))


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    return load_deployment(Path("emulated-mixed"))


def text_of(deployment: Deployment, *runs: Run) -> str:
    console = Console(width=120, record=True, file=StringIO())
    show(console, deployment, WORKLOAD, runs)
    return " ".join(console.export_text().split())


def test_tables(deployment: Deployment) -> None:
    text = text_of(deployment, run(), run("c"))
    for words in ("4 x A100-SXM-80 prefill", "p x 2", "6 M", "Impossible requests"):
        assert words in text
    assert "1 of 3 requests (33.3 %) can never be served" in text
    assert "flips" not in text
    assert "refused" not in text  # rows of zeros are left out
    flipped = text_of(deployment, run(flips=1))
    assert "flips" in flipped
    assert "60 %" in flipped


@pytest.mark.parametrize(
    ("found", "note"),
    [
        (Goodput(8.0, 1.0, False, ((8.0, 1.0),)), "too few requests"),
        (Goodput(0.0, 0.83, True, ((0.1, 0.83),)), "even 0.1 requests/s miss the target: SLO attainment 83.0 %"),
    ],
)
def test_a_goodput_at_either_end_is_explained(deployment: Deployment, found: Goodput, note: str) -> None:
    assert note in text_of(deployment, replace(run(), goodput=found))


def test_csv(tmp_path: Path) -> None:
    write_csv(tmp_path / "new" / "folder", (run(), run("c")))
    rows = pd.read_csv(tmp_path / "new" / "folder" / "summary.csv")
    assert (rows["policy"].tolist(), rows["completed"].tolist()) == (["a+b", "c"], [2, 2])
    assert (tmp_path / "new" / "folder" / "requests-a+b.csv").is_file()
    table = outcomes_table(run().result)
    assert table["prefill_instance"].tolist() == ["p-0", "", ""]
    assert table["decode_instance"].tolist() == ["p-1", "p-1", ""]
    assert table["status"].tolist() == ["completed", "completed", "impossible"]
    assert table["ttft_s"].tolist()[:2] == [0.5, 1.0]
    assert np.isnan(table["ttft_s"].iloc[2])
    names = {label: file_word(label) for label in ("least_load+split=none", "a/b: c", "…")}
    assert list(names.values()) == ["least_load+split=none", "a-b-c", "run"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, deployment: Deployment) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot write"):
        write_csv(tmp_path / "file" / "x", (run(),))
    with pytest.raises(InvalidRequest, match="cannot write"):
        write_page(tmp_path / "file" / "x", deployment, WORKLOAD, runs())


@pytest.fixture
def instances(tmp_path: Path) -> tuple[InstanceSpec, ...]:
    rows = [{**A100, "count": 1, "max_model_len": 4096}, {**A10, "tensor_parallel": 1, "max_model_len": 4096}]
    return load(tmp_path, instances=rows).instances


def workload(*lengths: tuple[int, int]) -> Workload:
    prompts, outputs = zip(*lengths, strict=True)
    return Workload("w", np.arange(float(len(lengths))), np.array(prompts), np.array(outputs))


def test_impossible_requests_are_found_before_the_simulation(instances: tuple[InstanceSpec, ...]) -> None:
    assert report.impossible_of(workload((100, 10), (4000, 96)), instances) is None
    assert report.impossible_of(workload((100, 10), (4000, 97), (9000, 1)), instances) == (
        "2 of 3 requests (66.7 %) can never be served: longer than max_model_len, 4,096 tokens.",
        "The first is request 1: 4,000 + 97 tokens. They miss the SLO, and have no latency.",
    )
    rare = report.impossible_of(workload(*[(10, 1)] * 4999, (9000, 1)), instances)
    assert rare is not None
    assert "1 of 5,000 requests (under 0.1 %)" in rare[0]


def test_impossible_requests_of_a_run_by_cause(instances: tuple[InstanceSpec, ...]) -> None:
    outcomes = Outcomes.empty(workload((3500, 10), (100, 10), (9000, 1)))
    assert report.impossible_in(outcomes, instances) is None
    status = np.array([Status.IMPOSSIBLE, Status.COMPLETED, Status.IMPOSSIBLE], dtype=np.int8)
    small = replace(instances[1], kv_tokens=3000)
    found = report.impossible_in(replace(outcomes, status=status), (instances[0], small))
    assert found is not None
    assert found[0] == (
        "2 of 3 requests (66.7 %) can never be served: 1 longer than max_model_len, 4,096 tokens; "
        "1 longer than the KV memory of any instance, 3,000 tokens."
    )


def test_plots() -> None:
    assert [title.split(":")[0] for title in figures_of(runs())] == [
        *("Latency", "TTFT and TPOT by time of arrival", "Goodput", "Load of each instance")
    ]
    assert len(figures_of((run("c"),))) == 2
    figure = latency_figure(runs())
    assert [trace.line.color for trace in figure.data[:6:3]] == list(palette.SERIES[:2])
    assert figure.layout.showlegend
    assert not latency_figure(runs()[:1]).layout.showlegend
    nothing = replace(run().result, outcomes=Outcomes.empty(WORKLOAD))
    assert len(latency_figure((replace(run(), result=nothing),)).data[0].x) == 0
    assert len(figures_of(runs())["Goodput: SLO attainment by rate"].data[1].x) == 2
    role, _, _, kv = load_figure(run().result, TIMELINE).data
    assert role.z.tolist() == [[0, 0], [1, -1]]
    assert np.isnan(kv.z[1][1])  # an instance that is gone has no load


def test_the_course_has_a_point_only_where_there_are_enough_requests() -> None:
    assert all(len(trace.x) == 0 for trace in course_figure(runs()).data)  # two requests that completed
    count = 600
    outcomes = replace(
        Outcomes.empty(WORKLOAD),
        arrival_s=np.linspace(0.0, 60.0, count),
        first_token_s=np.linspace(0.0, 60.0, count) + 0.5,
        last_token_s=np.linspace(0.0, 60.0, count) + 1.5,
        output_tokens=np.full(count, 11),
        status=np.full(count, int(Status.COMPLETED), dtype=np.int8),
    )
    ttft = course_figure((replace(run(), result=replace(run().result, outcomes=outcomes)),)).data[0]
    assert len(ttft.x) == 60
    assert ttft.y == pytest.approx([0.5] * 60)


def test_the_page_needs_nothing_else_and_escapes_labels(deployment: Deployment) -> None:
    text = page(deployment, WORKLOAD, runs())
    assert text.count("* plotly.js v") == 1
    ours = text.partition("<script>")[0] + text.partition("</script>")[2]
    assert not re.search(r"(?:src|href)=|https?://(?!www\.w3\.org)", ours.replace("https://plot.ly", ""))
    assert "a+b &lt;/script&gt;" in text
    assert "a+b </script>" not in text


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
def test_a_browser_draws_it_in_its_theme(
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
    red, green, blue = (int(ground.page[at : at + 2], 16) for at in (1, 3, 5))
    assert seen.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb({red}, {green}, {blue})"
    assert seen.evaluate("document.documentElement.scrollWidth") <= 1024, "nothing is wider than the page"
    context.close()
