"""Large inventories in equal parts, and the plan of a part on all of them."""

from dataclasses import replace

import pytest

from shared.cost.network import Link, pair_of
from shared.domain.instance import Role
from shared.plan import divide as divisions
from shared.plan.divide import MIN_PART, divide
from shared.plan.group import Group, Part
from shared.plan.inventory import Inventory
from shared.plan.methods.best import best
from shared.plan.plan import Plan
from shared.plan.routes import Route
from shared.plan.search import run_method
from tests.shared.plan.problems import inventory, problem, search

D, P = Role.DECODE, Role.PREFILL


def fleet(*counts: int) -> Inventory:
    """So many nodes of 8 A100, of 8 L40S and of 8 A10."""
    kinds = ("A100-SXM-80", "L40S", "A10")
    return inventory(*((f"n{at}x{kind}", kind, 8) for kind, n in zip(kinds, counts, strict=False) for at in range(n)))


def test_parts_are_as_many_and_equal_as_they_can_be() -> None:
    whole = fleet(8, 16)
    found = divide(whole)
    assert found is not None
    assert found.copies == 4  # of one part more, each would be below the least
    assert found.part.accelerators == 48 >= MIN_PART
    assert not found.left
    used = [pool for pools in found.pools for pool in pools.values()]
    assert sorted(used) == list(range(len(whole.pools)))
    for pools in found.pools:
        for at, pool in enumerate(found.part.pools):
            assert whole.pools[pools[at]].accelerator == pool.accelerator


def test_small_inventories_are_one() -> None:
    assert divide(fleet(3, 4)) is None
    assert divide(inventory(("a", "A10", 512))) is None


def test_what_is_left_does_as_an_equal_node() -> None:
    whole = fleet(17, 16)
    found = divide(whole)
    assert found is not None
    assert (found.copies, found.part.accelerators) == (8, 32)
    (pool, model) = next(iter(found.left.items()))
    assert whole.pools[pool].accelerator == found.part.pools[model].accelerator
    groups = found.groups_of_the_rest(Plan((Group(D, 4, (Part(model, 32),)), Group(P, 8, (Part(2, 32),)))))
    assert groups == (Group(D, 4, (Part(pool, 32),)),)


@pytest.mark.parametrize(("slow", "copies"), [("", 2), ("01 23 45 67", 2), ("01 24 35 67", None)])
def test_parts_have_equal_links(slow: str, copies: int | None) -> None:
    whole = inventory(*((f"n{at}", "A10", 8) for at in range(8)))
    links = dict(whole.network.between) | {pair_of(f"n{pair[0]}", f"n{pair[1]}"): Link(1e8) for pair in slow.split()}
    found = divide(replace(whole, network=replace(whole.network, between=links)))
    assert (found.copies if found else None) == copies


def test_each_part_has_its_own_routes() -> None:
    found = divide(fleet(8))
    assert found is not None
    plan = Plan((Group(P, 8, (Part(0, 32),)), Group(D, 8, (Part(1, 32),))), (Route(0, 1, 0.75), Route(None, 1, 0.25)))
    whole = found.plan(plan)
    assert len(whole.groups) == 2 * found.copies == 4
    assert [tuple(group.uses) for group in whole.groups] == [(0,), (1,), (4,), (5,)]
    assert whole.routes == (Route(0, 1, 0.375), Route(None, 1, 0.125), Route(2, 3, 0.375), Route(None, 3, 0.125))


def test_a_part_has_its_share_of_rate_and_budget() -> None:
    whole = search(problem(fleet(8), rate=8.0, budget_usd_hour=32.0))
    found = divide(whole.problem.inventory)
    assert found is not None
    part = whole.for_part(found.part, found.copies, 0.5)
    assert (part.problem.rate, part.problem.budget_usd_hour, part.copies) == (4.0, 16.0, 2)
    workload, mixed = whole.problem.workload, part.problem.workload
    assert sorted(mixed.prompt_tokens.tolist()) == sorted(workload.prompt_tokens.tolist())
    assert mixed.prompt_tokens[:64].mean() == pytest.approx(workload.prompt_tokens.mean(), rel=0.05)


def test_the_plan_of_a_part_is_judged_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divisions, "MIN_PART", 1)
    asked = search(problem(inventory(*((f"n{at}", "A10", 1) for at in range(5)))))
    outcome = run_method("best", best, asked)
    assert [tuple(group.uses) for group in outcome.plan.groups] == [(0,), (1,), (2,), (3,), (4,)]
    assert outcome.promise.goodput > 0.0
    assert outcome.promise.attainment >= asked.problem.target
    kept = outcome.endurance
    assert kept is not None
    assert kept.goodput == pytest.approx(0.8 * outcome.promise.goodput)  # four of five parts are left
    assert outcome.runs > asked.part_runs > 0
