"""A TCP proxy with the faults of a bad network, for a link between two processes.

It forwards bytes and ends of connections. `cut`, `stall`, `slow`, `spoil` and `replay` change that until `heal`. A
splitter finds the messages in the bytes of ZeroMQ (ZMTP 3) and of KV over TCP, so that a flipped bit arrives in a
well-framed message.
"""

import asyncio
import socket
import struct
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Self

from services.worker.kv.wire.tcp_streams import DIGEST_BYTES, PREFIX, prefix

_READ_BYTES = 1 << 16
_QUEUED_PIECES = 64  # in one direction; beyond that the sender has to wait
_REPLAYED_MESSAGES = 64  # messages remembered for a replay
_REPLAYED_BYTES = 1 << 16  # longer messages are not remembered
GREETING_BYTES = 64  # of ZMTP
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a ZMTP frame
_KV_MARK = prefix(0, 0)[:4]


@dataclass(frozen=True, slots=True)
class Piece:
    """A whole message, or a part of one. head: the bytes that frame the body.

    is_command: the piece belongs to the connection and not to a message: a handshake, a heartbeat.
    """

    head: bytes
    body: bytes
    is_command: bool = False
    ends_message: bool = True

    def encode(self) -> bytes:
        return self.head + self.body

    def flipped(self, rng: Random) -> "Piece":
        """The piece with one bit of its body flipped, and correctly framed."""
        if not self.body:
            return self
        body = bytearray(self.body)
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        return replace(self, body=bytes(body))


class Splitter:
    """One direction of a connection, in pieces. This one knows no protocol: each read of the socket is a message."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Piece]:
        """The pieces that are complete."""
        self._buffer += data
        pieces = []
        while self._buffer and (piece := self._next()) is not None:
            pieces.append(piece)
        return pieces

    def _next(self) -> Piece | None:
        return Piece(b"", self._take(len(self._buffer)))

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


class ZmtpSplitter(Splitter):
    """ZeroMQ. The greeting passes at once, because each side waits for the other side's; then come frames."""

    def __init__(self, greeting_bytes: int = GREETING_BYTES) -> None:
        super().__init__()
        self._greeting_bytes = greeting_bytes  # still to come

    def _next(self) -> Piece | None:
        if self._greeting_bytes:
            greeting = self._take(self._greeting_bytes)
            self._greeting_bytes -= len(greeting)
            return Piece(greeting, b"", is_command=True)
        flags = self._buffer[0]
        head = 9 if flags & _LONG else 2
        if len(self._buffer) < head:
            return None
        size = int.from_bytes(self._buffer[1:head], "big")
        if len(self._buffer) < head + size:
            return None
        return Piece(self._take(head), self._take(size), bool(flags & _COMMAND), not flags & _MORE)


