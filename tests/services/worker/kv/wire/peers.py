"""Peers and wires that misbehave: a plain socket that sends anything, and a proxy between an importer and an exporter
that reads their messages, changes, delays, slows or cuts them.
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

import msgspec

from benchmarks.chaos.proxy import KvSplitter
from services.worker.kv.wire.nixl_agent import Offer, decode_nixl
from services.worker.kv.wire.protocol import Confirm, Failed, Pull, checksum, decode_reply, decode_request, sealed
from services.worker.kv.wire.tcp_streams import DIGEST_BYTES, HEARTBEAT, PREFIX, prefix
from services.worker.kv.wire.tcp_transport import TcpListener, TcpTransport, host_and_port
from shared.domain.kv import Codec

# Messages on which msgspec raises what is no error of its own.
NOT_UTF8 = sealed(msgspec.msgpack.encode(Confirm("~~", 7, 0, 1)).replace(b"~~", b"\xff\xfe"))
NOT_UTF8_REPLY = sealed(msgspec.msgpack.encode(Failed(1, "~~", "")).replace(b"~~", b"\xff\xfe"))
NESTED = b"\x93\xa6Cancel\x01" + b"\x91" * 60_000 + b"\xc0"
SEALED_NESTED = sealed(NESTED)

Parts = list[bytes]  # header and payload, over plain TCP its checksum, too; of what is no message of ours none
Edit = Callable[[bool, Parts], Parts | None]  # whether the importer sends it, and the message; None drops it
Sent = queue.Queue[tuple[float, bytes] | None]  # when it is due; None: the end
_GIVE_UP_S = 30.0
_TURN_S = 0.02


def pull(**changes: object) -> Pull:
    """Of all the KV of 40 tokens."""
    all_of_it = Pull(
        pull_id=1,
        transfer_id="t",
        generation=7,
        fingerprint="model",
        codec=Codec.RAW,
        layer_start=0,
        layer_end=3,
        token_start=0,
        token_end=40,
        head_start=0,
        head_end=4,
        rank=0,
        ranks=1,
        consumers=1,
        credit_bytes=1000,
        timeout_s=5.0,
    )
    return msgspec.structs.replace(all_of_it, **changes)


def framed(parts: Parts) -> bytes:
    """As it goes over plain TCP; a payload without a checksum gets its own."""
    header, payload = (*parts, b"", b"")[:2]
    digest = b"".join(parts[2:]) or (checksum(payload).to_bytes(DIGEST_BYTES, "little") if payload else b"")
    return prefix(len(header), len(payload)) + header + payload + digest


class Stranger:
    """A plain socket that frames what it sends as an importer does."""

    def __init__(self, address: str) -> None:
        self.socket = socket.create_connection(host_and_port(address), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(HEARTBEAT)

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, message: bytes) -> None:
        self.socket.sendall(framed([message]))

    def receive(self) -> Parts:
        """Header and payload of the next message that is no heartbeat. Raises OSError at the stream's end."""
        while True:
            _, header_bytes, payload_bytes, _ = PREFIX.unpack(self._exactly(PREFIX.size))
            header = self._exactly(header_bytes)
            if payload_bytes:
                payload = self._exactly(payload_bytes)
                self._exactly(DIGEST_BYTES)
                return [header, payload]
            if header_bytes:
                return [header]

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            some = self.socket.recv(size - len(data))
            if not some:
                raise ConnectionResetError("the stream has ended")
            data += some
        return data


def next_pull(transport: TcpTransport, listener: TcpListener) -> tuple[bytes, Pull]:
    """The next pull that an importer sends to this listener, with its name."""
    for _ in range(200):
        transport.wait(0.1)
        while (message := listener.receive()) is not None:
            request = decode_request(message[1])
            if isinstance(request, Pull):
                return message[0], request
    raise AssertionError("no pull came")


class Cut(Exception):
    """Reset the connection, both sides of it, when a share of the message has passed."""

    def __init__(self, share: float = 0.0) -> None:
        self.share = share


def meaning(importers: bool, header: bytes) -> object:
    """The message of a header; of an offer, what it stands for."""
    message = decode_nixl(header)
    if isinstance(message, Offer):
        return decode_reply(message.header)
    return message or (decode_request if importers else decode_reply)(header)


def _reset(stream: socket.socket) -> None:
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
        self._target = host_and_port(target)
        self._edit = edit
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"{target.partition('://')[0]}://127.0.0.1:{self._server.getsockname()[1]}"
        self._over: list[threading.Event] = []  # of each connection
        self._threads: list[threading.Thread] = []
        self.connections = 0
        self._start(self._accept)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._threads[0].join(_GIVE_UP_S)  # no further connection is accepted
        for over in self._over:
            over.set()
        for each in self._threads:
            each.join(_GIVE_UP_S)
            assert not each.is_alive()

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
                _reset(near)
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
        _reset(near)
        _reset(far)

    def _read(self, source: socket.socket, sent: Sent, importers: bool, number: int, over: threading.Event) -> None:
        splitter, out = KvSplitter(), b""
        try:
            while True:
                for piece in splitter.feed(_some(source, over)):
                    out, parts = piece.encode(), []
                    if piece.head:  # otherwise it may be TLS
                        _, header, payload, _ = PREFIX.unpack(piece.head)
                        ends = (0, header, header + payload, len(piece.body))
                        parts = [piece.body[start:end] for start, end in pairwise(ends) if start < end]
                    passed = self._edit(importers, parts) if parts else parts
                    if passed is not None:
                        data = out if passed == parts else framed(passed)
                        sent.put((time.monotonic() + self._delay_s(number), data))
        except Cut as cut:
            sent.put((time.monotonic(), out[: int(len(out) * cut.share)]))
            sent.put(None)
        except OSError:
            sent.put(None)

    def _write(self, sink: socket.socket, sent: Sent, over: threading.Event) -> None:
        """What came before an end still arrives; then both sides are over."""
        free_s = 0.0
        while not over.is_set():
            try:
                item = sent.get(timeout=_TURN_S)
            except queue.Empty:
                continue
            if item is None:
                break
            due_s, data = item
            now_mono = time.monotonic()
            if self._bytes_per_s:
                free_s = max(free_s, now_mono) + len(data) / self._bytes_per_s
                due_s = max(due_s, free_s)
            over.wait(max(0.0, due_s - now_mono))
            try:
                _send(sink, data, over)
            except OSError:
                break
        over.set()


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
