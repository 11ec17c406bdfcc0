"""Connections of ZeroMQ sockets: what becomes of them, and that a lost one is made again."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.wire.sockets import LoopSocket, whole_messages

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
