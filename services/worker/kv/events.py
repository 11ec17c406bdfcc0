"""Events from each rank's connector to the worker process that owns the engine: ZeroMQ PUSH to PULL."""

import threading
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio

from services.worker.kv.wire.frames import decoded


class StagedChunk(msgspec.Struct, frozen=True, tag=True):
    """Tokens [0, token_end) of a transfer can be pulled from that rank, whose pool holds `staged_bytes` in all."""

    transfer_id: str
    rank: int
    token_end: int
    last: bool
    staged_bytes: int


class TransferEnded(msgspec.Struct, frozen=True, tag=True):
    """A rank has dropped what it held of an export, and will stage no more of it: taken by all its importers,
    released, refused, or its lease is over. Its pool holds `staged_bytes` now.
    """

    transfer_id: str
    rank: int
    staged_bytes: int


class ThreadEnded(msgspec.Struct, frozen=True, tag=True):
    """A thread of that rank's KV endpoint has died of a bug: the rank can do its work no more."""

    rank: int
    thread: str
    error: str


class StagingFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank could not stage the transfer; `reason` begins with a KvFault. Its pulls fail, its importers
    recompute.
    """

    transfer_id: str
    rank: int
    reason: str


class PullEnded(msgspec.Struct, frozen=True, tag=True):
    """An import ended on a rank. Times are unix seconds; `error` begins with a KvFault unless `ok`. `ended_s` is when
    the last of its KV had come: a prefetch may be complete long before the engine has blocks for it.

    `ok` with no tokens: the importer had them all, nothing was pulled.
    """

    transfer_id: str
    rank: int
    ok: bool
    error: str
    tokens: int
    wire_bytes: int
    started_s: float
    ended_s: float
    prefetched: bool
    transport: str = ""  # what carried it: tcp, zeromq, nixl, or several joined by "+"


KvEvent = StagedChunk | TransferEnded | StagingFailed | PullEnded | ThreadEnded

_MAX_BYTES = 64 << 10
_HIGH_WATER = 100_000


class EventSender:
    """A rank's end. Never blocks: an event that nobody can take is counted and lost. Thread-safe."""

    def __init__(self, address: str) -> None:
        self.lost = 0
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._socket.connect(address)
        self._lock = threading.Lock()  # a socket may move between threads behind a full fence
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, event: KvEvent) -> None:
        """Queue an event."""
        with self._lock:
            try:
                self._socket.send(self._encoder.encode(event), zmq.NOBLOCK)
            except zmq.ZMQError:
                self.lost += 1

    def close(self) -> None:
        """Give queued events a moment, then close."""
        with self._lock:
            self._socket.close()
        self._context.term()


class KvEvents:
    """The worker's end: an async iterator of events. Binds when entered.

    Garbage is dropped and counted in `dropped`. Raises OSError when the address is taken.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.dropped = 0
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._decoder = msgspec.msgpack.Decoder(KvEvent)

    async def __aenter__(self) -> "KvEvents":
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._socket.bind(self.address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket is not None and self._context is not None:
            self._socket.close()
            self._context.term()

    def __aiter__(self) -> "KvEvents":
        return self

    async def __anext__(self) -> KvEvent:
        return await self.get()

    async def get(self) -> KvEvent:
        """The next event."""
        assert self._socket is not None, "enter the context first"
        while True:
            frame = await self._socket.recv()
            event: KvEvent | None = decoded(self._decoder, frame)
            if event is not None:
                return event
            self.dropped += 1
