"""Tables, CSV and pages of a run."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from services.launcher import cli
from shared.domain.job import Slo
from shared.errors import InvalidRequest
from shared.sim.metrics import Goodput, summary
from shared.sim.outcomes import Gaps, InstanceUse, LoadTimeline, Outcomes, SimResult, Status
from shared.sim.spec import InstanceSpec, RunSpec
from shared.sim.workload import Workload
from tools.simulate import report
from tools.simulate.deployment import Deployment, load_deployment
from tools.simulate.page import latency_figure
from tools.simulate.report import Run, file_word, outcomes_table, show, write_csv

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


RUN = CliRunner()
ROWS: list[dict[str, Any]] = [
    {"id": "p", "accelerator": "A100-SXM-80", "role": "prefill", "max_model_len": 4096},
    {"id": "d", "accelerator": "A10", "role": "decode", "max_model_len": 4096},
]


def workload(*lengths: tuple[int, int]) -> Workload:
    prompts, outputs = zip(*lengths, strict=True)
    return Workload("w", np.arange(float(len(lengths))), np.array(prompts), np.array(outputs))


@pytest.fixture
def instances(tmp_path: Path) -> tuple[InstanceSpec, ...]:
    prefill, decode = load_deployment(file(tmp_path)).instances
    return prefill, decode


def file(folder: Path) -> Path:
    path = folder / "sim.yaml"
    path.write_text(yaml.safe_dump({"name": "small", "model": "Llama-3-8B", "instances": ROWS}))
    return path


def test_none(instances: tuple[InstanceSpec, ...]) -> None:
    one = workload((100, 10), (4000, 96))
    assert report.impossible_of(one, instances) is None
    assert report.impossible_in(Outcomes.empty(one), instances) is None


def test_those_longer_than_every_instance_are_certain_before_anything_runs(instances: tuple[InstanceSpec, ...]) -> None:
    found = report.impossible_of(workload((100, 10), (4000, 97), (9000, 1)), instances)
    assert found is not None
    assert found.sentences() == (
        "2 of 3 requests (66.7 %) can never be served: longer than max_model_len, 4,096 tokens.",
        "The first is request 1: 4,000 + 97 tokens. They miss the SLO, and have no latency.",
    )


def test_those_without_room_in_any_kv_memory_are_told_apart(instances: tuple[InstanceSpec, ...]) -> None:
    prefill, decode = instances
    outcomes = Outcomes.empty(workload((3500, 10), (100, 10), (9000, 1)))
    status = np.array([Status.IMPOSSIBLE, Status.COMPLETED, Status.IMPOSSIBLE], dtype=np.int8)
    found = report.impossible_in(replace(outcomes, status=status), (prefill, replace(decode, kv_tokens=3000)))
    assert found is not None
    loud, _ = found.sentences()
    assert loud == (
        "2 of 3 requests (66.7 %) can never be served: 1 longer than max_model_len, 4,096 tokens; "
        "1 longer than the KV memory of any instance, 3,000 tokens."
    )


def test_a_rare_one_is_not_rounded_away(instances: tuple[InstanceSpec, ...]) -> None:
    found = report.impossible_of(workload(*[(10, 1)] * 4999, (9000, 1)), instances)
    assert found is not None
    assert "1 of 5,000 requests (under 0.1 %)" in found.sentences()[0]
    assert "request 4,999" in found.sentences()[1]


def test_the_command_warns_before_and_after_and_on_the_page(tmp_path: Path) -> None:
    words = ["simulate", str(file(tmp_path)), "--trace", "prompt=3600,output=200,prompt_cv=1", "--rate", "2"]
    result = RUN.invoke(cli.app, [*words, "--requests", "60", "--plots", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    first, *rest = result.stdout.splitlines()
    assert "requests" in first
    assert "can never be served" in " ".join([first, *rest[:2]])
    assert any("Impossible requests" in line for line in rest)
    page = (tmp_path / "out" / "report.html").read_text()
    assert '<div class="alarm">' in page
    assert "can never be served" in page
