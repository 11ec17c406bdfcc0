"""An exporter's side of TCP: who has connected, and what they say."""

import logging
import socket
import time
from collections import deque
from itertools import count

from services.worker.kv.wire.frames import Buffer
from services.worker.kv.wire.tcp_link import Loop
from services.worker.kv.wire.tcp_peer import Messages, TcpPeer
from services.worker.kv.wire.tcp_resolving import host_and_port, numeric, resolve
from services.worker.kv.wire.tcp_streams import Keys, Untrusted, connection_of, prepared

_log = logging.getLogger(__name__)
_BACKLOG = 1024
_MAX_PEERS = 4096
_PAUSE_S = 0.5  # when nobody can be taken, as too many files are open
_TOLD_S = 10.0  # a stranger is told of in the log no more often
_BURST = 64  # connections taken before those that are here get their turn


class TcpListener:
    """See transport.Listener. All methods run on the transport's thread."""

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
        self._unread: set[TcpPeer] = set()  # those with more of which no socket tells
        self._numbers = count()
        self._told_s = -_TOLD_S
        self._paused_s = 0.0  # since when nobody is accepted, or 0
        loop.watch(self._socket, self, writes=False)

    @property
    def busy(self) -> bool:
        """Whether somebody has said more than was taken."""
        return bool(self._unread)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """See transport.Listener."""
        return self._messages.popleft() if self._messages else None

    def takes(self, peer: bytes) -> bool:
        """See transport.Listener."""
        known = self._peers.get(peer)
        return known is None or not known.outbound

    def send(self, peer: bytes, header: bytes, payload: Buffer | None = None) -> bool:
        """See transport.Listener."""
        known = self._peers.get(peer)
        return known is not None and known.send(header, payload)

    def has(self, peer: bytes) -> bool:
        """Whether it is still connected."""
        return peer in self._peers

    def drop(self, peer: bytes, why: str) -> None:
        """End its connection."""
        if peer in self._peers:
            self._peers[peer].end(TimeoutError(why))

    def happened(self, now_s: float, *, writable: bool) -> None:
        """Somebody connects."""
        for _ in range(_BURST):
            try:
                made, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # too many files are open: whoever waits goes on waiting, and we do not spin
                _log.warning("cannot take connections: %s", error)
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
        """Read more of those who had said too much for one turn."""
        for peer in list(self._unread):
            peer.happened(now_s, writable=False)

    def tick(self, now_s: float) -> None:
        """Close connections that come to nothing."""
        for peer in list(self._peers.values()):
            if why := peer.late(now_s):
                peer.end(TimeoutError(why))
        if self._paused_s and now_s - self._paused_s > _PAUSE_S:
            self._paused_s = 0.0
            self._loop.watch(self._socket, self, writes=False)

    def close(self) -> None:
        """Unbind, and end all connections."""
        self._loop.unwatch(self._socket)
        self._socket.close()
        for peer in list(self._peers.values()):
            peer.close()
        self._peers.clear()

    def _gone(self, name: bytes, error: Exception) -> None:
        self._peers.pop(name, None)
        if isinstance(error, Untrusted) and time.monotonic() - self._told_s > _TOLD_S:
            self._told_s = time.monotonic()
            _log.warning("wrong_keys: a peer does not hold this cluster's keys: %s", error)
