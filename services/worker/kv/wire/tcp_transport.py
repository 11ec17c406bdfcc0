"""KV messages over TCP or TLS: one thread and one epoll serve the listener, the connections that it has accepted, and
the links of the importer. Payloads are received directly into their destination.
"""

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count

from services.worker.kv.wire.protocol import Buffer, Link, Place
from services.worker.kv.wire.tcp_framing import Inbound, Outbound, WireError
from services.worker.kv.wire.tcp_link import Loop, Owner, Source, TcpLink
from services.worker.kv.wire.tcp_streams import (
    Connection,
    Keys,
    OnResolved,
    Resolver,
    Untrusted,
    connection_of,
    host_and_port,
    keys_of,
    numeric,
    prepared,
    resolve,
)

_log = logging.getLogger(__name__)
_TICK_S = 0.05  # between two looks at what is due
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_GREETING_S = 5.0  # how long a peer may take to agree on keys and send its greeting
_STUCK_S = 30.0  # how long a peer may accept nothing of what waits for it
_MESSAGE_BURST = 64  # messages of one peer before the others get their turn
_MAX_UNREAD = 1024  # messages that wait for the server's thread: at this number, no peer is read
_MAX_WAITING = 1024  # messages that wait for a peer

Messages = deque[tuple[bytes, list[bytes]]]  # sender and parts
_BACKLOG = 1024
_MAX_PEERS = 4096
_PAUSE_S = 0.5  # without accepting, when too many files are open
_LOG_S = 10.0  # between two log lines about peers with wrong keys
_CONNECTION_BURST = 64  # connections accepted before the existing ones get their turn


class TcpTransport:
    """Each link is a connection of its own.

    `curve` is the cluster's key pair (public, secret; Z85): with it both sides prove that they have the pair, and
    all traffic is TLS. Not `encrypted`, which is for one host: they prove it in the first message, and the rest is
    plain.
    """

    def __init__(self, curve: tuple[str, str] | None = None, *, encrypted: bool = True) -> None:
        """Raises ValueError for an invalid pair."""
        self._keys = keys_of(curve, encrypted=encrypted)
        self._epoll = select.epoll()
        self._owners: dict[int, Owner] = {}  # by descriptor
        self._watched: dict[Source, tuple[int, int]] = {}  # descriptor and events
        self._links: set[TcpLink] = set()
        self._listeners: list[TcpListener] = []
        self._resolved: deque[Callable[[], None]] = deque()
        self._resolver = Resolver(self._tell)
        self._tick_s = 0.0
        self._closed = False
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()  # a closed descriptor may be in use again
        self._epoll.register(self._wakes, _READ)

    def listen(self, address: str) -> "TcpListener":
        listener = TcpListener(address, self, self._keys)
        self._listeners.append(listener)
        return listener

    def connect(self, address: str, place: Place | None = None) -> TcpLink:
        if address.startswith("tcp://"):  # an instance of an earlier version
            raise OSError(f"{address}: KV over ZeroMQ was removed: the exporter must use `kv_transport: tcp`")
        link = TcpLink(address, self, self._keys, place, time.monotonic())
        self._links.add(link)
        return link

    def wait(self, timeout_s: float) -> list[Link]:
        ready: dict[int, Link] = {id(link): link for link in self._links if not link.drained}
        happened = self._epoll.poll(0.0 if self.busy else max(0.0, timeout_s))
        now_s = time.monotonic()
        for owner, events in [(self._owners.get(descriptor), events) for descriptor, events in happened]:
            if owner is None:
                self._drain_wakes()
                continue
            owner.happened(now_s, writable=bool(events & ~_READ))  # an error is found by the next write
            if isinstance(owner, TcpLink):
                ready[id(owner)] = owner
        for listener in self._listeners:
            listener.go_on(now_s)
        if now_s - self._tick_s > _TICK_S:
            self._tick(now_s)
        return list(ready.values())

    @property
    def busy(self) -> bool:
        """Whether there is data to handle for which no socket becomes readable."""
        return any(not link.drained for link in self._links) or any(each.busy for each in self._listeners)

    def fileno(self) -> int:
        """Readable when a socket has something, or after `wake`."""
        return self._epoll.fileno()

    def wake(self) -> None:
        with self._waking:
            if not self._closed:
                os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        for link in list(self._links):
            link.close()
        for listener in self._listeners:
            listener.close()
        with self._waking:
            self._closed = True
            os.close(self._wakes)
        self._epoll.close()

    def watch(self, source: Source, owner: Owner, *, writes: bool) -> None:
        events = _READ | _WRITE if writes else _READ
        known = self._watched.get(source)
        if known is None:
            descriptor = source.fileno()
            self._epoll.register(descriptor, events)
            self._owners[descriptor] = owner
        else:
            descriptor, before = known
            if before == events:
                return
            self._epoll.modify(descriptor, events)
        self._watched[source] = descriptor, events

    def unwatch(self, source: Source) -> None:
        known = self._watched.pop(source, None)
        if known is not None:
            self._epoll.unregister(known[0])
            del self._owners[known[0]]

    def look_up(self, host: str, port: int, on_resolved: OnResolved) -> None:
        self._resolver.look_up(host, port, on_resolved)

    def forget(self, link: TcpLink) -> None:
        self._links.discard(link)

    def _tell(self, what: Callable[[], None]) -> None:
        self._resolved.append(what)
        self.wake()

    def _drain_wakes(self) -> None:
        os.eventfd_read(self._wakes)
        while self._resolved:
            self._resolved.popleft()()

    def _tick(self, now_s: float) -> None:
        self._tick_s = now_s
        for link in list(self._links):
            link.tick(now_s)
        for listener in self._listeners:
            listener.tick(now_s)


