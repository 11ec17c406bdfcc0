"""Plans judged by the simulator, in long runs and in short ones."""

from random import Random
from time import perf_counter

import pytest

from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.plan.group import Group, Part
from shared.plan.judge import TOO_MUCH, Ask, Curve, Scout, race, repeated
from shared.plan.methods.best import best
from shared.plan.plan import Plan
from shared.plan.search import Helper, Search, helped, searched
from tests.shared.plan.problems import inventory, problem, search


def test_the_crossing_is_read_off_a_line() -> None:
    curve = Curve(0.9)
    for rate, share in ((8.0, 1.0), (9.0, 0.95), (10.0, 0.90), (11.0, 0.86), (16.0, 0.3)):
        curve.add(rate, share)
    assert curve.bracketed
    assert curve.crossing == pytest.approx(10.0, rel=0.03)


def test_one_lucky_run_does_not_move_it_far() -> None:
    rng = Random(4)
    curve = Curve(0.9)
    for rate in (8.0, 9.0, 9.5, 10.0, 10.5, 11.0, 12.0):
        curve.add(rate, 0.9 - 0.04 * (rate - 10.0) + rng.gauss(0.0, 0.01))
    curve.add(11.5, 0.91)
    assert curve.crossing == pytest.approx(10.0, rel=0.08)


def test_without_a_miss_there_is_no_bracket() -> None:
    curve = Curve(0.9)
    curve.add(5.0, 0.99)
    assert not curve.bracketed
    assert curve.best == 5.0
    curve.add(4.0, 0.5)  # below one that met it: says nothing
    assert not curve.bracketed


COUPLED = Plan((Group(Role.DECODE, 1, (Part(0, 32),)),) * 2)
ASKED = problem(inventory(("a", "A10", 2)), slo=Slo(ttft_s=2.0, tpot_s=0.1, itl_s=60.0))


def test_a_queue_that_grows_for_ever_shows() -> None:
    """At a rate beyond what the accelerators do at all, however late the targets allow requests to be."""
    found = search(ASKED)
    most = found.estimator.of(COUPLED.groups).most
    assert found.judge.attained(COUPLED, 0.5 * most) > 0.98
    assert found.judge.attained(COUPLED, 1.6 * most) < 0.5
    goodput = found.judge.goodput(COUPLED, 0.6 * most)
    assert 0.5 * most < goodput < 1.25 * most


def test_a_pause_counts_beside_ttft_and_tpot() -> None:
    """Prompts of others stop the streams of a coupled group for longer than the default target for gaps."""
    strict = search(problem(inventory(("a", "A10", 2)))).judge
    ask = Ask(COUPLED, 2.0)
    out, slo = strict.result(ask).outcomes, strict.problem.slo
    assert slo.itl_s == 0.25
    assert strict.told(ask) < search(ASKED).judge.told(ask)
    assert out.met(slo).sum() < (out.ttft_met(slo) & out.tpot_met(slo)).sum()


def test_the_same_run_is_made_once_and_repeats() -> None:
    found = search(ASKED)
    first = found.judge.attained(COUPLED, 2.0)
    assert (found.judge.attained(COUPLED, 2.0), found.judge.runs) == (first, 1)
    assert search(ASKED).judge.attained(COUPLED, 2.0) == first


def test_a_race_keeps_the_best_and_spares_who_is_behind() -> None:
    found = search(ASKED)
    lone = Plan(COUPLED.groups[:1])
    won = list(race(found.judge, [(COUPLED, 4.0), (lone, 2.0)], lambda: False))
    assert [plan for plan, _ in won] == [COUPLED]
    assert list(race(found.judge, [(lone, 0.0)], lambda: False)) == []


def test_a_workload_is_as_long_as_a_run_needs() -> None:
    workload = repeated(ASKED.workload, 1500)
    assert len(workload) == 1500
    assert (workload.prompt_tokens[:600] == workload.prompt_tokens[600:1200]).all()


def test_a_fast_cluster_is_judged_by_runs_that_fill_it() -> None:
    """However many requests that takes: as long as a queue at a rate too high needs to outgrow the targets."""
    fast = problem(inventory(("a", "H100-SXM", 4)), prompt=300, output=60)
    plan = Plan((Group(Role.DECODE, 1, (Part(0, 32),)),) * 4)
    workload = search(fast).judge.workload(Ask(plan, 400.0))
    assert len(workload) > 2000
    assert workload.arrival_s[-1] > 0.9 * fast.slo.ttft_s / TOO_MUCH


ON_FOUR = problem(inventory(("a", "A10", 4)))
ONE = Group(Role.DECODE, 1, (Part(0, 32),))
FOUR, THREE, LONE = (Plan((ONE,) * count) for count in (4, 3, 1))


def test_short_runs_find_who_leads() -> None:
    found = search(ON_FOUR)
    scout = Scout(found.judge, found.estimator.of(FOUR.groups).goodput, lambda: False)
    led = scout.led([LONE, THREE, FOUR])
    assert led[0][0] == FOUR
    assert LONE not in [plan for plan, _ in led]
    assert [plan for plan, _ in scout.beside(FOUR, [LONE])] == []
    assert [plan for plan, _ in scout.beside(LONE, [FOUR])] == [FOUR]


def test_a_short_run_has_fewer_requests_than_a_long_one() -> None:
    judge = search(ON_FOUR).judge
    assert len(judge.workload(Ask(FOUR, 4.0, short=True))) < len(judge.workload(Ask(FOUR, 4.0)))


def test_a_helper_finds_what_the_judge_finds_itself() -> None:
    judge, alone = search(ON_FOUR).judge, search(ON_FOUR).judge
    asks = [Ask(FOUR, 3.0), Ask(THREE, 3.0), Ask(LONE, 3.0, short=True)]
    with helped(judge):
        judge.ahead(asks)
        assert judge.runs == 0  # none was needed yet
        shown = [judge.attained(ask.plan, ask.rate, short=ask.short) for ask in asks]
    assert judge.helper is None
    assert shown == [alone.told(ask) for ask in asks]


def test_without_its_helper_the_judge_goes_on_alone() -> None:
    judge = search(ON_FOUR).judge
    judge.helper = gone = Helper(judge)
    gone.close()
    judge.ahead([Ask(FOUR, 3.0), Ask(THREE, 3.0)])
    assert judge.helper is None
    assert judge.attained(FOUR, 3.0) == search(ON_FOUR).judge.attained(FOUR, 3.0)


def test_a_search_is_the_same_with_a_helper_and_without() -> None:
    asked = problem(inventory(("a", "A10", 6), ("b", "L4", 6)))
    plans = []
    for with_helper in (False, True):
        found = searched("best", best, Search(asked, perf_counter, helped=with_helper))
        plans.append((found.plan, found.promise.goodput, found.runs))
    assert plans[0] == plans[1]
