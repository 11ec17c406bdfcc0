"""KV messages over plain TCP, or TLS: one thread, one selector, payloads straight into where they belong."""

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable

from services.worker.kv.wire.tcp_link import Owner, Source, TcpLink
from services.worker.kv.wire.tcp_listener import TcpListener
from services.worker.kv.wire.tcp_resolving import Resolver, Told
from services.worker.kv.wire.tls import TlsContexts
from services.worker.kv.wire.transport import Link, Place

_TICK_S = 0.05  # what is due is looked at so often
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class TcpTransport:
    """See transport.Transport. Each link is a connection of its own.

    `curve` is the cluster's key pair (public, secret; Z85): with it all traffic is TLS, and both sides prove that they
    have the pair.
    """

    def __init__(self, curve: tuple[str, str] | None = None) -> None:
        """Raises ValueError for a pair that is none."""
        self._tls = TlsContexts(curve) if curve else None
        self._selector = selectors.DefaultSelector()
        self._watched: dict[Source, int] = {}
        self._links: set[TcpLink] = set()
        self._listeners: list[TcpListener] = []
        self._told: deque[Callable[[], None]] = deque()
        self._resolver = Resolver(self._tell)
        self._tick_s = 0.0
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ, None)

    def listen(self, address: str) -> TcpListener:
        """See transport.Transport."""
        listener = TcpListener(address, self, self._tls.server if self._tls else None)
        self._listeners.append(listener)
        return listener

    def connect(self, address: str, place: Place | None = None) -> TcpLink:
        """See transport.Transport."""
        link = TcpLink(address, self, self._tls.client if self._tls else None, place, time.monotonic())
        self._links.add(link)
        return link

    def wait(self, timeout_s: float) -> list[Link]:
        """See transport.Transport."""
        ready: dict[int, Link] = {id(link): link for link in self._links if not link.drained}
        happened = self._selector.select(0.0 if self.busy else max(0.0, timeout_s))
        now_s = time.monotonic()
        for key, events in happened:
            if key.data is None:
                self._drain_wakes()
                continue
            key.data.happened(now_s, writable=bool(events & _WRITE))
            if isinstance(key.data, TcpLink):
                ready[id(key.data)] = key.data
        for listener in self._listeners:
            listener.go_on(now_s)
        if now_s - self._tick_s > _TICK_S:
            self._tick(now_s)
        return list(ready.values())

    @property
    def busy(self) -> bool:
        """Whether there is more to be read of which no socket tells."""
        return any(not link.drained for link in self._links) or any(each.busy for each in self._listeners)

    def fileno(self) -> int:
        """Can be read when a socket has something, or somebody wakes."""
        return self._selector.fileno()

    def wake(self) -> None:
        """See transport.Transport."""
        try:
            self._waker.send(b"\0")
        except OSError:
            return  # a wake is pending already, or the transport is closed

    def close(self) -> None:
        """See transport.Transport."""
        for link in list(self._links):
            link.close()
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def watch(self, source: Source, owner: Owner, *, writes: bool) -> None:
        """See tcp_link.Loop."""
        events = _READ | _WRITE if writes else _READ
        known = self._watched.get(source)
        if known is None:
            self._selector.register(source, events, owner)
        elif known != events:
            self._selector.modify(source, events, owner)
        self._watched[source] = events

    def unwatch(self, source: Source) -> None:
        """See tcp_link.Loop."""
        if self._watched.pop(source, None) is not None:
            self._selector.unregister(source)

    def look_up(self, host: str, port: int, told: Told) -> None:
        """See tcp_link.Loop."""
        self._resolver.look_up(host, port, told)

    def forget(self, link: TcpLink) -> None:
        """See tcp_link.Loop."""
        self._links.discard(link)

    def _tell(self, what: Callable[[], None]) -> None:
        self._told.append(what)
        self.wake()

    def _drain_wakes(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._told:
            self._told.popleft()()

    def _tick(self, now_s: float) -> None:
        self._tick_s = now_s
        for link in list(self._links):
            link.tick(now_s)
        for listener in self._listeners:
            listener.tick(now_s)
