"""ZeroMQ sockets on the event loop.

`zmq.asyncio` creates a future for every receive; a stream of tokens feels that. Here the loop watches the socket's
descriptor and hands each message to a plain function.
"""

import asyncio
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, Self, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.runtime.logs import get_log
from shared.runtime.settings import ServiceSettings
from shared.runtime.wire_version import OURS, WireVersions

log = get_log(__name__)
Message = TypeVar("Message")
MAX_FRAME_BYTES = 64 << 20  # libzmq cuts a connection that announces more
_DRAIN = 128  # messages handled before other callbacks of the loop get their turn
_BATCH = 32  # messages that are worth a wake-up
_MAX_SOCKETS = 16_384  # of a context; libzmq's 1,023 are 341 clients, each a socket and two ends of a monitor
_HEARTBEAT_MS = 1_000, 1_500  # between two, and for an answer
_STATE = (zmq.PUB, zmq.SUB, zmq.XPUB)  # what is said over these is said again
_STATE_HEARTBEAT_MS = 3_000, 2_000
_BACKLOG = 4_096  # connections that nobody has accepted yet: after a restart all of a cluster comes within a second
_MAX_FILES = 65_536  # a client takes four descriptors; the usual limit of 1,024 is reached at 250


@dataclass(frozen=True, slots=True)
class Curve:
    """The cluster's CurveZMQ key pair (Z85). Whoever knows the public key may connect; traffic is encrypted."""

    public: str
    secret: str


class Sockets:
    """Makes sockets with the limits that every one of ours has. Owns the ZeroMQ context.

    `wire`: the version that all messages over these sockets state, and the versions that are taken.
    """

    def __init__(self, curve: Curve | None = None, wire: WireVersions = OURS) -> None:
        self.wire = wire
        # One I/O thread: a connection's events come before its messages only in the order of one thread.
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._curve = curve
        _allow_files()

    @classmethod
    def of(cls, settings: ServiceSettings) -> Self:
        """Of a process with these settings, with its keys. Raises InvalidRequest for a key file that cannot be used."""
        pair = settings.curve_pair()
        return cls(Curve(*pair) if pair else None)

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
        """A socket to listen with, for whoever must do something before it is bound."""
        socket = self._new(kind)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        if kind in _STATE:  # a monitor has two thousand of these; the other side asks, and the kernel does
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
        # libzmq answers heartbeats in its own thread: a busy interpreter is not taken for a dead one.
        asks_ms, patience_ms = _STATE_HEARTBEAT_MS if kind in _STATE else _HEARTBEAT_MS
        socket.setsockopt(zmq.HEARTBEAT_IVL, asks_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, patience_ms)
        # Connections that come to nothing are given up: the other host is frozen, cut off, or does not speak ZMTP.
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 2_000)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        return socket

    def close(self) -> None:
        """Close the context; sockets must be closed before."""
        self._context.destroy(linger=0)


