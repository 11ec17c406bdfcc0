"""Ports for servers under test, below those that the system gives to outgoing connections.

One that the system chose may be some connection's own the moment it is let go of: a test that starts its server a
little later, or again, then finds it in use.
"""

import os
import socket
from collections.abc import Iterator

_FIRST, _EACH, _SHARES = 10_000, 600, 16  # up to 20_000, where the launcher's begin


def _ports() -> Iterator[int]:
    """Each process of a test run cycles through the ports of its share, which a run without workers chooses by pid."""
    share = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw")) % _SHARES
    number = os.getpid() * 7
    while True:
        yield _FIRST + share * _EACH + number % _EACH
        number += 1


_PORTS = _ports()


def free_port() -> int:
    """One that nobody listens on, on loopback; of this process's last 600 it is given out once."""
    for _ in range(_EACH):
        port = next(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as servers do: closed connections do not count
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")


def free_address() -> str:
    """As ZeroMQ writes it."""
    return f"tcp://127.0.0.1:{free_port()}"
