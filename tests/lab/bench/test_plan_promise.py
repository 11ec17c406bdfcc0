"""A plan's promise beside what it does: the file that is started is the plan, slowed; and what is compared is alike."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml

from lab.bench.experiment import shots_of, slower
from lab.bench.plan_live import (
    MIN_FACTOR,
    SLO,
    TOKENS_PER_S,
    Kept,
    Planned,
    PromiseFigures,
    compared,
    factor_for,
    file_of,
    kept_promise,
    kept_story,
    no_trace,
    problem_for,
    seen_by_clients,
    simulated_file,
)
from lab.calibrate.target import Sample
from lab.simulate.deployment import load_deployment
from services.launcher.cluster_file import load_cluster
from shared.cost.step import Batch
from shared.domain.instance import Role
from shared.plan.group import Group, Part
from shared.plan.plan import Plan
from shared.plan.search import Outcome, Search
from shared.sim.spec import RunSpec
from shared.sim.workload import Workload


@cache
def pair(rate: float = 2.0, requests: int = 250, longest: int = 2_000) -> Planned:
    """A prefill and a decode instance, as if they had been searched for; `longest`: output tokens at most."""
    problem = problem_for("conversation", None)
    workload = problem.workload.head(requests)
    workload = replace(workload, output_tokens=np.minimum(workload.output_tokens, longest))
    problem = replace(problem, workload=workload, rate=rate)
    layers = problem.shop.geometry.layers
    plan = Plan((Group(Role.PREFILL, 1, (Part(1, layers),)), Group(Role.DECODE, 1, (Part(0, layers),))))
    search = Search(problem, lambda: 0.0, RunSpec(streaming=False, step_budget=True))
    promise = search.judge.promise(plan, rate)
    return Planned("conversation", search, Outcome("by hand", plan, promise, 0.0, 0.0, 1))


def test_the_started_file_is_the_plan_so_many_times_as_slow(tmp_path: Path) -> None:
    one = pair()
    file = file_of(one, 4.0, tmp_path)
    assert load_cluster(file).instance_ids == one.plan.names(one.problem)
    deployment = load_deployment(file)
    assert deployment.run.slo.ttft_s == 4.0 * SLO.ttft_s
    assert deployment.run.patience_s == 40.0
    plain = load_deployment(file_of(one, 1.0, tmp_path))
    path, usual = deployment.run.network.path("a40", "a100"), plain.run.network.path("a40", "a100")
    assert path.bandwidth_bytes_s == pytest.approx(usual.bandwidth_bytes_s / 4.0)
    batch = Batch((), 8, 8_000)
    for slow, usual_one in zip(deployment.instances, plain.instances, strict=True):
        assert slow.model.step_time_s(batch) == pytest.approx(4.0 * usual_one.model.step_time_s(batch))
    assert yaml.safe_load(file.read_text())["predictor"] == {"enabled": False}


def test_further_sections_are_in_the_file(tmp_path: Path) -> None:
    file = file_of(pair(), 4.0, tmp_path, {"monitor": {"drain_timeout_s": 7.0}})
    assert yaml.safe_load(file.read_text())["monitor"] == {"drain_timeout_s": 7.0}


def test_the_file_as_it_is_does_in_the_simulator_what_the_plan_promised(tmp_path: Path) -> None:
    one = pair()
    promise = one.outcome.promise
    said = simulated_file(file_of(one, 1.0, tmp_path), one.promised, SLO, 1.0)
    assert said.ttft_mean_s == pytest.approx(promise.figures["ttft_mean_s"], rel=1e-6)
    assert said.tpot_mean_s == pytest.approx(promise.figures["tpot_mean_s"], rel=1e-6)
    assert said.attainment_share == pytest.approx(promise.attainment)


def test_slowed_it_does_the_same_slowly(tmp_path: Path) -> None:
    one, factor = pair(), 5.0
    promise = one.outcome.promise
    said = simulated_file(file_of(one, factor, tmp_path), slower(one.promised, factor), SLO, factor)
    assert said.ttft_mean_s == pytest.approx(promise.figures["ttft_mean_s"], rel=0.1)
    assert said.tpot_mean_s == pytest.approx(promise.figures["tpot_mean_s"], rel=0.1)
    assert said.attainment_share == pytest.approx(promise.attainment, abs=0.05)


def test_few_tokens_are_slowed_least() -> None:
    assert factor_for(10.0) == MIN_FACTOR
    assert factor_for(7.2 * TOKENS_PER_S) == 8.0


def test_attainment_is_of_those_that_come_once_the_cluster_is_full() -> None:
    workload = Workload("four", np.array([0.0, 1.0, 8.0, 10.0]), np.full(4, 100), np.full(4, 11))
    late, soon = 2.0 * SLO.ttft_s * 3.0, 0.1
    seen = [
        Sample(str(at), shot, 0.0, ttft_s, ttft_s + 10 * 0.03)
        for at, (shot, ttft_s) in enumerate(zip(shots_of(workload), (late, late, soon, late), strict=True))
    ]
    found = seen_by_clients(seen, workload, SLO, 3.0)
    assert found.attainment_share == 0.5
    assert found.tpot_mean_s == pytest.approx(0.01)
    assert found.ttft_mean_s == pytest.approx((3 * late + soon) / 4 / 3.0)


def test_a_promise_that_is_not_kept_is_told_as_missed() -> None:
    kept = Kept(
        PromiseFigures(0.4, 0.03, 0.9), PromiseFigures(0.5, 0.031, 0.85), PromiseFigures(0.41, 0.03, 0.9), 3.0, 0.2
    )
    figures, aims = compared("promise", kept)
    assert figures["promise_ttft_mean_off_percent"] == 25.0
    assert figures["promise_ttft_mean_live_s"] == 0.5
    assert figures["promise_attainment_file_share"] == 0.9
    assert {name: aim["met"] for name, aim in aims.items()} == {
        "promise_ttft_mean": False,
        "promise_tpot_mean": True,
        "promise_attainment": True,
    }
    assert "0.400 s promised, 0.500 s live" in kept_story(pair(), kept)


def test_a_trace_that_is_missing_is_told_of_and_made(tmp_path: Path) -> None:
    (said,) = no_trace("code", tmp_path)
    assert said.startswith("code: no Azure trace below")
    assert problem_for("code", tmp_path).workload.name == "code"


@pytest.mark.slow
def test_a_pair_does_live_what_it_does_in_the_simulator() -> None:
    """Short, and so only nearly; that all of a promise is kept is the bench's to show."""
    kept = kept_promise(pair(rate=4.0, longest=150), 24)
    assert kept.live.ttft_mean_s == pytest.approx(kept.simulated.ttft_mean_s, abs=0.1)
    assert kept.live.tpot_mean_s == pytest.approx(kept.simulated.tpot_mean_s, rel=0.2)
