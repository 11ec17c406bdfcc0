"""`polyphase simulate` as a person calls it: from files and options to tables, JSON, CSV and the report page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from services.launcher import cli
from shared.errors import PolyphaseError
from shared.sim.prediction import Prediction
from tests.tools.simulate.test_files import A10, A100, write
from tools.simulate.deployment import load_deployment
from tools.simulate.session import SimulateOptions, run_specs
from tools.simulate.workloads import WorkloadOptions, make_workload


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    return write(tmp_path, name="small", instances=[{**A100, "count": 1}, {**A10, "count": 2}])


def lines_of(*words: object) -> list[str]:
    result = CliRunner().invoke(cli.app, ["simulate", *map(str, words)])
    if isinstance(result.exception, PolyphaseError):
        raise result.exception
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout.splitlines()


def figures_of(*words: object) -> Any:
    answer = json.loads(lines_of(*words, "--json")[-1])
    assert answer["ok"]
    return answer["figures"]


def test_tables_and_json(cluster: Path) -> None:
    words = (cluster, "--trace", "azure-conv", "--rate", 2, "--requests", 60, "--accuracy", 0.75)
    *lines, last = lines_of(*words, "--json")
    for word in ("small", "Llama-3-8B", "A100-SXM-80", "d x 2", "TTFT p99", "SLO attainment", "60 requests"):
        assert word in "\n".join(lines)
    figures = json.loads(last)["figures"]
    assert figures["requests"] == figures["completed"] == 60
    assert 0 < figures["ttft_p50_s"] < figures["jct_p50_s"]
    assert figures["cost_usd"] > 0
    assert all(isinstance(value, int | float) for value in figures.values())
    assert figures_of(*words) == figures != figures_of(*words, "--seed", 1)


def test_policies_side_by_side_with_csv_and_page(cluster: Path, tmp_path: Path) -> None:
    csv, plots = tmp_path / "csv", tmp_path / "plots"
    policies = ("least_load+split=full", "split=none")
    words = [word for policy in policies for word in ("--policy", policy)]
    outputs = ("--csv", csv, "--plots", plots)
    figures = figures_of(cluster, "--trace", "LPLD", "--rate", 5, "--requests", 80, *words, *outputs)
    assert {name.split("/")[0] for name in figures} == set(policies)
    assert pd.read_csv(csv / "summary.csv")["policy"].tolist() == list(policies)
    rows = pd.read_csv(csv / "requests-least_load+split=full.csv")
    assert len(rows) == 80
    assert rows["status"].unique().tolist() == ["completed"]
    assert rows["prefill_instance"].unique().tolist() == ["p"]
    assert set(rows["decode_instance"]) <= {"d-0", "d-1"}
    assert (rows["jct_s"] >= rows["ttft_s"]).all()
    assert rows["ttft_s"].mean() == pytest.approx(figures[f"{policies[0]}/ttft_mean_s"])
    page = (plots / "report.html").read_text()
    assert all(f"Load of each instance: {policy}" in page for policy in policies)


def test_impossible_requests_are_announced_before_and_after_and_on_the_page(tmp_path: Path) -> None:
    file = write(tmp_path, instance_defaults={"max_model_len": 4096})
    words = ("--trace", "prompt=3600,output=200,prompt_cv=1", "--rate", 2, "--requests", 60)
    lines = lines_of(file, *words, "--plots", tmp_path / "out")
    assert "can never be served" in " ".join(lines[:3])
    assert any("Impossible requests" in line for line in lines)
    page = (tmp_path / "out" / "report.html").read_text()
    assert '<div class="alarm">' in page
    assert "can never be served" in page


def test_goodput(cluster: Path) -> None:
    slo = ("--slo-ttft", 0.5, "--slo-tpot", 0.1)
    figures = figures_of(cluster, "--trace", "prompt=1000,output=50", "--requests", 300, "--rate", 1, "--goodput", *slo)
    assert 1.0 < figures["goodput_requests_per_s"] < 100.0
    assert figures["goodput_attainment"] >= 0.9


def test_options_override_the_file(cluster: Path, tmp_path: Path) -> None:
    words = (cluster, "--trace", "prompt=1000,output=50", "--rate", 1, "--requests", 40)
    strict = figures_of(*words, "--slo-ttft", 1e-6)
    assert (strict["attainment_ttft"], strict["attainment_tpot"]) == (0.0, 1.0)
    confusion = {"buckets": 2, "width_tokens": 50, "confusion": [[0.0, 1.0], [1.0, 0.0]]}
    file = write(tmp_path, prediction=confusion, slo={"tpot_s": 0.1})
    options = SimulateOptions(file, WorkloadOptions("LPLD"), accuracy=1.0, slo={"tpot": 0.4})
    (spec,) = run_specs(options, load_deployment(file), make_workload(options.workload))
    assert spec.prediction == Prediction(width_tokens=50, buckets=2)
    assert (spec.slo.ttft_s, spec.slo.tpot_s) == (2.0, 0.4)
    assert spec.slo.itl_s > 0.4  # the default, which follows the TPOT


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", "none.csv"], "no trace file 'none.csv'; synthetic workloads are azure-conv"),
        (["--trace", "prompt=1000"], "output is missing"),
        (["--trace", "prompt=1000,outputs=3"], "no key 'outputs'; known: prompt, output"),
        (["--trace", "prompt=x,output=3"], "prompt must be a number, not 'x'"),
        (["--trace", "LPLD", "--requests", "0"], "requests must be at least 1"),
        (["--trace", "LPLD", "--rate", "0"], "rate must be positive"),
        (["--trace", "LPLD", "--rate", "1", "--arrivals", "daily"], "unknown arrivals 'daily'; known: trace, poisson"),
        (["--trace", "LPLD", "--rate", "1", "--cv", "2"], "is for arrivals 'bursts', not 'poisson'"),
        (["--trace", "LPLD", "--policy", "fastest"], "no policy 'fastest'"),
        (["--trace", "LPLD", "--slo-ttft", "0"], "--slo-ttft must be positive"),
        (["--trace", "LPLD", "--slo-tpot", "1", "--slo-itl", "0.1"], "--slo-itl: itl_s must be at least"),
        (["--trace", "LPLD", "--accuracy", "2"], "accuracy"),
        (["--trace", "LPLD", "--goodput", "--target", "0"], "--target must be above 0 and at most 1"),
        (["--trace", "LPLD", "--policy", "full", "--policy", "full"], "the same policies are given twice"),
    ],
)
def test_errors(cluster: Path, words: list[str], message: str) -> None:
    with pytest.raises(PolyphaseError, match=message) as error:
        lines_of(cluster, *words)
    assert "\n" not in error.value.message


def test_a_trace_keeps_its_times_or_is_stretched(tmp_path: Path) -> None:
    rows = "\n".join(f"{at},{100 + at},{10 + at}" for at in range(20))
    trace = tmp_path / "t.csv"
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}\n")

    def gaps(**options: Any) -> Any:
        return np.diff(make_workload(WorkloadOptions(str(trace), **options)).arrival_s)

    assert gaps().tolist() == [1.0] * 19
    assert len(gaps(requests=5)) == 4
    assert gaps(rate=4.0) == pytest.approx(0.25)
    poisson, bursts = gaps(rate=4.0, arrivals="poisson"), gaps(rate=4.0, arrivals="bursts", cv=5.0)
    assert poisson.std() > 0.05
    assert not np.array_equal(poisson, bursts)


def test_more_chats_have_the_same_pauses() -> None:
    chats = make_workload(WorkloadOptions("chats", requests=1_500, rate=20.0))
    assert chats.rate == pytest.approx(20.0, rel=0.2)
    last_s: dict[str, float] = {}
    pauses_s = []
    for name, at_s in zip(chats.sessions or (), chats.arrival_s.tolist(), strict=True):
        if name in last_s:
            pauses_s.append(at_s - last_s[name])
        last_s[name] = at_s
    assert np.mean(pauses_s) > 15.0  # the own pattern, stretched to this rate, would have about 10 s


def test_synthetic_workloads(tmp_path: Path) -> None:
    assert not make_workload(WorkloadOptions("azure-conv")).arrival_s.any()
    azure = make_workload(WorkloadOptions("azure-conv", requests=20_000, rate=10.0))
    assert (azure.name, azure.rate) == ("azure-conv", pytest.approx(10.0, rel=0.05))
    assert azure.prompt_tokens.mean() == pytest.approx(1155, rel=0.05)
    assert azure.output_tokens.mean() == pytest.approx(211, rel=0.05)
    lengths = make_workload(WorkloadOptions("prompt=1000, output=200,output_cv=1,longest=1100", requests=500))
    assert set(lengths.prompt_tokens[lengths.output_tokens < 100].tolist()) == {1000}
    assert (lengths.prompt_tokens + lengths.output_tokens).max() <= 1100
    assert make_workload(WorkloadOptions("HPLD", requests=50)).prompt_tokens.min() > 512
    table = tmp_path / "counts.csv"
    table.write_text("num_prefill_tokens,num_decode_tokens\n600,20\n10,10\n")
    drawn = make_workload(WorkloadOptions("HPLD", requests=50, lengths=table))
    assert set(drawn.prompt_tokens.tolist()) == {600}
