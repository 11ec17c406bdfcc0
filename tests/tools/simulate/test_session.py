"""The whole command: from files and words to tables, JSON, CSV and pages."""

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from services.launcher import cli
from shared.errors import InvalidRequest
from shared.sim.prediction import Prediction
from tools.simulate import session
from tools.simulate.session import SimulateOptions, run_simulation
from tools.simulate.workloads import WorkloadOptions

RUN = CliRunner()
SMALL: dict[str, Any] = {
    "name": "small",
    "model": "Llama-3-8B",
    "instances": [
        {"id": "p", "accelerator": "A100-SXM-80", "role": "prefill"},
        {"id": "d", "accelerator": "A10", "count": 2, "tensor_parallel": 2, "role": "decode"},
    ],
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    file = tmp_path / "sim.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    return file


def invoke(*words: object) -> list[str]:
    result = RUN.invoke(cli.app, ["simulate", *map(str, words)])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout.splitlines()


def test_json_is_the_last_line(cluster: Path) -> None:
    lines = invoke(cluster, "--trace", "azure-conv", "--rate", 2, "--requests", 60, "--json")
    answer = json.loads(lines[-1])
    assert answer["ok"] is True
    figures = answer["figures"]
    assert figures["requests"] == figures["completed"] == 60
    assert 0 < figures["ttft_p50_s"] < figures["jct_p50_s"]
    assert figures["cost_usd"] > 0
    assert all(isinstance(value, int | float) for value in figures.values())


def test_the_tables_name_what_ran(cluster: Path) -> None:
    text = "\n".join(invoke(cluster, "--trace", "prompt=500,output=20", "--rate", 2, "--requests", 30))
    for word in ("small", "Llama-3-8B", "A100-SXM-80", "d x 2", "TTFT p99", "SLO attainment", "30 requests"):
        assert word in text


def test_policies_side_by_side_with_csv_and_pages(cluster: Path, tmp_path: Path) -> None:
    csv, plots = tmp_path / "csv", tmp_path / "plots"
    policies = ("least_load+split=full", "split=none")
    words = [word for policy in policies for word in ("--policy", policy)]
    lines = invoke(
        cluster, "--trace", "LPLD", "--rate", 5, "--requests", 80, *words, "--csv", csv, "--plots", plots, "--json"
    )
    figures = json.loads(lines[-1])["figures"]
    assert {name.split("/")[0] for name in figures} == set(policies)
    table = pd.read_csv(csv / "summary.csv")
    assert table["policy"].tolist() == list(policies)
    rows = pd.read_csv(csv / "requests-least_load+split=full.csv")
    assert len(rows) == 80
    assert rows["status"].unique().tolist() == ["completed"]
    assert rows["prefill_instance"].unique().tolist() == ["p"]
    assert set(rows["decode_instance"]) <= {"d-0", "d-1"}
    assert (rows["jct_s"] >= rows["ttft_s"]).all()
    assert rows["ttft_s"].mean() == pytest.approx(figures[f"{policies[0]}/ttft_mean_s"])
    assert [file.name for file in plots.iterdir()] == ["report.html"]
    page = (plots / "report.html").read_text()
    assert all(f"Load of each instance: {policy}" in page for policy in policies)


def test_the_same_seed_gives_the_same_figures(cluster: Path) -> None:
    words = (cluster, "--trace", "azure-conv", "--rate", 3, "--requests", 50, "--json", "--accuracy", 0.75)
    assert invoke(*words)[-1] == invoke(*words)[-1]
    assert invoke(*words)[-1] != invoke(*words, "--seed", 1)[-1]


def test_goodput(cluster: Path) -> None:
    lines = invoke(
        cluster,
        "--trace",
        "prompt=1000,output=50",
        "--requests",
        300,
        "--rate",
        1,
        "--goodput",
        "--slo-ttft",
        0.5,
        "--slo-tpot",
        0.1,
        "--json",
    )
    figures = json.loads(lines[-1])["figures"]
    assert 1.0 < figures["goodput_requests_per_s"] < 100.0
    assert figures["goodput_attainment"] >= 0.9


def test_slo_of_the_command_line_wins(cluster: Path) -> None:
    words = (cluster, "--trace", "prompt=1000,output=50", "--rate", 1, "--requests", 40, "--json")
    strict = json.loads(invoke(*words, "--slo-ttft", 1e-6)[-1])["figures"]
    assert (strict["attainment_ttft"], strict["attainment_tpot"]) == (0.0, 1.0)


def test_an_accuracy_takes_the_place_of_the_files_matrix(tmp_path: Path) -> None:
    file = tmp_path / "sim.yaml"
    prediction = {"buckets": 2, "width_tokens": 50, "confusion": [[0.0, 1.0], [1.0, 0.0]]}
    file.write_text(yaml.safe_dump({**SMALL, "prediction": prediction}))
    options = SimulateOptions(file, WorkloadOptions("LPLD"), accuracy=1.0)
    deployment = session.load_deployment(file)
    (spec,) = session.run_specs(options, deployment, session.make_workload(options.workload))
    assert spec.prediction == Prediction(width_tokens=50, buckets=2)


def test_long_runs_tell_how_far_they_are(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    simulate = session.simulate

    def spy(workload: Any, instances: Any, run: Any, progress: Any) -> Any:
        progress(7)
        told.append(len(workload))
        return simulate(workload, instances, run, progress)

    monkeypatch.setattr(session, "simulate", spy)
    options = SimulateOptions(cluster, WorkloadOptions("LPLD", requests=20))
    assert run_simulation(options, Console(quiet=True))["figures"]["completed"] == 20
    assert told == [20]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--trace", "none.csv"], "no trace file 'none.csv'"),
        (["--trace", "LPLD", "--policy", "fastest"], "no policy 'fastest'"),
        (["--trace", "LPLD", "--slo-ttft", "0"], "--slo-ttft must be positive"),
        (["--trace", "LPLD", "--accuracy", "2"], "accuracy"),
        (["--trace", "LPLD", "--goodput", "--target", "0"], "--target must be above 0 and at most 1"),
        (["--trace", "LPLD", "--policy", "full", "--policy", "full"], "the same policies are given twice"),
    ],
)
def test_errors_of_ours_are_one_line(
    cluster: Path, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["polyphase", "simulate", str(cluster), *words])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_folder_that_cannot_be_written(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = SimulateOptions(cluster, WorkloadOptions("LPLD", requests=5), csv=tmp_path / "file" / "x")
    with pytest.raises(InvalidRequest, match="cannot write"):
        run_simulation(options, Console(quiet=True))
