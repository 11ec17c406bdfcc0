"""What each request waited between its tokens, though nothing looks at it with each step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import Role
from shared.domain.job import JobView, Slo
from shared.policy.dispatch import PowerOfTwo
from shared.policy.placement import LeastLoad, Policies
from shared.policy.split import FullSplit, NoSplit
from shared.sim.cluster import simulate
from shared.sim.group import Pauses, Segment, steps_over, without_first
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import EngineLimits, FirstToken, Loss, RunSpec
from tests.shared.sim.clusters import instance, pair
from tests.shared.sim.test_time import workload

# Sixteenths: sums and comparisons are exact.
STEPS = st.integers(1, 6).flatmap(
    lambda length: st.tuples(st.just(length), st.integers(1, 40), st.integers(0, 3 if length > 1 else 0)).map(
        lambda one: (one[0], one[1] / 16, (one[1] + (one[0] - 1) * one[2]) / 16)
    )
)


def singly(runs: tuple[Segment, ...]) -> list[float]:
    return [first + (last - first) / max(1, length - 1) * at for length, first, last in runs for at in range(length)]


def leg(target_s: float) -> Leg:
    return Leg(SimRequest(0, JobView("0", 8, 9, Slo(tpot_s=0.01, itl_s=target_s)), 9, ()), 9, 9, 8)


@given(STEPS, st.integers(0, 900))
def test_steps_over_a_target(run: Segment, sixteenths: int) -> None:
    for target_s in (sixteenths / 160, run[1], run[2]):
        assert steps_over(run, target_s) == sum(step_s > target_s for step_s in singly((run,)))
    assert singly(without_first((run, run))) == singly((run, run))[1:]


@given(st.lists(st.tuples(st.lists(STEPS, min_size=1, max_size=3), st.integers(0, 9), st.booleans()), max_size=30))
def test_each_member_has_the_steps_between_its_joining_and_its_leaving(
    course: list[tuple[list[Segment], int, bool]],
) -> None:
    pauses, members = Pauses(), dict[Leg, list[float]]()
    for runs, which, joins in course:
        if joins:
            members[one := leg(1.0 + which % 3 / 2)] = []
            pauses.join(one)
        elif members:
            one = list(members)[which % len(members)]
            had = members.pop(one)
            pauses.leave(one)
            assert one.request.longest_gap_s == max(had, default=0.0)
            assert one.request.gaps_over == sum(step_s > one.request.job.slo.itl_s for step_s in had)
            if not members:
                pauses.clear()
        if members:
            pauses.add(tuple(runs))
            for had in members.values():
                had += singly(tuple(runs))


def test_a_prompt_beside_it_is_a_gap_of_a_stream() -> None:
    # A step takes 10 ms and 1 ms a prompt token: the second prompt's chunk of 400 stops the first request for 0.41 s.
    run = RunSpec(policies=Policies(LeastLoad(), NoSplit(), PowerOfTwo()), slo=Slo(tpot_s=0.06))
    limits = EngineLimits(512, 8, 16)
    out = simulate(workload((0.0, 10, 60), (0.2, 400, 20)), [instance("d", Role.DECODE, limits=limits)], run).outcomes
    assert out.longest_gap_s == pytest.approx([0.411, 0.012], rel=0.01)
    assert out.gaps_over.tolist() == [1, 0]
    assert out.tpot_met(run.slo).tolist() == [True, True]
    assert out.met(run.slo).tolist() == [False, True]  # one of 59 gaps is more than one in a hundred
    assert out.met(Slo(tpot_s=0.06, itl_s=0.5)).tolist() == [True, True]


def test_one_gap_in_a_hundred_is_spared() -> None:
    run = RunSpec(policies=Policies(LeastLoad(), NoSplit(), PowerOfTwo()), slo=Slo(tpot_s=0.06))
    specs = [instance("d", Role.DECODE, limits=EngineLimits(512, 8, 16))]
    out = simulate(workload((0.0, 10, 101), (0.2, 400, 2)), specs, run).outcomes
    assert (out.gaps_over.tolist(), out.itl_met(run.slo).tolist()) == ([1, 0], [True, True])


def test_a_gap_over_the_handover_and_one_over_a_lost_instance() -> None:
    run = RunSpec(policies=Policies(LeastLoad(), FullSplit(), PowerOfTwo()), hop_s=0.3)
    whole = simulate(workload((0.0, 50, 20)), pair(), run).outcomes
    assert whole.longest_gap_s == pytest.approx([0.3], rel=0.1)  # between its first token and the next
    assert whole.gaps_over.tolist() == [1]
    lost = replace(run, losses=(Loss("d", 0.75, 1.25),))
    again = simulate(workload((0.0, 50, 20)), pair(), lost).outcomes
    assert again.attempts.tolist() == [2]
    assert again.gaps_over.tolist() == [3]  # the handover, the loss, the second handover
    assert again.longest_gap_s[0] > 0.5


def test_an_instance_that_is_lost_before_the_first_token_makes_no_gap() -> None:
    run = RunSpec(
        policies=Policies(LeastLoad(), FullSplit(), PowerOfTwo()), first_token=FirstToken.DECODE, streaming=False
    )
    whole = simulate(workload((0.0, 50, 20)), pair(), run).outcomes
    at_s = float(whole.first_token_s[0]) - 0.005  # within the step that gives it
    lost = simulate(workload((0.0, 50, 20)), pair(), replace(run, losses=(Loss("d", at_s, at_s + 1.0),))).outcomes
    assert lost.attempts.tolist() == [2]
    assert lost.ttft_s[0] > 1.0
    assert lost.gaps_over.tolist() == [0]


def test_a_stream_that_loses_its_blocks_waits_from_its_last_token_on() -> None:
    specs = [instance("d", Role.DECODE, kv_tokens=320, limits=EngineLimits(256, 8, 16))]
    run = RunSpec(policies=Policies(LeastLoad(), NoSplit(), PowerOfTwo()))
    result = simulate(workload(*((0.0, 60, 80) for _ in range(4))), specs, run)
    out = result.outcomes
    paused = out.preemptions > 0
    assert paused.any()
    assert out.longest_gap_s[paused].min() > 3 * out.longest_gap_s[~paused].max()
    assert out.longest_gap_s.max() == pytest.approx(result.gaps.percentile_s(1.0), rel=0.006)
