"""The calling side: request, stream, cancel, deadline; a lost connection fails its calls at once."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import zmq

from shared.errors import DeadlineExceeded, PeerLost, PolyphaseError, from_code
from shared.wire.envelope import NO_BODY, Envelope, ErrorBody, Kind, encode_body, pack, unpack
from shared.wire.methods import Method
from shared.wire.sockets import ConnectionWatch, LoopSocket, Sockets

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Item = TypeVar("Item")
CONNECT_S = 2.0  # how long a call waits for a connection that is not there

_error_decoder = msgspec.msgpack.Decoder(ErrorBody)


@dataclass(slots=True)
class _Pending:
    future: asyncio.Future[Any]
    reply: "msgspec.msgpack.Decoder[Any]"
    item: "msgspec.msgpack.Decoder[Any]"
    on_item: Callable[[Any], None] | None
    sent: bool = False


class RpcClient:
    """One DEALER to one peer. Calls wait for the connection at most CONNECT_S, then fail with PeerLost."""

    def __init__(self, sockets: Sockets, address: str) -> None:
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._outgoing: list[Envelope] = []
        self._connected = False
        self._closed = False
        self._on_lost: list[Callable[[], None]] = []
        self._decoders: dict[str, tuple[msgspec.msgpack.Decoder[Any], msgspec.msgpack.Decoder[Any]]] = {}
        socket = sockets.connect(zmq.DEALER, address)
        # Without a connection a message must wait here, where it can be withdrawn, not in libzmq's queue:
        # a restarted peer would otherwise get calls that were given up long ago.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        self._watch = ConnectionWatch(socket, self._connection_event)
        socket.connect(address)
        self._socket = LoopSocket(socket, self._receive)

    @property
    def connected(self) -> bool:
        """Whether the peer is there, by the last event of the connection."""
        return self._connected

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

        Cancelling the awaiting task cancels the call at the peer. Raises the peer's error, PeerLost when the
        connection breaks or is not there, DeadlineExceeded after `timeout_s`.
        """
        if timeout_s <= 0:
            raise DeadlineExceeded(f"{method.name}: no time left")
        number = next(self._numbers)
        reply, item = self._decoders_of(method)
        pending = _Pending(self._loop.create_future(), reply, item, on_item)
        self._pending[number] = pending
        if not self._connected:
            self._loop.call_later(CONNECT_S, self._give_up_connecting, number)
        timer = self._loop.call_later(timeout_s, self._expire, number, method.name, timeout_s)
        self._queue(Envelope(Kind.CALL, number, method.name, timeout_s, encode_body(request)))
        try:
            return await pending.future  # type: ignore[no-any-return]
        finally:
            timer.cancel()
            if self._pending.pop(number, None) is not None:  # not answered: cancelled, expired or lost
                self._withdraw(number)

    def notify(self, method: Method[Request, Any, Any], request: Request) -> None:
        """Send without waiting for anything; lost if the peer is not there."""
        if self._connected:
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
        elif self._connected:
            self._queue(Envelope(Kind.CANCEL, number, "", 0.0, NO_BODY))

    def _queue(self, envelope: Envelope) -> None:
        self._outgoing.append(envelope)
        if self._connected and len(self._outgoing) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._closed or not self._connected or not self._outgoing:
            return
        outgoing, self._outgoing = self._outgoing, []
        try:
            self._socket.send([pack(outgoing)])
        except zmq.Again:  # the connection broke and its event is on the way, or the peer does not read
            self._outgoing = outgoing + self._outgoing
            self._loop.call_later(0.01, self._flush)
            return
        for envelope in outgoing:
            if envelope.kind == Kind.CALL and (pending := self._pending.get(envelope.call)):
                pending.sent = True

    def _receive(self, frames: list[bytes]) -> None:
        try:
            envelopes = unpack(frames[-1])
        except msgspec.MsgspecError:
            return
        for envelope in envelopes:
            pending = self._pending.get(envelope.call)
            if pending is None or pending.future.done():
                continue
            try:
                self._deliver(pending, envelope)
            except Exception as error:  # the caller's callback or a body of another shape: the call fails, not the loop
                pending.future.set_exception(error)

    def _deliver(self, pending: _Pending, envelope: Envelope) -> None:
        if envelope.kind == Kind.ITEM:
            if pending.on_item is not None:
                pending.on_item(pending.item.decode(envelope.body))
            return
        del self._pending[envelope.call]
        if envelope.kind == Kind.REPLY:
            try:
                pending.future.set_result(pending.reply.decode(envelope.body))
            except msgspec.MsgspecError as error:
                pending.future.set_exception(PolyphaseError(f"reply of {self.address} is malformed: {error}"))
        else:
            body = _error_decoder.decode(envelope.body)
            pending.future.set_exception(from_code(body.code, body.message))

    def _connection_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
            self._flush()
        elif event == zmq.EVENT_DISCONNECTED and self._connected:
            self._connected = False
            self._fail(lambda pending: pending.sent, PeerLost(f"connection to {self.address} is lost"))
            for callback in list(self._on_lost):
                callback()

    def _give_up_connecting(self, number: int) -> None:
        pending = self._pending.get(number)
        if pending is not None and not pending.sent and not pending.future.done():
            pending.future.set_exception(PeerLost(f"no connection to {self.address}"))

    def _expire(self, number: int, method: str, timeout_s: float) -> None:
        pending = self._pending.get(number)
        if pending is not None and not pending.future.done():
            pending.future.set_exception(DeadlineExceeded(f"{method}: no answer within {timeout_s:.3f} s"))

    def _fail(self, which: Callable[[_Pending], bool], error: PolyphaseError) -> None:
        for pending in list(self._pending.values()):
            if which(pending) and not pending.future.done():
                pending.future.set_exception(error)

    def close(self) -> None:
        """Fail what is pending and close the socket."""
        if not self._closed:
            self._closed = True
            self._fail(lambda _: True, PeerLost(f"client of {self.address} is closed"))
            self._watch.close()
            self._socket.close()


class RpcClients:
    """Clients by address, made on first use. Use as a context manager."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._clients: dict[str, RpcClient] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            client.close()

    def to(self, address: str) -> RpcClient:
        """The client of that address."""
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = RpcClient(self._sockets, address)
        return client

    def forget(self, address: str) -> None:
        """Close the client of an address that is no longer used."""
        if client := self._clients.pop(address, None):
            client.close()
