"""Plans in the simulator, in long runs and in short ones."""

from dataclasses import replace
from random import Random
from time import perf_counter

import pytest

from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.plan.evaluate import TOO_MUCH, Curve, Scout, Trial, TrialProcess, helped, race
from shared.plan.group import Group, Part
from shared.plan.methods.best import best
from shared.plan.plan import Plan
from shared.plan.problem import repeated
from shared.plan.search import AS_SERVED, Search, run_method
from shared.sim.spec import RunSpec
from shared.sim.workload import conversations
from tests.shared.plan.problems import inventory, problem, search

RNG = Random(4)
LINE = [(rate, 0.9 - 0.04 * (rate - 10.0) + RNG.gauss(0.0, 0.01)) for rate in (8.0, 9.0, 9.5, 10.0, 10.5, 11.0, 12.0)]


@pytest.mark.parametrize(
    ("points", "tolerance"),
    [
        ([(8.0, 1.0), (9.0, 0.95), (10.0, 0.90), (11.0, 0.86), (16.0, 0.3)], 0.03),
        ([*LINE, (11.5, 0.91)], 0.08),  # one lucky run
    ],
)
def test_the_crossing_is_read_off_a_line(points: list[tuple[float, float]], tolerance: float) -> None:
    curve = Curve(0.9)
    for rate, attainment in points:
        curve.add(rate, attainment)
    assert curve.bracketed
    assert curve.crossing == pytest.approx(10.0, rel=tolerance)


def test_without_a_miss_above_a_rate_that_met_the_target_there_is_no_bracket() -> None:
    curve = Curve(0.9)
    curve.add(5.0, 0.99)
    curve.add(4.0, 0.5)
    assert not curve.bracketed
    assert curve.best == 5.0


COUPLED = Plan((Group(Role.DECODE, 1, (Part(0, 32),)),) * 2)
PROBLEM = problem(inventory(("a", "A10", 2)), slo=Slo(ttft_s=2.0, tpot_s=0.1, itl_s=60.0))


def test_a_queue_that_grows_for_ever_shows() -> None:
    """At a rate beyond what the accelerators do at all, however late the targets allow requests to be."""
    found = search(PROBLEM)
    most = found.estimator.estimate(COUPLED.groups).most
    assert found.evaluator.attainment(COUPLED, 0.5 * most) > 0.98
    assert found.evaluator.attainment(COUPLED, 1.6 * most) < 0.5
    goodput = found.evaluator.goodput(COUPLED, 0.6 * most)
    assert 0.5 * most < goodput < 1.25 * most


def test_a_pause_counts_beside_ttft_and_tpot() -> None:
    """Prompts of others stop the streams of a coupled group for longer than the default target for gaps."""
    strict = search(problem(inventory(("a", "A10", 2)))).evaluator
    trial = Trial(COUPLED, 2.0)
    out, slo = strict.result(trial).outcomes, strict.problem.slo
    assert slo.itl_s == 0.25
    assert strict.run_trial(trial) < search(PROBLEM).evaluator.run_trial(trial)
    assert out.met(slo).sum() < (out.ttft_met(slo) & out.tpot_met(slo)).sum()


def test_the_same_run_is_made_once_and_repeats() -> None:
    found = search(PROBLEM)
    first = found.evaluator.attainment(COUPLED, 2.0)
    assert (found.evaluator.attainment(COUPLED, 2.0), found.evaluator.runs) == (first, 1)
    assert search(PROBLEM).evaluator.attainment(COUPLED, 2.0) == first


def test_a_race_yields_the_best_and_drops_plans_that_are_behind() -> None:
    found = search(PROBLEM)
    lone = Plan(COUPLED.groups[:1])
    won = list(race(found.evaluator, [(COUPLED, 4.0), (lone, 2.0)], lambda: False))
    assert [plan for plan, _ in won] == [COUPLED]
    assert list(race(found.evaluator, [(lone, 0.0)], lambda: False)) == []


def test_a_workload_is_repeated_to_the_length_of_a_run() -> None:
    workload = repeated(PROBLEM.workload, 1500)
    assert len(workload) == 1500
    assert (workload.prompt_tokens[:600] == workload.prompt_tokens[600:1200]).all()
    evaluator = search(PROBLEM).evaluator
    short, long = (evaluator.requests(Trial(COUPLED, 4.0, short=short)).workload for short in (True, False))
    assert len(short) < len(long)


