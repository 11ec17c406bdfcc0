"""The messages between a worker process and the KV endpoints of its ranks.

The worker sends operations (`Release`, `Prefetch`, `Drop`, `RenewLease`, `Stats`): by a call to a rank in the same
process, otherwise over ZeroMQ. Each rank sends events, over ZeroMQ PUSH to PULL.
"""

import asyncio
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol, Self

import msgspec
import zmq
import zmq.asyncio

from services.worker.kv import KvError
from services.worker.kv.wire.protocol import MAX_MESSAGE_BYTES, Message, decoded, encode_message, opened
from shared.domain.kv import KvHandle
from shared.errors import DeadlineExceeded, PolyphaseError
from shared.runtime.tasks import Background

_TIMEOUT_S = 2.0
_MAX_EVENT_BYTES = 64 << 10
_HIGH_WATER = 100_000
_log = logging.getLogger(__name__)


class Release(Message, frozen=True):
    """Drop what is staged or prefetched for the transfer, and refuse later pulls of it. Idempotent."""

    transfer_id: str


class Prefetch(Message, frozen=True):
    """Begin to pull tokens [0, tokens) of the handle before the engine has blocks for them.

    Best effort: without room, without progress, or after `keep_s` without an import of it, nothing of it is left.
    """

    handle: KvHandle
    tokens: int
    keep_s: float


class Drop(Message, frozen=True):
    """Forget a prefetch. An import that the engine has begun goes on."""

    transfer_id: str


class RenewLease(Message, frozen=True):
    """Have the exporters keep the handle while a decode waits for blocks to pull it into. Best effort; a pull that is
    under way renews its lease by itself.
    """

    handle: KvHandle


class Stats(Message, frozen=True):
    """Report counters and levels."""


Operation = Release | Prefetch | Drop | RenewLease | Stats


class RankStats(msgspec.Struct):
    """State of one rank. Counts and byte totals are since its start. Each of its threads counts in its own fields."""

    rank: int = 0
    staged_bytes: int = 0
    staging_limit_bytes: int = 0
    transfers: int = 0  # staged, in part or in full
    serving: int = 0  # pulls of peers under way
    pulling: int = 0  # own pulls under way, prefetches included
    inbox_bytes: int = 0  # prefetched payload that waits for its blocks
    sent_bytes: int = 0
    received_bytes: int = 0
    pulls_served: int = 0
    pulls_refused: int = 0  # of peers, with an error
    pulls_ok: int = 0
    pulls_failed: int = 0
    prefetches: int = 0  # begun
    staging_failed: int = 0
    leases_expired: int = 0
    leases_renewed: int = 0  # by importers whose decodes wait for blocks
    dropped_messages: int = 0  # garbage, oversized or unknown
    events_lost: int = 0
    nixl_sent_bytes: int = 0  # of `sent_bytes`
    nixl_received_bytes: int = 0  # of `received_bytes`
    nixl_failures: int = 0  # pairs that both have NIXL and fell back to TCP
    nixl_refused: int = 0  # pairs that both have NIXL and may not use it


CarryOut = Callable[[Operation], RankStats | None]  # of an endpoint; any thread may call it, and it may raise KvError


class KvControl(Protocol):
    """Sends an operation to every rank of one instance."""

    async def call(self, operation: Operation) -> list[RankStats]:
        """The state of every rank in rank order, for `Stats`; otherwise empty. Raises PolyphaseError."""
        ...


class DirectControl:
    """For the one rank that runs in this process."""

    def __init__(self, carry_out: CarryOut) -> None:
        self._carry_out = carry_out

    async def call(self, operation: Operation) -> list[RankStats]:
        try:
            stats = self._carry_out(operation)
        except KvError as error:
            raise PolyphaseError(str(error)) from error
        return [stats] if stats is not None else []


class Control(Message, frozen=True):
    """A request to a rank. `key` proves that the rank's owner sent it."""

    call: int
    key: str
    operation: Operation


class Answer(Message, frozen=True):
    """The response of a rank; `error` is empty when the operation was carried out."""

    call: int
    error: str = ""
    stats: RankStats | None = None


_controls = msgspec.msgpack.Decoder(Control)
_answers = msgspec.msgpack.Decoder(Answer)


