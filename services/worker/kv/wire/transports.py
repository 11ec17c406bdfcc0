"""All transports behind one: the scheme of an address says which. `kv://` is TCP, `tcp://` and `ipc://` are ZeroMQ."""

from services.worker.kv.wire.tcp_transport import TcpTransport
from services.worker.kv.wire.transport import Link, Listener, Place, Transport
from services.worker.kv.wire.zmq_transport import ZmqTransport

TCP_SCHEME = "kv"


class Transports:
    """See Transport. Every instance can connect by every scheme; what an exporter listens on is its setting.

    ZeroMQ's context, which has threads of its own, is made for the first address that needs it.
    """

    def __init__(self, curve: tuple[str, str] | None = None) -> None:
        """`curve` is the cluster's key pair. Raises ValueError for one that is none."""
        self._curve = curve
        self._tcp = TcpTransport(curve)
        self._zmq: ZmqTransport | None = None

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
        others = self._zmq.wait(0.0 if self._tcp.busy else timeout_s)
        return others + self._tcp.wait(0.0)

    def wake(self) -> None:
        """See Transport."""
        self._tcp.wake()

    def close(self) -> None:
        """See Transport."""
        if self._zmq is not None:
            self._zmq.close()
        self._tcp.close()

    def _of(self, address: str) -> Transport:
        if address.startswith(f"{TCP_SCHEME}://"):
            return self._tcp
        if self._zmq is None:
            self._zmq = ZmqTransport(self._curve)
            self._zmq.watch(self._tcp.fileno())
        return self._zmq
