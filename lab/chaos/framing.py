"""What a proxy must know of a protocol to touch whole messages: where one begins and where it ends."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol


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
