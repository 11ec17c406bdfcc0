"""How the events of the ranks reach their worker: over ZeroMQ, from one `EventSender` in each rank (PUSH) to the
worker's `KvEvents` (PULL).
"""

import threading
from collections.abc import Awaitable

import msgspec
import zmq
import zmq.asyncio

from services.worker.kv.rank_messages import KvEvent
from services.worker.kv.wire.protocol import decoded

_MAX_EVENT_BYTES = 64 << 10  # bound of one event that the worker accepts
_NOBLOCK = int(zmq.NOBLOCK)
_HIGH_WATER = 100_000  # events queued at each end; beyond it, a rank loses events


class EventSender:
    """The rank's end. Any thread may call `send`, which does not block: it counts an event that it cannot queue."""

    def __init__(self, address: str) -> None:
        self.lost = 0  # events
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._socket.connect(address)
        self._lock = threading.Lock()  # a socket may move between threads behind a full fence
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, event: KvEvent) -> None:
        with self._lock:
            try:
                self._socket.send(self._encoder.encode(event), _NOBLOCK)
            except zmq.ZMQError:
                self.lost += 1

    def close(self) -> None:
        """Close, after up to 200 ms for queued events."""
        with self._lock:
            self._socket.close()
        self._context.term()


class KvEvents:
    """The worker's end: an async iterator of events. It binds when entered; OSError: the address is taken."""

    def __init__(self, address: str) -> None:
        self.address = address  # once entered, the one that ZeroMQ has bound
        self.dropped = 0  # malformed events
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._decoder = msgspec.msgpack.Decoder(KvEvent)

    async def __aenter__(self) -> "KvEvents":
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_EVENT_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._socket.bind(self.address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def __aiter__(self) -> "KvEvents":
        return self

    def __anext__(self) -> Awaitable[KvEvent]:
        return self.get()

    async def get(self) -> KvEvent:
        """Wait for the next event, like the iteration, for a caller that wants a single one."""
        while True:
            frame = await self._socket.recv()
            event: KvEvent | None = decoded(self._decoder, frame)
            if event is not None:
                return event
            self.dropped += 1
