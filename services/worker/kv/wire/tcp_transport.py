"""KV messages over TCP or TLS: one thread and one epoll serve the listener, the connections that it has accepted, and
the links of the importer. Payloads are received directly into their destination.

The thread that owns a transport waits on it and drains what is ready; other threads may call `wake`. Where a transport
is `shared`, its owner polls and handles what it found in two steps, and holds a lock of its own for the second: other
threads that hold that lock may send on links that are connected.
"""

import errno
import ipaddress
import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from itertools import count
from typing import Protocol

from services.worker.kv.wire.protocol import MAX_FRAME_BYTES, Buffer, Placement, Received
from services.worker.kv.wire.tcp_streams import (
    Connection,
    Inbound,
    Outbound,
    Untrusted,
    WireError,
    connection_of,
    keys_of,
)

_log = logging.getLogger(__name__)
_TICK_S = 0.05  # between two looks at what is due
_LINGER_S = 0.003  # a message that may wait for the next one to the same peer waits so long at most
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_UNANSWERED_MS = 30_000  # data that is not acknowledged by then: the peer's host is gone

# Of links:
_ATTEMPT_S = 2.0  # the longest that a connection may take to be made, keys included
_RETRY_S, _RETRY_MAX_S = 0.05, 0.5
_BEAT_S = 0.5  # a peer that is silent for so long is sent a heartbeat
_SILENCE_S = 3.0  # and counts as lost without an answer for so long: a thread there answers once it gets the GIL
_ACTIVE_S = 10.0  # after the last message; later no heartbeat is sent until the next one
_MAX_UNSENT = 1000  # messages for a peer that is not connected
_TLS_ALERT = 0x15  # the answer of a side that expects TLS to one that does not speak it

# Of listeners:
_GREETING_S = 5.0  # how long a peer may take to agree on keys and send its greeting
_STUCK_S = 30.0  # how long a peer may accept nothing of what waits for it
_MESSAGE_BURST = 64  # messages of one peer before the others get their turn
_CONNECTION_BURST = 64  # connections accepted before the existing ones get their turn
_MAX_UNREAD = 1024  # messages that wait for the server's thread: at this number, no peer is read
_MAX_WAITING = 1024  # messages that wait for a peer
_BACKLOG = 1024
_MAX_PEERS = 4096
_PAUSE_S = 0.5  # without accepting, when too many files are open
_LOG_S = 10.0  # between two log lines about peers with wrong keys

SocketAddress = tuple[int, tuple[object, ...]]  # family and address
Events = list[tuple[int, int]]  # of epoll: descriptors with flags
Place = Callable[["TcpLink", Buffer, int], Placement | None]  # see tcp_streams.PlacePayload; it raises nothing


class _Owner(Protocol):
    def on_event(self, now_mono: float, *, writable: bool) -> None:
        """The socket can be read, or written. `now_mono` is monotonic."""


