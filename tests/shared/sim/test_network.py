"""Ports: rates, turns and latencies."""

import pytest

from shared.cost.transfer import Link
from shared.sim.instance import Port, send

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
