"""Publish and subscribe for state of which only the latest matters."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import msgspec
import zmq

from shared.errors import WireVersionMismatch
from shared.runtime.logs import get_log
from shared.wire.addresses import several
from shared.wire.connections import Connection
from shared.wire.envelope import MALFORMED
from shared.wire.sealed import opened, sealed
from shared.wire.sockets import LoopSocket, Sockets

log = get_log(__name__)
Value = TypeVar("Value")
MAX_STATE_BYTES = 8 << 20


class Publisher:
    """PUB sockets: never block, drop for whoever does not read. Connect to bound subscribers, one for each address."""

    def __init__(self, sockets: Sockets, address: str) -> None:
        """`address`: one, or several as `several` reads them."""
        self._header = sockets.wire.header
        self._sockets = [sockets.unconnected(zmq.PUB) for _ in several(address)]
        pairs = zip(self._sockets, several(address), strict=True)
        self._connections = [Connection(socket, each) for socket, each in pairs]
        self._encoder = msgspec.msgpack.Encoder()

    def publish(self, value: object) -> None:
        """Send to whoever listens."""
        message = sealed(self._header + self._encoder.encode(value))
        for socket in self._sockets:
            socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets."""
        for connection, socket in zip(self._connections, self._sockets, strict=True):
            connection.close()
            socket.close()


class Subscriber(Generic[Value]):
    """A bound SUB socket that decodes each message and hands it over. Garbage and messages of an incompatible wire
    version are dropped and counted by cause; the first of these is logged.

    gather_s: see LoopSocket.
    """

    def __init__(
        self,
        sockets: Sockets,
        address: str,
        kind: type[Value],
        on_value: Callable[[Value], None],
        gather_s: float = 0.0,
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._on_value = on_value
        self._wire = sockets.wire
        self._address = address
        self.dropped: Counter[str] = Counter()
        socket = sockets.bind(zmq.SUB, address)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket = LoopSocket(socket, self._receive, partial(socket.recv, zmq.NOBLOCK), gather_s)

    def _receive(self, frame: bytes) -> None:
        """A frame at a time: in a message of several each is judged by itself, which costs the usual ones nothing."""
        try:
            sealed_body = opened(frame) if len(frame) <= MAX_STATE_BYTES else None
            body = None if sealed_body is None else self._wire.body(sealed_body, "a publisher")
            if body is None:
                self.dropped["garbage"] += 1
                return
            value = self._decoder.decode(body)
        except WireVersionMismatch as error:
            if not self.dropped["wire_version"]:
                log.warning("messages of a publisher are dropped", address=self._address, reason=error.message)
            self.dropped["wire_version"] += 1
            return
        except MALFORMED:
            self.dropped["garbage"] += 1
            return
        self._on_value(value)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