class TcpTransport:
    """Each link is a connection of its own.

    `curve` is the cluster's key pair (public, secret; Z85): with it both sides prove that they have the pair, and
    all traffic is TLS. Not `encrypted`, which is for one host: they prove it in the first message, and the rest is
    plain.
    """

    shared = True  # whether other threads may send: see above

    def __init__(self, curve: tuple[str, str] | None = None, *, encrypted: bool = True) -> None:
        self.keys = keys_of(curve, encrypted=encrypted)
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[_Owner, int]] = {}  # by descriptor, with events
        self._links: set[TcpLink] = set()
        self._listeners: list[TcpListener] = []
        self._lookups: dict[tuple[str, int], list[TcpLink]] = {}  # names that are being resolved, and who waits
        self._resolved: deque[tuple[str, int, list[SocketAddress], str]] = deque()
        self._tick_mono = 0.0
        self._lingering: set[TcpLink] = set()  # links with messages that wait for a next one
        self._linger_mono = 0.0  # until when the first of them waits
        self._closed = False
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()  # a closed descriptor may be in use again
        self._epoll.register(self._wakes, _READ)

    def listen(self, address: str) -> "TcpListener":
        """Bind. Raises OSError when the address cannot be had."""
        listener = TcpListener(address, self)
        self._listeners.append(listener)
        return listener

    def connect(self, address: str, place: Place | None = None) -> "TcpLink":
        """A new link to an address, which need not be up yet. Raises OSError when the address is not valid."""
        if address.startswith("tcp://"):  # an instance of an earlier version
            raise OSError(f"{address}: KV over ZeroMQ was removed: the exporter must use `kv_transport: tcp`")
        link = TcpLink(address, self, place)
        self._links.add(link)
        return link

    def wait(self, timeout_s: float) -> list["TcpLink"]:
        """Wait until a listener or link has something to receive or `wake` is called; the links that have something."""
        return self.handle(self.poll(timeout_s))

    def poll(self, timeout_s: float) -> Events:
        """The first half of `wait`, which changes nothing."""
        if self.busy:
            timeout_s = 0.0
        elif self._lingering:
            timeout_s = min(timeout_s, self._linger_mono - time.monotonic())
        return self._epoll.poll(max(0.0, timeout_s))

    def handle(self, events: Events) -> list["TcpLink"]:
        """The second half of `wait`."""
        ready = {link for link in self._links if not link.drained}
        now_mono = time.monotonic()
        # An owner that another one has closed since the poll is gone; a descriptor is not watched again before a tick.
        for descriptor, watched, flags in [(each, self._watched.get(each), flags) for each, flags in events]:
            if descriptor == self._wakes:
                self._drain_wakes()
            elif watched is not None:
                owner, _ = watched
                owner.on_event(now_mono, writable=bool(flags & ~_READ))  # an error is found by the next write
                if isinstance(owner, TcpLink):
                    ready.add(owner)
        for listener in self._listeners:
            listener.read_more(now_mono)
        if self._lingering and now_mono >= self._linger_mono:
            self._end_lingering()
        if now_mono - self._tick_mono > _TICK_S:
            self._tick_mono = now_mono
            for link in list(self._links):
                link.tick(now_mono)
            for listener in self._listeners:
                listener.tick(now_mono)
        return list(ready)

    @property
    def busy(self) -> bool:
        """Whether there is data to handle for which no socket becomes readable."""
        for link in self._links:
            if not link.drained:
                return True
        return any(each.unread for each in self._listeners) if self._listeners else False

    def wake(self) -> None:
        """End the current or next wait. Any thread may call this."""
        with self._waking:
            if not self._closed:
                os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        self._end_lingering()
        for link in list(self._links):
            link.close()
        for listener in self._listeners:
            listener.close()
        with self._waking:
            self._closed = True
            os.close(self._wakes)
        self._epoll.close()

    def _end_lingering(self) -> None:
        for link in list(self._lingering):
            link.flush()

    # For links and listeners:

    def linger(self, link: "TcpLink", *, waits: bool) -> None:
        """The link has messages that wait for a next one, or none any more: it is to be flushed within `_LINGER_S`."""
        if not waits:
            self._lingering.discard(link)
            return
        if not self._lingering:
            self._linger_mono = time.monotonic() + _LINGER_S
        self._lingering.add(link)

    def watch(self, descriptor: int, owner: _Owner, *, writes: bool) -> None:
        """Call the owner when the socket can be read, or with `writes` also when it can be written."""
        events = _READ | _WRITE if writes else _READ
        known = self._watched.get(descriptor)
        if known == (owner, events):
            return
        if known is None:
            self._epoll.register(descriptor, events)
        else:
            self._epoll.modify(descriptor, events)
        self._watched[descriptor] = owner, events

    def unwatch(self, descriptor: int) -> None:
        """To be called before the socket is closed."""
        if self._watched.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def forget(self, link: "TcpLink") -> None:
        self._links.discard(link)
        self._lingering.discard(link)

    def look_up(self, host: str, port: int, link: "TcpLink") -> None:
        """Resolve a name in a thread of its own, so that a silent name server holds up only the links that need it, and
        call `link.connect_to` on the transport's thread.
        """
        waiting = self._lookups.setdefault((host, port), [])
        waiting.append(link)
        if len(waiting) == 1:
            threading.Thread(target=self._resolve, args=(host, port), name="kv-resolve", daemon=True).start()

    def _resolve(self, host: str, port: int) -> None:
        places: list[SocketAddress] = []
        try:
            places, error = resolve(host, port), ""
        except OSError as failure:
            error = f"{host}: {failure}"
        self._resolved.append((host, port, places, error))
        self.wake()

    def _drain_wakes(self) -> None:
        os.eventfd_read(self._wakes)
        while self._resolved:
            host, port, places, error = self._resolved.popleft()
            for link in self._lookups.pop((host, port)):
                link.connect_to(places, error)


