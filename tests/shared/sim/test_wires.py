"""Ports: rates, turns and latencies; nodes and the paths between them."""

import pytest

from shared.cost.network import Link, Network
from shared.errors import InvalidRequest
from shared.sim.wires import Port, Wires, known_rates, send

FAST, SLOW = Link(10e9, 0.001, 1.0), Link(1e9, 0.002, 1.0)


def test_the_slower_port_and_the_longer_latency_rule() -> None:
    assert send(Port(FAST), Port(SLOW), 2e9, 1.0) == pytest.approx(1.0 + 2.0 + 0.002)


def test_transfers_into_one_port_take_turns() -> None:
    target = Port(FAST)
    first = send(Port(FAST), target, 10e9, 0.0)
    second = send(Port(FAST), target, 10e9, 0.0)
    assert first == pytest.approx(1.001)
    assert second == pytest.approx(2.001)


def test_transfers_between_other_ports_do_not_wait() -> None:
    one, other = Port(FAST), Port(FAST)
    send(one, Port(FAST), 10e9, 0.0)
    assert send(other, Port(FAST), 10e9, 0.0) == pytest.approx(1.001)
    assert send(Port(FAST), one, 10e9, 0.0) == pytest.approx(1.001)  # full duplex


def test_a_cleared_port_has_forgotten() -> None:
    port = Port(FAST)
    send(port, Port(FAST), 100e9, 0.0)
    port.clear(2.0)
    assert send(port, Port(FAST), 10e9, 2.0) == pytest.approx(3.001)


INSIDE, NEAR, FAR = Link(20e9, 0.0, 1.0), Link(5e9, 0.001, 1.0), Link(0.5e9, 0.01, 1.0)
THREE = Network(dict.fromkeys("abc", INSIDE), {("a", "b"): NEAR, ("a", "c"): FAR, ("b", "c"): FAR})


def wires(*nodes: str) -> Wires:
    return Wires(nodes, nodes, [SLOW] * len(nodes), THREE)


def test_inside_of_a_node_kv_takes_no_port_of_it() -> None:
    some = wires("a", "a", "b")
    some.send(0, 2, 50e9, 0.0)  # ten seconds of the node's port
    assert some.send(0, 1, 20e9, 0.0) == pytest.approx(1.0)


def test_between_nodes_the_path_sets_the_pace_in_either_direction() -> None:
    assert wires("a", "c").send(0, 1, 1e9, 0.0) == pytest.approx(2.01)
    assert wires("c", "a").send(0, 1, 1e9, 0.0) == pytest.approx(2.01)


def test_instances_of_a_node_share_its_port_and_a_slow_path_holds_up_nobody_else() -> None:
    some = wires("a", "a", "b", "c")
    assert some.send(0, 2, 5e9, 0.0) == pytest.approx(1.001)
    assert some.send(1, 2, 5e9, 0.0) == pytest.approx(2.001)
    some = wires("a", "a", "b", "c")
    some.send(0, 3, 0.5e9, 0.0)  # a second of the path, a tenth of one of the port
    assert some.send(1, 2, 5e9, 0.0) == pytest.approx(1.101)


def test_an_instance_on_no_node_has_a_port_of_its_own() -> None:
    assert wires("a", "").send(0, 1, 1e9, 0.0) == pytest.approx(1.002)


def test_policies_know_from_whom_kv_comes_slower() -> None:
    near, far = known_rates(["p", "q", "r"], ["a", "b", "c"], [SLOW] * 3, THREE)[1:]
    assert (near.bytes_s, near.slow) == (5e9, {"r": 0.5e9})
    assert (far.bytes_s, far.slow) == (0.5e9, {})
    inside = known_rates(["p", "q", "r"], ["a", "a", "b"], [SLOW] * 3, THREE)[0]
    assert (inside.bytes_s, inside.slow) == (20e9, {"r": 5e9})


def test_a_missing_path_is_named() -> None:
    with pytest.raises(InvalidRequest, match="no link between the nodes 'x' and 'a'"):
        Network({"a": INSIDE, "x": INSIDE}).path("x", "a")
