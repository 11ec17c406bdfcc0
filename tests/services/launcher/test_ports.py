"""Ports: a busy one is named before anything starts."""

import socket

import pytest

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


def test_a_free_range_skips_what_is_taken() -> None:
    base = free_range(size=20)
    with socket.create_server(("127.0.0.1", base + 7)):
        assert free_range(start=base, stop=base + 2_000, size=20) >= base + 20


def test_no_free_range() -> None:
    base = free_range(size=20)
    with socket.create_server(("127.0.0.1", base)), pytest.raises(Conflict):
        free_range(start=base, stop=base + 20, size=20)
