"""KV messages over TCP, payloads by NIXL between those that both have it."""

import select
import time

from services.worker.kv.wire.nixl_link import NixlLink
from services.worker.kv.wire.nixl_listener import Exports, NixlListener
from services.worker.kv.wire.nixl_memory import Imports
from services.worker.kv.wire.nixl_state import NIXL_SCHEME, NixlCounters, NixlUse
from services.worker.kv.wire.tcp_transport import TcpTransport
from services.worker.kv.wire.transport import Link, Listener, Place

_FAST_S, _SLOW_S = 0.0001, 0.002  # reads are looked at so often: nothing tells that they are done
_LONGEST_S = 0.02  # what else is due is looked at so often


class NixlTransport:
    """See transport.Transport: TCP, where addresses of the scheme `nixl` say that the exporter has NIXL."""

    def __init__(self, tcp: TcpTransport, use: NixlUse) -> None:
        """Raises OSError where NIXL is not to be had."""
        self.counters = NixlCounters()
        self._tcp = tcp
        self._use = use
        self._imports = Imports(use.trusted, use.receiving_bytes) if use.receiving_bytes else None
        self._listeners: list[NixlListener] = []
        self._links: dict[int, NixlLink] = {}  # by the id of the inner link
        self._poller = select.poll()
        self._poller.register(tcp.fileno(), select.POLLIN)

    def listen(self, address: str) -> Listener:
        """See transport.Transport. Raises OSError as `__init__` does, too."""
        if not address.startswith(f"{NIXL_SCHEME}://"):
            return self._tcp.listen(address)
        exports = Exports(self._use.trusted, self._use.staging)
        listener = NixlListener(self._tcp.listen(address), exports, self.counters)
        self._listeners.append(listener)
        return listener

    def connect(self, address: str, place: Place | None = None) -> Link:
        """See transport.Transport."""
        if self._imports is None or not address.startswith(f"{NIXL_SCHEME}://"):
            return self._tcp.connect(address, place)
        link = NixlLink(address, self._tcp, self._imports, self.counters, place, self._closed)
        self._links[id(link.inner)] = link
        return link

    def wait(self, timeout_s: float) -> list[Link]:
        """See transport.Transport."""
        waited = self._wait_for_nixl(timeout_s)
        happened = self._tcp.wait(0.0 if waited else timeout_s)
        ready: dict[int, Link] = {id(link): self._links.get(id(link), link) for link in happened}
        self._go_on()
        ready |= {key: link for key, link in self._links.items() if link.ready}
        return list(ready.values())

    @property
    def busy(self) -> bool:
        """See TcpTransport.busy; also while NIXL is at it, of which no socket tells."""
        return self._tcp.busy or self._active

    def fileno(self) -> int:
        """See TcpTransport.fileno."""
        return self._tcp.fileno()

    def wake(self) -> None:
        """See transport.Transport."""
        self._tcp.wake()

    def close(self) -> None:
        """See transport.Transport."""
        for link in list(self._links.values()):
            link.close()
        self._tcp.close()
        self._listeners.clear()
        self._imports = None

    def _wait_for_nixl(self, timeout_s: float) -> bool:
        """Wait as long as NIXL is at it, until something of it is done or a socket has something; whether it was."""
        if not self._active or self._tcp.busy:
            return self._active
        until_s = time.monotonic() + min(timeout_s, _LONGEST_S)
        while not self._poller.poll(0):
            self._go_on()
            if not self._active or any(link.ready for link in self._links.values()) or time.monotonic() >= until_s:
                break
            time.sleep(_FAST_S if self._lively else _SLOW_S)
        return True

    @property
    def _active(self) -> bool:
        return any(link.reading for link in self._links.values()) or any(each.active for each in self._listeners)

    @property
    def _lively(self) -> bool:
        return any(link.reading for link in self._links.values()) or any(each.lively for each in self._listeners)

    def _go_on(self) -> None:
        now_s = time.monotonic()
        for listener in self._listeners:
            if listener.known:
                listener.help(now_s)
        for link in list(self._links.values()):
            link.go_on(now_s)
        if self._imports is not None:
            self._imports.sweep(now_s)

    def _closed(self, link: NixlLink) -> None:
        del self._links[id(link.inner)]
