"""ZeroMQ sockets on the event loop, and their connections.

`zmq.asyncio` creates a future for every receive, which is too slow for streams of tokens. Here the loop watches the
socket's descriptor and passes each message to a plain function.
"""

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.runtime.logs import get_log
from shared.runtime.settings import PEER_SILENCE_S, ServiceSettings
from shared.runtime.tasks import awake
from shared.runtime.wire_version import OURS, WireVersions

log = get_log(__name__)
Message = TypeVar("Message")
Near = TypeVar("Near")
MAX_FRAME_BYTES = 64 << 20  # libzmq cuts a connection that announces a larger frame
_DRAIN = 128  # messages handled before other callbacks of the loop get their turn
_MAX_SOCKETS = 16_384  # of a context; libzmq's 1,023 are 341 clients, each a socket and two ends of a monitor
_HEARTBEAT_MS = 1_000  # between two
_STATE = (zmq.PUB, zmq.SUB, zmq.XPUB)  # sockets of state, which is sent again and again
_STATE_HEARTBEAT_MS, _STATE_PATIENCE_MS = 3_000, 2_000  # between two, and for an answer, at least
_BACKLOG = 4_096  # connections that are not accepted yet: after a restart a whole cluster connects within a second
_MAX_FILES = 65_536  # a client takes four descriptors; the usual limit of 1,024 is reached at 250


@dataclass(frozen=True, slots=True)
class Curve:
    """The cluster's CurveZMQ key pair (Z85). Peers that know the public key may connect; traffic is encrypted."""

    public: str
    secret: str


class Sockets:
    """Creates all ZeroMQ sockets of a process, with common limits and keys. Owns the ZeroMQ context.

    `wire`: the version that messages over these sockets state, and the versions that are accepted. `peer_silence_s`:
    without an answer to a heartbeat for so long, a connection is lost. `near`: addresses of services in this process,
    as its other services call them, and where they listen: they are reached without a socket.
    """

    def __init__(
        self,
        curve: Curve | None = None,
        wire: WireVersions = OURS,
        peer_silence_s: float = PEER_SILENCE_S,
        near: Mapping[str, str] | None = None,
    ) -> None:
        self.wire = wire
        self._near = near or {}
        self._listening: dict[str, Any] = {}  # what serves or publishes here, by the address where it listens
        self._patience_ms = max(1, round(peer_silence_s * 1e3))
        # One I/O thread: a connection's events come before its messages only in the order of one thread.
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._curve = curve
        _allow_files()

    @classmethod
    def from_settings(cls, settings: ServiceSettings, near: Mapping[str, str] | None = None) -> Self:
        """With the keys of a process's settings. Raises InvalidRequest for a key file that cannot be used."""
        pair = settings.curve_pair()
        return cls(Curve(*pair) if pair else None, peer_silence_s=settings.peer_silence_s, near=near)

    @property
    def shared(self) -> bool:
        """Whether several services of the process use these sockets."""
        return bool(self._near)

    def listens(self, address: str, service: object) -> None:
        """What others reach at an address, from now on; `None`: nothing."""
        self._listening[address] = service

    def near(self, address: str, kind: type[Near]) -> Near | None:
        """What listens at an address in this process; None where the address is not `near`, or nothing listens yet."""
        found = self._listening.get(self._near.get(address, ""))
        return found if isinstance(found, kind) else None

    def bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """A listening socket. Raises zmq.ZMQError when the address is taken."""
        socket = self.unbound(kind)
        try:
            socket.bind(address)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def unbound(self, kind: int) -> zmq.Socket[bytes]:
        """A listening socket that is not bound yet."""
        socket = self._new(kind)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        if kind in _STATE:  # a monitor has thousands of connections; the other side and the kernel check them
            socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
        if self._curve:
            socket.curve_secretkey = self._curve.secret.encode()
            socket.curve_publickey = self._curve.public.encode()
            socket.curve_server = True
        return socket

    def unconnected(self, kind: int) -> zmq.Socket[bytes]:
        """A socket for one `Connection`, which connects it."""
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
        # libzmq answers heartbeats in its own thread, so that a busy interpreter does not look dead.
        asks_ms, patience_ms = _HEARTBEAT_MS, self._patience_ms
        if kind in _STATE:
            asks_ms, patience_ms = _STATE_HEARTBEAT_MS, max(_STATE_PATIENCE_MS, patience_ms)
        socket.setsockopt(zmq.HEARTBEAT_IVL, asks_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, patience_ms)
        # Give up connection attempts to hosts that are frozen, cut off, or do not speak ZMTP.
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 2_000)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        return socket

    def close(self) -> None:
        """Close the context; sockets must be closed before."""
        self._context.destroy(linger=0)


