"""A TCP proxy between an importer and an exporter that reads their messages, changes, delays, slows or cuts them."""

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from services.worker.kv.wire.tcp_framing import PREFIX, prefix

Parts = list[bytes]  # header and payload; a heartbeat has neither
Edit = Callable[[bool, Parts], Parts | None]  # whether the importer says it, and what; None drops it
_GIVE_UP_S = 30.0


class Cut(Exception):
    """Reset the connection, both sides of it."""


def read_message(stream: socket.socket) -> Parts:
    """Raises OSError at the stream's end."""
    _, header_bytes, payload_bytes, _ = PREFIX.unpack(_exactly(stream, PREFIX.size))
    header = _exactly(stream, header_bytes)
    return [header, _exactly(stream, payload_bytes)] if payload_bytes else [header] if header_bytes else []


def framed(parts: Parts) -> bytes:
    """As it goes over a stream."""
    header, payload = (*parts, b"", b"")[:2]
    return prefix(len(header), len(payload)) + header + payload


def reset(stream: socket.socket) -> None:
    """Close as a process that is killed does: RST."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


class Proxy:
    """Listens before `target`. `edit` sees each message; what passes arrives `delay_s(connection)` later, at
    `bytes_per_s` at most in each direction.
    """

    def __init__(
        self,
        target: str,
        edit: Edit = lambda _, parts: parts,
        delay_s: Callable[[int], float] = lambda _: 0.0,
        bytes_per_s: float = 0.0,
    ) -> None:
        host, _, port = target.removeprefix("kv://").rpartition(":")
        self._target = host, int(port)
        self._edit = edit
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"kv://127.0.0.1:{self._server.getsockname()[1]}"
        self._streams: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.connections = 0
        self._start(self._accept)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for each in self._threads:
            each.join(_GIVE_UP_S)
            assert not each.is_alive()

    def cut(self) -> None:
        """Reset all connections."""
        for each in self._streams:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes its reader

    def _start(self, run: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=_GIVE_UP_S)
            except OSError:
                reset(near)
                continue
            far.settimeout(None)
            number, self.connections = self.connections, self.connections + 1
            self._streams += [near, far]
            for source, sink, importers in ((near, far, True), (far, near, False)):
                sent: queue.Queue[tuple[float, bytes] | None] = queue.Queue(maxsize=8)
                self._start(lambda a=source, s=sent, i=importers, n=number: self._read(a, s, i, n))  # type: ignore[misc]
                self._start(lambda a=source, b=sink, s=sent: self._write(a, b, s))  # type: ignore[misc]

    def _read(
        self, source: socket.socket, sent: "queue.Queue[tuple[float, bytes] | None]", importers: bool, number: int
    ) -> None:
        try:
            while True:
                parts = self._edit(importers, read_message(source))
                if parts is not None:
                    sent.put((time.monotonic() + self._delay_s(number), framed(parts)), timeout=_GIVE_UP_S)
        except (OSError, Cut, struct.error):
            sent.put(None, timeout=_GIVE_UP_S)

    def _write(
        self, source: socket.socket, sink: socket.socket, sent: "queue.Queue[tuple[float, bytes] | None]"
    ) -> None:
        pause, free_s, broken = threading.Event(), 0.0, False
        while (item := sent.get(timeout=None)) is not None:
            due_s, data = item
            if broken:
                continue
            now_s = time.monotonic()
            if self._bytes_per_s:
                free_s = max(free_s, now_s) + len(data) / self._bytes_per_s
                due_s = max(due_s, free_s)
            pause.wait(max(0.0, due_s - now_s))
            try:
                sink.sendall(data)
            except OSError:
                broken = True
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RD)
                reset(each)


def _exactly(stream: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        some = stream.recv(min(size - len(data), 1 << 20))
        if not some:
            raise ConnectionResetError("the stream has ended")
        data += some
    return bytes(data)
