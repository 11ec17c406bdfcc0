"""Requests that nobody can hold are counted, named, and told loudly: before a run, after it, and on its page."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from lab.simulate import report
from lab.simulate.deployment import load_deployment
from services.launcher import cli
from shared.sim.outcomes import Outcomes, Status
from shared.sim.spec import InstanceSpec
from shared.sim.workload import Workload

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
