"""The worker's handle on its own ranks' KV endpoints: direct for a rank in this process, else over its socket."""

import asyncio
import threading
from types import TracebackType
from typing import Protocol, Self

import msgspec
import zmq
import zmq.asyncio

from services.worker.kv.errors import KvError
from services.worker.kv.wire.protocol import (
    MAX_MESSAGE_BYTES,
    Answer,
    Control,
    Drop,
    Prefetch,
    RankStats,
    Release,
    RenewLease,
    Stats,
    decode_answer,
    decoded,
    encode_message,
)
from shared.domain.kv import KvHandle
from shared.errors import DeadlineExceeded, PolyphaseError
from shared.runtime.tasks import Background

_TIMEOUT_S = 2.0


class KvControl(Protocol):
    """Calls every rank of one instance. Raises PolyphaseError."""

    async def release(self, transfer_id: str) -> None:
        """Drop what is staged or prefetched for the transfer, and refuse later pulls of it. Idempotent."""

    async def prefetch(self, handle: KvHandle, *, keep_s: float) -> None:
        """Begin to pull the handle before the engine has blocks for it.

        Best effort: without room, without progress, or after `keep_s` without an import of it, nothing of it is left.
        """

    async def drop(self, transfer_id: str) -> None:
        """Forget a prefetch. An import that the engine has begun goes on."""

    async def renew(self, handle: KvHandle) -> None:
        """Have the exporter keep the handle while a decode waits for blocks to pull it into. Best effort."""

    async def stats(self) -> tuple[RankStats, ...]:
        """State of every rank, in rank order."""
        ...


class Rank(Protocol):
    """What a rank's endpoint does for its worker, from any thread and without waiting. Raises KvError."""

    def release(self, transfer_id: str) -> None:
        """See KvControl."""

    def prefetch(self, handle: KvHandle, tokens: int, timeout_s: float) -> None:
        """See KvControl."""

    def drop(self, transfer_id: str) -> None:
        """See KvControl."""

    def renew(self, handle: KvHandle) -> None:
        """See KvControl."""

    def stats(self) -> RankStats:
        """See KvControl."""


class DirectControl:
    """Of the one rank that runs in this process."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    async def release(self, transfer_id: str) -> None:
        """See KvControl."""
        self._rank.release(transfer_id)

    async def prefetch(self, handle: KvHandle, *, keep_s: float) -> None:
        """See KvControl."""
        try:
            self._rank.prefetch(handle, handle.tokens, keep_s)
        except KvError as error:
            raise PolyphaseError(str(error)) from error

    async def drop(self, transfer_id: str) -> None:
        """See KvControl."""
        self._rank.drop(transfer_id)

    async def renew(self, handle: KvHandle) -> None:
        """See KvControl."""
        self._rank.renew(handle)

    async def stats(self) -> tuple[RankStats, ...]:
        """See KvControl."""
        return (self._rank.stats(),)


class SocketControl:
    """Of ranks in processes of their own; enter it on the event loop that uses it.

    All calls raise DeadlineExceeded when a rank does not answer in `timeout_s` seconds, a wrong key included.
    """

    def __init__(self, endpoints: tuple[str, ...] | list[str], key: str, curve: tuple[str, str] | None = None) -> None:
        """`key` is "control_key" of the connector's configuration; `curve` the cluster's pair (public,
        secret).
        """
        self._endpoints = tuple(endpoints)
        self._key = key
        self._curve = curve
        self._context: zmq.asyncio.Context | None = None
        self._sockets: list[zmq.asyncio.Socket] = []
        self._answers: dict[tuple[int, int], asyncio.Future[Answer]] = {}
        self._readers = Background()
        self._last_call = 0

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        for rank, endpoint in enumerate(self._endpoints):
            dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            if self._curve:
                dealer.curve_publickey, dealer.curve_secretkey = (key.encode() for key in self._curve)
                dealer.curve_serverkey = self._curve[0].encode()
            dealer.connect(endpoint)
            self._sockets.append(dealer)
            self._readers.start(f"kv-control-{rank}", self._read(rank, dealer))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._readers.close()
        for each in self._sockets:
            each.close()
        if self._context is not None:
            self._context.term()

    async def release(self, transfer_id: str, timeout_s: float = _TIMEOUT_S) -> None:
        """See KvControl."""
        await self._call(Release(transfer_id), timeout_s)

    async def prefetch(self, handle: KvHandle, *, keep_s: float) -> None:
        """See KvControl."""
        await self._call(Prefetch(handle, handle.tokens, keep_s), _TIMEOUT_S)

    async def drop(self, transfer_id: str, timeout_s: float = _TIMEOUT_S) -> None:
        """See KvControl."""
        await self._call(Drop(transfer_id), timeout_s)

    async def renew(self, handle: KvHandle, timeout_s: float = _TIMEOUT_S) -> None:
        """See KvControl."""
        await self._call(RenewLease(handle), timeout_s)

    async def stats(self, timeout_s: float = _TIMEOUT_S) -> tuple[RankStats, ...]:
        """See KvControl."""
        answers = await self._call(Stats(), timeout_s)
        return tuple(answer.stats or RankStats() for answer in answers)

    async def _call(self, operation: Release | Prefetch | Drop | RenewLease | Stats, timeout_s: float) -> list[Answer]:
        self._last_call += 1
        call = self._last_call
        message = encode_message(Control(call, self._key, operation))
        loop = asyncio.get_running_loop()
        waiting = {(rank, call): loop.create_future() for rank in range(len(self._sockets))}
        self._answers.update(waiting)
        try:
            async with asyncio.timeout(timeout_s):
                for each in self._sockets:
                    await each.send(message)
                answers: list[Answer] = list(await asyncio.gather(*waiting.values()))
        except TimeoutError:
            raise DeadlineExceeded(f"a KV endpoint did not answer {type(operation).__name__}") from None
        finally:
            for key in waiting:
                self._answers.pop(key, None)
        for answer in answers:
            if answer.error:
                raise PolyphaseError(answer.error)
        return answers

    async def _read(self, rank: int, dealer: zmq.asyncio.Socket) -> None:
        while True:
            parts = await dealer.recv_multipart()
            answer = decode_answer(parts[0]) if len(parts) == 1 else None
            future = self._answers.get((rank, answer.call)) if answer is not None else None
            if answer is not None and future is not None and not future.done():
                future.set_result(answer)


# MERGED events.py
# Events from each rank's connector to the worker process that owns the engine: ZeroMQ PUSH to PULL.


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
