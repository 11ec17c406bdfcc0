"""Flips, losses, and streams that move to another instance."""

from dataclasses import replace

import numpy as np
import pytest

from shared.domain.instance import Role
from shared.domain.rates import Rates, StepForm, StepRates
from shared.policy.dispatch import PowerOfTwo
from shared.policy.papers.tetriinfer import IdleFlip
from shared.policy.predictive_flip import PredictiveFlip
from shared.policy.split import NoSplit, RandomSplit
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult, Status
from shared.sim.spec import Flip, Loss, RunSpec, plain_policies
from shared.sim.workload import Workload
from tests.shared.sim.clusters import (
    LastByName,
    Linear,
    check,
    drawn,
    instance,
    pair,
    policies,
    several,
    with_split,
    workload,
)


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


TWO = workload((0.0, 100, 100), (0.0, 100, 100))


def crowded(run: RunSpec, *, large: int = 16_000, work: Workload = TWO) -> SimResult:
    """Two streams that do not both fit on "small" to their ends, and both are sent there; none migrates before that."""
    specs = [
        instance("p", Role.PREFILL),
        instance("large", Role.DECODE, kv_tokens=large),
        instance("small", Role.DECODE, kv_tokens=320),
    ]
    result = simulate(work, specs, replace(run, migration=False))
    check(result, work)
    return result


@pytest.mark.parametrize("split", [None, NoSplit()])
def test_a_paused_stream_goes_on_where_there_is_room(split: NoSplit | None) -> None:
    run = RunSpec(policies=policies(dispatch=LastByName(), **({"split": split} if split else {})))
    stays, moved = crowded(replace(run, moves=0)), crowded(run)
    for result in (stays, moved):
        assert result.outcomes.preemptions.sum() == 1
        assert result.outcomes.attempts.tolist() == [1, 1], "a move is no further attempt"
    assert stays.outcomes.decode_instance.tolist() == [2, 2]
    (paused,) = moved.outcomes.preemptions.nonzero()[0]
    assert moved.outcomes.decode_instance[paused] == 1
    assert moved.outcomes.decode_instance[1 - paused] == 2
    assert moved.outcomes.longest_gap_s[paused] < 0.5 * stays.outcomes.longest_gap_s[paused]


def test_it_stays_where_no_other_instance_has_room_for_it() -> None:
    result = crowded(RunSpec(policies=policies(dispatch=LastByName())), large=160)
    assert result.outcomes.decode_instance.tolist() == [2, 2]
    assert result.instances[1].decode_tokens == 0


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_many_moves_lose_nothing_and_macro_steps_are_the_same_as_single_ones(seed: int) -> None:
    work = drawn(60, seed, rate=40.0)
    specs = several(5, 3, kv_tokens=700)
    run = RunSpec(policies=policies(dispatch=PowerOfTwo()), migration=False)
    one, single = simulate(work, specs, run), simulate(work, specs, replace(run, stepwise=True))
    check(one, work)
    assert one.outcomes.preemptions.sum() > 0
    assert one.outcomes.decode_instance.tolist() == single.outcomes.decode_instance.tolist()
    assert one.outcomes.preemptions.tolist() == single.outcomes.preemptions.tolist()
    assert one.outcomes.last_token_s.tolist() == pytest.approx(single.outcomes.last_token_s.tolist())
