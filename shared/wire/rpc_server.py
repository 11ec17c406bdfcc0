"""The serving side of a call: run the handler, send items and the reply, cancel when the caller cancels or is gone.

Who frees what: when a caller is gone, or given up as too slow, `on_peer_gone` is called, and the handlers free what
calls of that peer left behind. A caller that is alive may miss a reply, too: a reply that crosses the caller's
cancellation or deadline is dropped where it arrives. So what a call leaves behind has a name chosen by the caller, and
the caller frees it whenever a call ends without a reply.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import zmq

from shared.errors import Busy, DeadlineExceeded, InvalidRequest, NotConnected, PolyphaseError, WireVersionMismatch
from shared.runtime.logs import get_log
from shared.wire.envelope import (
    ALL_CALLS,
    ITEM,
    MALFORMED,
    MAX_MESSAGE_BYTES,
    NO_BODY,
    Envelope,
    ErrorBody,
    Kind,
    encode_body,
    pack,
    pack_batches,
    reset,
    unpack,
)
from shared.wire.messages import Method
from shared.wire.sockets import MAX_FRAME_BYTES, ConnectionWatch, LoopSocket, Sockets

log = get_log(__name__)
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Item = TypeVar("Item")
BACKLOG_BYTES = 8 << 20  # queued for a peer that does not read, beyond the buffers of libzmq and the kernel
RETRY_S = 0.01
MAX_CALLS_A_PEER = 10_000
_MAX_NUMBER = 1 << 53
_MAX_TIMEOUT_S = 7 * 86_400.0
_MAX_ANSWER_BYTES = MAX_FRAME_BYTES - 1024
_MAX_ERROR_CHARACTERS = 4_000


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. A peer that connects again is another peer: the identity is the ROUTER's."""

    identity: bytes
    calls: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)
    notices: "set[asyncio.Task[None]]" = field(default_factory=set)
    last_call: int = 0  # the highest number of a received call
    gone: bool = False
    due: list[Envelope] = field(default_factory=list)  # in this turn of the loop
    backlog: deque[bytes] = field(default_factory=deque)  # messages that could not be sent
    backlog_bytes: int = 0
    refused: bool = False  # for its wire version, which has been logged


class _Received(NamedTuple):
    identity: bytes
    descriptor: int | None  # None: the peer speaks an older ZeroMQ protocol
    frames: list[bytes]