def _allow_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class LoopSocket(Generic[Message]):
    """A socket whose messages arrive as calls of `on_message` on the running loop.

    `read` takes one message off the socket or raises zmq.Again. What `on_message` raises is logged, and the next
    message is handled: one that nobody foresaw must not leave those behind it unread. `gather_s`: how long messages may
    wait for others where many come, so that the process wakes once for all of them; 0: each is handled as it comes.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[Message], None],
        read: Callable[[], Message],
        gather_s: float = 0.0,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._gather_s = gather_s
        self._timer: asyncio.TimerHandle | None = None  # in the place of watching the descriptor
        self._looked_mono = 0.0
        self._taken = 0
        self._loop.add_reader(self._fd, self._readable)
        self.look_again()

    def send(self, frames: list[bytes]) -> None:
        """Send now or raise: zmq.Again when nobody can take it, EHOSTUNREACH when the peer is gone."""
        self.look_again()
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def drain(self) -> None:
        """Handle all that has arrived, now."""
        while self._take(_DRAIN):
            pass

    def close(self) -> None:
        """Stop watching and close the socket."""
        if not self._socket.closed:
            if self._timer is not None:
                self._timer.cancel()
            self._loop.remove_reader(self._fd)
            self._socket.close()

    def look_again(self) -> None:
        """After anything else was done with the socket: the descriptor is edge-triggered, and that may swallow the
        edge.
        """
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _readable(self) -> None:
        if self._gather_s:
            now, before = self._loop.time(), self._looked_mono
            self._looked_mono = now
            if now - before < self._gather_s:
                self._loop.remove_reader(self._fd)
                self._timer = self._loop.call_later(self._gather_s, self._look)
        self._drain()

    def _look(self) -> None:
        """Handle what has gathered; whether to wait for the descriptor or for a time again follows from how much."""
        now, before, taken = self._loop.time(), self._looked_mono, self._taken
        self._looked_mono = now
        self._drain()
        taken = self._taken - taken
        if self._socket.closed:
            return
        if taken > 1:
            for_a_batch_s = _BATCH * (now - before) / taken  # more of them at once would hold up all else
            self._timer = self._loop.call_later(min(self._gather_s, for_a_batch_s), self._look)
        else:
            self._timer = None
            self._loop.add_reader(self._fd, self._readable)
            self.look_again()

    def _drain(self) -> None:
        self._scheduled = False
        if self._take(_DRAIN):
            self.look_again()

    def _take(self, most: int) -> bool:
        """Handle so many messages; whether there may be more."""
        for _ in range(most):
            if self._socket.closed:
                return False
            try:
                message = self._read()
            except zmq.Again:
                return False
            self._taken += 1
            try:
                self._on_message(message)
            except Exception as error:  # the boundary of the event loop
                log.error("a message was not handled", handler=repr(self._on_message), exc_info=error)
        return True


def whole_messages(socket: zmq.Socket[bytes]) -> Callable[[], list[bytes]]:
    """Reads all frames of a message."""
    return partial(socket.recv_multipart, zmq.NOBLOCK)


# MERGED connections.py
# Connections of ZeroMQ sockets: what becomes of them, and that a lost one is made again.


RENEW_S = 0.25  # after a loss, for libzmq to say that it tries again
LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
TRYING = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECTED


class ConnectionWatch:
    """Tells of a socket's connections: `on_event(event, value)`, where libzmq's meaning of `value` is a descriptor
    for ACCEPTED and DISCONNECTED.

    To miss nothing it must be there before the socket is bound or connected.
    """

    def __init__(self, socket: zmq.Socket[bytes], events: int, on_event: Callable[[int, int], None]) -> None:
        self._socket = socket
        self._on_event = on_event
        address = f"inproc://connections-{int(socket.getsockopt(zmq.FD))}"
        socket.monitor(address, events)
        pair: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        pair.setsockopt(zmq.RCVHWM, 0)  # at a bound libzmq's own thread would wait for us, heartbeats and all
        pair.connect(address)
        self._events = LoopSocket(pair, self._parse, whole_messages(pair))

    def catch_up(self) -> None:
        """Tell of all that has happened by now."""
        self._events.drain()

    def _parse(self, frames: list[bytes]) -> None:
        told = parse_monitor_message(frames)
        self._on_event(int(told["event"]), int(told["value"]))

    def close(self) -> None:
        """Stop watching. First the source of events: with nobody to take them they would pile up."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._events.close()


class Connection:
    """The one connection of a connecting socket. `on_change(made)` is called whenever it is made or lost.

    libzmq makes a broken one again, but not one over which something came that makes no sense (bits that flipped, with
    keys or without): its session is over then, which only its events tell. That one is made again here.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], address: str, on_change: Callable[[bool], None] = lambda _: None
    ) -> None:
        """Raises zmq.ZMQError for an address that makes no sense."""
        self.made = False
        self._socket = socket
        self._address = address
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._renewal: asyncio.TimerHandle | None = None
        self._watch = ConnectionWatch(socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | LOST | TRYING, self._happened)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        """Stop watching; to be called before the socket is closed."""
        self.made = False
        self._settle()
        self._watch.close()

    def _happened(self, event: int, _: int) -> None:
        self._settle()
        if event & LOST:
            self._renewal = self._loop.call_later(RENEW_S, self._renew)
        if event & TRYING:
            return
        made = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if made != self.made:
            self.made = made
            self._on_change(made)

    def _settle(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    def _renew(self) -> None:
        with suppress(zmq.ZMQError):  # libzmq may have let go of it
            self._socket.disconnect(self._address)
        self._socket.connect(self._address)
