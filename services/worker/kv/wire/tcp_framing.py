"""Messages on a byte stream: a prefix, a header, perhaps a payload and its checksum. No sockets.

A prefix is 16 bytes, little-endian: a mark, the sizes of header and payload, and a checksum over these. A prefix
without either is a heartbeat, which a listener sends back. Bits that flip in a prefix are noticed before anybody waits
for bytes that nobody sends.

Behind a payload comes its xxh3_64, 8 bytes, little-endian: so each side takes the checksum of a piece while it is in
the cache, and the first bytes are on their way before the last ones were looked at.
"""

import struct
from typing import Protocol

import xxhash

PREFIX = struct.Struct("<4sIII")
_SIZES = struct.Struct("<4sII")
MARK = b"PKV2"
DIGEST_BYTES = 8
VIEWS = 64  # of one call of a stream: more gain nothing


class WireError(Exception):
    """What came is no message of ours; nothing behind it can be read either."""


class Stream(Protocol):
    """A connected socket that never blocks."""

    def read(self, views: list[memoryview]) -> int:
        """Bytes that went into the views, in order: fewer than they hold when there are no more at the moment. Raises
        OSError at the stream's end too.
        """

    def expect(self, count: int) -> None:
        """That the stream can be read need not be told before so many bytes are here."""

    def write(self, views: list[memoryview]) -> int:
        """Bytes that were taken of the views, in order; fewer than there are when there is no more room at the moment.
        Raises OSError.
        """


def prefix(header_bytes: int, payload_bytes: int) -> bytes:
    """Of a message."""
    sizes = _SIZES.pack(MARK, header_bytes, payload_bytes)
    return sizes + xxhash.xxh32_intdigest(sizes).to_bytes(4, "little")


HEARTBEAT = prefix(0, 0)
