"""Ports: who gets which, whether they are free, and a free range for a throw-away suite."""

import errno
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from shared.errors import Conflict, InvalidRequest

MONITOR, PREDICTOR, SCHEDULERS, INSTANCES = 0, 3, 10, 50  # offsets from the first port
_SPAN = 250


@dataclass(frozen=True, slots=True)
class PortUse:
    """A port that a process will listen on."""

    process: str
    host: str
    port: int


def instance_ports(base: int, tensor_parallel: Iterable[int]) -> list[int]:
    """The first port of each instance: rpc, http, and then one a rank for KV."""
    first, ports = base + INSTANCES, []
    for ranks in tensor_parallel:
        ports.append(first)
        first += 2 + ranks
    return ports


def check_distinct(uses: Iterable[PortUse]) -> None:
    """Raises InvalidRequest when two processes of one host would share a port, or a port is out of range."""
    uses = list(uses)
    for (host, port), count in Counter((use.host, use.port) for use in uses).items():
        if count > 1:
            names = " and ".join(use.process for use in uses if (use.host, use.port) == (host, port))
            raise InvalidRequest(f"port {port} is meant for {names}: change `ports` or one of theirs")
        if port > 65535:
            raise InvalidRequest(f"port {port} is out of range: lower `ports`")


def check_free(uses: Iterable[PortUse]) -> None:
    """Raises Conflict that names every port that cannot be listened on, who wants it, and, if known, who has it."""
    faults = [(use, error) for use in uses if (error := _fault(use.host, use.port)) is not None]
    if faults:
        lines = [_explain(use, error) for use, error in faults]
        choices = "Stop that, or choose others: --port, --dashboard-port, `ports` in the cluster file."
        raise Conflict(f"{'; '.join(lines)}. {choices}")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    return _fault(host, port) is None


def free_range(start: int = 20_000, stop: int = 32_000, size: int = _SPAN, host: str = "127.0.0.1") -> int:
    """The first of `size` free ports in a row, below the range from which the system takes outgoing ones."""
    for base in range(start, stop, size):
        if all(is_free(host, port) for port in range(base, base + size)):
            return base
    raise Conflict(f"no {size} free ports in a row between {start} and {stop}")


def _fault(host: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def _explain(use: PortUse, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {use.port} for {use.process} is taken{_holder(use.port)}"
    return f"{use.process} cannot listen on {use.host}, port {use.port}: {error.strerror} (see `hosts`, `gateway.host`)"


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            ours = connection.status == psutil.CONN_LISTEN and getattr(connection.laddr, "port", 0) == port
            if ours and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass
    return ""
