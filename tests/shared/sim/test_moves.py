"""Paused streams of the simulator: they go on at another instance where that is clearly sooner."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

import pytest

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView
from shared.policy.dispatch import Choice, PowerOfTwo
from shared.policy.split import NoSplit
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import RunSpec
from shared.sim.workload import Workload
from tests.shared.sim.cluster_runs import check, drawn, policies, workload
from tests.shared.sim.clusters import instance, several


@dataclass(frozen=True)
class LastByName:
    """The last instance by name of those that may have the job."""

    name: ClassVar[str] = "last by name"

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: Collection[str], now: float, rng: Random
    ) -> Choice:
        views = [view for view in candidates if view.instance_id not in exclude]
        return Choice(max(views, key=lambda view: view.instance_id))


TWO = workload((0.0, 100, 100), (0.0, 100, 100))


def crowded(run: RunSpec, *, large: int = 16_000, work: Workload = TWO) -> SimResult:
    """Two streams that do not both fit on "small" to their ends, and both are sent there."""
    specs = [
        instance("p", Role.PREFILL),
        instance("large", Role.DECODE, kv_tokens=large),
        instance("small", Role.DECODE, kv_tokens=320),
    ]
    result = simulate(work, specs, run)
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
    run = RunSpec(policies=policies(dispatch=PowerOfTwo()))
    one, single = simulate(work, specs, run), simulate(work, specs, replace(run, stepwise=True))
    check(one, work)
    assert one.outcomes.preemptions.sum() > 0
    assert one.outcomes.decode_instance.tolist() == single.outcomes.decode_instance.tolist()
    assert one.outcomes.preemptions.tolist() == single.outcomes.preemptions.tolist()
    assert one.outcomes.last_token_s.tolist() == pytest.approx(single.outcomes.last_token_s.tolist())
