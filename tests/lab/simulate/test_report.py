"""Tables, CSV and pages of a run."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from lab.simulate.deployment import Deployment, load_deployment
from lab.simulate.page import latency_figure
from lab.simulate.report import Run, file_word, outcomes_table, show, write_csv
from shared.domain.job import Slo
from shared.errors import InvalidRequest
from shared.sim.metrics import Goodput, summary
from shared.sim.outcomes import Gaps, InstanceUse, LoadTimeline, Outcomes, SimResult, Status
from shared.sim.spec import RunSpec
from shared.sim.workload import Workload

WORKLOAD = Workload("w", np.arange(3.0), np.full(3, 100), np.array([11, 11, 1]))


def use(name: str, flips: int = 0) -> InstanceUse:
    return InstanceUse(name, "A10", 1, 1.0, 5.0, {"prefill": 6.0, "decode": 4.0}, 3_000_000, 20, 9, 0, 0.5, flips)


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


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    return load_deployment(Path("emulated-mixed"))


def text_of(deployment: Deployment, *runs: Run) -> str:
    console = Console(width=120, record=True, file=StringIO())
    show(console, deployment, WORKLOAD, runs)
    return console.export_text()


def test_tables(deployment: Deployment) -> None:
    text = text_of(deployment, run(), run("c"))
    assert "4 x A100-SXM-80 prefill" in text
    assert "p x 2" in text
    assert "6 M" in text
    assert "flips" not in text
    assert "refused" not in text  # there were none
    assert "Impossible requests" in text
    assert "1 of 3 requests (33.3 %) can never be served" in " ".join(text.split())


def test_flips_are_shown_where_there_were_any(deployment: Deployment) -> None:
    text = text_of(deployment, run(flips=1))
    assert "flips" in text
    assert "60 %" in text


def test_a_goodput_at_either_end_is_explained(deployment: Deployment) -> None:
    unbounded = replace(run(), goodput=Goodput(8.0, 1.0, False, ((8.0, 1.0),)))
    assert "too few requests" in text_of(deployment, unbounded)
    none = replace(run(), goodput=Goodput(0.0, 0.83, True, ((0.1, 0.83),)))
    assert "even 0.1 requests/s miss the target: SLO attainment 83.0 %" in text_of(deployment, none)


def test_outcomes_name_instances_and_leave_gaps_empty() -> None:
    table = outcomes_table(run().result)
    assert table["prefill_instance"].tolist() == ["p-0", "", ""]
    assert table["decode_instance"].tolist() == ["p-1", "p-1", ""]
    assert table["status"].tolist() == ["completed", "completed", "impossible"]
    assert table["ttft_s"].tolist()[:2] == [0.5, 1.0]
    assert np.isnan(table["ttft_s"].iloc[2])


def test_csv(tmp_path: Path) -> None:
    write_csv(tmp_path / "new" / "folder", (run(), run("c")))
    rows = pd.read_csv(tmp_path / "new" / "folder" / "summary.csv")
    assert rows["policy"].tolist() == ["a+b", "c"]
    assert rows["completed"].tolist() == [2, 2]
    assert (tmp_path / "new" / "folder" / "requests-a+b.csv").is_file()


def test_labels_become_names_of_files() -> None:
    assert file_word("least_load+split=none") == "least_load+split=none"
    assert file_word("a/b: c") == "a-b-c"
    assert file_word("…") == "run"


def test_pages_of_a_run_in_which_nothing_completed() -> None:
    result = replace(run().result, outcomes=Outcomes.empty(WORKLOAD))
    figure = latency_figure((replace(run(), result=result),))
    assert len(figure.data[0].x) == 0


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot write"):
        write_csv(tmp_path / "file" / "x", (run(),))
