"""Puts messages on a byte stream: see `tcp_framing`. No sockets."""

from collections import deque

import xxhash

from services.worker.kv.wire.frames import Buffer
from services.worker.kv.wire.tcp_framing import DIGEST_BYTES, HEARTBEAT, VIEWS, Stream, prefix

_PIECE = 512 << 10  # sent at once, the first one the sooner


class _Body:
    """A payload of which some is still to be looked at."""

    def __init__(self, payload: memoryview) -> None:
        self._rest = payload
        self._hash = xxhash.xxh3_64()

    def prepare(self, ready: deque[memoryview]) -> bool:
        """Add the next piece, and behind the last one the checksum; whether that was all."""
        piece, self._rest = self._rest[:_PIECE], self._rest[_PIECE:]
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
