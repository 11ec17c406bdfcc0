"""Ports: a busy one is named before anything starts."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.launcher import ports
from services.launcher.ports import PortUse, check_free, free_range, is_free
from shared.errors import Conflict


def test_a_busy_port_is_named_with_who_wants_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(Conflict, match=f"port {port} for gateway is taken"):
            check_free([PortUse("gateway", "127.0.0.1", port)])
    check_free([PortUse("gateway", "127.0.0.1", port)])


def test_an_address_of_another_machine_is_said_to_be_one() -> None:
    with pytest.raises(Conflict, match=r"gateway cannot listen on 192\.0\.2\.1, port 8000: Cannot assign.*hosts"):
        check_free([PortUse("gateway", "192.0.2.1", 8000)])


@pytest.fixture
def own_reservations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not those of the tests beside this one, which a shorter RESERVED_S would end."""
    monkeypatch.setattr(ports, "_RESERVATIONS", tmp_path / "reserved")


def test_a_free_range_skips_what_is_taken(monkeypatch: pytest.MonkeyPatch, own_reservations: None) -> None:
    base = free_range(start=8_000, stop=8_900, size=20)  # which no suite uses
    monkeypatch.setattr(ports, "RESERVED_S", 0.0)  # so that nothing but the port keeps it
    assert free_range(start=base, stop=base + 20, size=20) == base
    with socket.create_server(("127.0.0.1", base + 7)):
        assert free_range(start=base, stop=base + 1_000, size=20) >= base + 20


def test_those_who_ask_at_the_same_time_get_different_ranges() -> None:
    ask = "from services.launcher.ports import free_range; print(free_range(size=250))"
    command = [sys.executable, "-c", ask]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    bases = [int(process.communicate(timeout=60)[0]) for process in asking]
    assert len({*bases}) == 4
    own = free_range(size=10)
    assert not any(base - 10 < own < base + 250 for base in bases)


def test_a_reservation_ends(monkeypatch: pytest.MonkeyPatch, own_reservations: None, tmp_path: Path) -> None:
    (tmp_path / "reserved").write_text("[20000, 5")  # by one that was killed
    first = free_range(start=8_000, stop=8_900, size=30)
    assert free_range(start=8_000, stop=8_900, size=30) != first
    monkeypatch.setattr(ports, "RESERVED_S", 0.0)
    assert free_range(start=8_000, stop=8_900, size=30) == first


def test_a_range_is_waited_for_until_a_reservation_ends(
    monkeypatch: pytest.MonkeyPatch, own_reservations: None
) -> None:
    monkeypatch.setattr(ports, "_POLL_S", 0.01)
    base = free_range(start=9_000, stop=9_900, size=20)  # which no suite uses
    monkeypatch.setattr(ports, "RESERVED_S", 0.2)
    assert free_range(start=base, stop=base + 20, size=20) == base


def test_no_free_range(monkeypatch: pytest.MonkeyPatch, own_reservations: None) -> None:
    base = free_range(start=8_000, stop=8_900, size=20)
    monkeypatch.setattr(ports, "RESERVED_S", 0.0)
    with socket.create_server(("127.0.0.1", base)), pytest.raises(Conflict):
        free_range(start=base, stop=base + 20, size=20)
