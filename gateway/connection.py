"""HTTP connections as plain streams need them: an event goes to the socket in one call, and only where it takes it."""

from asyncio import TimerHandle
from collections.abc import Callable
from typing import Any, Protocol, cast

from shared.runtime.connections import BoundedProtocol

WRITE_TIMEOUT_S = 60.0
EXTENSION = "polyphase.body"  # of a request's ASGI scope: its Body


class BodyWriter(Protocol):
    """Writes parts of a body past the application's wrappers around `send`."""

    @property
    def open(self) -> bool:
        """Whether the answer has begun and has not ended."""
        ...

    @property
    def full(self) -> bool:
        """Whether the reader is so slow that what is written would wait in memory."""
        ...

    def write(self, part: bytes) -> None:
        """Send that much of the body. Only while `open`."""
        ...

    def on_room(self, told: Callable[[], None]) -> None:
        """Call back whenever it is `full` no longer."""
        ...


class Body:
    """Of one answer, a BodyWriter over uvicorn's connection."""

    __slots__ = ("_cycle", "_flow", "_left", "_transport", "room")

    def __init__(self, cycle: Any, flow: Any) -> None:
        self._cycle = cycle
        self._flow = flow
        self._transport = cycle.transport
        self.room: Callable[[], None] | None = None
        self._left: Callable[[], object] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more is to come of it."""
        return bool(self._cycle.response_complete or self._cycle.disconnected)

    @property
    def gone(self) -> bool:
        """Whether its reader has left before the end."""
        return bool(self._cycle.disconnected)

    @property
    def open(self) -> bool:
        """Whether the answer has begun, in chunks, and has neither ended nor lost its reader."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding and not cycle.response_complete and not cycle.disconnected)

    @property
    def full(self) -> bool:
        """Whether the transport's buffer is over its mark."""
        return bool(self._flow.write_paused)

    def write(self, part: bytes) -> None:
        """One chunk (RFC 9112, section 7.1). Nothing where nobody reads any more."""
        cycle = self._cycle
        if cycle.chunked_encoding and not cycle.response_complete and not cycle.disconnected:  # as `open`, for less
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    def on_room(self, told: Callable[[], None]) -> None:
        """Call back when the buffer has drained."""
        self.room = told

    def on_gone(self, told: Callable[[], object] | None) -> None:
        """Call back once when its reader has left, at once if it has; None: no more."""
        self._left = told
        self.left()

    def left(self) -> None:
        """The connection may be lost."""
        if self.gone and self._left is not None:
            told, self._left = self._left, None
            told()


class StreamProtocol(BoundedProtocol):
    """uvicorn's protocol that gives each request a Body as the extension EXTENSION of its scope.

    A client that takes nothing of what waits for it in `write_timeout_s` is hung up on: its answer costs memory.
    """

    write_timeout_s = WRITE_TIMEOUT_S
    _write_timer: TimerHandle | None = None
    _unread_bytes = 0  # when the timer was set
    _bodies: tuple[Body, ...] = ()  # of requests that have not got all of their answer

    def on_headers_complete(self) -> None:
        """The application's task is made, and has not begun."""
        super().on_headers_complete()
        if self.cycle is not None:
            body = Body(self.cycle, self.flow)
            self._bodies = (*(each for each in self._bodies if not each.over), body)
            extensions = cast(dict[str, Any], self.cycle.scope).setdefault("extensions", {})
            extensions[EXTENSION] = body

    def pause_writing(self) -> None:
        """The transport's buffer is over its mark."""
        super().pause_writing()
        self._watch()

    def on_response_complete(self) -> None:
        """All of an answer was written; the transport may have some of it still, and would keep it for ever."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Look again in a while whether the client has taken some of what is in the buffer."""
        if self._write_timer is None and (size := self.transport.get_write_buffer_size()):
            self._unread_bytes = size
            self._write_timer = self.loop.call_later(self.write_timeout_s, self._look)

    def _look(self) -> None:
        self._write_timer = None
        size = self.transport.get_write_buffer_size()
        if size and size >= self._unread_bytes:
            self.transport.abort()
        elif self.flow.write_paused or self.cycle is None or self.cycle.response_complete:
            self._watch()

    def resume_writing(self) -> None:
        """The transport's buffer has drained."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        for body in self._bodies:
            if body.room is not None:
                body.room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody reads any more."""
        super().connection_lost(exc)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        bodies, self._bodies = self._bodies, ()
        for body in bodies:
            body.left()


def giving_up_after(write_timeout_s: float) -> type[StreamProtocol]:
    """The protocol with that time."""
    return type("StreamProtocol", (StreamProtocol,), {"write_timeout_s": write_timeout_s})
