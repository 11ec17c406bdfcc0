"""Every method on small inventories: plans that are possible, and none better than the best."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.errors import Incompatible, InvalidRequest
from shared.plan.compose import Composer
from shared.plan.methods.papers import machine_throughputs, recommended, strategies
from shared.plan.methods.registry import METHODS, method
from shared.plan.methods.simple import deployments
from shared.plan.plan import Plan, canonical, routes_of
from shared.plan.problem import Problem
from shared.plan.search import ScoredPlan, Search, run_method
from tests.shared.plan.problems import inventory, problem, search

STOCK = inventory(("a", "A100-SXM-80", 1), ("b", "A10", 2))


def check(asked: Problem, plan: Plan) -> None:
    """No accelerator is used twice, every group holds the model, one decodes at least."""
    left = [pool.count for pool in asked.inventory.pools]
    for group in plan.groups:
        for pool, count in group.uses.items():
            left[pool] -= count
        assert sum(part.layers for part in group.parts) == asked.models.geometry.layers
        assert asked.models.kv_tokens(group.kind(asked.inventory)) >= asked.longest
    assert min(left) >= 0
    assert plan.roles[Role.DECODE] > 0


@pytest.fixture(scope="module")
def outcomes() -> dict[str, float]:
    found = {}
    for name, one in METHODS.items():
        asked = problem(STOCK)
        outcome = run_method(name, one, search(asked))
        check(asked, outcome.plan)
        assert outcome.promise.goodput > 0
        assert outcome.found_s <= outcome.took_s
        found[name] = outcome.promise.goodput
    return found


def test_every_method_finds_a_plan_and_none_is_ahead_of_best(outcomes: dict[str, float]) -> None:
    assert set(outcomes) == set(METHODS)
    assert outcomes["best"] >= 0.98 * max(outcomes.values()), outcomes


def test_one_accelerator_is_one_group() -> None:
    asked = problem(inventory(("a", "A10", 1)))
    outcome = run_method("best", method("best"), search(asked))
    assert len(outcome.plan.groups) == 1
    assert outcome.plan.coupled


def test_nothing_that_holds_the_model_is_no_plan() -> None:
    with pytest.raises(Incompatible, match="method best finds no deployment for Llama-2-70B"):
        run_method("best", method("best"), search(problem(STOCK, "Llama-2-70B", longest_tokens=400_000)))


def test_unknown_methods_are_named_with_the_known() -> None:
    with pytest.raises(InvalidRequest, match="unknown method 'magic'; known: best, tabu"):
        method("magic")


def test_the_oracle_looks_at_each_deployment_once() -> None:
    asked = problem(inventory(("a", "A10", 2), ("b", "A10", 2)))
    found = list(deployments(search(asked)))
    keys = {canonical(groups, asked.inventory.alike) for groups in found}
    assert len(keys) == len(found)
    for groups in found:
        check(asked, Plan(groups))
    assert any(len(groups) == 4 for groups in found)
    assert any(len(groups) == 1 and groups[0].accelerators == 4 for groups in found)


def test_a_budget_is_kept() -> None:
    asked = problem(STOCK, budget_usd_hour=2.0)  # of three that cost 1 each
    outcome = run_method("best", method("best"), search(asked))
    assert sum(group.price_usd_hour(asked.inventory) for group in outcome.plan.groups) <= 2.0


def test_joint_serves_the_rate_with_the_fewest() -> None:
    stock = inventory(("a", "A100-SXM-80", 8))
    few, many = (recommended(search(problem(stock, rate=rate))) for rate in (2.0, 20.0))
    assert few is not None
    assert many is not None
    assert (few.prefills, few.decodes) == (1, 1)
    assert few.rate >= 2.0
    assert many.accelerators > few.accelerators


def test_joint_decodes_with_the_instance_that_serves_most_and_prefills_with_the_best_accelerators() -> None:
    # ZTE's equation 1 divides by accelerators, its equation 4 by decode instances. Of four accelerators a decode
    # instance of four would leave none for prefill.
    asked = search(problem(inventory(("a", "A100-SXM-80", 4)), rate=2.0))
    found = recommended(asked)
    assert found is not None
    assert found.prefill.each == max(one.each for one in strategies(asked, Role.PREFILL))
    fitting = [one for one in strategies(asked, Role.DECODE) if one.size + found.prefill.size <= 4]
    assert found.decode.rate == max(one.rate for one in fitting)
    assert found.decode.each < max(one.each for one in fitting)  # the two objectives differ here
    ours = recommended(asked, per_accelerator=True)
    assert ours is not None
    assert ours.decode.each > found.decode.each


def test_huaweis_estimate_prefers_small_degrees_where_a_model_fits() -> None:
    found = machine_throughputs(search(problem(STOCK)), "A100-SXM-80", 4, [(800, 150)] * 50)
    assert list(found) == [1, 2, 4]
    assert found[1] > found[2] > found[4]


def test_what_serves_as_much_and_says_more_takes_its_place() -> None:
    asked = search(problem(STOCK))
    plan = Plan(next(iter(deployments(asked))))
    told = Plan(plan.groups, routes_of(asked.estimator.estimate(plan.groups)))
    assert told.routes

    def two(of: Search) -> Iterator[ScoredPlan]:
        yield plan, 1.0
        yield told, 1.0
        yield plan, 0.5

    assert run_method("two", two, asked).plan == told


def test_ctrl_c_takes_the_best_so_far() -> None:
    asked = search(problem(STOCK))
    plan = Plan(next(iter(deployments(asked))))

    def pressed(of: Search) -> Iterator[ScoredPlan]:
        yield plan, 1.0
        raise KeyboardInterrupt

    outcome = run_method("pressed", pressed, asked)
    assert outcome.stopped
    assert (outcome.plan, outcome.promise.goodput) == (plan, 1.0)


@pytest.mark.parametrize("count", [3, 4])
def test_alike_nodes_share_a_model_that_none_of_them_holds(count: int) -> None:
    """Four nodes of four 24 GB accelerators and a model of 140 GB: groups of two nodes; whole pools of three, too."""
    model = "Llama-2-70B" if count == 4 else "LLaMA-30B"
    asked = problem(inventory(*((f"n{at}", "L4", count) for at in range(4)), gbps=100.0), model)
    asked = replace(asked, slo=Slo(ttft_s=10.0, tpot_s=1.0))
    found = [groups for groups in Composer(search(asked).estimator).candidates() if groups]
    assert found
    for groups in found:
        check(asked, Plan(groups))
