"""An importer's connection to an exporter over TCP: it is made, watched, and made again when it is lost."""

import errno
import math
import os
import socket
from enum import Enum
from typing import Protocol

from services.worker.kv.wire.protocol import MAX_FRAME_BYTES, Buffer, Place, Placement, Received
from services.worker.kv.wire.tcp_framing import Inbound, Outbound, WireError
from services.worker.kv.wire.tcp_streams import (
    Connection,
    Keys,
    OnResolved,
    Untrusted,
    Where,
    connection_of,
    host_and_port,
    numeric,
    prepared,
)

_ATTEMPT_S = 2.0  # the longest that a connection may take to be made, keys included
_RETRY_S, _RETRY_MAX_S = 0.05, 0.5
_BEAT_S = 0.5  # a peer that is silent for so long is sent a heartbeat
_SILENCE_S = 3.0  # and counts as lost without an answer for so long: a thread there answers once it gets the GIL
_ACTIVE_S = 10.0  # after the last message; later no heartbeat is sent until the next one
_MAX_WAITING = 1000  # messages for a peer that is not connected
_TLS_ALERT = 0x15  # the answer of a side that expects TLS to one that does not speak it


class Source(Protocol):
    def fileno(self) -> int:
        """The socket's descriptor."""


class Owner(Protocol):
    """An object that handles the events of a socket."""

    def happened(self, now_s: float, *, writable: bool) -> None:
        """The socket can be read, or written. `now_s` is monotonic."""


class Loop(Protocol):
    """The part of the transport that a link uses."""

    def watch(self, source: Source, owner: Owner, *, writes: bool) -> None:
        """Call the owner when the socket can be read, or with `writes` also when it can be written; replaces an
        earlier call.
        """

    def unwatch(self, source: Source) -> None:
        pass

    def look_up(self, host: str, port: int, on_resolved: OnResolved) -> None:
        """Resolve a name; `on_resolved` is called on the transport's thread."""

    def forget(self, link: "TcpLink") -> None:
        pass


class _State(Enum):
    DOWN = 0  # until `_retry_s`
    RESOLVING = 1
    CONNECTING = 2
    SHAKING = 3  # agreeing on keys, and exchanging greetings
    UP = 4
    CLOSED = 5


