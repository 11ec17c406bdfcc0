"""ZeroMQ sockets on the event loop.

`zmq.asyncio` creates a future for every receive; a stream of tokens feels that. Here the loop watches the socket's
descriptor and hands each message to a plain function.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

MAX_FRAME_BYTES = 64 << 20  # libzmq cuts a connection that announces more
_DRAIN = 128  # messages handled before other callbacks of the loop get their turn


@dataclass(frozen=True, slots=True)
class Curve:
    """The cluster's CurveZMQ key pair (Z85). Whoever knows the public key may connect; traffic is encrypted."""

    public: str
    secret: str


class Sockets:
    """Makes sockets with the limits that every one of ours has. Owns the ZeroMQ context."""

    def __init__(self, curve: Curve | None = None) -> None:
        self._context = zmq.Context()
        self._curve = curve

    def bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """A listening socket. Raises zmq.ZMQError when the address is taken."""
        socket = self._new(kind)
        if self._curve:
            socket.curve_secretkey = self._curve.secret.encode()
            socket.curve_publickey = self._curve.public.encode()
            socket.curve_server = True
        socket.bind(address)
        return socket

    def connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """A connecting socket; it reconnects by itself."""
        socket = self._new(kind)
        if self._curve:
            socket.curve_secretkey = self._curve.secret.encode()
            socket.curve_publickey = self._curve.public.encode()
            socket.curve_serverkey = self._curve.public.encode()
        return socket

    def _new(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # libzmq answers heartbeats in its own thread: a busy interpreter is not taken for a dead one.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 500)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        return socket

    def close(self) -> None:
        """Close the context; sockets must be closed before."""
        self._context.destroy(linger=0)


class LoopSocket:
    """A socket whose messages arrive as calls of `on_message(frames)` on the running loop."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._loop.add_reader(self._fd, self._drain)
        self._poke()

    def send(self, frames: list[bytes]) -> None:
        """Send now or raise: zmq.Again when nobody can take it, EHOSTUNREACH when the peer is gone."""
        self._poke()
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Stop watching and close the socket."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()

    def _poke(self) -> None:
        # The descriptor is edge-triggered, and a send may swallow the edge: look once more afterwards.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        for _ in range(_DRAIN):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(frames)
        self._poke()


class ConnectionWatch:
    """Tells when a connecting socket gains or loses its peer, and when a handshake fails."""

    _EVENTS = (
        zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )  # fmt: skip

    def __init__(self, socket: zmq.Socket[bytes], on_event: Callable[[int], None]) -> None:
        self._socket = socket
        self._on_event = on_event
        self._events = LoopSocket(socket.get_monitor_socket(self._EVENTS), self._parse)

    def _parse(self, frames: list[bytes]) -> None:
        self._on_event(int(parse_monitor_message(frames)["event"]))

    def close(self) -> None:
        """Stop watching. First the source of events: with nobody to take them libzmq's own thread would block."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._events.close()