class KvSplitter(Splitter):
    """Messages of KV over TCP, whose body is header, payload and digest; a heartbeat has no body.

    From the first byte that does not fit the framing (TLS, say) all bytes pass as read, without a head.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unknown = False

    def _next(self) -> Piece | None:
        self._unknown = self._unknown or not _KV_MARK.startswith(bytes(self._buffer[: len(_KV_MARK)]))
        if self._unknown:
            return super()._next()
        if len(self._buffer) < PREFIX.size:
            return None
        _, header, payload, _ = PREFIX.unpack_from(self._buffer)
        size = header + payload + (DIGEST_BYTES if payload else 0)
        if len(self._buffer) < PREFIX.size + size:
            return None
        return Piece(self._take(PREFIX.size), self._take(size), is_command=not header)


class Proxy:
    """One link: a connection to `port` is forwarded to `target`. Use as an async context manager.

    counts: how many messages were "corrupted", "lost", "swapped" and "replayed" so far.
    """

    def __init__(self, target: tuple[str, int], rng: Random, splitter: Callable[[], Splitter] = ZmtpSplitter) -> None:
        self.target = target
        self.port = 0
        self.rng = rng
        self.splitter = splitter
        self.counts: Counter[str] = Counter()
        self.latency_s = 0.0
        self.bytes_per_s = 0.0  # 0: unlimited
        self.flowing = asyncio.Event()  # clear: nothing moves, and neither side is notified
        self.flowing.set()
        self._shares: dict[str, float] = {}  # of the messages that each fault hits
        self._refusing = False
        self._pipes: set[_Pipe] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_READ_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut(self, *, refuse: bool = False) -> None:
        """Reset all connections; with `refuse` reset new ones too, until `heal`."""
        self._refusing = refuse
        for pipe in list(self._pipes):
            reset(pipe.writer)

    def stall(self) -> None:
        self.flowing.clear()

    def slow(self, *, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """Delay each piece, and limit the rate of each direction."""
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s

    def spoil(self, fault: str, share: float) -> None:
        """Hit this share of the messages, in both directions.

        fault: "corrupted" (one bit flips), "lost", or "swapped" (forwarded after the message that follows).
        """
        self._shares[fault] = share

    def replay(self, *, back: bool = True, changed: Callable[[bytes], bytes] = bytes) -> int:
        """Send the recent messages to the target again, in order, and with `back` also those from the target.

        `changed` maps each message, framing included. Returns the number of messages.
        """
        count = sum(pipe.replay(changed) for pipe in list(self._pipes) if back or pipe.onward)
        self.counts["replayed"] += count
        return count

    def heal(self) -> None:
        """End all faults. Connections that were cut stay cut: their clients connect again."""
        self._refusing = False
        self.latency_s = self.bytes_per_s = 0.0
        self._shares.clear()
        self.flowing.set()

    def hits(self, fault: str) -> bool:
        """Whether the fault hits the present message, which is counted then."""
        share = self._shares.get(fault, 0.0)
        hit = share > 0.0 and self.rng.random() < share
        self.counts[fault] += hit
        return hit

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.flowing.wait()
            if self._refusing:
                reset(writer)
                return
            target_reader, target_writer = await asyncio.open_connection(*self.target, limit=_READ_BYTES)
            there = _Pipe(reader, target_writer, self, onward=True)
            back = _Pipe(target_reader, writer, self, onward=False)
            self._pipes |= {there, back}
            try:
                await _until_first_ends(there.run(), back.run(), then=self.flowing.wait)  # a stall hides an end, too
            finally:
                self._pipes -= {there, back}
                target_writer.close()
        except OSError:  # the target does not listen
            reset(writer)
        finally:
            writer.close()


class _Pipe:
    """One direction of one connection; `onward` is the direction of the proxy's target."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, proxy: Proxy, *, onward: bool
    ) -> None:
        self.onward = onward
        self.writer = writer
        self._reader = reader
        self._proxy = proxy
        self._splitter = proxy.splitter()
        self._due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_PIECES)
        self._recent: deque[bytes] = deque(maxlen=_REPLAYED_MESSAGES)
        self._parts: list[Piece] = []  # of a message that is not complete yet
        self._swapped = b""  # a message that goes after the next one

    async def run(self) -> None:
        reading, writing = asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())

        async def drained() -> None:
            if reading.done() and not writing.done():
                await self._due.join()

        await _until_first_ends(reading, writing, then=drained)

    def replay(self, changed: Callable[[bytes], bytes]) -> int:
        """Send the remembered messages again, between two others; returns their number."""
        if self._due.full():
            return 0
        if again := b"".join(changed(message) for message in self._recent):
            self._due.put_nowait((0.0, again))
        return len(self._recent)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await self._reader.read(_READ_BYTES):
                if out := b"".join(self._forwarded(piece) for piece in self._splitter.feed(data)):
                    await self._due.put((loop.time() + self._proxy.latency_s, out))

    def _forwarded(self, piece: Piece) -> bytes:
        """The bytes that go out now that this piece has come."""
        if piece.is_command:
            return piece.encode() + self._take_swapped()
        self._parts.append(piece)
        if not piece.ends_message:
            return b""
        parts, self._parts = self._parts, []
        message = b"".join(part.encode() for part in parts)
        if len(message) <= _REPLAYED_BYTES:
            self._recent.append(message)
        proxy = self._proxy
        if proxy.hits("lost"):
            return b""
        out = b"".join((part.flipped(proxy.rng) if proxy.hits("corrupted") else part).encode() for part in parts)
        if not self._swapped and proxy.hits("swapped"):
            self._swapped = out
            return b""
        return out + self._take_swapped()

    def _take_swapped(self) -> bytes:
        swapped, self._swapped = self._swapped, b""
        return swapped

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while True:
                due_s, data = await self._due.get()
                try:
                    await asyncio.sleep(max(0.0, due_s - loop.time()))
                    await self._proxy.flowing.wait()
                    rate = self._proxy.bytes_per_s
                    step = max(1, int(rate / 20)) if rate else len(data)
                    for start in range(0, len(data), step):
                        self.writer.write(data[start : start + step])
                        await self.writer.drain()
                        if rate:
                            await asyncio.sleep(step / rate)
                finally:
                    self._due.task_done()


async def _until_first_ends(*work: Awaitable[None], then: Callable[[], Awaitable[object]]) -> None:
    """Run all until one ends, wait for `then`, and cancel the others."""
    running = {asyncio.ensure_future(each) for each in work}
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await then()
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a RST in place of a FIN."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