class TcpListener:
    """The connections of an exporter's listener. The transport's thread calls all methods."""

    seals = True

    def __init__(self, address: str, loop: Loop, keys: Keys) -> None:
        """Binds. Raises OSError."""
        scheme = address.partition("://")[0]
        host, port = host_and_port(address)
        family, where = (numeric(host, port) or resolve(host, port))[0]
        self._socket = socket.create_server(where, family=socket.AddressFamily(family), backlog=_BACKLOG)
        self._socket.setblocking(False)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{scheme}://{shown}:{self._socket.getsockname()[1]}"
        self._loop = loop
        self._keys = keys
        self._peers: dict[bytes, TcpPeer] = {}
        self._messages: Messages = deque()
        self._unread: set[TcpPeer] = set()  # peers with data that was read from the socket and not handled
        self._numbers = count()
        self._logged_s = -_LOG_S
        self._paused_s = 0.0  # since when no connection is accepted, or 0
        loop.watch(self._socket, self, writes=False)

    @property
    def busy(self) -> bool:
        """Whether data was read and not handled."""
        return bool(self._unread)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        return self._messages.popleft() if self._messages else None

    def takes(self, peer: bytes) -> bool:
        known = self._peers.get(peer)
        return known is None or not known.outbound

    def send(self, peer: bytes, header: bytes, payload: Buffer | None = None) -> bool:
        known = self._peers.get(peer)
        return known is not None and known.send(header, payload)

    def has(self, peer: bytes) -> bool:
        return peer in self._peers

    def drop(self, peer: bytes, why: str) -> None:
        if peer in self._peers:
            self._peers[peer].end(TimeoutError(why))

    def happened(self, now_s: float, *, writable: bool) -> None:
        """Accept connections."""
        for _ in range(_CONNECTION_BURST):
            try:
                made, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # too many files are open: connections wait, and the thread must not spin
                _log.warning("cannot accept connections: %s", error)
                self._paused_s = now_s
                self._loop.unwatch(self._socket)
                return
            self._take(made, now_s)

    def _take(self, made: socket.socket, now_s: float) -> None:
        if len(self._peers) >= _MAX_PEERS:
            made.close()
            return
        try:
            connection = connection_of(prepared(made), self._keys, server=True)
        except OSError:  # gone already
            made.close()
            return
        name = next(self._numbers).to_bytes(8, "big")
        peer = self._peers[name] = TcpPeer(
            name, connection, self._loop, self._messages, self._gone, self._unread, now_s
        )
        peer.happened(now_s, writable=False)

    def go_on(self, now_s: float) -> None:
        """Read more from peers that had sent too much for one turn."""
        for peer in list(self._unread):
            peer.happened(now_s, writable=False)

    def tick(self, now_s: float) -> None:
        """Close connections that are late."""
        for peer in list(self._peers.values()):
            if why := peer.late(now_s):
                peer.end(TimeoutError(why))
        if self._paused_s and now_s - self._paused_s > _PAUSE_S:
            self._paused_s = 0.0
            self._loop.watch(self._socket, self, writes=False)

    def close(self) -> None:
        """Unbind and close all connections."""
        self._loop.unwatch(self._socket)
        self._socket.close()
        for peer in list(self._peers.values()):
            peer.close()
        self._peers.clear()

    def _gone(self, name: bytes, error: Exception) -> None:
        self._peers.pop(name, None)
        if isinstance(error, Untrusted) and time.monotonic() - self._logged_s > _LOG_S:
            self._logged_s = time.monotonic()
            _log.warning("wrong_keys: a peer does not hold this cluster's keys: %s", error)


