"""The calling side of the RPC: requests, streams of items, cancellation, deadlines. A lost connection fails its calls
at once. `RpcClients` keeps the clients of a process by address.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import zmq

from shared.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotConnected,
    PeerLost,
    PolyphaseError,
    Unavailable,
    WireVersionMismatch,
    from_code,
)
from shared.wire.envelope import (
    ALL_CALLS,
    ITEM,
    MALFORMED,
    MAX_BODY_BYTES,
    NO_BODY,
    Envelope,
    ErrorBody,
    Kind,
    encode_body,
    pack_batches,
    unpack,
)
from shared.wire.messages import Method
from shared.wire.rpc_server import RpcServer
from shared.wire.sockets import Connection, LoopSocket, Sockets, whole_messages

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Item = TypeVar("Item")
CONNECT_S = 2.0  # how long a call waits for the first connection
RECONNECT_S = 0.5  # and for a lost one, which is made again sooner if the peer is there
LOST_S = 30.0  # how long an unused client tries to reach an address without a peer
IDLE_S = 600.0  # how long an unused client keeps its connection
SWEEP_S = 5.0
_RETRY_S = 0.01

_error_decoder = msgspec.msgpack.Decoder(ErrorBody)
_number_decoder = msgspec.msgpack.Decoder(int)


@dataclass(slots=True)
class _Pending:
    future: asyncio.Future[Any]
    reply: "msgspec.msgpack.Decoder[Any]"
    item: "msgspec.msgpack.Decoder[Any]"
    on_item: Callable[[Any], None] | None
    sent: bool = False


_Concerned = Callable[[int, _Pending], bool]  # whether a failure concerns the pending call of that number


def _sent(_number: int, pending: _Pending) -> bool:
    return pending.sent


def _sent_up_to(last: int) -> _Concerned:
    return lambda number, pending: pending.sent and number <= last


def _unsent_of(numbers: Collection[int]) -> _Concerned:
    return lambda number, pending: number in numbers and not pending.sent


def _every(_number: int, _call: _Pending) -> bool:
    return True


class RpcClient:
    """A DEALER socket to one peer. Calls wait for the first connection for `CONNECT_S`, for a lost one for
    `RECONNECT_S`, then fail with NotConnected. The constructor raises zmq.ZMQError for an invalid address.
    """

    def __init__(self, sockets: Sockets, address: str) -> None:
        self.address = address
        self._wire = sockets.wire
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._outgoing: list[Envelope] = []
        self._closed = False
        self._connect_s = CONNECT_S
        self._on_lost: list[Callable[[], None]] = []
        self._decoders: dict[str, tuple[msgspec.msgpack.Decoder[Any], msgspec.msgpack.Decoder[Any]]] = {}
        socket = sockets.unconnected(zmq.DEALER)
        # Without a connection, messages wait here, where they can be withdrawn, and not in libzmq's queue: a restarted
        # peer would otherwise get calls that were given up long ago.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            self._connection = Connection(socket, address, self._made_or_lost)
        except zmq.ZMQError:
            socket.close()
            raise
        self._socket = LoopSocket(socket, self._receive, whole_messages(socket))

    @property
    def connected(self) -> bool:
        """Whether there is a connection, by its last event."""
        return self._connection.made

    @property
    def busy(self) -> bool:
        return bool(self._pending or self._outgoing)

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call back whenever an established connection breaks."""
        self._on_lost.append(callback)

    async def call(
        self,
        method: Method[Request, Reply, Item],
        request: Request,
        *,
        timeout_s: float,
        on_item: Callable[[Item], None] | None = None,
    ) -> Reply:
        """Call and wait for the reply; items arrive through `on_item`, in order, before it.

        Cancelling the awaiting task cancels the call at the peer. The call has not been carried out when it raises
        InvalidRequest because the request is too large, NotConnected because there is no connection, or
        WireVersionMismatch, a NotConnected, because the peer has an incompatible version. It may have been carried out
        when it raises PeerLost because the connection broke, DeadlineExceeded after `timeout_s`, an error of the peer,
        or CancelledError: then the caller frees what the call left at the peer.
        """
        if timeout_s <= 0:
            raise DeadlineExceeded(f"{method.name}: no time left")
        if self._closed:
            raise PeerLost(f"client of {self.address} is closed")
        number = next(self._numbers)
        call = Envelope(Kind.CALL, number, method.name, timeout_s, encode_body(request))
        if len(call.body) > MAX_BODY_BYTES:
            raise InvalidRequest(f"{method.name}: {len(call.body)} bytes, more than {MAX_BODY_BYTES}")
        reply, item = self._decoders_of(method)
        pending = _Pending(self._loop.create_future(), reply, item, on_item)
        self._pending[number] = pending
        if not self.connected:
            self._limit_wait([number])
        timer = self._loop.call_later(timeout_s, self._expire, number, method.name, timeout_s)
        self._queue(call)
        try:
            return await pending.future  # type: ignore[no-any-return]
        finally:
            timer.cancel()
            if self._pending.pop(number, None) is not None:  # without an answer: cancelled, expired or lost
                self._withdraw(number)

    def notify(self, method: Method[Request, Any, Any], request: Request) -> None:
        """Send without an answer; the message is lost without a connection."""
        if self.connected:
            self._queue(Envelope(Kind.NOTIFY, 0, method.name, 30.0, encode_body(request)))

    def _decoders_of(self, method: Method[Any, Any, Any]) -> tuple[Any, Any]:
        found = self._decoders.get(method.name)
        if found is None:
            found = (msgspec.msgpack.Decoder(method.reply), msgspec.msgpack.Decoder(method.item))
            self._decoders[method.name] = found
        return found

    def _withdraw(self, number: int) -> None:
        kept = [envelope for envelope in self._outgoing if envelope.call != number]
        if len(kept) != len(self._outgoing):
            self._outgoing = kept
        elif self.connected:
            self._queue(Envelope(Kind.CANCEL, number, "", 0.0, NO_BODY))

    def _queue(self, envelope: Envelope) -> None:
        self._outgoing.append(envelope)
        if self.connected and len(self._outgoing) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._closed or not self.connected or not self._outgoing:
            return
        outgoing, self._outgoing = self._outgoing, []
        batches = pack_batches(outgoing, self._wire)
        for index, (envelopes, message) in enumerate(batches):
            try:
                self._socket.send([message])
            except zmq.Again:  # the connection broke and its event is on the way, or the peer does not read
                self._outgoing = [envelope for unsent, _ in batches[index:] for envelope in unsent]
                self._loop.call_later(_RETRY_S, self._flush)
                return
            for envelope in envelopes:
                if envelope.kind == Kind.CALL and (pending := self._pending.get(envelope.call)):
                    pending.sent = True

    def _receive(self, frames: list[bytes]) -> None:
        try:
            envelopes = unpack(frames[-1], self._wire, self.address)
        except WireVersionMismatch as mismatch:  # the peer has found it, too, and has carried out nothing
            self._fail(_sent, mismatch)
            return
        except MALFORMED as error:
            # It may have held the only reply to any of the calls.
            self._fail(_sent, PeerLost(f"{self.address} sent a malformed message: {error}"))
            return
        for envelope in envelopes:
            pending = self._pending.get(envelope.call)
            if pending is None:
                if envelope.kind == Kind.RESET:
                    self._reset(envelope)
            elif not pending.future.done():
                try:
                    self._deliver(pending, envelope)
                except MALFORMED as error:
                    pending.future.set_exception(PeerLost(f"{self.address} sent a malformed body: {error}"))

    def _deliver(self, pending: _Pending, envelope: Envelope) -> None:
        if envelope.kind == ITEM:  # most envelopes are: the plain int compares faster than `Kind.ITEM`
            if pending.on_item is None:
                return
            item = pending.item.decode(envelope.body)
            try:
                pending.on_item(item)
            except Exception as error:  # of the caller's code: its call fails, and no other
                if not pending.future.done():
                    pending.future.set_exception(error)
        elif envelope.kind == Kind.REPLY:
            reply = pending.reply.decode(envelope.body)
            del self._pending[envelope.call]
            pending.future.set_result(reply)
        elif envelope.kind == Kind.ERROR:
            body = _error_decoder.decode(envelope.body)
            del self._pending[envelope.call]
            pending.future.set_exception(from_code(body.code, body.message, body.retry_after_s))

    def _reset(self, envelope: Envelope) -> None:
        try:
            last = _number_decoder.decode(envelope.body)
        except MALFORMED:
            last = ALL_CALLS
        why = f"{self.address} gave the call up: it could not read it, or we did not read its answers"
        self._fail(_sent_up_to(last), PeerLost(why))

    def _made_or_lost(self, made: bool) -> None:
        if made:
            self._connect_s = RECONNECT_S
            self._flush()
            return
        self._fail(_sent, PeerLost(f"connection to {self.address} is lost"))
        # Calls that were not sent wait for another connection like new ones: their deadlines may be far.
        self._outgoing = [envelope for envelope in self._outgoing if envelope.kind == Kind.CALL]
        self._limit_wait([envelope.call for envelope in self._outgoing])
        for callback in list(self._on_lost):
            callback()

    def _limit_wait(self, numbers: list[int]) -> None:
        """Start the wait for a connection. If there is none at its end, those of the calls that are unsent fail."""
        # The timer is not cancelled when the connection is made or a call ends. When it fires:
        # - It cannot hit a later call, since numbers are not used again, nor one that has ended, which is not pending.
        # - It leaves alone a call that was sent: `_made_or_lost` fails such a call when its connection breaks.
        # - It leaves alone all calls while there is a connection: an unsent call is about to be flushed.
        # - If a connection was made and lost within the wait, `_made_or_lost` has started a second timer for the unsent
        #   calls. They fail when the earlier timer fires.
        self._loop.call_later(self._connect_s, self._give_up_connecting, frozenset(numbers))

    def _give_up_connecting(self, numbers: frozenset[int]) -> None:
        if not self.connected:
            self._fail(_unsent_of(numbers), NotConnected(f"no connection to {self.address}"))

    def _expire(self, number: int, method: str, timeout_s: float) -> None:
        pending = self._pending.get(number)
        if pending is not None and not pending.future.done():
            pending.future.set_exception(DeadlineExceeded(f"{method}: no answer within {timeout_s:.3f} s"))

    def _fail(self, concerned: _Concerned, error: PolyphaseError) -> None:
        for number, pending in list(self._pending.items()):
            if concerned(number, pending) and not pending.future.done():
                pending.future.set_exception(error)

    def close(self) -> None:
        """Fail what is pending and close the socket."""
        if not self._closed:
            self._closed = True
            self._fail(_every, PeerLost(f"client of {self.address} is closed"))
            self._connection.close()
            self._socket.close()


