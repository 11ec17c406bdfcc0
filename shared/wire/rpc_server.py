"""The serving side of a call: run the handler, send items and reply, cancel when the caller says so or is gone."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import zmq

from shared.errors import DeadlineExceeded, InvalidRequest, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.envelope import NO_BODY, Envelope, ErrorBody, Kind, encode_body, pack, unpack
from shared.wire.methods import Method
from shared.wire.sockets import LoopSocket, Sockets

log = get_log(__name__)
Request = TypeVar("Request")
MAX_MESSAGE_BYTES = 16 << 20
MAX_CALLS_A_PEER = 10_000


class ServerCall:
    """A call under way. `send` puts an item on its way to the caller; items keep their order."""

    def __init__(self, server: "RpcServer", peer: bytes, number: int, timeout_s: float) -> None:
        self._server = server
        self.peer = peer
        self._number = number
        self.timeout_s = timeout_s

    def send(self, item: object) -> None:
        """Queue one item; all items of one turn of the loop leave in one message."""
        self._server._queue(self.peer, Envelope(Kind.ITEM, self._number, "", 0.0, encode_body(item)))


Handler = Callable[[Any, ServerCall], Awaitable[Any]]
Handlers = Mapping[Method[Any, Any, Any], Handler]


class RpcServer:
    """One ROUTER socket and the methods behind it. Use as an async context manager.

    Bad input never reaches a handler: it is dropped and counted in `dropped` by cause.
    """

    def __init__(
        self, sockets: Sockets, address: str, handlers: Handlers, on_peer_gone: Callable[[bytes], None] | None = None
    ) -> None:
        self._on_peer_gone = on_peer_gone
        self._sockets = sockets
        self._address = address
        self._handlers = {method.name: (method, handler) for method, handler in handlers.items()}
        self._decoders = {method.name: msgspec.msgpack.Decoder(method.request) for method in handlers}
        self._calls: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._by_peer: Counter[bytes] = Counter()
        self._outgoing: dict[bytes, list[Envelope]] = defaultdict(list)
        self.dropped: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._socket = self._open()
        return self

    def _open(self) -> LoopSocket:
        socket = self._sockets.bind(zmq.ROUTER, self._address)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return LoopSocket(socket, self._receive)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._calls.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._flush()
        self._socket.close()

    @property
    def calls(self) -> int:
        """Calls under way."""
        return len(self._calls)

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) != 2 or len(frames[1]) > MAX_MESSAGE_BYTES:
            self.dropped["frame"] += 1
            return
        peer, frame = frames
        try:
            envelopes = unpack(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.dropped["garbage"] += 1
            return
        for envelope in envelopes:
            self._accept(peer, envelope)

    def _accept(self, peer: bytes, envelope: Envelope) -> None:
        if envelope.kind == Kind.CANCEL:
            if task := self._calls.get((peer, envelope.call)):
                task.cancel()
            return
        if envelope.kind not in (Kind.CALL, Kind.NOTIFY) or (peer, envelope.call) in self._calls:
            self.dropped["kind"] += 1
            return
        if self._by_peer[peer] >= MAX_CALLS_A_PEER:
            self.dropped["too_many_calls"] += 1
            return
        try:
            request = self._decode(envelope)
        except PolyphaseError as error:
            self.dropped["request"] += 1
            if envelope.kind == Kind.CALL:
                self._queue_error(peer, envelope.call, error)
            return
        self._start(peer, envelope, request)

    def _decode(self, envelope: Envelope) -> Any:
        decoder = self._decoders.get(envelope.method)
        if decoder is None:
            raise InvalidRequest(f"unknown method {envelope.method!r}")
        try:
            return decoder.decode(envelope.body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{envelope.method}: {error}") from error

    def _start(self, peer: bytes, envelope: Envelope, request: Any) -> None:
        _, handler = self._handlers[envelope.method]
        call = ServerCall(self, peer, envelope.call, envelope.timeout_s)
        key = (peer, envelope.call)
        if envelope.kind == Kind.NOTIFY:
            key = (peer, -1 - len(self._calls))
            while key in self._calls:
                key = (peer, key[1] - 1)
        task = self._loop.create_task(self._run(handler, request, call, envelope))
        self._calls[key] = task
        self._by_peer[peer] += 1
        task.add_done_callback(lambda _: self._ended(key))

    def _ended(self, key: tuple[bytes, int]) -> None:
        self._calls.pop(key, None)
        self._by_peer[key[0]] -= 1
        if not self._by_peer[key[0]]:
            del self._by_peer[key[0]]

    async def _run(self, handler: Handler, request: Any, call: ServerCall, envelope: Envelope) -> None:
        peer, number, answer = call.peer, envelope.call, envelope.kind == Kind.CALL
        try:
            async with asyncio.timeout(envelope.timeout_s or None):
                reply = await handler(request, call)
        except TimeoutError:
            error: PolyphaseError = DeadlineExceeded(f"{envelope.method}: {envelope.timeout_s:.3f} s are over")
        except PolyphaseError as known:
            error = known
        except Exception as unknown:  # the boundary of the process: nothing a handler raises may vanish
            log.error("handler failed", method=envelope.method, exc_info=unknown)
            error = PolyphaseError(f"{envelope.method} failed: {type(unknown).__name__}: {unknown}")
        else:
            if answer:
                body = NO_BODY if reply is None else encode_body(reply)
                self._queue(peer, Envelope(Kind.REPLY, number, "", 0.0, body))
            return
        if answer:
            self._queue_error(peer, number, error)

    def _queue_error(self, peer: bytes, number: int, error: PolyphaseError) -> None:
        body = encode_body(ErrorBody(error.code, error.message))
        self._queue(peer, Envelope(Kind.ERROR, number, "", 0.0, body))

    def _queue(self, peer: bytes, envelope: Envelope) -> None:
        if not self._outgoing:
            # One turn later: a handler that was woken by its last item gets to add its reply.
            self._loop.call_soon(self._loop.call_soon, self._flush)
        self._outgoing[peer].append(envelope)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, defaultdict(list)
        for peer, envelopes in outgoing.items():
            try:
                self._socket.send([peer, pack(envelopes)])
            except zmq.ZMQError as error:  # gone (EHOSTUNREACH) or not reading (EAGAIN): its calls are pointless
                self.dropped["peer_gone" if error.errno == zmq.EHOSTUNREACH else "peer_slow"] += 1
                self._cancel_peer(peer)

    def _cancel_peer(self, peer: bytes) -> None:
        for (owner, _), task in list(self._calls.items()):
            if owner == peer:
                task.cancel()
        if self._on_peer_gone is not None:
            self._on_peer_gone(peer)
