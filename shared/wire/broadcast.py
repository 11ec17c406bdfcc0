"""Publish and subscribe for state of which only the latest matters."""

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import zmq

from shared.wire.connections import Connection
from shared.wire.envelope import MALFORMED
from shared.wire.sockets import LoopSocket, Sockets, whole_messages

Value = TypeVar("Value")
MAX_STATE_BYTES = 8 << 20


class Publisher:
    """A PUB socket: never blocks, drops for whoever does not read. Binds, or connects to a bound subscriber."""

    def __init__(self, sockets: Sockets, address: str, *, bind: bool = True) -> None:
        self._socket = sockets.bind(zmq.PUB, address) if bind else sockets.unconnected(zmq.PUB)
        self._connection = None if bind else Connection(self._socket, address)
        self._encoder = msgspec.msgpack.Encoder()

    def publish(self, value: object) -> None:
        """Send to whoever listens."""
        self._socket.send(self._encoder.encode(value), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket."""
        if self._connection is not None:
            self._connection.close()
        self._socket.close()


class Subscriber(Generic[Value]):
    """A SUB socket that decodes each message and hands it over; garbage is dropped and counted."""

    def __init__(
        self,
        sockets: Sockets,
        address: str,
        kind: type[Value],
        on_value: Callable[[Value], None],
        *,
        bind: bool = False,
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._on_value = on_value
        self.dropped: Counter[str] = Counter()
        socket = sockets.bind(zmq.SUB, address) if bind else sockets.unconnected(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._connection = None if bind else Connection(socket, address)
        self._socket = LoopSocket(socket, self._receive, whole_messages(socket))

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) != 1 or len(frames[0]) > MAX_STATE_BYTES:
            self.dropped["frame"] += 1
            return
        try:
            value = self._decoder.decode(frames[0])
        except MALFORMED:
            self.dropped["garbage"] += 1
            return
        self._on_value(value)

    def close(self) -> None:
        """Close the socket."""
        if self._connection is not None:
            self._connection.close()
        self._socket.close()
