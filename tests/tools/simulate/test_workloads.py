"""Workloads as the command line says them."""

from pathlib import Path

import numpy as np
import pytest

from shared.errors import InvalidRequest
from tools.simulate.workloads import WorkloadOptions, make_workload


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = "\n".join(f"{at},{100 + at},{10 + at}" for at in range(20))
    path = tmp_path / "t.csv"
    path.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}\n")
    return str(path)


def test_a_trace_keeps_its_times(trace: str) -> None:
    assert make_workload(WorkloadOptions(trace)).arrival_s.tolist() == list(range(20))
    assert len(make_workload(WorkloadOptions(trace, requests=5))) == 5


def test_a_rate_stretches_a_traces_own_pattern(trace: str) -> None:
    workload = make_workload(WorkloadOptions(trace, rate=4.0))
    assert np.diff(workload.arrival_s) == pytest.approx(0.25)


def test_other_arrivals(trace: str) -> None:
    poisson = make_workload(WorkloadOptions(trace, rate=4.0, arrivals="poisson", seed=1))
    assert np.diff(poisson.arrival_s).std() > 0.05
    bursts = make_workload(WorkloadOptions(trace, rate=4.0, arrivals="bursts", cv=5.0, seed=1))
    assert not np.array_equal(poisson.arrival_s, bursts.arrival_s)


def test_made_workloads_come_at_once_unless_there_is_a_rate() -> None:
    assert not make_workload(WorkloadOptions("azure-conv")).arrival_s.any()
    workload = make_workload(WorkloadOptions("azure-conv", requests=20_000, rate=10.0))
    assert workload.name == "azure-conv"
    assert workload.rate == pytest.approx(10.0, rel=0.05)
    assert workload.prompt_tokens.mean() == pytest.approx(1155, rel=0.05)
    assert workload.output_tokens.mean() == pytest.approx(211, rel=0.05)


def test_lengths_in_words() -> None:
    workload = make_workload(WorkloadOptions("prompt=1000, output=200,output_cv=1,longest=1100", requests=500))
    assert set(workload.prompt_tokens[workload.output_tokens < 100].tolist()) == {1000}
    assert (workload.prompt_tokens + workload.output_tokens).max() <= 1100


def test_tetri_workloads_with_and_without_a_table(tmp_path: Path) -> None:
    assert make_workload(WorkloadOptions("HPLD", requests=50)).prompt_tokens.min() > 512
    table = tmp_path / "counts.csv"
    table.write_text("num_prefill_tokens,num_decode_tokens\n600,20\n10,10\n")
    drawn = make_workload(WorkloadOptions("HPLD", requests=50, lengths=table))
    assert set(drawn.prompt_tokens.tolist()) == {600}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (WorkloadOptions("nothing.csv"), "no trace file 'nothing.csv'; synthetic workloads are azure-conv"),
        (WorkloadOptions("prompt=1000"), "output is missing"),
        (WorkloadOptions("prompt=1000,outputs=3"), "no key 'outputs'; known: prompt, output"),
        (WorkloadOptions("prompt=x,output=3"), "prompt must be a number, not 'x'"),
        (WorkloadOptions("azure-conv", requests=0), "requests must be at least 1"),
        (WorkloadOptions("azure-conv", rate=0.0), "rate must be positive"),
        (WorkloadOptions("azure-conv", rate=1.0, arrivals="daily"), "unknown arrivals 'daily'; known: trace, poisson"),
        (WorkloadOptions("azure-conv", rate=1.0, cv=2.0), "is for arrivals 'bursts', not 'poisson'"),
    ],
)
def test_errors(options: WorkloadOptions, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        make_workload(options)
