"""Takes messages off a byte stream: see `tcp_framing`. No sockets."""

from typing import Protocol

import numpy as np
import xxhash

from services.worker.kv.wire.frames import MAX_MESSAGE_BYTES, Buffer
from services.worker.kv.wire.tcp_framing import DIGEST_BYTES, MARK, PREFIX, VIEWS, Stream, WireError, prefix
from services.worker.kv.wire.transport import Placement, Received

_AHEAD_BYTES = 4096  # read along with a prefix: of a payload so much at most is copied once more
_PIECE = 512 << 10  # read at once: what was read is still in the cache when its checksum is taken
_WORTH_BYTES = _PIECE  # of a payload: less is not worth waking up for, unless it is the rest


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
        room = _PIECE
        for view in self._views[: -VIEWS - 1 : -1]:
            room -= len(view)
            if room < 0:
                view = view[:room]
            views.append(view)
            if room <= 0:
                break
        wanted = _PIECE - max(0, room)
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