class NearClient:
    """What `RpcClient` is to a server of another process, for one of this process."""

    connected = True

    def __init__(self, server: RpcServer, address: str) -> None:
        self.address = address
        self._server = server

    async def call(
        self,
        method: Method[Request, Reply, Item],
        request: Request,
        *,
        timeout_s: float,
        on_item: Callable[[Item], None] | None = None,
    ) -> Reply:
        """As `RpcClient.call`."""
        return await self._server.reply(method, request, timeout_s, on_item)


class RpcClients:
    """Clients by address, created on first use. Use as a context manager, and call `sweep` every `SWEEP_S`.

    Clients of the addresses in `keep` stay connected, used or not.
    """

    def __init__(self, sockets: Sockets, keep: Collection[str] = ()) -> None:
        self._sockets = sockets
        self._keep = frozenset(keep)
        self._clients: dict[str, RpcClient] = {}
        self._used_mono: dict[str, float] = {}  # monotonic, by address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            client.close()

    def __len__(self) -> int:
        return len(self._clients)

    def near(self, address: str) -> NearClient | None:
        """The client of a server of this process, if the address leads to one; see `Sockets`."""
        server = self._sockets.near(address, RpcServer)
        return NearClient(server, address) if server is not None else None

    def to(self, address: str) -> RpcClient:
        """The client of an address, for immediate use: `sweep` may close it later. Raises Unavailable for an invalid
        address.
        """
        self._used_mono[address] = time.monotonic()
        client = self._clients.get(address)
        if client is None:
            try:
                client = self._clients[address] = RpcClient(self._sockets, address)
            except zmq.ZMQError as error:
                del self._used_mono[address]
                raise Unavailable(f"no connection to {address!r}: {error}") from error
        return client

    def sweep(self) -> None:
        """Close clients that have been unused for a while: instances come and go, with new addresses."""
        now_mono = time.monotonic()
        for address, client in list(self._clients.items()):
            unused_s = now_mono - self._used_mono[address]
            if address not in self._keep and not client.busy and unused_s > (IDLE_S if client.connected else LOST_S):
                client.close()
                del self._clients[address], self._used_mono[address]
