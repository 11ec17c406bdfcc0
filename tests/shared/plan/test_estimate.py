"""The closed form beside the simulator, and what it must do whatever the numbers are."""

import pytest

from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.plan.group import Group, Part
from shared.plan.plan import Plan, routes_of
from tests.shared.plan.problems import inventory, problem, search

P, D = Role.PREFILL, Role.DECODE


def one(role: Role, pool: int, degree: int = 1) -> Group:
    return Group(role, degree, (Part(pool, 32),))


STOCK = inventory(("a", "A100-SXM-80", 2), ("b", "A10", 4))
CASES = {
    "split": (one(P, 1), one(P, 1), one(D, 0), one(D, 0)),
    "coupled": (one(D, 0), one(D, 0), one(D, 1), one(D, 1)),
    "mixed": (one(P, 1), one(P, 1), one(D, 0), one(D, 1)),
    "pipeline": (one(P, 0), Group(D, 1, (Part(1, 16), Part(1, 16))), Group(D, 1, (Part(1, 16), Part(1, 16)))),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_near_the_simulator(name: str) -> None:
    found = search(problem(STOCK))
    estimate = found.estimator.of(CASES[name])
    simulated = found.judge.goodput(Plan(CASES[name]), estimate.goodput)
    assert estimate.goodput == pytest.approx(simulated, rel=0.35)
    assert estimate.goodput <= estimate.most


def test_more_accelerators_and_looser_targets_never_serve_less() -> None:
    tight, loose = search(problem(STOCK)), search(problem(STOCK, slo=Slo(ttft_s=4.0, tpot_s=0.2)))
    for groups in CASES.values():
        base = tight.estimator.of(groups).goodput
        assert tight.estimator.of((*groups, one(D, 1))).goodput >= 0.99 * base
        assert loose.estimator.of(groups).goodput >= base


def test_a_slow_link_is_what_binds() -> None:
    near, far = (search(problem(inventory(("a", "A100-SXM-80", 2), ("b", "A10", 4), gbps=g))) for g in (40.0, 0.5))
    groups = CASES["split"]
    assert far.estimator.of(groups, local=False).goodput < 0.5 * near.estimator.of(groups, local=False).goodput


def test_routes_are_the_flows_and_sum_to_one() -> None:
    estimate = search(problem(STOCK)).estimator.of(CASES["mixed"])
    routes = routes_of(estimate)
    assert sum(route.share for route in routes) == pytest.approx(1.0)
    for route in routes:
        assert CASES["mixed"][route.decode].role is D
        assert route.prefill is None or CASES["mixed"][route.prefill].role is P


def test_without_a_group_that_decodes_nothing_is_served() -> None:
    assert search(problem(STOCK)).estimator.of((one(P, 0),)).goodput == 0.0
