"""Flips and routes for a plan that meets something else; the cheapest plan for a rate."""

from dataclasses import replace

import pytest

from shared.domain.instance import Role
from shared.errors import Incompatible
from shared.plan.answer import cheapest, nearest
from shared.plan.group import Group, Part
from shared.plan.plan import Plan
from shared.plan.routes import Route
from shared.plan.running import rescheduled, survivors
from shared.plan.search import Stopped
from shared.sim.workload import synthetic
from tests.shared.plan.problems import inventory, problem, search

P, D = Role.PREFILL, Role.DECODE
STOCK = inventory(("a", "A10", 4), ("b", "A10", 4), gbps=100.0)


def one(role: Role, pool: int) -> Group:
    return Group(role, 1, (Part(pool, 32),))


def prefills(groups: tuple[Group, ...]) -> int:
    return sum(group.role is P for group in groups)


def test_roles_follow_what_clients_ask_for() -> None:
    """Long prompts and short answers want more prefill, and the other way round."""
    groups = (*[one(P, 0)] * 4, *[one(D, 1)] * 4)
    asked = problem(STOCK)
    prompts = search(replace(asked, workload=synthetic(400, 3000, 15, seed=1)))
    answers = search(replace(asked, workload=synthetic(400, 200, 600, seed=1)))
    more, less = (rescheduled(found.estimator, Plan(groups, policies="plan:routes=[]")) for found in (prompts, answers))
    assert prefills(more.plan.groups) > 4 > prefills(less.plan.groups) >= 1
    for proposal in (more, less):
        assert proposal.after.goodput > 1.1 * proposal.before.goodput
        assert {at for at in range(8) if proposal.plan.groups[at] != groups[at]} == set(proposal.flips)
        assert proposal.plan.policies.startswith("plan:")


def test_what_serves_well_stays_as_it_is() -> None:
    found = search(problem(STOCK))
    first = rescheduled(found.estimator, Plan((*[one(P, 0)] * 4, *[one(D, 1)] * 4)))
    again = rescheduled(found.estimator, first.plan)
    assert not again.changes
    assert again.plan.groups == first.plan.groups


def test_after_a_loss_routes_are_those_that_are_left() -> None:
    groups = (one(P, 0), one(P, 0), one(D, 1), one(D, 1))
    plan = Plan(groups, (Route(0, 2, 0.4), Route(1, 3, 0.4), Route(None, 3, 0.2)))
    left, routes = survivors(plan, [2])
    assert left == (groups[0], groups[1], groups[3])
    assert routes == (Route(1, 2, pytest.approx(2 / 3)), Route(None, 2, pytest.approx(1 / 3)))


def test_the_cheapest_is_cheaper_than_all_of_it_and_serves_the_rate() -> None:
    asked = problem(STOCK, rate=3.0)
    found = search(asked)
    plan = cheapest(found)
    price = sum(group.price_usd_hour(STOCK) for group in plan.groups)
    assert price < STOCK.price_usd_hour / 2
    assert found.judge.attained(plan, 3.0) >= asked.target


def test_a_rate_that_nothing_serves_says_what_can_be_served() -> None:
    with pytest.raises(Incompatible, match=r"all that is on offer serves \d+\.\d+ requests/s .* not 1000"):
        cheapest(search(problem(inventory(("a", "A10", 1)), rate=1000.0)))


def test_advice_names_the_memory_that_is_missing() -> None:
    said = nearest(problem(inventory(("a", "A10", 1)), "Llama-2-70B"), lambda: 0.0)
    assert "needs 138.0 GB of weights" in said
    assert "GB are missing" in said


def test_ctrl_c_during_the_cheapest_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(problem(STOCK, rate=3.0))

    def pressed(plan: Plan, rate: float) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(found.judge, "attained", pressed)
    with pytest.raises(Stopped, match="stopped before an offer was found"):
        cheapest(found)
