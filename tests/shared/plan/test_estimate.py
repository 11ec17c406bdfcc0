"""Layouts of groups, and the estimate of what deployments serve."""

from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.plan.group import Group, Part
from shared.plan.layouts import proportional, widest_path
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
    estimate = found.estimator.estimate(CASES[name])
    simulated = found.evaluator.goodput(Plan(CASES[name]), estimate.goodput)
    assert estimate.goodput == pytest.approx(simulated, rel=0.35)
    assert estimate.goodput <= estimate.most


def test_more_accelerators_and_looser_targets_never_serve_less() -> None:
    tight, loose = search(problem(STOCK)), search(problem(STOCK, slo=Slo(ttft_s=4.0, tpot_s=0.2)))
    for groups in CASES.values():
        base = tight.estimator.estimate(groups).goodput
        assert tight.estimator.estimate((*groups, one(D, 1))).goodput >= 0.99 * base
        assert loose.estimator.estimate(groups).goodput >= base


def test_a_slow_link_is_what_binds() -> None:
    near, far = (search(problem(inventory(("a", "A100-SXM-80", 2), ("b", "A10", 4), gbps=g))) for g in (40.0, 0.5))
    groups = CASES["split"]
    assert (
        far.estimator.estimate(groups, local=False).goodput < 0.5 * near.estimator.estimate(groups, local=False).goodput
    )


def test_routes_are_the_flows_and_sum_to_one() -> None:
    estimate = search(problem(STOCK)).estimator.estimate(CASES["mixed"])
    routes = routes_of(estimate)
    assert sum(route.share for route in routes) == pytest.approx(1.0)
    for route in routes:
        assert CASES["mixed"][route.decode].role is D
        assert route.prefill is None or CASES["mixed"][route.prefill].role is P


def test_without_a_group_that_decodes_nothing_is_served() -> None:
    assert search(problem(STOCK)).estimator.estimate((one(P, 0),)).goodput == 0.0


@pytest.mark.parametrize(
    ("total", "weights", "rooms", "counts"),
    [
        (60, [1.0, 1.0], [60, 60], (30, 30)),
        (60, [2.0, 1.0], [60, 60], (40, 20)),
        (60, [2.0, 1.0], [35, 60], (35, 25)),  # clipped by memory
        (3, [100.0, 1.0, 1.0], [3, 3, 3], (1, 1, 1)),  # at least one each
    ],
)
def test_layers_in_proportion(total: int, weights: list[float], rooms: list[int], counts: tuple[int, ...]) -> None:
    assert proportional(total, weights, rooms) == counts


@given(st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 40)), min_size=1, max_size=6), st.data())
def test_layers_always_sum_up_within_their_rooms(stages: list[tuple[float, int]], data: st.DataObject) -> None:
    weights, rooms = [w for w, _ in stages], [r for _, r in stages]
    total = data.draw(st.integers(len(stages), sum(rooms)))
    counts = proportional(total, weights, rooms)
    assert sum(counts) == total
    assert all(1 <= count <= room for count, room in zip(counts, rooms, strict=True))


@given(st.lists(st.lists(st.integers(1, 9), min_size=5, max_size=5), min_size=5, max_size=5), st.integers(1, 5))
def test_the_path_of_stages_has_the_fastest_slowest_hop(rows: list[list[int]], count: int) -> None:
    rates = tuple(tuple(float(rows[min(i, j)][max(i, j)]) for j in range(count)) for i in range(count))

    def slowest(order: tuple[int, ...]) -> float:
        return min((rates[one][other] for one, other in pairwise(order)), default=float("inf"))

    found = widest_path(rates)
    assert sorted(found) == list(range(count))
    assert slowest(found) == max(map(slowest, permutations(range(count))))


def test_every_degree_of_a_node_that_holds_the_model() -> None:
    layouts = search(problem(inventory(("a", "A10", 4)), "Llama-2-13B")).estimator.layouts
    assert layouts.all({0: 1}, Role.DECODE) == ()  # 26 GB of weights in 24
    assert {(g.tensor_parallel, len(g.parts)) for g in layouts.all({0: 2}, Role.DECODE)} == {(1, 2), (2, 1)}
    assert {(g.tensor_parallel, len(g.parts)) for g in layouts.all({0: 4}, Role.DECODE)} == {(1, 4), (2, 2), (4, 1)}


def test_unlike_stages_get_layers_by_what_they_can() -> None:
    stock = inventory(("a", "A10", 2), ("b", "A100-SXM-80", 2))
    layouts = search(problem(stock, "Llama-2-13B")).estimator.layouts
    group = layouts.best({0: 1, 1: 1}, Role.PREFILL)
    assert group is not None
    layers = {stock.pools[part.pool].accelerator.name: part.layers for part in group.parts}
    assert layers["A100-SXM-80"] > layers["A10"]
    assert sum(layers.values()) == 40


def test_tensor_parallelism_stays_inside_a_node_and_type() -> None:
    layouts = search(problem(inventory(("a", "A10", 2), ("b", "A10", 1)), "Llama-2-13B")).estimator.layouts
    assert {g.tensor_parallel for g in layouts.all({0: 2, 1: 1}, Role.DECODE)} == {1}
