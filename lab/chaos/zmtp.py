"""ZeroMQ's framing on TCP (ZMTP 3), as far as a proxy must know it to touch whole messages."""

from dataclasses import dataclass, field
from random import Random

from lab.chaos.framing import Piece, flip_bit

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
