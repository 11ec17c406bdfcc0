"""A TCP proxy between an importer and an exporter that reads their messages, changes, delays, slows or cuts them."""

import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from services.worker.kv.wire.tcp_framing import PREFIX, prefix

Parts = list[bytes]  # header and payload; a heartbeat has neither
Edit = Callable[[bool, Parts], Parts | None]  # whether the importer says it, and what; None drops it
Sent = queue.Queue[tuple[float, bytes] | None]  # when it is due; None: the end
_GIVE_UP_S = 30.0
_TURN_S = 0.02


class Cut(Exception):
    """Reset the connection, both sides of it."""


def read_message(stream: socket.socket, over: threading.Event | None = None) -> Parts:
    """Raises OSError at the stream's end, or when it is over."""
    _, header_bytes, payload_bytes, _ = PREFIX.unpack(_exactly(stream, PREFIX.size, over))
    header = _exactly(stream, header_bytes, over)
    return [header, _exactly(stream, payload_bytes, over)] if payload_bytes else [header] if header_bytes else []


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
        self._over: list[threading.Event] = []  # of each connection
        self._threads: list[threading.Thread] = []
        self.connections = 0
        self._start(self._accept)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._threads[0].join(_GIVE_UP_S)  # nobody else is let in
        self.cut()
        for each in self._threads:
            each.join(_GIVE_UP_S)
            assert not each.is_alive()

    def cut(self) -> None:
        """Reset all connections."""
        for over in self._over:
            over.set()

    def _start(self, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)
        return thread

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
            number, self.connections = self.connections, self.connections + 1
            self._over.append(threading.Event())
            self._start(partial(self._relay, near, far, number, self._over[-1]))

    def _relay(self, near: socket.socket, far: socket.socket, number: int, over: threading.Event) -> None:
        threads = []
        for source, sink, importers in ((near, far, True), (far, near, False)):
            source.setblocking(False)
            sent: Sent = queue.Queue()
            threads.append(self._start(partial(self._read, source, sent, importers, number, over)))
            threads.append(self._start(partial(self._write, sink, sent, over)))
        for each in threads:
            each.join()
        reset(near)
        reset(far)

    def _read(self, source: socket.socket, sent: Sent, importers: bool, number: int, over: threading.Event) -> None:
        try:
            while True:
                parts = self._edit(importers, read_message(source, over))
                if parts is not None:
                    sent.put((time.monotonic() + self._delay_s(number), framed(parts)))
        except (OSError, Cut):
            sent.put(None)

    def _write(self, sink: socket.socket, sent: Sent, over: threading.Event) -> None:
        """What came before an end still arrives; then both sides are over."""
        free_s = 0.0
        while (item := _next(sent, over)) is not None:
            due_s, data = item
            now_s = time.monotonic()
            if self._bytes_per_s:
                free_s = max(free_s, now_s) + len(data) / self._bytes_per_s
                due_s = max(due_s, free_s)
            over.wait(max(0.0, due_s - now_s))
            try:
                _send(sink, data, over)
            except OSError:
                break
        over.set()


def _next(sent: Sent, over: threading.Event) -> tuple[float, bytes] | None:
    while not over.is_set():
        with suppress(queue.Empty):
            return sent.get(timeout=_TURN_S)
    return None


def _send(sink: socket.socket, data: bytes, over: threading.Event) -> None:
    rest = memoryview(data)
    while rest:
        if over.is_set():
            raise ConnectionResetError
        if select.select([], [sink], [], _TURN_S)[1]:
            with suppress(BlockingIOError):
                rest = rest[sink.send(rest) :]


def _exactly(stream: socket.socket, size: int, over: threading.Event | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if over is not None and over.is_set():
            raise ConnectionResetError
        if over is not None and not select.select([stream], [], [], _TURN_S)[0]:
            continue
        some = stream.recv(min(size - len(data), 1 << 20))
        if not some:
            raise ConnectionResetError("the stream has ended")
        data += some
    return bytes(data)
