"""What a proxy must know of a protocol to touch whole messages: where one begins and where it ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from services.worker.kv.wire.protocol import checksum
from services.worker.kv.wire.tcp_framing import DIGEST_BYTES, PREFIX, prefix


class Piece(Protocol):
    """A whole message, or a part of one."""

    @property
    def is_command(self) -> bool:
        """Whether it belongs to the connection and not to those who talk over it: a handshake, a heartbeat."""

    @property
    def ends_message(self) -> bool:
        """Whether no further part of the same message follows."""

    def encode(self) -> bytes:
        """As bytes on the wire."""

    def flipped(self, rng: Random) -> "Piece":
        """With one bit the other way, and framed as well as before."""


class Splitter(Protocol):
    """One direction of a connection."""

    def feed(self, data: bytes) -> "tuple[bytes, list[Piece]]":
        """What passes at once, whatever becomes of messages; and the pieces that are whole."""


Framing = Callable[[], Splitter]


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes of a protocol that nobody looks into."""

    body: bytes
    is_command = False
    ends_message = True

    def encode(self) -> bytes:
        """As they are."""
        return self.body

    def flipped(self, rng: Random) -> "Raw":
        """See Piece."""
        return Raw(flip_bit(self.body, rng))


class RawSplitter:
    """Takes whatever comes in one turn for a message."""

    def feed(self, data: bytes) -> tuple[bytes, list[Piece]]:
        """See Splitter."""
        return b"", [Raw(data)]


def flip_bit(body: bytes, rng: Random) -> bytes:
    """The same bytes with one bit the other way."""
    if not body:
        return body
    changed = bytearray(body)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


# MERGED zmtp.py
# ZeroMQ's framing on TCP (ZMTP 3), as far as a proxy must know it to touch whole messages.


GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Part:
    """One frame. A command belongs to the protocol, everything else to a message."""

    flags: int
    body: bytes

    @property
    def is_command(self) -> bool:
        """Whether it is libzmq's own: a handshake, a heartbeat."""
        return bool(self.flags & _COMMAND)

    @property
    def ends_message(self) -> bool:
        """Whether no further part of the same message follows."""
        return not self.flags & _MORE

    def encode(self) -> bytes:
        """As bytes on the wire."""
        size = len(self.body)
        if size > 255:
            return bytes((self.flags | _LONG,)) + size.to_bytes(8, "big") + self.body
        return bytes((self.flags & ~_LONG, size)) + self.body

    def flipped(self, rng: Random) -> "Part":
        """See Piece."""
        return Part(self.flags, flip_bit(self.body, rng))


@dataclass(slots=True)
class ZmtpSplitter:
    """One direction of a connection: bytes in, the greeting and whole frames out."""

    _greeting: int = GREETING_BYTES  # of it, what is to come
    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> tuple[bytes, list[Piece]]:
        """What comes before the first frame, at once, since the sides wait for it; and the frames that are whole."""
        greeting, data = data[: self._greeting], data[self._greeting :]
        self._greeting -= len(greeting)
        self._rest += data
        parts: list[Piece] = []
        while (part := self._next()) is not None:
            parts.append(part)
        return greeting, parts

    def _next(self) -> Part | None:
        if len(self._rest) < 2:
            return None
        flags, wide = self._rest[0], bool(self._rest[0] & _LONG)
        head = 9 if wide else 2
        if len(self._rest) < head:
            return None
        size = int.from_bytes(self._rest[1:head], "big")
        if len(self._rest) < head + size:
            return None
        self._take(head)
        return Part(flags, self._take(size))

    def _take(self, size: int) -> bytes:
        taken = bytes(self._rest[:size])
        del self._rest[:size]
        return taken


# MERGED kv_framing.py
# The framing of KV over TCP (`services.worker.kv.wire.tcp_framing`), message by message.


_MARK = prefix(0, 0)[:4]


@dataclass(frozen=True, slots=True)
class Message:
    """A message; a heartbeat has neither header nor payload. `digest` comes with a payload."""

    header: bytes
    payload: bytes = b""
    digest: bytes = b""
    ends_message = True

    @property
    def is_command(self) -> bool:
        """Whether it is a heartbeat."""
        return not self.header

    def encode(self) -> bytes:
        """As bytes on the wire."""
        return prefix(len(self.header), len(self.payload)) + self.header + self.payload + self.digest

    def flipped(self, rng: Random) -> "Message":
        """See Piece: the prefix stays true, as nobody could read on otherwise."""
        body = flip_bit(self.header + self.payload + self.digest, rng)
        header, payload = len(self.header), len(self.header) + len(self.payload)
        return Message(body[:header], body[header:payload], body[payload:])


def said(header: bytes, payload: bytes = b"") -> bytes:
    """As an honest peer's transport sends it."""
    digest = checksum(payload).to_bytes(DIGEST_BYTES, "little") if payload else b""
    return Message(header, payload, digest).encode()


@dataclass(slots=True)
class KvSplitter:
    """See Splitter. What is no such framing (TLS, a stranger) passes as it comes, from there on."""

    _rest: bytearray = field(default_factory=bytearray)
    _strange: bool = False

    def feed(self, data: bytes) -> tuple[bytes, list[Piece]]:
        """See Splitter."""
        self._rest += data
        pieces: list[Piece] = []
        while (piece := self._next()) is not None:
            pieces.append(piece)
        return b"", pieces

    def _next(self) -> Piece | None:
        self._strange = self._strange or not _MARK.startswith(bytes(self._rest[: len(_MARK)]))
        if self._strange:
            return Raw(self._take(len(self._rest))) if self._rest else None
        if len(self._rest) < PREFIX.size:
            return None
        _, header_bytes, payload_bytes, _ = PREFIX.unpack_from(self._rest)
        digest_bytes = DIGEST_BYTES if payload_bytes else 0
        if len(self._rest) < PREFIX.size + header_bytes + payload_bytes + digest_bytes:
            return None
        self._take(PREFIX.size)
        return Message(self._take(header_bytes), self._take(payload_bytes), self._take(digest_bytes))

    def _take(self, size: int) -> bytes:
        taken = bytes(self._rest[:size])
        del self._rest[:size]
        return taken
