"""KV messages over plain TCP, or TLS: one thread, one epoll, payloads straight into where they belong."""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from services.worker.kv.wire.tcp_link import Owner, Source, TcpLink
from services.worker.kv.wire.tcp_listener import TcpListener
from services.worker.kv.wire.tcp_resolving import Resolver, Told
from services.worker.kv.wire.tcp_streams import keys_of
from services.worker.kv.wire.transport import Link, Place

_TICK_S = 0.05  # what is due is looked at so often
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT


class TcpTransport:
    """See transport.Transport. Each link is a connection of its own.

    `curve` is the cluster's key pair (public, secret; Z85): with it both sides prove that they have the pair, and all
    traffic is TLS. Not `encrypted`, which is for one host: they prove it in the first message, and the rest is plain.
    """

    def __init__(self, curve: tuple[str, str] | None = None, *, encrypted: bool = True) -> None:
        """Raises ValueError for a pair that is none."""
        self._keys = keys_of(curve, encrypted=encrypted)
        self._epoll = select.epoll()
        self._owners: dict[int, Owner] = {}  # by descriptor
        self._watched: dict[Source, tuple[int, int]] = {}  # descriptor and events
        self._links: set[TcpLink] = set()
        self._listeners: list[TcpListener] = []
        self._told: deque[Callable[[], None]] = deque()
        self._resolver = Resolver(self._tell)
        self._tick_s = 0.0
        self._closed = False
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()  # a descriptor that is closed may be somebody else's already
        self._epoll.register(self._wakes, _READ)

    def listen(self, address: str) -> TcpListener:
        """See transport.Transport."""
        listener = TcpListener(address, self, self._keys)
        self._listeners.append(listener)
        return listener

    def connect(self, address: str, place: Place | None = None) -> TcpLink:
        """See transport.Transport."""
        link = TcpLink(address, self, self._keys, place, time.monotonic())
        self._links.add(link)
        return link

    def wait(self, timeout_s: float) -> list[Link]:
        """See transport.Transport."""
        ready: dict[int, Link] = {id(link): link for link in self._links if not link.drained}
        happened = self._epoll.poll(0.0 if self.busy else max(0.0, timeout_s))
        now_s = time.monotonic()
        for owner, events in [(self._owners.get(descriptor), events) for descriptor, events in happened]:
            if owner is None:
                self._drain_wakes()
                continue
            owner.happened(now_s, writable=bool(events & ~_READ))  # errors are found by who writes
            if isinstance(owner, TcpLink):
                ready[id(owner)] = owner
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
        return self._epoll.fileno()

    def wake(self) -> None:
        """See transport.Transport."""
        with self._waking:
            if not self._closed:
                os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """See transport.Transport."""
        for link in list(self._links):
            link.close()
        for listener in self._listeners:
            listener.close()
        with self._waking:
            self._closed = True
            os.close(self._wakes)
        self._epoll.close()

    def watch(self, source: Source, owner: Owner, *, writes: bool) -> None:
        """See tcp_link.Loop."""
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
        """See tcp_link.Loop."""
        known = self._watched.pop(source, None)
        if known is not None:
            self._epoll.unregister(known[0])
            del self._owners[known[0]]

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
        os.eventfd_read(self._wakes)
        while self._told:
            self._told.popleft()()

    def _tick(self, now_s: float) -> None:
        self._tick_s = now_s
        for link in list(self._links):
            link.tick(now_s)
        for listener in self._listeners:
            listener.tick(now_s)