class TcpPeer:
    """A connection of the listener: an importer, or any other client, known by its number. The transport's thread
    calls all methods.
    """

    def __init__(
        self,
        name: bytes,
        connection: Connection,
        loop: Loop,
        messages: Messages,
        on_end: Callable[[bytes, Exception], None],
        unread: "set[TcpPeer]",
        now_s: float,
    ) -> None:
        """Its messages go to `messages`; it is in `unread` while it has sent more than was read."""
        self.outbound = Outbound()
        self._name = name
        self._connection = connection
        self._loop = loop
        self._messages = messages
        self._on_end = on_end
        self._unread = unread
        self._inbound = Inbound(max_payload_bytes=0)
        self._answered = 0  # heartbeats
        self._since_s = now_s
        self._stuck_s = 0.0  # since when nothing was sent though something waits, or 0
        self._agreed = self._greeted = self._closed = False
        loop.watch(connection, self, writes=False)

    def late(self, now_s: float) -> str:
        """Why the connection should be closed; empty: it should not."""
        if not self._greeted and now_s - self._since_s > _GREETING_S:
            return "no greeting in time"
        if not self.outbound:
            self._stuck_s = 0.0
        elif not self._stuck_s:
            self._stuck_s = now_s
        elif now_s - self._stuck_s > _STUCK_S:
            return "it accepts nothing"
        return ""

    def happened(self, now_s: float, *, writable: bool) -> None:
        if self._closed:
            return
        self._inbound.readable = True
        try:
            if not self._agreed and not self._agree():
                return
            self._read()
        except (OSError, WireError, Untrusted) as error:
            self.end(error)
            return
        if writable or self.outbound:
            self._stuck_s = 0.0 if writable else self._stuck_s
            self._flush()

    def send(self, header: bytes, payload: Buffer | None = None) -> bool:
        if len(self.outbound) > _MAX_WAITING:
            self.end(TimeoutError("it accepts no answers"))
            return False
        self.outbound.put(header, payload)
        return self._flush()

    def end(self, error: Exception) -> None:
        """Close the connection and report why."""
        self.close()
        self._on_end(self._name, error)

    def close(self) -> None:
        self._closed = True
        self._unread.discard(self)
        self._loop.unwatch(self._connection)
        self._connection.close()
        self.outbound.clear()

    def _flush(self) -> bool:
        """Send what the socket accepts; False when the peer is gone."""
        try:
            done = self.outbound.flush(self._connection)
        except (OSError, Untrusted) as error:
            self.end(error)
            return False
        self._loop.watch(self._connection, self, writes=not done)
        return True

    def _agree(self) -> bool:
        """Send the greeting once both sides agree on keys; whether they do."""
        if not self._connection.ready():
            return False
        self._agreed = True
        self.outbound.heartbeat()
        return True

    def _read(self) -> None:
        self._unread.add(self)
        for _ in range(_MESSAGE_BURST):
            if len(self._messages) >= _MAX_UNREAD:
                break
            message = self._inbound.receive(self._connection)
            if message is None:
                self._unread.discard(self)
                break
            self._messages.append((self._name, [bytes(message.header)]))
        self._greeted = self._greeted or self._inbound.heartbeats > 0
        for _ in range(self._inbound.heartbeats - self._answered):
            self.outbound.heartbeat()
        self._answered = self._inbound.heartbeats
