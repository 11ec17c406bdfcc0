"""Routes by the linear programme, and the places and links between which they go."""

import numpy as np
import pytest

from shared.cost.network import rate_of
from shared.domain.instance import Role
from shared.plan.group import Group, Part
from shared.plan.routes import Capacity, EngineCost, Joints, Places, best_flows, decode_capacity, place_name
from tests.shared.plan.problems import INSIDE, inventory


def joints(rows: list[list[float]], *ports: tuple[list[tuple[int, int, float]], float]) -> Joints:
    return Joints(np.array(rows), list(ports))


PREFILL, DECODE = [Capacity(4.0), Capacity(2.0)], [Capacity(9.0, 3.0, ((3.0, 3.0),)), Capacity(9.0, 5.0, ((5.0, 5.0),))]
WIDE = [[np.inf, np.inf], [np.inf, np.inf]]


def test_the_side_that_does_less_sets_the_rate() -> None:
    flows = best_flows(PREFILL, DECODE, joints(WIDE), local=False)
    assert flows.rate == pytest.approx(6.0)
    assert flows.sent.sum(axis=1) == pytest.approx([4.0, 2.0])
    assert (flows.sent.sum(axis=0) <= np.array([3.0, 5.0]) + 1e-9).all()


def test_links_and_ports_bind() -> None:
    assert best_flows(PREFILL, DECODE, joints([[1.0, 0.5], [0.0, 1.0]]), local=False).rate == pytest.approx(2.5)
    leaving = ([(0, 0, 1.0), (0, 1, 1.0)], 1.5)
    assert best_flows(PREFILL, DECODE, joints(WIDE, leaving), local=False).rate == pytest.approx(3.5)
    half = ([(0, 0, 0.5), (0, 1, 0.5)], 1.5)  # half of the KV stays on the node
    assert best_flows(PREFILL, DECODE, joints(WIDE, half), local=False).rate == pytest.approx(5.0)


def test_groups_that_decode_compute_what_is_left_over_of_their_time() -> None:
    # One more request costs the second group one decode and 5/9 of one for its prompt: 8 - 6 = 2 are left of 3 + 5.
    flows = best_flows(PREFILL, DECODE, joints(WIDE), local=True)
    assert flows.rate > 6.0
    assert flows.local.sum() == pytest.approx(flows.rate - 6.0)
    assert best_flows([], DECODE, Joints(np.zeros((0, 2))), local=True).rate == pytest.approx(
        3 / (1 + 1 / 3) + 5 / (1 + 5 / 9)
    )


def test_worth_draws_requests_to_where_they_are_in_time() -> None:
    worth = np.array([[0.1, 1.0], [1.0, 0.1], [1.0, 1.0]])
    flows = best_flows([Capacity(2.0), Capacity(2.0)], DECODE, joints(WIDE), local=False, worth=worth)
    assert flows.sent == pytest.approx(np.array([[0.0, 2.0], [2.0, 0.0]]))


def test_nothing_to_decode_is_no_flow() -> None:
    assert best_flows(PREFILL, [], Joints(np.zeros((2, 0)))).rate == 0.0


def cost(batch: float) -> EngineCost:
    return EngineCost(np.array([0.5]), 1, batch, 0.02, 0.001)


def test_decodes_are_as_many_as_the_target_or_the_memory_allows() -> None:
    by_time = decode_capacity(cost(1000.0), 0.1, 100.0, 1.0)  # 80 of them take 0.1 s
    assert by_time.decodes == pytest.approx(80 / (100 * 0.1))
    by_memory = decode_capacity(cost(10.0), 0.1, 100.0, 1.0)
    assert by_memory.decodes == pytest.approx(10 / (100 * 0.03))
    assert decode_capacity(cost(10.0), 0.01, 100.0, 1.0).decodes == 0.0  # a step alone takes longer


def test_time_for_prompts_is_no_time_for_decodes() -> None:
    capacity = decode_capacity(cost(1000.0), 0.1, 100.0, 1.0)
    at_half = min(most - slope * 0.5 for most, slope in capacity.cuts)
    assert at_half == pytest.approx((0.05 - 0.02) / 0.001 / (100 * 0.1))
    at_all = min(most - slope for most, slope in capacity.cuts)
    assert at_all <= 1e-9


STOCK = inventory(("a", "A10", 4), ("b", "A10", 4), gbps=8.0)  # 1 GB/s, of which 58 % are reached
KV = 1e8
P, D = Role.PREFILL, Role.DECODE


def group(role: Role, *parts: tuple[int, int]) -> Group:
    return Group(role, 1, tuple(Part(pool, layers) for pool, layers in parts))


def test_layers_go_from_their_node_to_their_node() -> None:
    places = Places(STOCK, KV)
    on_a, on_b, both = (group(D, *parts).place(STOCK) for parts in (((0, 32),), ((1, 32),), ((0, 8), (1, 24))))
    slow = 0.58e9
    assert rate_of(places.link(on_a, on_a)) == rate_of(INSIDE)
    assert rate_of(places.link(on_a, on_b)) == pytest.approx(slow)
    assert rate_of(places.link(on_a, both)) == pytest.approx(slow / 0.75)  # a quarter of the layers stays on the node
    assert rate_of(places.link(both, both)) == pytest.approx(rate_of(INSIDE) / 0.75)  # each half on its own node
    shifted = group(D, (0, 24), (1, 8)).place(STOCK)
    assert rate_of(places.link(both, shifted)) == pytest.approx(slow / 0.5)  # 16 of 32 layers change the node


def test_ports_are_shared_by_the_groups_of_a_node() -> None:
    joints = Places(STOCK, KV).joints([group(P, (0, 32)), group(P, (0, 32))], [group(D, (1, 32))])
    passing = {tuple(pairs): most for pairs, most in joints.ports}
    assert passing == {((0, 0, 1.0), (1, 0, 1.0)): pytest.approx(5.8)}  # out of a, and into b
    assert len(joints.ports) == 2


def test_names_say_who_holds_which_layers() -> None:
    assert place_name(group(D, (0, 32)).place(STOCK)) == "a"
    assert place_name(group(D, (0, 16), (0, 16)).place(STOCK)) == "a"
    assert place_name(group(D, (0, 8), (1, 24)).place(STOCK)) == "a.8+b.24"


def test_the_simulator_gets_a_node_for_every_place() -> None:
    places = Places(STOCK, KV)
    spots = [group(D, *parts).place(STOCK) for parts in (((0, 32),), ((0, 8), (1, 24)))]
    network = places.network(spots)
    assert set(network.inside) == {"a", "a.8+b.24"}
    assert rate_of(network.path("a", "a.8+b.24")) == pytest.approx(0.58e9 / 0.75)