class Router:
    """A ROUTER socket: its peers, and the envelopes that are due to each of them.

    `on_message(peer, frames)` gets each message; `on_lost(peer)` is called when a peer is `gone`, or given up because
    it does not read; then its connection may live on. libzmq reports each connection that it accepted or lost by its
    descriptor, and each message names the descriptor by which it came. libzmq's own thread finds lost connections,
    those of frozen peers by heartbeats, so that it needs neither a message to them nor time of this interpreter.
    """

    def __init__(
        self,
        sockets: Sockets,
        address: str,
        on_message: Callable[[Peer, list[bytes]], None],
        on_lost: Callable[[Peer], None],
        dropped: Counter[str],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._dropped = dropped
        self._wire = sockets.wire
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, list[Peer]] = {}  # by descriptor, those that are open
        self._peers: dict[bytes, Peer] = {}
        self._due: list[Peer] = []
        self._blocked: list[Peer] = []
        socket = sockets.unbound(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._watch = ConnectionWatch(socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED, self._connection_event)
        self._socket = LoopSocket(socket, self._receive, partial(_read, socket))
        try:
            socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise

    def queue(self, peer: Peer, envelope: Envelope) -> None:
        """Send an envelope, together with all others for the peer in this turn of the loop."""
        if peer.gone:
            return
        if not peer.due:
            if not self._due:
                # One turn later: a handler that was woken by its last item gets to add its reply.
                self._loop.call_soon(self._loop.call_soon, self.flush)
            self._due.append(peer)
        peer.due.append(envelope)

    def flush(self) -> None:
        ready, self._due = self._due, []
        for peer in ready:
            envelopes, peer.due = peer.due, []
            if not envelopes:  # lost or given up since
                continue
            for _, message in pack_batches(envelopes, self._wire):
                if peer.backlog or not self._send(peer, message):
                    self._keep(peer, message)
            if peer.backlog_bytes > BACKLOG_BYTES:
                self._give_up(peer)

    def close(self) -> None:
        self._blocked.clear()
        self._watch.close()
        self._socket.close()

    def _send(self, peer: Peer, message: bytes) -> bool:
        """Send a message; False when it cannot be sent now."""
        if peer.gone:
            return True
        try:
            self._socket.send([peer.identity, message])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(peer)
        return True

    def _keep(self, peer: Peer, message: bytes) -> None:
        if not peer.backlog:
            if not self._blocked:
                self._loop.call_later(RETRY_S, self._retry)
            self._blocked.append(peer)
        peer.backlog.append(message)
        peer.backlog_bytes += len(message)

    def _retry(self) -> None:
        blocked, self._blocked = self._blocked, []
        for peer in blocked:
            while peer.backlog and self._send(peer, peer.backlog[0]):
                if peer.backlog:  # not lost meanwhile
                    peer.backlog_bytes -= len(peer.backlog.popleft())
        self._blocked = [peer for peer in blocked if peer.backlog] + self._blocked
        if self._blocked:
            self._loop.call_later(RETRY_S, self._retry)

    def _give_up(self, peer: Peer) -> None:
        """Give up a peer that does not read: replace its backlog by a RESET, for when it reads again."""
        message = pack([reset(peer.last_call)], self._wire)
        peer.due.clear()
        peer.backlog = deque([message])
        peer.backlog_bytes = len(message)
        self._dropped["peer_slow"] += 1
        self._on_lost(peer)

    def _receive(self, message: _Received) -> None:
        peer = self._peers.get(message.identity) or self._new_peer(message)
        if peer is not None:
            self._on_message(peer, message.frames)

    def _new_peer(self, message: _Received) -> Peer | None:
        identity = message.identity
        if message.descriptor is None or len(identity) != 5 or identity[0]:
            # The ROUTER did not assign this identity: another peer could choose the same one and get its answers.
            self._dropped["frame"] += 1
            return None
        self._watch.catch_up()
        sharing = self._connections.get(message.descriptor)
        if sharing is None:
            self._dropped["peer_gone"] += 1  # a message from before its end
            return None
        # A descriptor may have been reused before such a message is read. Then both peers share it: the one that is
        # gone is found when something is due to it, or with the other at the latest.
        peer = self._peers[identity] = Peer(identity)
        sharing.append(peer)
        return peer

    def _connection_event(self, event: int, descriptor: int) -> None:
        for peer in self._connections.pop(descriptor, ()):
            self._lose(peer)
        if event == zmq.EVENT_ACCEPTED:
            self._connections[descriptor] = []

    def _lose(self, peer: Peer) -> None:
        if peer.gone:
            return
        peer.gone = True
        del self._peers[peer.identity]
        if peer.calls or peer.due or peer.backlog:
            self._dropped["peer_gone"] += 1
        peer.due.clear()
        peer.backlog.clear()
        self._on_lost(peer)


def _read(socket: zmq.Socket[bytes]) -> _Received:
    first = socket.recv(zmq.NOBLOCK, copy=False)
    frames = []
    while socket.getsockopt(zmq.RCVMORE):
        frames.append(socket.recv(zmq.NOBLOCK))
    try:
        descriptor = int(first.get(zmq.SRCFD))
    except zmq.ZMQError:
        descriptor = None
    return _Received(first.bytes, descriptor, frames)


class ServerCall:
    """A call under way. `peer` identifies the connection of its caller, for as long as that lasts."""

    def __init__(self, router: Router, peer: Peer, number: int, timeout_s: float) -> None:
        self._router = router
        self._peer = peer
        self._number = number
        self.timeout_s = timeout_s
        self.peer = peer.identity

    def send(self, item: object) -> None:
        """Queue an item; items keep their order, and all items of one turn of the loop leave in one message."""
        body = encode_body(item)
        if len(body) > _MAX_ANSWER_BYTES:
            raise _too_large(body)
        self._router.queue(self._peer, Envelope(ITEM, self._number, "", 0.0, body))


class NearCall(ServerCall):
    """A call from the same process. Items arrive at once."""

    def __init__(self, timeout_s: float, on_item: Callable[[Any], None] | None) -> None:
        self.timeout_s = timeout_s
        self.peer = b""
        self._on_item = on_item

    def send(self, item: object) -> None:
        if self._on_item is not None:
            self._on_item(item)


Handler = Callable[[Any, ServerCall], Any]  # a coroutine function, or a plain one that gives the reply
Handlers = Mapping[Method[Any, Any, Any], Handler]


class RpcServer:
    """A ROUTER socket and the methods behind it. Use as an async context manager.

    A handler is a coroutine function, or a plain function that does not wait: then it answers where its call is read,
    without a task. Malformed input is dropped and counted in `dropped` by cause. `on_peer_gone(peer)` is called when a
    peer's connection is lost (at once where the kernel knows, else by heartbeat), or when the peer is given up because
    it does not read. Its calls have been cancelled by then; their clean-up may still run.
    """

    def __init__(
        self, sockets: Sockets, address: str, handlers: Handlers, on_peer_gone: Callable[[bytes], None] | None = None
    ) -> None:
        self._sockets = sockets
        self._address = address
        self._handlers = {method.name: handler for method, handler in handlers.items()}
        self._in_tasks = {name for name, handler in self._handlers.items() if iscoroutinefunction(handler)}
        self._decoders = {method.name: msgspec.msgpack.Decoder(method.request) for method in handlers}
        self._on_peer_gone = on_peer_gone
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.dropped: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._router = Router(self._sockets, self._address, self._receive, self._lost, self.dropped)
        self._sockets.listens(self._address, self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._sockets.listens(self._address, None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._router.flush()
        self._router.close()

    @property
    def calls(self) -> int:
        return len(self._tasks)

    async def reply(
        self,
        method: Method[Request, Reply, Item],
        request: Request,
        timeout_s: float,
        on_item: Callable[[Item], None] | None,
    ) -> Reply:
        """The reply to a call from the same process, which passes no socket. Raises as `RpcClient.call` does."""
        if self._closing:
            raise NotConnected(f"{self._address} is closed")
        call, name = NearCall(timeout_s, on_item), method.name
        try:
            if name not in self._in_tasks:
                return self._handlers[name](request, call)  # type: ignore[no-any-return]
            async with asyncio.timeout(timeout_s):
                return await self._handlers[name](request, call)  # type: ignore[no-any-return]
        except TimeoutError:
            raise DeadlineExceeded(f"{name}: no answer within {timeout_s:.3f} s") from None
        except PolyphaseError:
            raise
        except Exception as unknown:
            log.error("handler failed", method=name, exc_info=unknown)
            raise PolyphaseError(f"{name} failed: {type(unknown).__name__}: {unknown}") from unknown

    def _receive(self, peer: Peer, frames: list[bytes]) -> None:
        envelopes, cause = None, "frame"
        if len(frames) == 1 and len(frames[0]) <= MAX_MESSAGE_BYTES:
            try:
                envelopes = unpack(frames[0], self._sockets.wire, "a caller")
            except MALFORMED:
                cause = "garbage"
            except WireVersionMismatch as error:
                cause = "wire_version"
                if not peer.refused:
                    peer.refused = True
                    log.warning("calls of a peer are refused", address=self._address, reason=error.message)
        if envelopes is None:
            self.dropped[cause] += 1
            # The message may have held calls, and their callers must not wait for them. A caller of an incompatible
            # version reads only the header of the answer, which says why.
            self._router.queue(peer, reset(ALL_CALLS))
            return
        for envelope in envelopes:
            self._accept(peer, envelope)

    def _accept(self, peer: Peer, envelope: Envelope) -> None:
        kind, number = envelope.kind, envelope.call
        if kind == Kind.CANCEL:
            if task := peer.calls.get(number):
                task.cancel()
            return
        if kind not in (Kind.CALL, Kind.NOTIFY) or number in peer.calls or self._closing:
            self.dropped["kind"] += 1
            return
        try:
            if kind == Kind.CALL:
                self._take_number(peer, number)
            request = self._decode(envelope)
            if len(peer.calls) + len(peer.notices) >= MAX_CALLS_A_PEER:
                self.dropped["too_many_calls"] += 1
                raise Busy(f"{MAX_CALLS_A_PEER} calls of this peer are under way")
        except PolyphaseError as error:
            self.dropped["request"] += isinstance(error, InvalidRequest)
            if kind == Kind.CALL:
                self._router.queue(peer, _error(number, error))
            return
        self._start(peer, envelope, request)

    def _take_number(self, peer: Peer, number: int) -> None:
        """Check the number of a call: callers count their calls, so that an old number means a repeated call."""
        if not peer.last_call < number <= _MAX_NUMBER:
            self.dropped["repeated"] += 1
            raise InvalidRequest(f"call {number} came after call {peer.last_call}: it is not carried out again")
        peer.last_call = number

    def _decode(self, envelope: Envelope) -> Any:
        decoder = self._decoders.get(envelope.method)
        if decoder is None:
            raise InvalidRequest(f"unknown method {envelope.method!r}")
        if not 0 < envelope.timeout_s <= _MAX_TIMEOUT_S:
            raise InvalidRequest(f"{envelope.method}: a timeout of {envelope.timeout_s} s")
        try:
            return decoder.decode(envelope.body)
        except MALFORMED as error:
            raise InvalidRequest(f"{envelope.method}: {error}") from error

    def _start(self, peer: Peer, envelope: Envelope, request: Any) -> None:
        number, is_call = envelope.call, envelope.kind == Kind.CALL
        call = ServerCall(self._router, peer, number, envelope.timeout_s)
        if envelope.method not in self._in_tasks:
            answer = self._answer(request, call, envelope)
            if is_call:
                self._router.queue(peer, answer)
            return
        task = self._loop.create_task(self._run(request, call, envelope, peer if is_call else None))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if is_call:
            peer.calls[number] = task
            task.add_done_callback(lambda _: peer.calls.pop(number))
        else:
            peer.notices.add(task)
            task.add_done_callback(peer.notices.discard)

    def _answer(self, request: Any, call: ServerCall, envelope: Envelope) -> Envelope:
        number, method = envelope.call, envelope.method
        try:
            return _reply(number, self._handlers[method](request, call))
        except PolyphaseError as known:
            return _error(number, known)
        except (Exception, asyncio.CancelledError) as unknown:  # the boundary of the process
            return _failure(number, method, unknown)

    async def _run(self, request: Any, call: ServerCall, envelope: Envelope, caller: Peer | None) -> None:
        number, method = envelope.call, envelope.method
        try:
            async with asyncio.timeout(envelope.timeout_s) as deadline:
                reply = await self._handlers[method](request, call)
            answer = _reply(number, reply)
        except PolyphaseError as known:
            answer = _error(number, known)
        except asyncio.CancelledError as cancelled:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            answer = _failure(number, method, cancelled)  # something else was cancelled, not the call
        except Exception as unknown:  # the boundary of the process
            if deadline.expired():
                answer = _error(number, DeadlineExceeded(f"{method}: {envelope.timeout_s:.3f} s are over"))
            else:
                answer = _failure(number, method, unknown)
        if caller is not None:
            self._router.queue(caller, answer)

    def _lost(self, peer: Peer) -> None:
        for task in peer.calls.values():
            task.cancel()
        if self._on_peer_gone is not None:
            self._loop.call_soon(self._on_peer_gone, peer.identity)


def _reply(number: int, reply: Any) -> Envelope:
    body = NO_BODY if reply is None else encode_body(reply)
    if len(body) > _MAX_ANSWER_BYTES:
        raise _too_large(body)
    return Envelope(Kind.REPLY, number, "", 0.0, body)


def _too_large(body: msgspec.Raw) -> PolyphaseError:
    """Refused here: libzmq would cut the connection, and with it all other calls."""
    return PolyphaseError(f"an answer of {len(body)} bytes is too large to send")


def _failure(number: int, method: str, error: BaseException) -> Envelope:
    log.error("handler failed", method=method, exc_info=error)
    return _error(number, PolyphaseError(f"{method} failed: {type(error).__name__}: {error}"))


def _error(number: int, error: PolyphaseError) -> Envelope:
    message = error.message[:_MAX_ERROR_CHARACTERS].encode(errors="replace").decode()
    return Envelope(Kind.ERROR, number, "", 0.0, encode_body(ErrorBody(error.code, message, error.retry_after_s)))
