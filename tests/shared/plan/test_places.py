"""Where groups stand and how fast KV gets from one to another."""

import pytest

from shared.cost.network import rate_of
from shared.domain.instance import Role
from shared.plan.group import Group, Part
from shared.plan.routes import Places, place_name
from tests.shared.plan.problems import INSIDE, inventory

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
