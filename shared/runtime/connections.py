"""Limits on HTTP connections: the size of a request's head, a deadline for it, an idle time, and the number of open
connections.

A connection costs a descriptor before a key is read, so these limits also hold for clients without a key. When the
limit on the number is reached, the connection that has waited longest for a request is closed to make room: a client
that sends nothing cannot shut others out. While all connections are busy, new ones are refused with 503. `RESERVED`
more are still read then, so that health checks over new connections are answered; their other requests are refused.
"""

import asyncio
import json
import resource
from asyncio import Transport
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared.runtime.logs import get_log

log = get_log(__name__)
MAX_HEAD_BYTES = 64 << 10
_SLICE = 16 << 10
HEALTH = "/health"
PROBES = frozenset({HEALTH, "/ready", "/metrics"})  # answered beyond the limit; while draining only HEALTH
RESERVED = 32
_FILES = 256  # descriptors that a process keeps for everything but these connections
_RETRY_S = 2
# States of a connection: without any request yet, waiting for another request, with a request. The first two may be
# closed to make room, in this order.
_SILENT, _KEPT, _BUSY = range(3)

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class HeaderLimitProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol that answers 431 and hangs up after `MAX_HEAD_BYTES` of a request that are not its body:
    uvicorn's parser keeps all of them, without a limit of its own.

    For `uvicorn.Config(http=HeaderLimitProtocol)`. Bytes are counted, not parsed headers, because an endless header
    stays inside the parser. Trailers after a chunked body and empty lines between requests count, too.
    """

    transport: Transport
    _head_bytes = 0
    _refused = False

    def data_received(self, data: bytes) -> None:
        """Feed the parser in slices, so that the limit holds within one read of the socket, too."""
        for start in range(0, len(data), _SLICE):
            if self._refused:
                return
            piece = data[start : start + _SLICE]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self.transport.is_closing() or self.parser is None:
                return
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        self._refused = True
        if self.cycle is None or self.cycle.response_complete:  # else another answer is on its way: only hang up
            message = f"the request's line and headers are over the limit of {MAX_HEAD_BYTES} bytes"
            self._answer("431 Request Header Fields Too Large", "headers_too_large", message)
        self.transport.close()

    def _answer(self, status: str, code: str, message: str) -> None:
        """Write an error before the application sees a request."""
        number = int(status[:3])
        body = _error(number, code, message)
        retry = f"retry-after: {_RETRY_S}\r\n" if number == 503 else ""
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{retry}"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """head_s: from the opening of a connection, or the first byte of a later request, to the end of the head.

    idle_s: how long a connection is kept after an answer. most: open connections. most_an_address: open connections
    from one address, 0: no limit; it does not apply to addresses in `proxies`.
    """

    head_s: float = 10.0
    idle_s: float = 75.0
    most: int = 16384
    most_an_address: int = 0
    proxies: frozenset[str] = frozenset()


class Connections:
    """The open HTTP connections of one process."""

    def __init__(self, limits: ConnectionLimits) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = limits.most if files == resource.RLIM_INFINITY else max(1, files - min(_FILES, files // 2) - RESERVED)
        self.limits = limits
        self.most = min(limits.most, room)
        if self.most < limits.most:
            log.warning("fewer connections than set: the process may open too few files", most=self.most, files=files)
        self.draining = False
        self._addresses: Counter[str] = Counter()
        self._state: dict[BoundedProtocol, int] = {}
        # By state, in the order in which the connections entered it.
        self._in_state: tuple[dict[BoundedProtocol, None], ...] = ({}, {}, {})
        self._quiet = asyncio.Event()

    def __len__(self) -> int:
        return len(self._state)

    def add(self, connection: "BoundedProtocol", address: str) -> str:
        """Count a new connection. Returns why it is refused everything but health checks; empty: it is accepted."""
        refusal = ""
        most = self.limits.most_an_address if address not in self.limits.proxies else 0
        if most and self._addresses[address] >= most and not self._make_room(address):
            refusal = (
                f"{address} has {self._addresses[address]} connections in use; the limit for one address is {most}"
            )
        elif len(self._state) >= self.most and not self._make_room():
            refusal = f"all of the {self.most} connections that this server takes are in use"
        self._enter(connection, _SILENT)
        self._addresses[address] += 1
        return refusal

    @property
    def overfull(self) -> bool:
        """Whether the reserve is in use, too."""
        return len(self._state) > self.most + RESERVED

    def begin(self, connection: "BoundedProtocol") -> None:
        """Report that the connection has a request."""
        if connection in self._state:
            self._enter(connection, _BUSY)

    def rest(self, connection: "BoundedProtocol") -> None:
        """Report that its request is answered."""
        if connection in self._state:
            self._enter(connection, _KEPT)

    def remove(self, connection: "BoundedProtocol", address: str) -> None:
        """Report that it is closed, or about to be."""
        if connection not in self._state:
            return
        self._enter(connection, None)
        self._addresses[address] -= 1
        if not self._addresses[address]:
            del self._addresses[address]

    async def drain(self, seconds: float) -> None:
        """Refuse new requests and wait for the open ones, at most `seconds`."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                while self._in_state[_BUSY]:
                    self._quiet.clear()
                    await self._quiet.wait()
        except TimeoutError:
            log.warning(
                "requests are cut off: they did not end in time", requests=len(self._in_state[_BUSY]), seconds=seconds
            )

    def _enter(self, connection: "BoundedProtocol", state: int | None) -> None:
        """Give a connection another state; None: it is no longer counted."""
        before = self._state.pop(connection, None)
        if before is not None:
            del self._in_state[before][connection]
        if state is not None:
            self._state[connection] = state
            self._in_state[state][connection] = None
        if not self._in_state[_BUSY]:
            self._quiet.set()

    def _make_room(self, address: str = "") -> bool:
        for state in (_SILENT, _KEPT):
            for connection in self._in_state[state]:
                if not address or connection.address == address:
                    connection.hang_up()
                    return True
        return False