@asynccontextmanager
async def open_sockets(settings: ServiceSettings, near: Mapping[str, str] | None = None) -> AsyncIterator[Sockets]:
    """Sockets that are closed at the end of the block. Raises as `Sockets.from_settings`."""
    sockets = Sockets.from_settings(settings, near)
    try:
        yield sockets
    finally:
        sockets.close()


def _allow_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class LoopSocket(Generic[Message]):
    """A socket whose messages arrive as calls of `on_message` on the running loop.

    `read` takes one message off the socket or raises zmq.Again. Errors of `on_message` are logged, and the next message
    is handled. `watched`: messages are handled on arrival; else by `take`, so that many share a wake-up.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[Message], None],
        read: Callable[[], Message],
        watched: bool = True,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._watched = watched
        self._scheduled = False
        if watched:
            self._loop.add_reader(self._fd, self._drain)
            self.look_again()

    def send(self, frames: list[bytes]) -> None:
        """Send now. Raises zmq.Again when the message cannot be sent now, EHOSTUNREACH when the peer is gone."""
        self.look_again()
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def drain(self) -> None:
        """Handle all messages that have arrived."""
        while self.take(_DRAIN) == _DRAIN:
            pass

    def take(self, most: int) -> int:
        """Handle up to `most` messages that have arrived, and return their number."""
        for taken in range(most):
            if self._socket.closed:
                return taken
            try:
                message = self._read()
            except zmq.Again:
                return taken
            try:
                self._on_message(message)
            except Exception as error:  # the boundary of the event loop
                log.error("a message was not handled", handler=repr(self._on_message), exc_info=error)
        return most

    def close(self) -> None:
        """Stop watching and close the socket."""
        if not self._socket.closed:
            if self._watched:
                self._loop.remove_reader(self._fd)
            self._socket.close()

    def look_again(self) -> None:
        """Look for messages after any other use of the socket, which may have swallowed the edge of the edge-triggered
        descriptor.
        """
        if self._watched and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        taken = self.take(_DRAIN)
        if taken:
            awake()
        if taken == _DRAIN:
            self.look_again()


def whole_messages(socket: zmq.Socket[bytes]) -> Callable[[], list[bytes]]:
    """Reads all frames of a message."""
    return partial(socket.recv_multipart, zmq.NOBLOCK)


RENEW_S = 0.25  # after a loss, for libzmq to report that it reconnects
LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
TRYING = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECTED


class ConnectionWatch:
    """Reports the events of a socket's connections: `on_event(event, value)`, where `value` is a descriptor for
    ACCEPTED and DISCONNECTED. To miss no event, create it before the socket is bound or connected.
    """

    def __init__(self, socket: zmq.Socket[bytes], events: int, on_event: Callable[[int, int], None]) -> None:
        self._socket = socket
        self._on_event = on_event
        address = f"inproc://connections-{int(socket.getsockopt(zmq.FD))}"
        socket.monitor(address, events)
        pair: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        pair.setsockopt(zmq.RCVHWM, 0)  # with a limit, libzmq's own thread would block on us, heartbeats included
        pair.connect(address)
        self._events = LoopSocket(pair, self._parse, whole_messages(pair))

    def catch_up(self) -> None:
        """Report all events until now."""
        self._events.drain()

    def _parse(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        self._on_event(int(event["event"]), int(event["value"]))

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()  # first the source: events that are not read would accumulate
        self._events.close()


class Connection:
    """The one connection of a connecting socket. `on_change(made)` is called whenever it is made or lost.

    libzmq reconnects a broken connection, but not one over which malformed bytes came (flipped bits, with or without
    keys): it ends the session, which only its events show. Such a connection is renewed here.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], address: str, on_change: Callable[[bool], None] = lambda _: None
    ) -> None:
        """Raises zmq.ZMQError for an invalid address."""
        self.made = False
        self._socket = socket
        self._address = address
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._renewal: asyncio.TimerHandle | None = None
        self._watch = ConnectionWatch(socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | LOST | TRYING, self._on_event)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        """Stop watching; to be called before the socket is closed."""
        self.made = False
        self._cancel_renewal()
        self._watch.close()

    def _on_event(self, event: int, _: int) -> None:
        self._cancel_renewal()
        if event & LOST:
            self._renewal = self._loop.call_later(RENEW_S, self._renew)
        if event & TRYING:
            return
        made = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if made != self.made:
            self.made = made
            self._on_change(made)

    def _cancel_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    def _renew(self) -> None:
        with suppress(zmq.ZMQError):  # libzmq may have dropped it
            self._socket.disconnect(self._address)
        self._socket.connect(self._address)
