"""The serving side of a call: run the handler, send items and reply, cancel when the caller says so or is gone.

Who frees what. A caller that is gone, or given up as too slow, is told of by `on_peer_gone`; what calls of that peer
left behind here is the handlers' to free then. A caller that lives may still never see a reply: one that crosses its
cancellation or deadline is dropped where it arrives. So what a call leaves behind goes by a name of the caller's
choosing, and the caller frees it whenever a call ends without its reply.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from shared.errors import Busy, DeadlineExceeded, InvalidRequest, PolyphaseError, WireVersionMismatch
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
    reset,
    unpack,
)
from shared.wire.methods import Method
from shared.wire.router import Peer, Router
from shared.wire.sockets import MAX_FRAME_BYTES, Sockets

log = get_log(__name__)
Request = TypeVar("Request")
MAX_CALLS_A_PEER = 10_000
_MAX_NUMBER = 1 << 53
_MAX_TIMEOUT_S = 7 * 86_400.0
_MAX_ANSWER_BYTES = MAX_FRAME_BYTES - 1024
_MAX_ERROR_CHARACTERS = 4_000


class ServerCall:
    """A call under way. `send` puts an item on its way to the caller; items keep their order.

    `peer` names the connection that it came by, for as long as that lasts.
    """

    def __init__(self, router: Router, peer: Peer, number: int, timeout_s: float) -> None:
        self._router = router
        self._peer = peer
        self._number = number
        self.timeout_s = timeout_s
        self.peer = peer.identity

    def send(self, item: object) -> None:
        """Queue one item; all items of one turn of the loop leave in one message."""
        body = encode_body(item)
        if len(body) > _MAX_ANSWER_BYTES:
            raise _too_large(body)
        self._router.queue(self._peer, Envelope(ITEM, self._number, "", 0.0, body))


Handler = Callable[[Any, ServerCall], Any]  # a coroutine function, or a plain one that gives the reply
Handlers = Mapping[Method[Any, Any, Any], Handler]


class RpcServer:
    """One ROUTER socket and the methods behind it. Use as an async context manager.

    A handler that never waits is a plain function, and answers where its call is read, without a task.
    Bad input never reaches a handler: it is dropped and counted in `dropped` by cause. `on_peer_gone(peer)` is called
    when a peer's connection is lost (at once where the kernel knows, else by heartbeat), or when it is given up because
    it does not read what is due to it. Its calls have been cancelled by then; their clean-up may still run.
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
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._router.flush()
        self._router.close()

    @property
    def calls(self) -> int:
        """Calls under way."""
        return len(self._tasks)

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
            # There may have been calls in it, and nobody shall wait for them. A caller of an incompatible version reads
            # no more of this than the header, which says why.
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
        """A caller counts its calls, so that one whose number is not new is an old one that came again."""
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
        """What a plain function says."""
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
            answer = _failure(number, method, cancelled)  # something that it waited for, not the call
        except Exception as unknown:  # the boundary of the process: nothing a handler raises may vanish
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
    """Libzmq would cut the connection, and with it all other calls."""
    return PolyphaseError(f"an answer of {len(body)} bytes is too large to send")


def _failure(number: int, method: str, error: BaseException) -> Envelope:
    log.error("handler failed", method=method, exc_info=error)
    return _error(number, PolyphaseError(f"{method} failed: {type(error).__name__}: {error}"))


def _error(number: int, error: PolyphaseError) -> Envelope:
    message = error.message[:_MAX_ERROR_CHARACTERS].encode(errors="replace").decode()
    return Envelope(Kind.ERROR, number, "", 0.0, encode_body(ErrorBody(error.code, message, error.retry_after_s)))
