"""Flips, losses and returns during a run."""

from dataclasses import replace

import pytest

from shared.policy.role_flip import IdleFlip
from shared.policy.split import NoSplit, RandomSplit
from shared.sim.cluster import simulate
from shared.sim.outcomes import Status
from shared.sim.spec import Flip, Loss, RunSpec, plain_policies
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
