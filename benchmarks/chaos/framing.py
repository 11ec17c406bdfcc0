"""Message boundaries of the protocols that the proxy understands.

These are ZeroMQ on TCP (ZMTP 3) and KV over TCP (`services.worker.kv.wire.tcp_streams`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from services.worker.kv.wire.protocol import checksum
from services.worker.kv.wire.tcp_streams import DIGEST_BYTES, PREFIX, prefix


class Piece(Protocol):
    """A whole message, or a part of one."""

    @property
    def is_command(self) -> bool:
        """Whether the piece belongs to the connection and not to a message: a handshake, a heartbeat."""

    @property
    def ends_message(self) -> bool: ...

    def encode(self) -> bytes:
        """The bytes on the wire."""

    def flipped(self, rng: Random) -> "Piece":
        """The piece with one bit flipped, and correctly framed."""


class Splitter(Protocol):
    """One direction of a connection."""

    def feed(self, data: bytes) -> tuple[bytes, list[Piece]]:
        """Returns bytes that are forwarded at once and untouched, and the pieces that are complete."""


Framing = Callable[[], Splitter]


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes of a protocol that is not parsed."""

    body: bytes
    is_command = False
    ends_message = True

    def encode(self) -> bytes:
        return self.body

    def flipped(self, rng: Random) -> "Raw":
        return Raw(flip_bit(self.body, rng))


class RawSplitter:
    """Each read of the socket counts as a message."""

    def feed(self, data: bytes) -> tuple[bytes, list[Piece]]:
        return b"", [Raw(data)]


def flip_bit(body: bytes, rng: Random) -> bytes:
    """The same bytes with one bit flipped."""
    if not body:
        return body
    flipped = bytearray(body)
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _take(buffer: bytearray, size: int) -> bytes:
    """Remove the first bytes of a buffer."""
    taken = bytes(buffer[:size])
    del buffer[:size]
    return taken


GREETING_BYTES = 64  # of ZMTP
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a ZMTP frame


@dataclass(frozen=True, slots=True)
class Part:
    """A frame of ZMTP."""

    flags: int
    body: bytes

    @property
    def is_command(self) -> bool:
        return bool(self.flags & _COMMAND)

    @property
    def ends_message(self) -> bool:
        return not self.flags & _MORE

    def encode(self) -> bytes:
        size = len(self.body)
        if size > 255:
            return bytes((self.flags | _LONG,)) + size.to_bytes(8, "big") + self.body
        return bytes((self.flags & ~_LONG, size)) + self.body

    def flipped(self, rng: Random) -> "Part":
        return Part(self.flags, flip_bit(self.body, rng))


@dataclass(slots=True)
class ZmtpSplitter:
    """The greeting passes at once, because each side waits for the other side's; then come frames."""

    _greeting: int = GREETING_BYTES  # bytes that are still to come
    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> tuple[bytes, list[Piece]]:
        greeting, data = data[: self._greeting], data[self._greeting :]
        self._greeting -= len(greeting)
        self._buffer += data
        parts: list[Piece] = []
        while (part := self._next()) is not None:
            parts.append(part)
        return greeting, parts

    def _next(self) -> Part | None:
        if len(self._buffer) < 2:
            return None
        flags = self._buffer[0]
        head = 9 if flags & _LONG else 2
        if len(self._buffer) < head:
            return None
        size = int.from_bytes(self._buffer[1:head], "big")
        if len(self._buffer) < head + size:
            return None
        _take(self._buffer, head)
        return Part(flags, _take(self._buffer, size))


_KV_MARK = prefix(0, 0)[:4]


@dataclass(frozen=True, slots=True)
class Message:
    """A message of KV over TCP. A heartbeat has neither header nor payload; a payload has a digest."""

    header: bytes
    payload: bytes = b""
    digest: bytes = b""
    ends_message = True

    @property
    def is_command(self) -> bool:
        return not self.header

    def encode(self) -> bytes:
        return prefix(len(self.header), len(self.payload)) + self.header + self.payload + self.digest

    def flipped(self, rng: Random) -> "Message":
        """The prefix stays as it is: without its lengths the peer could not read on."""
        body = flip_bit(self.header + self.payload + self.digest, rng)
        header, payload = len(self.header), len(self.header) + len(self.payload)
        return Message(body[:header], body[header:payload], body[payload:])


def kv_message(header: bytes, payload: bytes = b"") -> bytes:
    """A message of KV over TCP as a worker sends it."""
    digest = checksum(payload).to_bytes(DIGEST_BYTES, "little") if payload else b""
    return Message(header, payload, digest).encode()


@dataclass(slots=True)
class KvSplitter:
    """Messages of KV over TCP. From the first byte that does not fit the framing (TLS, say) all bytes pass as read."""

    _buffer: bytearray = field(default_factory=bytearray)
    _unknown: bool = False

    def feed(self, data: bytes) -> tuple[bytes, list[Piece]]:
        self._buffer += data
        pieces: list[Piece] = []
        while (piece := self._next()) is not None:
            pieces.append(piece)
        return b"", pieces

    def _next(self) -> Piece | None:
        self._unknown = self._unknown or not _KV_MARK.startswith(bytes(self._buffer[: len(_KV_MARK)]))
        if self._unknown:
            return Raw(_take(self._buffer, len(self._buffer))) if self._buffer else None
        if len(self._buffer) < PREFIX.size:
            return None
        _, header_bytes, payload_bytes, _ = PREFIX.unpack_from(self._buffer)
        sizes = (header_bytes, payload_bytes, DIGEST_BYTES if payload_bytes else 0)
        if len(self._buffer) < PREFIX.size + sum(sizes):
            return None
        _take(self._buffer, PREFIX.size)
        return Message(*(_take(self._buffer, size) for size in sizes))