class _State(Enum):
    DOWN = 0  # until `_retry_mono`
    RESOLVING = 1
    CONNECTING = 2
    SHAKING = 3  # agreeing on keys, and exchanging greetings
    UP = 4
    CLOSED = 5


class TcpLink:
    """Import side: a connection to an exporter, which is made, watched, and made again when it is lost."""

    carrier = "tcp"  # of the message that was received last: "tcp" or "nixl"

    def __init__(self, address: str, transport: TcpTransport, place: Place | None) -> None:
        """Raises OSError for an invalid address."""
        now_mono = time.monotonic()
        self.address = address
        self.losses = 0  # connections that were lost
        self.refusal = ""  # why the two sides do not trust each other; empty while no reason is known
        self.drained = True  # nothing more can be read before the socket becomes readable
        self._host, self._port = host_and_port(address)
        self._places = numeric(self._host, self._port)  # empty for a name
        self._attempts = 0
        self._transport = transport
        self._place = place
        self._state, self._since_mono = _State.DOWN, now_mono
        self._raw: socket.socket | None = None  # while it connects
        self._connection: Connection | None = None
        self._inbound = Inbound(MAX_FRAME_BYTES)
        self._outbound = Outbound()
        self._unsent: list[bytes] = []  # messages that wait for a connection
        self._lingering: list[bytes] = []  # messages that are sent behind the next one, or soon
        self._retry_mono, self._pause_s = now_mono, _RETRY_S
        self._now_mono = self._received_mono = self._active_mono = now_mono
        self._heartbeat_mono = math.inf  # since when an answer to a heartbeat is due
        TcpLink.tick(self, now_mono)

    @property
    def connected(self) -> bool:
        """Whether the present connection is made and the peer has sent its greeting."""
        return self._state is _State.UP

    def receive(self) -> Received | None:
        """The next message, or None when there is none at the moment."""
        self.drained = True
        if self._connection is None or self._state is not _State.UP:
            return None
        try:
            message = self._inbound.receive(self._connection)
        except (OSError, WireError, Untrusted) as error:
            self._lose(error)
            return None
        if message is not None:
            self.drained, self._active_mono = False, self._now_mono
        return message

    def keep(self) -> None:
        """The payload of the message that was received last must not be overwritten."""
        self._inbound.keep()

    def divert(self, owner: object) -> None:
        """Payloads on their way to memory that this owner placed are discarded; that memory is not written any more."""
        self._inbound.divert(owner)

    def send(self, message: bytes, *, lingers: bool = False) -> None:
        """Queue without blocking. While there is no connection, messages wait for the next one.

        One that `lingers` is sent behind the next message, in the same call, or after `_LINGER_S`: neither side wakes
        for it alone where messages are frequent.
        """
        self._active_mono = self._now_mono
        if self._state is not _State.UP:
            self._unsent.append(message)
            del self._unsent[:-_MAX_UNSENT]
        elif lingers:
            self._lingering.append(message)
            self._transport.linger(self, waits=True)
        else:
            self._outbound.put(message)
            self.flush()

    def flush(self) -> None:
        """Send also the messages that linger."""
        if self._lingering:
            for each in self._lingering:
                self._outbound.put(each)
            self._lingering.clear()
            self._transport.linger(self, waits=False)
        self._flush()

    def close(self) -> None:
        self._disconnect()
        self._state = _State.CLOSED
        self._transport.forget(self)

    def on_event(self, now_mono: float, *, writable: bool) -> None:
        """See _Owner; to be called before `receive`."""
        self._now_mono = self._received_mono = now_mono
        self._heartbeat_mono = math.inf
        self._inbound.readable = True
        try:
            if self._state is _State.CONNECTING:
                self._on_connected()
            if self._state is _State.SHAKING:
                self._shake()
            elif self._state is _State.UP and writable:
                self._flush()
        except (OSError, WireError, Untrusted) as error:
            self._lose(error)

    def tick(self, now_mono: float) -> None:
        """Do what is due; to be called some ten times a second, after `on_event`."""
        self._now_mono = now_mono
        if self._state is _State.DOWN:
            if now_mono >= self._retry_mono:
                self._begin()
        elif self._state is not _State.UP:
            if now_mono - self._since_mono > _ATTEMPT_S:
                self._lose(TimeoutError("no connection in time"))
        elif now_mono - self._heartbeat_mono > _SILENCE_S:
            self._lose(TimeoutError("the peer does not answer"))
        elif (
            self._heartbeat_mono == math.inf
            and now_mono - self._received_mono > _BEAT_S
            and now_mono - self._active_mono < _ACTIVE_S
        ):
            self._heartbeat_mono = now_mono
            if self._connection is not None:
                self._connection.expect(1)  # on a slow link, a few bytes are a sign of life too
            self._outbound.heartbeat()
            self._flush()

    def connect_to(self, places: list[SocketAddress], error: str = "") -> None:
        if self._state is not _State.RESOLVING:
            return
        if not places:
            self._lose(OSError(error))
            return
        family, address = places[self._attempts % len(places)]
        self._attempts += 1
        try:
            self._raw = _configured(socket.socket(family, socket.SOCK_STREAM))
            error_number = self._raw.connect_ex(address)
            if error_number not in (0, errno.EINPROGRESS):
                raise OSError(error_number, os.strerror(error_number))
        except OSError as failure:
            self._lose(failure)
            return
        self._enter(_State.CONNECTING)
        self._transport.watch(self._raw.fileno(), self, writes=True)

    def _begin(self) -> None:
        self._enter(_State.RESOLVING)
        if self._places:
            self.connect_to(self._places)
        else:  # a name is resolved for each attempt: an exporter may have moved
            self._transport.look_up(self._host, self._port, self)

    def _on_connected(self) -> None:
        raw = self._raw
        assert raw is not None
        if error := raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        self._transport.unwatch(raw.fileno())
        self._raw, self._connection = None, connection_of(raw, self._transport.keys, server=False)
        self._inbound, self._outbound = Inbound(MAX_FRAME_BYTES, self._place_payload), Outbound()
        self._outbound.heartbeat()
        self._enter(_State.SHAKING)
        self._transport.watch(self._connection.fileno(), self, writes=False)

    def _shake(self) -> None:
        connection = self._connection
        assert connection is not None
        if not connection.ready():
            return
        self._flush()
        if self._inbound.receive(connection) is not None:
            raise WireError("a message before a greeting")
        if not self._inbound.heartbeats:
            return
        self._enter(_State.UP)
        self.refusal, self._pause_s = "", _RETRY_S
        for each in self._unsent:
            self._outbound.put(each)
        self._unsent.clear()
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
        self._transport.watch(connection.fileno(), self, writes=not done)

    def _lose(self, error: Exception) -> None:
        """The connection is lost, or could not be made: another attempt follows."""
        if self._state is _State.UP:
            self.losses += 1
        elif isinstance(error, Untrusted):
            self.refusal = str(error)
        elif isinstance(error, WireError) and self._inbound.first_byte == _TLS_ALERT:
            self.refusal = "the peer requires keys, and this side has none"
        elif isinstance(error, ConnectionError) and self._state is _State.SHAKING:
            self.refusal = "the peer closes the connection before its greeting: does it have other keys?"
        self._disconnect()
        self._enter(_State.DOWN)
        self._retry_mono = self._now_mono + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY_MAX_S)

    def _disconnect(self) -> None:
        for each in (self._raw, self._connection):
            if each is not None:
                self._transport.unwatch(each.fileno())
                each.close()
        self._raw = self._connection = None
        self._outbound.clear()
        self._lingering.clear()
        self._transport.linger(self, waits=False)
        self.drained = True

    def _enter(self, state: _State) -> None:
        self._state, self._since_mono = state, self._now_mono