class SocketControl:
    """For ranks in processes of their own; enter it on the event loop that uses it."""

    def __init__(self, endpoints: tuple[str, ...] | list[str], key: str, curve: tuple[str, str] | None = None) -> None:
        """`key` is "control_key" of the connector's configuration; `curve` the cluster's pair (public, secret)."""
        self._endpoints = tuple(endpoints)
        self._key = key
        self._curve = curve
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._waiting: dict[tuple[int, int], asyncio.Future[Answer]] = {}
        self._readers = Background()
        self._last_call = 0

    async def __aenter__(self) -> Self:
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

    async def __aexit__(self, *_: object) -> None:
        await self._readers.close()
        for each in self._sockets:
            each.close()
        self._context.term()

    async def call(self, operation: Operation, timeout_s: float = _TIMEOUT_S) -> list[RankStats]:
        """Raises DeadlineExceeded when a rank does not answer in time; a rank does not answer a wrong key either."""
        self._last_call += 1
        call = self._last_call
        message = encode_message(Control(call, self._key, operation))
        loop = asyncio.get_running_loop()
        waiting = {(rank, call): loop.create_future() for rank in range(len(self._sockets))}
        self._waiting.update(waiting)
        try:
            async with asyncio.timeout(timeout_s):
                for each in self._sockets:
                    await each.send(message)
                answers: list[Answer] = list(await asyncio.gather(*waiting.values()))
        except TimeoutError:
            raise DeadlineExceeded(f"a KV endpoint did not answer {type(operation).__name__}") from None
        finally:
            for key in waiting:
                self._waiting.pop(key, None)
        for answer in answers:
            if answer.error:
                raise PolyphaseError(answer.error)
        return [answer.stats for answer in answers if answer.stats is not None]

    async def _read(self, rank: int, dealer: zmq.asyncio.Socket) -> None:
        while True:
            parts = await dealer.recv_multipart()
            answer = opened(_answers, parts[0]) if len(parts) == 1 else None
            future = self._waiting.get((rank, answer.call)) if answer is not None else None
            if answer is not None and future is not None and not future.done():
                future.set_result(answer)


class ControlServer:
    """The rank's end of `SocketControl`: a thread that carries out operations and answers them."""

    def __init__(
        self,
        address: str,
        key: str,
        curve: tuple[str, str] | None,
        carry_out: CarryOut,
        on_death: Callable[[str, BaseException], None],
    ) -> None:
        """Binds and starts at once. Raises OSError when the address cannot be bound. `on_death(thread, error)` is
        called when a bug ends the thread.
        """
        self.dropped = 0  # messages that are malformed or have a wrong key
        self._key = key
        self._carry_out = carry_out
        self._on_death = on_death
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if curve:
            self._router.curve_server = True
            self._router.curve_publickey, self._router.curve_secretkey = (half.encode() for half in curve)
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"cannot bind {address}: {error}") from error
        self._stopping, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kv-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.send(b"\0")
        self._thread.join()
        self._stop.close()
        self._stopping.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stopping, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._stopping.fileno() in ready:
                    return
                peer, *parts = self._router.recv_multipart()
                control = opened(_controls, parts[0]) if len(parts) == 1 else None
                if control is None or not hmac.compare_digest(control.key.encode(), self._key.encode()):
                    self.dropped += 1
                    continue
                self._router.send_multipart([peer, encode_message(self._answer(control))])
        except Exception as error:
            _log.exception("the thread that answers the worker's control ended")
            self._on_death("control", error)

    def _answer(self, control: Control) -> Answer:
        try:
            return Answer(control.call, "", self._carry_out(control.operation))
        except KvError as error:
            return Answer(control.call, str(error))


class StagedChunk(msgspec.Struct, frozen=True, tag=True):
    """Tokens [0, token_end) of a transfer can be pulled from that rank, whose pool holds `staged_bytes` in all."""

    transfer_id: str
    rank: int
    token_end: int
    last: bool
    staged_bytes: int


class TransferEnded(msgspec.Struct, frozen=True, tag=True):
    """A rank has dropped what it held of an export and stages no more of it: all importers have pulled it, it was
    released or refused, or its lease has expired. The rank's pool holds `staged_bytes` now.
    """

    transfer_id: str
    rank: int
    staged_bytes: int


class ThreadEnded(msgspec.Struct, frozen=True, tag=True):
    """A bug ended a thread of that rank's KV endpoint: the instance cannot go on."""

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
    """An import ended on a rank; there is one for each rank and each request that had an import.

    Times are unix seconds; `error` begins with a KvFault unless `ok`. `ended_s` is when the last of its KV arrived: a
    prefetch may be complete long before the engine has blocks for it. `ok` with no tokens: the importer's cache held
    all of them and nothing was pulled.
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
    transport: str = ""  # what carried it: tcp, nixl, or "nixl+tcp"

    @classmethod
    def without_pull(cls, transfer_id: str, rank: int, error: str) -> "PullEnded":
        now = time.time()
        return cls(transfer_id, rank, not error, error, 0, 0, now, now, False)


KvEvent = StagedChunk | TransferEnded | StagingFailed | PullEnded | ThreadEnded


class EventSender:
    """A rank's end. It does not block: an event that cannot be queued is counted and lost. Thread-safe."""

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
        with self._lock:
            try:
                self._socket.send(self._encoder.encode(event), zmq.NOBLOCK)
            except zmq.ZMQError:
                self.lost += 1

    def close(self) -> None:
        """Close, after up to 200 ms for queued events."""
        with self._lock:
            self._socket.close()
        self._context.term()


class KvEvents:
    """The worker's end: an async iterator of events. Binds when entered, and raises OSError when the address is taken.

    Malformed events are counted in `dropped`.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.dropped = 0
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

    async def __anext__(self) -> KvEvent:
        while True:
            frame = await self._socket.recv()
            event: KvEvent | None = decoded(self._decoder, frame)
            if event is not None:
                return event
            self.dropped += 1

    get = __anext__