def test_chats_are_judged_with_the_caches_that_engines_have() -> None:
    """What a cache holds is not computed: the same plan serves more, in trials and by the estimate."""
    chats = conversations(600, seed=3)
    with_caches = replace(problem(inventory(("a", "A100-SXM-80", 2))), workload=chats, longest_tokens=16_384)
    cached, plain = (search(replace(with_caches, prefix_cache=caches)) for caches in (True, False))
    assert cached.estimator.estimate(COUPLED.groups).goodput > 1.3 * plain.estimator.estimate(COUPLED.groups).goodput
    trial = Trial(COUPLED, 5.0, short=True)
    results = [found.evaluator.result(trial) for found in (cached, plain)]
    computed = [sum(use.prefill_tokens for use in result.instances) for result in results]
    assert computed[0] < 0.7 * computed[1]
    assert cached.evaluator.run_trial(trial) > plain.evaluator.run_trial(trial)


def test_runs_of_a_fast_cluster_fill_it() -> None:
    """However many requests that takes: as long as a queue at a rate too high needs to outgrow the targets."""
    fast = problem(inventory(("a", "H100-SXM", 4)), prompt=300, output=60)
    plan = Plan((Group(Role.DECODE, 1, (Part(0, 32),)),) * 4)
    workload = search(fast).evaluator.requests(Trial(plan, 400.0)).workload
    assert len(workload) > 2000
    assert workload.arrival_s[-1] > 0.9 * fast.slo.ttft_s / TOO_MUCH


ON_FOUR = problem(inventory(("a", "A10", 4)))
ONE = Group(Role.DECODE, 1, (Part(0, 32),))
FOUR, THREE, LONE = (Plan((ONE,) * count) for count in (4, 3, 1))


def test_coupled_groups_meet_the_gaps_with_the_policies_that_services_run_by_default() -> None:
    """Without the step budget the prompts of others stop streams, and `adaptive` looks worse than it serves."""
    served, plain = (Search(ON_FOUR, perf_counter, run).evaluator for run in (AS_SERVED, RunSpec()))
    assert served.attainment(FOUR, 8.0) > 0.98
    assert served.attainment(replace(FOUR, policies="workload+split=none+dispatch=random"), 8.0) > 0.98
    assert plain.attainment(FOUR, 8.0) < 0.8


def test_short_runs_find_the_leader() -> None:
    found = search(ON_FOUR)
    scout = Scout(found.evaluator, found.estimator.estimate(FOUR.groups).goodput, lambda: False)
    leaders = scout.leaders([LONE, THREE, FOUR])
    assert leaders[0][0] == FOUR
    assert LONE not in [plan for plan, _ in leaders]
    assert [plan for plan, _ in scout.challengers(FOUR, [LONE])] == []
    assert [plan for plan, _ in scout.challengers(LONE, [FOUR])] == [FOUR]


def test_a_second_process_gives_the_same_results() -> None:
    evaluator, alone = search(ON_FOUR).evaluator, search(ON_FOUR).evaluator
    trials = [Trial(FOUR, 3.0), Trial(THREE, 3.0), Trial(LONE, 3.0, short=True)]
    with helped(evaluator):
        evaluator.prefetch(trials)
        assert evaluator.runs == 0  # none was needed yet
        shown = [evaluator.attainment(trial.plan, trial.rate, short=trial.short) for trial in trials]
    assert evaluator.helper is None
    assert shown == [alone.run_trial(trial) for trial in trials]


def test_without_the_second_process_the_evaluator_goes_on_alone() -> None:
    evaluator = search(ON_FOUR).evaluator
    evaluator.helper = gone = TrialProcess(evaluator)
    gone.close()
    evaluator.prefetch([Trial(FOUR, 3.0), Trial(THREE, 3.0)])
    assert evaluator.helper is None
    assert evaluator.attainment(FOUR, 3.0) == search(ON_FOUR).evaluator.attainment(FOUR, 3.0)


def test_a_search_gives_the_same_plan_with_a_second_process() -> None:
    asked = problem(inventory(("a", "A10", 5), ("b", "L4", 4)))
    plans = []
    for with_process in (False, True):
        found = run_method("best", best, Search(asked, perf_counter, RunSpec(), helped=with_process))
        plans.append((found.plan, found.promise.goodput, found.runs))
    assert plans[0] == plans[1]