class TcpListener:
    """Export side: the connections of importers, each known by a number."""

    seals = True  # the transport sends a checksum behind each payload, so that frames need none

    def __init__(self, address: str, transport: TcpTransport) -> None:
        """Binds. Raises OSError."""
        scheme = address.partition("://")[0]
        host, port = host_and_port(address)
        family, where = (numeric(host, port) or resolve(host, port))[0]
        self._socket = socket.create_server(where, family=socket.AddressFamily(family), backlog=_BACKLOG)
        self._socket.setblocking(False)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{scheme}://{shown}:{self._socket.getsockname()[1]}"
        self.unread: set[TcpPeer] = set()  # peers with data that was read from the socket and not handled
        self.messages: deque[tuple[bytes, bytes]] = deque()  # sender and message
        self.transport = transport
        self._peers: dict[bytes, TcpPeer] = {}
        self._numbers = count()
        self._logged_mono = -_LOG_S
        self._paused_mono = 0.0  # since when no connection is accepted, or 0
        transport.watch(self._socket.fileno(), self, writes=False)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next message with its sender, or None when there is none at the moment."""
        return self.messages.popleft() if self.messages else None

    def sends_at_once(self, peer: bytes) -> bool:
        """Whether a payload for that peer would not wait behind others; true for a peer that is gone."""
        known = self._peers.get(peer)
        return known is None or not known.outbound

    def send(self, peer: bytes, header: bytes, payload: Buffer | None = None, digest: int | None = None) -> bool:
        """Send without blocking or copying the payload, which must not change later; False when the peer is gone.
        `digest` is its checksum, where that is known.
        """
        known = self._peers.get(peer)
        return known is not None and known.send(header, payload, digest)

    def has(self, peer: bytes) -> bool:
        return peer in self._peers

    def drop(self, peer: bytes, reason: str) -> None:
        if peer in self._peers:
            self._peers[peer].end(TimeoutError(reason))

    def on_event(self, now_mono: float, *, writable: bool) -> None:
        for _ in range(_CONNECTION_BURST):
            try:
                raw, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # too many files are open: connections wait, and the thread must not spin
                _log.warning("cannot accept connections: %s", error)
                self._paused_mono = now_mono
                self.transport.unwatch(self._socket.fileno())
                return
            self._accept(raw, now_mono)

    def _accept(self, raw: socket.socket, now_mono: float) -> None:
        if len(self._peers) >= _MAX_PEERS:
            raw.close()
            return
        try:
            connection = connection_of(_configured(raw), self.transport.keys, server=True)
        except OSError:  # gone already
            raw.close()
            return
        name = next(self._numbers).to_bytes(8, "big")
        peer = self._peers[name] = TcpPeer(name, connection, self, now_mono)
        peer.on_event(now_mono, writable=False)

    def read_more(self, now_mono: float) -> None:
        for peer in list(self.unread):
            peer.on_event(now_mono, writable=False)

    def tick(self, now_mono: float) -> None:
        for peer in list(self._peers.values()):
            if reason := peer.lateness(now_mono):
                peer.end(TimeoutError(reason))
        if self._paused_mono and now_mono - self._paused_mono > _PAUSE_S:
            self._paused_mono = 0.0
            self.transport.watch(self._socket.fileno(), self, writes=False)

    def remove(self, name: bytes, error: Exception) -> None:
        self._peers.pop(name, None)
        if isinstance(error, Untrusted) and time.monotonic() - self._logged_mono > _LOG_S:
            self._logged_mono = time.monotonic()
            _log.warning("wrong_keys: a peer does not hold this cluster's keys: %s", error)

    def close(self) -> None:
        self.transport.unwatch(self._socket.fileno())
        self._socket.close()
        for peer in list(self._peers.values()):
            peer.close()
        self._peers.clear()


class TcpPeer:
    """A connection of a listener: an importer, or any other client."""

    def __init__(self, name: bytes, connection: Connection, listener: TcpListener, now_mono: float) -> None:
        self.outbound = Outbound()
        self._name = name
        self._connection = connection
        self._listener = listener
        self._inbound = Inbound(max_payload_bytes=0)
        self._answered = 0  # heartbeats
        self._since_mono = now_mono
        self._stuck_mono = 0.0  # since when nothing was sent though something waits, or 0
        self._agreed = self._greeted = self._closed = False
        listener.transport.watch(connection.fileno(), self, writes=False)

    def lateness(self, now_mono: float) -> str:
        """Why the connection should be closed; empty: it should not."""
        if not self._greeted and now_mono - self._since_mono > _GREETING_S:
            return "no greeting in time"
        if not self.outbound:
            self._stuck_mono = 0.0
        elif not self._stuck_mono:
            self._stuck_mono = now_mono
        elif now_mono - self._stuck_mono > _STUCK_S:
            return "it accepts nothing"
        return ""

    def on_event(self, now_mono: float, *, writable: bool) -> None:
        if self._closed:
            return
        self._inbound.readable = True
        try:
            if not self._agreed:
                if not self._connection.ready():
                    return
                self._agreed = True
                self.outbound.heartbeat()  # the greeting
            self._read()
        except (OSError, WireError, Untrusted) as error:
            self.end(error)
            return
        if writable or self.outbound:
            self._stuck_mono = 0.0 if writable else self._stuck_mono
            self._flush()

    def send(self, header: bytes, payload: Buffer | None, digest: int | None) -> bool:
        if len(self.outbound) > _MAX_WAITING:
            self.end(TimeoutError("it accepts no answers"))
            return False
        self.outbound.put(header, payload, digest)
        return self._flush()

    def end(self, error: Exception) -> None:
        self.close()
        self._listener.remove(self._name, error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._listener.unread.discard(self)
        self._listener.transport.unwatch(self._connection.fileno())
        self._connection.close()
        self.outbound.clear()

    def _flush(self) -> bool:
        """Send what the socket accepts; False when the peer is gone."""
        try:
            done = self.outbound.flush(self._connection)
        except (OSError, Untrusted) as error:
            self.end(error)
            return False
        self._listener.transport.watch(self._connection.fileno(), self, writes=not done)
        return True

    def _read(self) -> None:
        unread, messages = self._listener.unread, self._listener.messages
        unread.add(self)
        for _ in range(_MESSAGE_BURST):
            if len(messages) >= _MAX_UNREAD:
                break
            message = self._inbound.receive(self._connection)
            if message is None:
                unread.discard(self)
                break
            messages.append((self._name, bytes(message.header)))
        self._greeted = self._greeted or self._inbound.heartbeats > 0
        for _ in range(self._inbound.heartbeats - self._answered):
            self.outbound.heartbeat()
        self._answered = self._inbound.heartbeats


def host_and_port(address: str) -> tuple[str, int]:
    """Of `scheme://host:port`; a port of `*` is 0. Raises OSError for another form."""
    _, found, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not found or not host or not (port == "*" or (port.isdecimal() and int(port) < 65536)):
        raise OSError(f"{address!r} is not an address of the form scheme://host:port")
    return host, 0 if port == "*" else int(port)


def numeric(host: str, port: int) -> list[SocketAddress]:
    """The socket address of a numeric host; empty for a name."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return []
    return [(socket.AF_INET, (host, port)) if version == 4 else (socket.AF_INET6, (host, port, 0, 0))]


def resolve(host: str, port: int) -> list[SocketAddress]:
    """The socket addresses of a host, IPv4 first. May take seconds. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty or overlong label
        raise OSError(f"{host!r} is not a valid host name: {error}") from error
    places: list[SocketAddress] = [(int(family), where) for family, _, _, _, where in found]
    return sorted(places, key=lambda place: place[0] != socket.AF_INET)


def _configured(raw: socket.socket) -> socket.socket:
    """Non-blocking, nothing held back, and the kernel notices peers that are gone."""
    raw.setblocking(False)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    return raw
