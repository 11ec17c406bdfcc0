"""Ports: their assignment to processes, whether they are free, and a free range for a temporary suite."""

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from services.worker.settings import DATA_PARALLEL_PORTS
from shared.errors import Conflict, InvalidRequest

MONITOR, PLANNER, SCHEDULERS, PREDICTORS, GATEWAYS, INSTANCES = 0, 5, 10, 42, 80, 96  # offsets from the first port
STANDBYS = 74  # of all monitors but the first, three ports each
_SPAN = 250
_ALONE = range(32_000, 32_740)  # for what is no suite: above the ports of suites, below those of outgoing connections
RESERVED_S = 60.0
_POLL_S = 0.5
_RESERVATIONS = Path(tempfile.gettempdir()) / f"polyphase-ports-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class PortUse:
    process: str
    host: str
    port: int


def ranks_of(settings: Mapping[str, Any]) -> int:
    """The ranks of an instance with these settings, whose faults are reported by their validation later."""
    try:
        return int(settings.get("tensor_parallel", 1)) * int(settings.get("pipeline_parallel", 1))
    except (TypeError, ValueError):
        return 1


def of_instance(data_parallel: int, settings: Mapping[str, Any]) -> range:
    """The ports of an instance, or of one of its data-parallel ranks, as distances from that of its HTTP server: RPC,
    HTTP, one for KV of each rank, and those at which data-parallel ranks meet.
    """
    meeting = DATA_PARALLEL_PORTS if data_parallel > 1 else 0
    return range(-1, 1 + ranks_of(settings) + meeting)


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
    return _fault(host, port) is None


def free_range(start: int = 20_000, stop: int = 32_000, size: int = _SPAN, host: str = "127.0.0.1") -> int:
    """The first of `size` consecutive free ports, below the system's range of outgoing ports.

    For RESERVED_S no other process of this user gets them, so that the caller can start to listen. Where all ports are
    reserved, the call waits until a reservation ends. Raises Conflict if there are none then.
    """
    give_up_mono = time.monotonic() + RESERVED_S
    while True:
        last = time.monotonic() > give_up_mono  # before the look: whatever was reserved at the call has ended by then
        with _reservations() as reserved:
            for base in range(start, stop, size):
                meets_other = any(base < other.base + other.size and other.base < base + size for other in reserved)
                if not meets_other and all(is_free(host, port) for port in range(base, base + size)):
                    reserved.append(_Reservation(base, size, time.monotonic()))
                    return base
        if not reserved or last:
            raise Conflict(f"there are no {size} consecutive free ports between {start} and {stop}")
        time.sleep(_POLL_S)


def free_alone(size: int = 1) -> int:
    """The first of so many ports for a temporary process that belongs to no suite.

    Each process that calls this begins in another part of a range that suites do not use, since on a busy machine a
    server may begin to listen after its reservation has ended.
    """
    return free_range(_ALONE.start + os.getpid() * 16 % 640, _ALONE.stop, size)


class _Reservation(NamedTuple):
    base: int
    size: int
    at_mono: float  # on the monotonic clock, which all processes share; after a reboot it may lie in the future


@contextmanager
def _reservations() -> Iterator[list[_Reservation]]:
    """The reservations that have not ended, locked within the block and written at its end."""
    # O_NOFOLLOW: not a file that another user linked to this name.
    descriptor = os.open(_RESERVATIONS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        entries = []
        for line in file:
            with suppress(ValueError, TypeError):  # an incomplete line of a killed process
                entries.append(_Reservation(*json.loads(line)))
        entries = [entry for entry in entries if 0 <= time.monotonic() - entry.at_mono < RESERVED_S]
        yield entries
        file.seek(0)
        file.truncate()
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


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
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and getattr(connection.laddr, "port", 0) == port
            if listens and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""
