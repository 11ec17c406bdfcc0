"""Messages on a byte stream: a prefix, a header, and optionally a payload with its checksum; how they are written and
how they are read. No sockets.

A prefix is 16 bytes, little-endian: a mark, the sizes of header and payload, and a checksum over these, so that
flipped bits are noticed before a reader waits for bytes that are not sent. A prefix without header and payload is a
heartbeat, which a listener sends back.

The payload is followed by its xxh3_64, 8 bytes, little-endian: each side hashes a piece while it is in the cache, and
the first bytes are sent before the last ones were hashed.
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
_AHEAD_BYTES = 4096  # read along with a prefix: at most this much of a payload is copied once more
_READ_BYTES = 512 << 10  # read at once: the data is still in the cache when it is hashed
_WORTH_BYTES = _READ_BYTES  # of a payload: less is not worth a wake-up, unless it is the rest
_WRITE_BYTES = 512 << 10  # sent at once, so that the first piece leaves early


class WireError(Exception):
    """The stream holds no valid message here, so nothing behind this point can be read either."""


class Stream(Protocol):
    """A connected socket that never blocks."""

    def read(self, views: list[memoryview]) -> int:
        """Bytes read into the views, in order: fewer than they hold when no more are available. Raises OSError, at
        the stream's end too.
        """

    def expect(self, count: int) -> None:
        """The stream need not become readable before that many bytes are available."""

    def write(self, views: list[memoryview]) -> int:
        """Bytes written of the views, in order; fewer than they hold when there is no more room. Raises OSError."""


def prefix(header_bytes: int, payload_bytes: int) -> bytes:
    sizes = _SIZES.pack(MARK, header_bytes, payload_bytes)
    return sizes + xxhash.xxh32_intdigest(sizes).to_bytes(4, "little")


HEARTBEAT = prefix(0, 0)


class PlacePayload(Protocol):
    """Chooses the memory of a payload; see protocol.Place."""

    def __call__(self, header: Buffer, size_bytes: int) -> Placement | None:
        """Called once a payload's header is here."""


class Inbound:
    """Reads messages from a stream, each payload directly into its memory."""

    def __init__(self, max_payload_bytes: int, place: PlacePayload = lambda *_: None) -> None:
        self.heartbeats = 0
        self.readable = True  # whether the stream may have more; its owner sets this when it has again
        self._max_payload_bytes = max_payload_bytes
        self._place = place
        self._head = memoryview(bytearray(2 * _AHEAD_BYTES))  # grows with a header that needs more
        self._filled = 0  # bytes in it
        self._spare = memoryview(b"")  # for payloads without a placement
        self._views: list[memoryview] = []  # of the present payload, still to be filled, the next one last
        self._header = b""
        self._size = self._missing = 0  # bytes of the present payload, and those still to come
        self._placement: Placement | None = None
        self._unwanted = False  # the present payload is discarded
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
        if read and not self.readable:  # only then: a caller that expects less has a reason
            stream.expect(min(_WORTH_BYTES, self._missing + DIGEST_BYTES) if self._missing else 1)
        return message

    def keep(self) -> None:
        """The payload that was received last must not be overwritten."""
        self._spare = memoryview(b"")

    @property
    def first(self) -> int:
        """The first byte of data that could not be read."""
        return self._head[0]

    def divert(self, owner: object) -> None:
        """If that owner placed the present payload, discard the rest of it."""
        if self._placement is not None and self._placement.owner is owner:
            self._placement, self._unwanted = None, True
            self._views = [self._room(self._missing)]

    def _begun(self) -> Received | None:
        """A message without a payload, if one is here; for a payload its memory is prepared."""
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
        """Begin a payload with the part of it that was read with its header."""
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
        """Account for that many more bytes of the payload."""
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
        """Drop the first bytes of what was read ahead."""
        if end < self._filled:
            rest = bytes(self._head[end : self._filled])
            self._head[: len(rest)] = rest
        self._filled -= end

    def _room(self, size: int) -> memoryview:
        if len(self._spare) < size:
            self._spare = np.empty(size, np.uint8).data
        return self._spare[:size]


class _Body:
    """A payload that is being hashed piece by piece."""

    def __init__(self, payload: memoryview) -> None:
        self._rest = payload
        self._hash = xxhash.xxh3_64()

    def prepare(self, ready: deque[memoryview]) -> bool:
        """Add the next piece, and behind the last one the checksum; whether that was the last."""
        piece, self._rest = self._rest[:_WRITE_BYTES], self._rest[_WRITE_BYTES:]
        self._hash.update(piece)
        ready.append(piece)
        if self._rest:
            return False
        ready.append(memoryview(self._hash.intdigest().to_bytes(DIGEST_BYTES, "little")))
        return True


class Outbound:
    """Messages that wait to be sent, in order; nothing is copied."""

    def __init__(self) -> None:
        self._waiting: deque[memoryview | _Body] = deque()
        self._ready: deque[memoryview] = deque()  # goes first

    def __len__(self) -> int:
        return len(self._ready) + len(self._waiting)

    def put(self, header: bytes, payload: Buffer | None = None) -> None:
        size = len(payload) if payload is not None else 0
        self._waiting.append(memoryview(prefix(len(header), size) + header))
        if payload is not None and size:
            self._waiting.append(_Body(memoryview(payload).cast("B")))

    def heartbeat(self) -> None:
        self._waiting.append(memoryview(HEARTBEAT))

    def flush(self, stream: Stream) -> bool:
        """Write as much as the stream accepts; whether that was all. Raises OSError."""
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
        self._waiting.clear()
        self._ready.clear()

    def _prepare(self) -> None:
        """Make messages ready, and one piece of a payload: it is in the cache when the kernel copies it."""
        ready, waiting = self._ready, self._waiting
        while waiting and len(ready) < VIEWS:
            first = waiting[0]
            if isinstance(first, _Body):
                if first.prepare(ready):
                    waiting.popleft()
                return
            ready.append(first)
            waiting.popleft()
