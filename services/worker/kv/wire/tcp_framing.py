"""Messages on a byte stream: a prefix, a header, perhaps a payload and its checksum. No sockets.

A prefix is 16 bytes, little-endian: a mark, the sizes of header and payload, and a checksum over these. A prefix
without either is a heartbeat, which a listener sends back. Bits that flip in a prefix are noticed before anybody waits
for bytes that nobody sends.

Behind a payload comes its xxh3_64, 8 bytes, little-endian: so each side takes the checksum of a piece while it is in
the cache, and the first bytes are on their way before the last ones were looked at.
"""

import struct
from collections import deque
from typing import Protocol

import numpy as np
import xxhash

from services.worker.kv.wire.protocol import MAX_MESSAGE_BYTES, Buffer, Placement, Received

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

# MERGED tcp_inbound.py
# Takes messages off a byte stream: see `tcp_framing`. No sockets.


_AHEAD_BYTES = 4096  # read along with a prefix: of a payload so much at most is copied once more
_READ_BYTES = 512 << 10  # read at once: what was read is still in the cache when its checksum is taken
_WORTH_BYTES = _READ_BYTES  # of a payload: less is not worth waking up for, unless it is the rest


class Asked(Protocol):
    """Says where a payload goes; see transport.Place."""

    def __call__(self, header: Buffer, size_bytes: int) -> Placement | None:
        """Called once a payload's header is here."""


class Inbound:
    """Takes messages off a stream, a payload straight into where it belongs."""

    def __init__(self, max_payload_bytes: int, place: Asked = lambda *_: None) -> None:
        self.heartbeats = 0
        self.readable = True  # whether the stream may have more: its owner says when it has again
        self._max_payload_bytes = max_payload_bytes
        self._place = place
        self._head = memoryview(bytearray(2 * _AHEAD_BYTES))  # grows with a header that needs more
        self._filled = 0  # bytes in it
        self._spare = memoryview(b"")  # where payloads go that have no other place
        self._views: list[memoryview] = []  # of the present payload, what is to come, the next one last
        self._header = b""
        self._size = self._missing = 0  # bytes of the present payload, and those that are to come
        self._placement: Placement | None = None
        self._unwanted = False  # the present payload: nobody hears of it
        self._hash = xxhash.xxh3_64()

    def receive(self, stream: Stream) -> Received | None:
        """The next message; None when the stream has no more at the moment. Raises WireError or OSError."""
        read = False
        while True:
            message = self._finished() if self._header else self._begun()
            if message is not None or not self.readable:
                break
            read = True
            if self._missing:
                self._read_payload(stream)
            else:
                self._read_head(stream)
        if read and not self.readable:  # only then: whoever has asked for less has a reason
            stream.expect(min(_WORTH_BYTES, self._missing + DIGEST_BYTES) if self._missing else 1)
        return message

    def keep(self) -> None:
        """The payload that was received last is not overwritten."""
        self._spare = memoryview(b"")

    @property
    def first(self) -> int:
        """The first byte of what could not be read."""
        return self._head[0]

    def divert(self, owner: object) -> None:
        """Nothing more of the present payload goes to where that owner wanted it."""
        if self._placement is not None and self._placement.owner is owner:
            self._placement, self._unwanted = None, True
            self._views = [self._room(self._missing)]

    def _begun(self) -> Received | None:
        """A message without a payload, if one is here; a payload is prepared for."""
        if self._filled < PREFIX.size:
            return None
        mark, header_bytes, payload_bytes, _ = PREFIX.unpack_from(self._head)
        if mark != MARK or self._head[: PREFIX.size] != prefix(header_bytes, payload_bytes):
            raise WireError("not a message")
        if header_bytes > MAX_MESSAGE_BYTES or payload_bytes > self._max_payload_bytes:
            raise WireError(f"a message of {header_bytes} and {payload_bytes} bytes")
        end = PREFIX.size + header_bytes
        if self._filled < end:
            return None
        header = bytes(self._head[PREFIX.size : end])
        if not header_bytes:
            if payload_bytes:
                raise WireError("a payload without a header")
            self.heartbeats += 1
            self._drop(end)
            return self._begun()
        if not payload_bytes:
            self._drop(end)
            return Received(header)
        self._prepare(header, payload_bytes, end)
        return self._finished()

    def _prepare(self, header: bytes, payload_bytes: int, end: int) -> None:
        """Begin a payload with what of it was read with its header."""
        self._header, self._size, self._missing = header, payload_bytes, payload_bytes
        self._placement = self._place(header, payload_bytes)
        if self._placement is None:
            self._views = [self._room(payload_bytes)]
        else:
            self._views = self._placement.views[::-1]
        self._hash.reset()
        ahead = self._head[end : min(self._filled, end + payload_bytes)]
        taken = 0
        while taken < len(ahead):
            view = self._views[-1]
            part = ahead[taken : taken + len(view)]
            view[: len(part)] = part
            taken += len(part)
            self._advance(len(part))
        self._drop(end + taken)

    def _finished(self) -> Received | None:
        if self._missing or self._filled < DIGEST_BYTES:
            return None
        sent = int.from_bytes(self._head[:DIGEST_BYTES], "little")
        self._drop(DIGEST_BYTES)
        payload = None if self._placement is not None else self._spare[: self._size]
        message = Received(self._header, payload, self._size, self._hash.intdigest(), sent)
        unwanted, self._unwanted = self._unwanted, False
        self._header, self._placement = b"", None
        return self._begun() if unwanted else message

    def _read_head(self, stream: Stream) -> None:
        begun = self._filled >= PREFIX.size and not self._header
        wanted = PREFIX.size + (PREFIX.unpack_from(self._head)[1] if begun else 0)
        if wanted > len(self._head):
            grown = memoryview(bytearray(wanted + _AHEAD_BYTES))
            grown[: self._filled] = self._head[: self._filled]
            self._head = grown
        got = stream.read([self._head[self._filled :]])
        self._filled += got
        self.readable = self._filled == len(self._head)

    def _read_payload(self, stream: Stream) -> None:
        """Read what is missing, and in the same call what may follow it."""
        views: list[memoryview] = []
        room = _READ_BYTES
        for view in self._views[: -VIEWS - 1 : -1]:
            room -= len(view)
            if room < 0:
                view = view[:room]
            views.append(view)
            if room <= 0:
                break
        wanted = _READ_BYTES - max(0, room)
        if wanted == self._missing:
            wanted += _AHEAD_BYTES
            views.append(self._head[:_AHEAD_BYTES])
        got = stream.read(views)
        ours = min(got, self._missing)
        self._advance(ours)
        self.readable = got == wanted
        self._filled = got - ours

    def _advance(self, count: int) -> None:
        """So much of the payload has come."""
        self._missing -= count
        views, update = self._views, self._hash.update
        while count:
            view = views.pop()
            size = len(view)
            if count < size:
                update(view[:count])
                views.append(view[count:])
                return
            update(view)
            count -= size

    def _drop(self, end: int) -> None:
        """Forget the first bytes of what was read ahead."""
        if end < self._filled:
            rest = bytes(self._head[end : self._filled])
            self._head[: len(rest)] = rest
        self._filled -= end

    def _room(self, size: int) -> memoryview:
        if len(self._spare) < size:
            self._spare = np.empty(size, np.uint8).data
        return self._spare[:size]


