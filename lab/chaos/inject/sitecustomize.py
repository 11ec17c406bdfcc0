"""What a process of a suite under test does differently, so that faults reach it without a line of the product.

Python imports this file at the start of every process that has this folder on its PYTHONPATH. It changes nothing until
the process's environment says so; the environment is looked at when it is used, because the fork server's children get
theirs after they began.

CHAOS_LINKS: JSON of address → address of the proxy that stands before it, of ZeroMQ, or of KV over TCP (`kv://`).
CHAOS_SWITCHES: a file of SWITCHES that the bench changes while the process runs: seconds by which its clock is off, and
whether its database is read-only. CHAOS_WIRE_VERSION: the wire version that the process claims to speak.
CHAOS_MIN_WIRE_VERSION: the oldest version that it speaks with; by default that one.
"""

import json
import mmap
import os
import socket
import sqlite3
import struct
import time
from pathlib import Path
from typing import Any

import zmq

SWITCHES = struct.Struct("<dQ")  # clock offset in seconds; 1: the database is read-only


class _Switches:
    """The present values in the process's file; all off without one."""

    def __init__(self) -> None:
        self._path = ""
        self._map: mmap.mmap | None = None

    def read(self) -> tuple[float, int]:
        path = os.environ.get("CHAOS_SWITCHES", "")
        if path != self._path:
            self._path, self._map = path, None
            if path:
                with Path(path).open("rb") as file:
                    self._map = mmap.mmap(file.fileno(), SWITCHES.size, access=mmap.ACCESS_READ)
        if self._map is None:
            return 0.0, 0
        offset_s, read_only = SWITCHES.unpack_from(self._map)
        return offset_s, read_only


_switches = _Switches()
_time, _time_ns, _connect = time.time, time.time_ns, zmq.Socket.connect
_connect_ex = socket.socket.connect_ex


def _wrong_time() -> float:
    return _time() + _switches.read()[0]


def _wrong_time_ns() -> int:
    return _time_ns() + int(_switches.read()[0] * 1e9)


def _connect_by_proxy(made: Any, address: str) -> Any:
    return _connect(made, _swapped(address))


def _connect_kv_by_proxy(made: socket.socket, address: Any) -> int:
    """What KV over TCP connects by; nothing else in the suite does to these ports."""
    if made.family != socket.AF_INET:
        return _connect_ex(made, address)
    host, _, port = _swapped("kv://{}:{}".format(*address)).removeprefix("kv://").rpartition(":")
    return _connect_ex(made, (host, int(port)))


def _swapped(address: str) -> str:
    swapped: str = json.loads(os.environ.get("CHAOS_LINKS", "{}")).get(address, address)
    return swapped


class _Cursor(sqlite3.Cursor):
    """Makes SQLite itself refuse writes, with its own error, while the switch says so."""

    def execute(self, *arguments: Any) -> Any:
        super().execute(f"PRAGMA query_only={_switches.read()[1]}")
        return super().execute(*arguments)

    def executemany(self, *arguments: Any) -> Any:
        super().execute(f"PRAGMA query_only={_switches.read()[1]}")
        return super().executemany(*arguments)


class _Connection(sqlite3.Connection):
    def cursor(self, factory: Any = _Cursor) -> Any:
        return super().cursor(factory)


def _connect_switched(*arguments: Any, **named: Any) -> Any:
    return _open(*arguments, **{"factory": _Connection, **named})


_open = sqlite3.connect


def _install() -> None:
    sqlite3.connect = _connect_switched
    time.time, time.time_ns = _wrong_time, _wrong_time_ns
    zmq.Socket.connect = _connect_by_proxy  # type: ignore[method-assign, assignment]
    socket.socket.connect_ex = _connect_kv_by_proxy  # type: ignore[method-assign, assignment]
    if version := os.environ.get("CHAOS_WIRE_VERSION"):
        from shared.runtime import wire_version as wire

        wire.WIRE_VERSION = int(version)
        wire.MIN_WIRE_VERSION = int(os.environ.get("CHAOS_MIN_WIRE_VERSION", version))
        wire.OURS = wire.WireVersions(wire.WIRE_VERSION, wire.MIN_WIRE_VERSION)


if __name__ == "sitecustomize":  # imported by Python itself, not by who wants to know the layout of the switches
    _install()