class TcpLink:
    """A link over TCP. The transport's thread calls all methods."""

    carrier = "tcp"

    def __init__(self, address: str, loop: Loop, keys: Keys, place: Place | None, now_s: float) -> None:
        """Raises OSError for an invalid address."""
        self.address = address
        self.losses = 0
        self.refusal = ""
        self.drained = True  # nothing more can be read before the socket becomes readable
        self._host, self._port = host_and_port(address)
        self._places = numeric(self._host, self._port)
        self._named = not self._places
        self._attempts = 0
        self._loop = loop
        self._keys = keys
        self._place = place
        self._state, self._since_s = _State.DOWN, now_s
        self._raw: socket.socket | None = None  # while it connects
        self._connection: Connection | None = None
        self._inbound = Inbound(MAX_FRAME_BYTES)
        self._outbound = Outbound()
        self._waiting: list[bytes] = []
        self._retry_s, self._pause_s = now_s, _RETRY_S
        self._now_s = self._received_s = self._active_s = now_s
        self._heartbeat_s = math.inf  # since when an answer to a heartbeat is due
        self.tick(now_s)

    @property
    def connected(self) -> bool:
        return self._state is _State.UP

    def receive(self) -> Received | None:
        self.drained = True
        if self._connection is None or self._state is not _State.UP:
            return None
        try:
            message = self._inbound.receive(self._connection)
        except (OSError, WireError, Untrusted) as error:
            self._lose(error)
            return None
        if message is not None:
            self.drained, self._active_s = False, self._now_s
        return message

    def keep(self) -> None:
        self._inbound.keep()

    def divert(self, owner: object) -> None:
        self._inbound.divert(owner)

    def send(self, message: bytes) -> bool:
        """While there is no connection, messages wait for the next one."""
        self._active_s = self._now_s
        if self._state is _State.UP:
            self._outbound.put(message)
            self._flush()
            return True
        self._waiting.append(message)
        del self._waiting[:-_MAX_WAITING]
        return True

    def close(self) -> None:
        self._disconnect()
        self._state = _State.CLOSED
        self._loop.forget(self)

    def happened(self, now_s: float, *, writable: bool) -> None:
        """The socket can be read, or written; to be called before `receive`."""
        self._now_s = self._received_s = now_s
        self._heartbeat_s = math.inf
        self._inbound.readable = True
        try:
            if self._state is _State.CONNECTING:
                self._connected()
            if self._state is _State.SHAKING:
                self._shake()
            elif self._state is _State.UP and writable:
                self._flush()
        except (OSError, WireError, Untrusted) as error:
            self._lose(error)

    def tick(self, now_s: float) -> None:
        """Do what is due; to be called some ten times a second, after `happened`."""
        self._now_s = now_s
        if self._state is _State.DOWN:
            if now_s >= self._retry_s:
                self._begin()
        elif self._state is not _State.UP:
            if now_s - self._since_s > _ATTEMPT_S:
                self._lose(TimeoutError("no connection in time"))
        elif now_s - self._heartbeat_s > _SILENCE_S:
            self._lose(TimeoutError("the peer does not answer"))
        elif (
            self._heartbeat_s == math.inf and now_s - self._received_s > _BEAT_S and now_s - self._active_s < _ACTIVE_S
        ):
            self._heartbeat_s = now_s
            if self._connection is not None:
                self._connection.expect(1)  # on a slow link, a few bytes are a sign of life too
            self._outbound.heartbeat()
            self._flush()

    def _begin(self) -> None:
        if self._named:  # for each attempt: an exporter may have moved
            self._enter(_State.RESOLVING)
            self._loop.look_up(self._host, self._port, self._resolved)
        else:
            self._connect(self._places[0])

    def _resolved(self, places: list[Where], error: str) -> None:
        if self._state is not _State.RESOLVING:
            return
        if not places:
            self._lose(OSError(error))
        else:
            self._connect(places[self._attempts % len(places)])

    def _connect(self, where: Where) -> None:
        family, address = where
        self._attempts += 1
        try:
            self._raw = prepared(socket.socket(family, socket.SOCK_STREAM))
            error_number = self._raw.connect_ex(address)
            if error_number not in (0, errno.EINPROGRESS):
                raise OSError(error_number, os.strerror(error_number))
        except OSError as error:
            self._lose(error)
            return
        self._enter(_State.CONNECTING)
        self._loop.watch(self._raw, self, writes=True)

    def _connected(self) -> None:
        raw = self._raw
        assert raw is not None
        if error := raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        self._loop.unwatch(raw)
        self._raw, self._connection = None, connection_of(raw, self._keys, server=False)
        self._inbound, self._outbound = Inbound(MAX_FRAME_BYTES, self._place_payload), Outbound()
        self._outbound.heartbeat()
        self._enter(_State.SHAKING)
        self._loop.watch(self._connection, self, writes=False)

    def _shake(self) -> None:
        """Agree on keys, send the greeting, and wait for the peer's."""
        connection = self._connection
        assert connection is not None
        if not connection.ready():
            return
        self._flush()
        message = self._inbound.receive(connection)
        if message is not None or not self._inbound.heartbeats:
            if message is not None:
                raise WireError("a message before a greeting")
            return
        self._enter(_State.UP)
        self.refusal, self._pause_s = "", _RETRY_S
        for each in self._waiting:
            self._outbound.put(each)
        self._waiting.clear()
        self._flush()

    def _place_payload(self, header: Buffer, size_bytes: int) -> Placement | None:
        return self._place(self, header, size_bytes) if self._place is not None else None

    def _flush(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            done = self._outbound.flush(connection)
        except (OSError, Untrusted) as error:
            self._lose(error)
            return
        self._loop.watch(connection, self, writes=not done)

    def _lose(self, error: Exception) -> None:
        """The connection is lost, or could not be made: another attempt follows."""
        if self._state is _State.UP:
            self.losses += 1
        elif isinstance(error, Untrusted):
            self.refusal = str(error)
        elif isinstance(error, WireError) and self._inbound.first == _TLS_ALERT:
            self.refusal = "the peer requires keys, and this side has none"
        elif isinstance(error, ConnectionError) and self._state is _State.SHAKING:
            self.refusal = "the peer closes the connection before its greeting: does it have other keys?"
        self._disconnect()
        self._enter(_State.DOWN)
        self._retry_s = self._now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY_MAX_S)

    def _disconnect(self) -> None:
        for each in (self._raw, self._connection):
            if each is not None:
                self._loop.unwatch(each)
                each.close()
        self._raw = self._connection = None
        self._outbound.clear()
        self.drained = True

    def _enter(self, state: _State) -> None:
        self._state, self._since_s = state, self._now_s