# MERGED tcp_outbound.py
# Puts messages on a byte stream: see `tcp_framing`. No sockets.


_WRITE_BYTES = 512 << 10  # sent at once, the first one the sooner


class _Body:
    """A payload of which some is still to be looked at."""

    def __init__(self, payload: memoryview) -> None:
        self._rest = payload
        self._hash = xxhash.xxh3_64()

    def prepare(self, ready: deque[memoryview]) -> bool:
        """Add the next piece, and behind the last one the checksum; whether that was all."""
        piece, self._rest = self._rest[:_WRITE_BYTES], self._rest[_WRITE_BYTES:]
        self._hash.update(piece)
        ready.append(piece)
        if self._rest:
            return False
        ready.append(memoryview(self._hash.intdigest().to_bytes(DIGEST_BYTES, "little")))
        return True


class Outbound:
    """What waits to be sent, in order; nothing is copied."""

    def __init__(self) -> None:
        self._waiting: deque[memoryview | _Body] = deque()
        self._ready: deque[memoryview] = deque()  # goes first

    def __len__(self) -> int:
        """Pieces that wait."""
        return len(self._ready) + len(self._waiting)

    def put(self, header: bytes, payload: Buffer | None = None) -> None:
        """Queue a message."""
        size = len(payload) if payload is not None else 0
        self._waiting.append(memoryview(prefix(len(header), size) + header))
        if payload is not None and size:
            self._waiting.append(_Body(memoryview(payload).cast("B")))

    def heartbeat(self) -> None:
        """Queue a heartbeat."""
        self._waiting.append(memoryview(HEARTBEAT))

    def flush(self, stream: Stream) -> bool:
        """Send what goes; whether all of it went. Raises OSError."""
        ready = self._ready
        while ready or self._waiting:
            if not ready:
                self._prepare()
            left = stream.write(list(ready))
            while ready and left >= len(ready[0]):
                left -= len(ready.popleft())
            if ready:
                ready[0] = ready[0][left:]
                return False
        return True

    def clear(self) -> None:
        """Forget all of it."""
        self._waiting.clear()
        self._ready.clear()

    def _prepare(self) -> None:
        """Messages, and one piece of a payload: it is in the cache when the kernel copies it."""
        ready, waiting = self._ready, self._waiting
        while waiting and len(ready) < VIEWS:
            first = waiting[0]
            if isinstance(first, _Body):
                if first.prepare(ready):
                    waiting.popleft()
                return
            ready.append(first)
            waiting.popleft()