class BoundedProtocol(HeaderLimitProtocol):
    """uvicorn's HTTP protocol within the limits of a `Connections` (see `bounded`)."""

    _timer: asyncio.TimerHandle | None = None
    _idle = True  # it waits for a request
    _heading = False  # part of a head has come
    _refusal = ""
    address = ""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections
        self.timeout_keep_alive = cast(int, self._connections.limits.idle_s)  # uvicorn hands it to call_later

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._refusal = self._connections.add(self, self.address)
        if self._refusal and self._connections.overfull:
            self._answer("503 Service Unavailable", "unavailable", self._refusal)
            self.hang_up()
            return
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; bytes while no request is open begin a head or are ignored, and start its deadline."""
        super().data_received(data)
        if self._idle and self._timer is None and not self.transport.is_closing():
            self._arm()

    def on_message_begin(self) -> None:
        self._heading = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._disarm()
        self._heading = self._idle = False
        self._connections.begin(self)
        usual = self.app
        path = self.url.partition(b"?")[0].decode("latin-1")
        if self._connections.draining and path != HEALTH:
            self.app = refusing("this server is about to end and takes no new requests")
        elif self._refusal and path not in PROBES:
            self.app = refusing(self._refusal)
        try:
            super().on_headers_complete()
        finally:
            self.app = usual

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:  # no other request waits for its turn
            self._idle = True
            self._connections.rest(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._connections.remove(self, self.address)
        super().connection_lost(exc)

    def hang_up(self) -> None:
        """Close the connection while it waits for a request."""
        self._disarm()
        self._connections.remove(self, self.address)
        self.transport.close()

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self._connections.limits.head_s, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._heading:
            message = f"the request's line and headers did not come within {self._connections.limits.head_s:g} s"
            self._answer("408 Request Timeout", "head_too_slow", message)
        self.hang_up()


def bounded(protocol: type[BoundedProtocol], connections: Connections) -> type[asyncio.Protocol]:
    """`protocol` within these limits, for `uvicorn.Config(http=…)`."""

    def made(*args: Any, **kwargs: Any) -> BoundedProtocol:
        return protocol(*args, connections=connections, **kwargs)

    return cast(type[asyncio.Protocol], made)  # uvicorn only calls it


def refusing(message: str) -> Callable[..., Awaitable[None]]:
    """An application that answers 503 with Retry-After and has the connection closed."""
    body = _error(503, "unavailable", message)

    async def app(scope: Any, receive: Any, send: Send) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"%d" % _RETRY_S),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def _error(status: int, code: str, message: str) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
