"""What a process of a suite under test does differently, so that faults reach it without a line of the product.

Python imports this file at the start of every process that has this folder on its PYTHONPATH. It changes nothing until
the process's environment says so; the environment is looked at when it is used, because the fork server's children get
theirs after they began.

CHAOS_LINKS: JSON of address → address of the proxy that stands before it, of ZeroMQ, or of KV over TCP (`kv://`).
CHAOS_SWITCHES: a file of SWITCHES that the bench changes while the process runs: seconds by which its clock is off, and
what is wrong with its database. CHAOS_LOOP_TIMES: a file of LOOP_TIME into which the process writes the longest time of
CPU that its uvloop was held. CHAOS_WIRE_VERSION: the wire version that the process claims to speak.
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

import uvloop
import zmq

SWITCHES = struct.Struct("<dQ")  # clock offset in seconds; what is wrong with the database
READ_ONLY, LOST = 1, 2  # SQLite refuses writes; it writes changes of leases, and reports an error
LOOP_TIME = struct.Struct("<d")  # CPU seconds
LOOP_BEAT_S = 0.002


_mapped: dict[str, mmap.mmap] = {}  # the process's file of switches; the path of a forked process may differ


def _switches() -> tuple[float, int]:
    """The present values in the process's file; all off without one."""
    path = os.environ.get("CHAOS_SWITCHES", "")
    if not path:
        return 0.0, 0
    if path not in _mapped:
        with Path(path).open("rb") as file:
            _mapped[path] = mmap.mmap(file.fileno(), SWITCHES.size, access=mmap.ACCESS_READ)
    offset_s, database = SWITCHES.unpack_from(_mapped[path])
    return offset_s, database


_time, _time_ns, _connect = time.time, time.time_ns, zmq.Socket.connect
_connect_ex = socket.socket.connect_ex


def _wrong_time() -> float:
    return _time() + _switches()[0]


def _wrong_time_ns() -> int:
    return _time_ns() + int(_switches()[0] * 1e9)


def _connect_by_proxy(zmq_socket: Any, address: str) -> Any:
    return _connect(zmq_socket, _proxied(address))


def _connect_kv_by_proxy(tcp_socket: socket.socket, address: Any) -> int:
    """KV over TCP connects with `connect_ex`; no other connection to these ports does."""
    if tcp_socket.family != socket.AF_INET:
        return _connect_ex(tcp_socket, address)
    host, _, port = _proxied("kv://{}:{}".format(*address)).removeprefix("kv://").rpartition(":")
    return _connect_ex(tcp_socket, (host, int(port)))


def _proxied(address: str) -> str:
    """The address of the proxy before this address, if it has one."""
    proxied: str = json.loads(os.environ.get("CHAOS_LINKS", "{}")).get(address, address)
    return proxied


class _Cursor(sqlite3.Cursor):
    """Makes SQLite itself refuse writes, with its own error, while the switch says so."""

    def execute(self, *arguments: Any) -> Any:
        mode = _switches()[1]
        super().execute(f"PRAGMA query_only={int(mode == READ_ONLY)}")
        done = super().execute(*arguments)
        if mode == LOST and arguments[0].lstrip().upper().startswith("UPDATE LEASES"):
            raise sqlite3.OperationalError("disk I/O error")
        return done

    def executemany(self, *arguments: Any) -> Any:
        super().execute(f"PRAGMA query_only={int(_switches()[1] == READ_ONLY)}")
        return super().executemany(*arguments)


class _Connection(sqlite3.Connection):
    def cursor(self, factory: Any = _Cursor) -> Any:
        return super().cursor(factory)


def _connect_switched(*arguments: Any, **named: Any) -> Any:
    return _open(*arguments, **{"factory": _Connection, **named})


_open = sqlite3.connect


class _LoopTimer:
    """Notes the longest CPU time between two beats of the loop: that of a turn, and LOOP_BEAT_S at most."""

    def __init__(self, loop: uvloop.Loop, path: str) -> None:
        self._loop = loop
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), LOOP_TIME.size)
        self._last_s = 0.0
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._last_s = time.thread_time()
        self._loop.call_later(LOOP_BEAT_S, self._beat)

    def _beat(self) -> None:
        held_s = time.thread_time() - self._last_s
        if held_s > LOOP_TIME.unpack_from(self._map)[0]:
            LOOP_TIME.pack_into(self._map, 0, held_s)
        self._begin()


def _timed_loop() -> uvloop.Loop:
    loop = _new_loop()
    if path := os.environ.get("CHAOS_LOOP_TIMES"):
        _LoopTimer(loop, path)
    return loop


_new_loop = uvloop.new_event_loop


def _install() -> None:
    sqlite3.connect = _connect_switched
    uvloop.new_event_loop = _timed_loop
    time.time, time.time_ns = _wrong_time, _wrong_time_ns
    zmq.Socket.connect = _connect_by_proxy  # type: ignore[method-assign, assignment]
    socket.socket.connect_ex = _connect_kv_by_proxy  # type: ignore[method-assign, assignment]
    if version := os.environ.get("CHAOS_WIRE_VERSION"):
        from shared.runtime import wire_version as wire

        wire.WIRE_VERSION = int(version)
        wire.MIN_WIRE_VERSION = int(os.environ.get("CHAOS_MIN_WIRE_VERSION", version))
        wire.OURS = wire.WireVersions(wire.WIRE_VERSION, wire.MIN_WIRE_VERSION)


if __name__ == "sitecustomize":  # imported by Python itself, not by the bench, which reads the layout of the switches
    _install()
