"""HTTP connections for plain streams: an event goes to the socket in one call, and only while the socket accepts it."""

from asyncio import TimerHandle
from collections.abc import Callable
from typing import Any, Protocol, cast

from shared.runtime.connections import BoundedProtocol

WRITE_TIMEOUT_S = 60.0
EXTENSION = "polyphase.body"  # the extension of a request's ASGI scope that holds its Body


class BodyWriter(Protocol):
    """Writes parts of a body past the application's wrappers around `send`."""

    @property
    def open(self) -> bool:
        """Whether the answer has begun, has not ended, and has its reader."""
        ...

    @property
    def full(self) -> bool:
        """Whether the reader is so slow that further parts would wait in memory."""
        ...

    def write(self, part: bytes) -> None: ...

    def on_room(self, callback: Callable[[], None]) -> None:
        """Call back each time that the body is `full` no longer."""
        ...


class Body:
    """The body of one answer, a BodyWriter over uvicorn's connection."""

    __slots__ = ("_cycle", "_disconnect_callback", "_flow", "_transport", "room_callback")

    def __init__(self, cycle: Any, flow: Any) -> None:
        self._cycle = cycle
        self._flow = flow
        self._transport = cycle.transport
        self.room_callback: Callable[[], None] | None = None
        self._disconnect_callback: Callable[[], object] | None = None

    @property
    def over(self) -> bool:
        return bool(self._cycle.response_complete or self._cycle.disconnected)

    @property
    def disconnected(self) -> bool:
        """Whether the client left before the end."""
        return bool(self._cycle.disconnected)

    @property
    def open(self) -> bool:
        cycle = self._cycle
        return bool(cycle.chunked_encoding and not cycle.response_complete and not cycle.disconnected)

    @property
    def full(self) -> bool:
        return bool(self._flow.write_paused)

    def write(self, part: bytes) -> None:
        """Write one chunk (RFC 9112, section 7.1), unless the client has left."""
        cycle = self._cycle
        if cycle.chunked_encoding and not cycle.response_complete and not cycle.disconnected:  # `open`, inlined
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    def on_room(self, callback: Callable[[], None]) -> None:
        self.room_callback = callback

    def on_disconnect(self, callback: Callable[[], object] | None) -> None:
        """Call back once when the client has left, at once if it has already; None cancels that."""
        self._disconnect_callback = callback
        self.check_disconnect()

    def check_disconnect(self) -> None:
        if self.disconnected and self._disconnect_callback is not None:
            callback, self._disconnect_callback = self._disconnect_callback, None
            callback()


class StreamProtocol(BoundedProtocol):
    """uvicorn's protocol, with a Body for each request as the extension EXTENSION of its scope.

    It aborts the connection of a client that reads nothing of its answer in `write_timeout_s`: the answer costs memory.
    """

    write_timeout_s = WRITE_TIMEOUT_S
    _write_timer: TimerHandle | None = None
    _unread_bytes = 0  # when the timer was set
    _bodies: tuple[Body, ...] = ()  # of requests whose answer is not complete

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:  # the application's task exists, and has not begun
            body = Body(self.cycle, self.flow)
            self._bodies = (*(each for each in self._bodies if not each.over), body)
            extensions = cast(dict[str, Any], self.cycle.scope).setdefault("extensions", {})
            extensions[EXTENSION] = body

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()  # the transport may still hold a part of the answer, and would keep it for ever

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        for body in self._bodies:
            if body.room_callback is not None:
                body.room_callback()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()
        bodies, self._bodies = self._bodies, ()
        for body in bodies:
            body.check_disconnect()

    def _watch(self) -> None:
        """Check after the write timeout whether the client has read some of the transport's buffer."""
        if self._write_timer is None and (size := self.transport.get_write_buffer_size()):
            self._unread_bytes = size
            self._write_timer = self.loop.call_later(self.write_timeout_s, self._check)

    def _check(self) -> None:
        self._write_timer = None
        size = self.transport.get_write_buffer_size()
        if size and size >= self._unread_bytes:
            self.transport.abort()
        elif self.flow.write_paused or self.cycle is None or self.cycle.response_complete:
            self._watch()

    def _stop_watching(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def stream_protocol(write_timeout_s: float) -> type[StreamProtocol]:
    """The protocol with that timeout."""
    return type("StreamProtocol", (StreamProtocol,), {"write_timeout_s": write_timeout_s})
