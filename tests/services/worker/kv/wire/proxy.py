"""A proxy between an importer and an exporter that reads their messages, changes, delays, slows or
cuts them.
"""

import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise

from benchmarks.chaos.proxy import KvSplitter
from services.worker.kv.wire.nixl_agent import Offer, decode_nixl
from services.worker.kv.wire.protocol import checksum, decode_reply, decode_request
from services.worker.kv.wire.tcp_framing import DIGEST_BYTES, PREFIX, prefix
from services.worker.kv.wire.tcp_streams import host_and_port

Parts = list[bytes]  # header and payload, over plain TCP its checksum, too; what is no message of ours has none
Edit = Callable[[bool, Parts], Parts | None]  # whether the importer says it, and what; None drops it
Sent = queue.Queue[tuple[float, bytes] | None]  # when it is due; None: the end
_GIVE_UP_S = 30.0
_TURN_S = 0.02


class Cut(Exception):
    """Reset the connection, both sides of it, when a share of the message has passed."""

    def __init__(self, share: float = 0.0) -> None:
        self.share = share


class _KvMessages:
    """One direction of our framing."""

    def __init__(self) -> None:
        self._splitter = KvSplitter()

    def feed(self, data: bytes) -> list[tuple[bytes, Parts]]:
        """What can be passed on: as it came, and what it says."""
        found = []
        for piece in self._splitter.feed(data):
            parts = []
            if piece.head:  # it may be TLS
                _, header, payload, _ = PREFIX.unpack(piece.head)
                ends = (0, header, header + payload, len(piece.body))
                parts = [piece.body[start:end] for start, end in pairwise(ends) if start < end]
            found.append((piece.encode(), parts))
        return found

    def framed(self, parts: Parts) -> bytes:
        """As it goes over the wire."""
        return framed(parts)


def read_message(stream: socket.socket) -> Parts:
    """Over plain TCP. Raises OSError at the stream's end."""
    _, header_bytes, payload_bytes, _ = PREFIX.unpack(_exactly(stream, PREFIX.size))
    header = _exactly(stream, header_bytes)
    if not payload_bytes:
        return [header] if header_bytes else []
    return [header, _exactly(stream, payload_bytes), _exactly(stream, DIGEST_BYTES)]


def meant(importers: bool, header: bytes) -> object:
    """What a header says; of an offer, what it stands for."""
    said = decode_nixl(header)
    if isinstance(said, Offer):
        return decode_reply(said.header)
    return said or (decode_request if importers else decode_reply)(header)


def framed(parts: Parts) -> bytes:
    """As it goes over plain TCP; a payload without a checksum gets its own."""
    header, payload = (*parts, b"", b"")[:2]
    digest = b"".join(parts[2:]) or (checksum(payload).to_bytes(DIGEST_BYTES, "little") if payload else b"")
    return prefix(len(header), len(payload)) + header + payload + digest


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
        self._scheme = target.partition("://")[0]
        self._target = host_and_port(target)
        self._edit = edit
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"{self._scheme}://127.0.0.1:{self._server.getsockname()[1]}"
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
        messages = _KvMessages()
        out = b""
        try:
            while True:
                for out, parts in messages.feed(_some(source, over)):
                    passed = self._edit(importers, parts) if parts else parts
                    if passed is not None:
                        data = out if passed == parts else messages.framed(passed)
                        sent.put((time.monotonic() + self._delay_s(number), data))
        except Cut as cut:
            sent.put((time.monotonic(), out[: int(len(out) * cut.share)]))
            sent.put(None)
        except OSError:
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


def _some(stream: socket.socket, over: threading.Event) -> bytes:
    while not over.is_set():
        if select.select([stream], [], [], _TURN_S)[0]:
            if data := stream.recv(1 << 20):
                return data
            break
    raise ConnectionResetError("the stream has ended")


def _exactly(stream: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        some = stream.recv(min(size - len(data), 1 << 20))
        if not some:
            raise ConnectionResetError("the stream has ended")
        data += some
    return bytes(data)
