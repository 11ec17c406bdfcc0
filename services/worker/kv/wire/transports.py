"""All transports behind one: the scheme of an address says which. `kv://` is TCP, `tcp://` and `ipc://` are ZeroMQ;
`nixl://` is TCP, too, from an exporter whose memory can be read by NIXL, by whoever has it.
"""

from services.worker.kv.wire.nixl_state import NIXL_SCHEME, NixlCounters, NixlUse
from services.worker.kv.wire.nixl_transport import NixlTransport
from services.worker.kv.wire.tcp_transport import TcpTransport
from services.worker.kv.wire.transport import Link, Listener, Place, Transport
from services.worker.kv.wire.zmq_transport import ZmqTransport

_TCP_SCHEMES = ("kv://", f"{NIXL_SCHEME}://")
_TURN_S = 0.001  # ZeroMQ's sockets are looked at so often while NIXL is at it


class Transports:
    """See Transport. Every instance can connect by every scheme. What an exporter listens on is its setting, and so is
    whether it uses NIXL, in either direction.

    ZeroMQ's context, which has threads of its own, is made for the first address that needs it.
    """

    def __init__(
        self, curve: tuple[str, str] | None = None, nixl: NixlUse | None = None, *, encrypted: bool = True
    ) -> None:
        """`curve` is the cluster's key pair; `encrypted`: see TcpTransport. ZeroMQ is encrypted with any pair. Raises
        ValueError for one that is none.
        """
        self._curve = curve
        tcp = TcpTransport(curve, encrypted=encrypted)
        self._nixl = NixlTransport(tcp, nixl) if nixl is not None else None
        self._tcp = self._nixl or tcp
        self._zmq: ZmqTransport | None = None

    @property
    def nixl(self) -> NixlCounters:
        """What went by NIXL, and did not."""
        return self._nixl.counters if self._nixl is not None else NixlCounters()

    def listen(self, address: str) -> Listener:
        """See Transport."""
        return self._of(address).listen(address)

    def connect(self, address: str, place: Place | None = None) -> Link:
        """See Transport."""
        return self._of(address).connect(address, place)

    def wait(self, timeout_s: float) -> list[Link]:
        """See Transport."""
        if self._zmq is None:
            return self._tcp.wait(timeout_s)
        busy = self._tcp.busy
        others = self._zmq.wait(0.0 if busy else timeout_s)
        return others + self._tcp.wait(min(timeout_s, _TURN_S) if busy and not others else 0.0)

    def wake(self) -> None:
        """See Transport."""
        self._tcp.wake()

    def close(self) -> None:
        """See Transport."""
        if self._zmq is not None:
            self._zmq.close()
        self._tcp.close()

    def _of(self, address: str) -> Transport:
        if address.startswith(_TCP_SCHEMES):
            return self._tcp
        if self._zmq is None:
            self._zmq = ZmqTransport(self._curve)
            self._zmq.watch(self._tcp.fileno())
        return self._zmq
