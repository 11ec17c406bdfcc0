"""Flips, losses and returns during a run."""

from dataclasses import replace

import numpy as np
import pytest

from shared.domain.rates import Rates, StepForm, StepRates
from shared.policy.predictive_roles import PredictiveFlip
from shared.policy.role_flip import IdleFlip
from shared.policy.split import NoSplit, RandomSplit
from shared.sim.cluster import simulate
from shared.sim.outcomes import Status
from shared.sim.spec import Flip, Loss, RunSpec, plain_policies
from shared.sim.workload import Workload
from tests.shared.sim.cluster_runs import check, drawn, with_split, workload
from tests.shared.sim.clusters import Linear, pair, several


def test_a_flip_drains_and_loses_nothing() -> None:
    work = drawn(200, 3)
    run = RunSpec(flips=(Flip("p1", 2.0), Flip("d0", 4.0)), sample_s=0.5)
    result = simulate(work, several(2, 2), run)
    check(result, work)
    assert [use.flips for use in result.instances] == [0, 1, 1, 0]
    assert result.timeline is not None
    assert set(result.timeline.role[:, 1]) == {0, 1}
    assert all(
        sum(use.role_s.values()) == pytest.approx(sum(result.instances[0].role_s.values())) for use in result.instances
    )


@pytest.mark.parametrize(
    ("lost", "split"),
    [("p0", None), ("d0", None), ("d0", NoSplit()), ("p0", RandomSplit()), ("d0", RandomSplit())],
    ids=["p-full", "d-full", "d-local", "p-random", "d-random"],
)
def test_a_lost_instance_costs_new_prefills_only(lost: str, split: object) -> None:
    work = drawn(200, 4)
    chosen = plain_policies() if split is None else with_split(split)
    run = RunSpec(policies=chosen, losses=(Loss(lost, 3.0, 6.0),))
    result = simulate(work, several(2, 2), run)
    check(result, work)
    assert result.outcomes.attempts.max() == 2
    if split is None:
        calm = simulate(work, several(2, 2), replace(run, losses=()))
        assert sum(u.prefill_tokens for u in result.instances) > sum(u.prefill_tokens for u in calm.instances)


def test_without_decode_instances_requests_wait_and_are_refused_at_last() -> None:
    work = workload((0.0, 100, 5), (1.0, 100, 5))
    specs = pair()
    back = simulate(work, specs, RunSpec(losses=(Loss("d", 0.05, 10.0),)))
    assert back.outcomes.completed.all()
    assert back.outcomes.last_token_s.min() > 10.0
    gone = simulate(work, specs, RunSpec(losses=(Loss("d", 0.05),)))
    assert not gone.outcomes.completed.any()
    assert set(gone.outcomes.status.tolist()) <= {int(Status.REFUSED), int(Status.UNFINISHED)}
    impatient = simulate(work, specs, RunSpec(losses=(Loss("d", 0.5, 100.0),), patience_s=5.0))
    assert impatient.outcomes.status.tolist() == [int(Status.COMPLETED), int(Status.REFUSED)]


def test_idle_instances_flip_by_policy() -> None:
    work = drawn(300, 5, rate=8.0)
    run = RunSpec(role_flip=IdleFlip(for_s=5.0))
    result = simulate(work, several(1, 3, model=Linear(prefill_s=0.0015)), run)
    check(result, work)
    assert sum(use.flips for use in result.instances) >= 1


def test_roles_follow_a_shift_of_what_is_asked_for() -> None:
    short, long = drawn(600, 6, rate=10.0), drawn(600, 7, rate=10.0)
    arrival_s = np.concatenate([short.arrival_s, short.arrival_s[-1] + 1.0 + long.arrival_s])
    prompts = np.concatenate([1 + short.prompt_tokens // 8, long.prompt_tokens])
    work = Workload("turns", arrival_s, prompts, np.concatenate([short.output_tokens, long.output_tokens]))
    both = StepForm(0.01, 0.001, 0.0, 0.001)  # as `Linear` is
    known = Rates(step=StepRates(StepForm(0.01, 0.001), StepForm(0.01, 0.0, 0.0, 0.001), both))
    specs = [replace(spec, rates=known) for spec in several(1, 3)]
    result = simulate(work, specs, RunSpec(role_flip=PredictiveFlip()))
    check(result, work)
    turned_s = float(arrival_s[600])
    assert any(turned_s < at < turned_s + 15.0 and shift.what == "prompts" for at, shift in result.shifts)
    assert [flip.to for flip in result.role_flips if flip.time_s > turned_s][:1] == ["prefill"]


def test_a_policy_does_not_undo_an_ordered_flip() -> None:
    work = drawn(300, 5, rate=8.0)
    specs = several(1, 3, model=Linear(prefill_s=0.0015))
    run = RunSpec(role_flip=IdleFlip(for_s=5.0), flips=(Flip("p0", 0.0), Flip("d0", 1.0), Flip("p0", 3.0)))
    assert simulate(work, specs, run).role_flips == ()
    assert simulate(work, specs, replace(run, role_flip_respects_s=0.0)).role_flips != ()
