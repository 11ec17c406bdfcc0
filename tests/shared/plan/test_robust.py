"""What plans keep when they lose a group, and the search that prefers those which keep more."""

from collections.abc import Iterator
from time import perf_counter

import pytest

from shared.domain.instance import Role
from shared.errors import InvalidRequest
from shared.plan.compose import SPREAD, Composer, Margin
from shared.plan.find import PlanGoals, endurance_in_words
from shared.plan.group import Group, Part
from shared.plan.methods.best import best
from shared.plan.plan import Plan
from shared.plan.robust import Endurance, kept_as_it_is, losses
from shared.plan.search import ScoredPlan, Search, run_method
from shared.sim.spec import RunSpec
from tests.shared.plan.problems import inventory, problem, search

P, D = Role.PREFILL, Role.DECODE
STOCK = inventory(("a", "A10", 4), ("b", "A10", 4), gbps=100.0)


def one(role: Role, pool: int) -> Group:
    return Group(role, 1, (Part(pool, 32),))


def test_each_kind_of_loss_is_counted_once_the_worst_first() -> None:
    found = search(problem(STOCK, prompt=300, output=400))
    plan = Plan((*[one(P, 0)] * 3, one(D, 0), *[one(D, 1)] * 4))
    every = losses(found.estimator, plan)
    assert [plan.groups[loss.lost] for loss in every].count(one(P, 0)) == 1
    assert {plan.groups[loss.lost].role for loss in every} == {P, D}
    assert [loss.goodput for loss in every] == sorted(loss.goodput for loss in every)
    for loss in every:
        assert len(loss.plan.groups) == len(plan.groups) - 1


def test_flips_make_up_for_the_only_group_that_decodes() -> None:
    found = search(problem(STOCK))
    groups = (*[one(P, 0)] * 3, one(D, 1))
    worst = next(loss for loss in losses(found.estimator, Plan(groups)) if groups[loss.lost].role is D)
    assert worst.flips >= 1
    assert worst.plan.roles[D] == worst.flips
    assert worst.goodput > 0.0
    assert kept_as_it_is(found.estimator, groups) == 0.0


def test_the_only_group_leaves_nothing() -> None:
    found = search(problem(STOCK))
    (loss,) = losses(found.estimator, Plan((one(D, 0),)))
    assert (loss.goodput, loss.plan.groups) == (0.0, ())


@pytest.mark.parametrize("most", [1 / 2, 1 / 3])
def test_no_group_of_a_spread_deployment_has_more_than_its_share(most: float) -> None:
    found = search(problem(inventory(("a", "A100-SXM-80", 8), ("b", "A10", 8))))
    assert {margin.most for margin in SPREAD} == {1 / 2, 1 / 3}
    composer = Composer(found.estimator)
    groups = composer.best(Margin(local=False, most=most))
    for role in Role:
        assert sum(group.role is role for group in groups) >= round(1 / most)


def test_the_search_gives_up_a_little_goodput_and_says_what_is_kept() -> None:
    asked = problem(inventory(("a", "A10", 2)))
    robust = run_method("best", best, Search(asked, perf_counter, RunSpec(), robust=0.1))
    kept = robust.endurance
    assert kept is not None
    assert 0.0 <= kept.given_up <= 0.1
    assert 0.0 < kept.goodput <= robust.promise.goodput
    assert f"{kept.goodput:.2f} requests/s" in endurance_in_words(robust)
    assert kept.lost in endurance_in_words(robust)


def test_a_method_may_prefer_a_plan_with_less_goodput() -> None:
    asked = search(problem(STOCK))
    first, other = Plan((one(D, 0), one(D, 1))), Plan((one(P, 0), one(D, 1)))

    def two(of: Search) -> Iterator[ScoredPlan]:
        yield first, 1.0
        of.preferred, of.endurance = (other, 0.97), Endurance("decode 1 x A10 on b", 0.5, 1, 0.03)

    outcome = run_method("two", two, asked)
    assert (outcome.plan, outcome.promise.goodput) == (other, 0.97)
    assert endurance_in_words(outcome) == (
        "Without any one of its groups it serves about 0.50 requests/s (52 %) or more: the loss of decode 1 x A10 on b "
        "costs most after 1 flip of roles. For this the plan gives up 3.0 % of goodput."
    )


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_the_share_is_checked(share: float) -> None:
    with pytest.raises(InvalidRequest, match="robust must be at least 0 and less than 1"):
        PlanGoals(robust=share).check()


def test_a_plan_that_keeps_nothing_is_a_plan() -> None:
    outcome = run_method("best", best, search(problem(inventory(("a", "A10", 1), ("b", "L4", 1)))))
    assert outcome.promise.goodput > 0.0
    assert outcome.endurance is None or outcome.endurance.goodput <= outcome.promise.goodput
