"""Ports: their assignment to processes, whether they are free, and a free range for a temporary suite."""

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import psutil

from shared.errors import Conflict, InvalidRequest

MONITOR, PLANNER, SCHEDULERS, PREDICTORS, GATEWAYS, INSTANCES = 0, 5, 10, 42, 80, 96  # offsets from the first port
STANDBYS = 74  # of all monitors but the first, three ports each
_SPAN = 250
RESERVED_S = 60.0
LOCK_S = 10.0
_RESERVATIONS = Path(tempfile.gettempdir()) / f"polyphase-ports-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class PortUse:
    """A port on which a process will listen."""

    process: str
    host: str
    port: int


def ranks_of(settings: Mapping[str, Any]) -> int:
    """The ranks of an instance with these settings, whose faults are reported by their validation later."""
    try:
        return int(settings.get("tensor_parallel", 1)) * int(settings.get("pipeline_parallel", 1))
    except (TypeError, ValueError):
        return 1


def instance_ports(base: int, ranks: Iterable[int]) -> list[int]:
    """The first port of each instance with so many ranks: RPC, HTTP, and then one per rank for KV."""
    first, ports = base + INSTANCES, []
    for count in ranks:
        ports.append(first)
        first += 2 + count
    return ports


def beside_ports(base: int, ranks: Iterable[int]) -> list[int]:
    """The HTTP port of the predictor beside each instance, followed by its RPC port; after all ports of instances."""
    *instances, first = instance_ports(base, (*ranks, 0))
    return [first + 2 * index for index in range(len(instances))]


def check_distinct(uses: Iterable[PortUse]) -> None:
    """Raises InvalidRequest when two processes of one host would share a port, or a port is out of range."""
    uses = list(uses)
    for (host, port), count in Counter((use.host, use.port) for use in uses).items():
        if count > 1:
            names = " and ".join(use.process for use in uses if (use.host, use.port) == (host, port))
            raise InvalidRequest(f"port {port} is assigned to {names}: change `ports` or the port of one of them")
        if port > 65535:
            raise InvalidRequest(f"port {port} is above 65535: lower `ports`")


def check_free(uses: Iterable[PortUse]) -> None:
    """Raises Conflict that names the ports that are not available, for which processes, and who uses them if known."""
    faults = [(use, error) for use in uses if (error := _fault(use.host, use.port)) is not None]
    if faults:
        lines = [_explain(use, error) for use, error in faults]
        choices = "Stop that process, or choose other ports: --port, --dashboard-port, `ports` in the cluster file."
        raise Conflict(f"{'; '.join(lines)}. {choices}")


def is_free(host: str, port: int) -> bool:
    """Whether a server can listen there now."""
    return _fault(host, port) is None


def free_range(start: int = 20_000, stop: int = 32_000, size: int = _SPAN, host: str = "127.0.0.1") -> int:
    """The first of `size` consecutive free ports, below the system's range of outgoing ports.

    For RESERVED_S no other process of this user gets them, so that the caller can start to listen.
    """
    with _opened() as file:
        _lock(file)
        reserved = _read(file)
        for base in range(start, stop, size):
            ports = range(base, base + size)
            if not any(entry.meets(ports) for entry in reserved) and all(is_free(host, port) for port in ports):
                reserved.append(_Reservation(base, size, time.monotonic()))
                file.truncate(0)
                file.writelines(json.dumps(entry) + "\n" for entry in reserved)
                return base
    raise Conflict(f"there are no {size} consecutive free ports between {start} and {stop}")


class _Reservation(NamedTuple):
    base: int
    size: int
    at_s: float  # on the monotonic clock, which all processes share; after a reboot it may lie in the future

    def meets(self, ports: range) -> bool:
        return self.base < ports.stop and ports.start < self.base + self.size


def _opened() -> TextIO:
    """The file of reservations; O_NOFOLLOW: not one that another user linked to its name."""
    return os.fdopen(os.open(_RESERVATIONS, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600), "a+")


def _lock(file: TextIO) -> None:
    """Lock the file until it is closed. Raises Conflict if it stays locked for LOCK_S."""
    give_up_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > give_up_s:
                raise Conflict(f"{_RESERVATIONS} has been locked for {LOCK_S:g} s") from None
            time.sleep(0.01)


def _read(file: TextIO) -> list[_Reservation]:
    file.seek(0)
    entries = []
    for line in file:
        with suppress(ValueError, TypeError):  # an incomplete line of a killed process
            entries.append(_Reservation(*json.loads(line)))
    return [entry for entry in entries if 0 <= time.monotonic() - entry.at_s < RESERVED_S]


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
