"""KV messages over ZeroMQ: a ROUTER to listen, a DEALER a link."""

import math
import socket
import time
from contextlib import suppress
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from services.worker.kv.wire.protocol import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, Buffer, Link, Place, Received, checksum
from shared.wire.sockets import LOST, RENEW_S, TRYING

_MAX_SOCKETS = 16_384  # libzmq's 1,023 are 341 links, each a socket and two ends of a monitor


class ZmqTransport:
    """ZeroMQ over TCP: a ROUTER to listen, a DEALER a link. Heartbeats find dead peers within two seconds.

    `curve` is the cluster's key pair (public, secret; Z85): with it all traffic is encrypted and
    authenticated.
    """

    def __init__(self, curve: tuple[str, str] | None = None) -> None:
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._curve = curve
        self._poller = zmq.Poller()
        self._links: dict[object, ZmqLink] = {}
        self._listeners: list[ZmqListener] = []
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)

    def listen(self, address: str) -> "ZmqListener":
        """Bind a ROUTER. Raises OSError when the address is taken."""
        router = self._socket(zmq.ROUTER, MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._curve:
            router.curve_server = True
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            router.close()
            raise OSError(f"cannot bind {address}: {error}") from error
        self._poller.register(router, zmq.POLLIN)
        listener = ZmqListener(router)
        self._listeners.append(listener)
        return listener

    def connect(self, address: str, place: Place | None = None) -> "ZmqLink":
        """Connect a DEALER. Raises OSError when the address makes no sense or there are no more sockets to be had.

        libzmq says nothing of a message before all of it is here, so nobody is asked for a place.
        """
        dealer = monitor = None
        try:
            dealer = self._socket(zmq.DEALER, MAX_FRAME_BYTES)
            if self._curve:
                dealer.curve_serverkey = self._curve[0].encode()
            monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | LOST | TRYING)
            dealer.connect(address)
        except zmq.ZMQError as error:
            if dealer is not None:
                _close(dealer, monitor)
            raise OSError(f"cannot connect to {address!r}: {error}") from error
        link = ZmqLink(address, dealer, monitor, self._forget)
        for each in (dealer, monitor):
            self._poller.register(each, zmq.POLLIN)
            self._links[each] = link
        return link

    def wait(self, timeout_s: float) -> list[Link]:
        """See Transport."""
        ready: dict[int, Link] = {}
        for link in self._links.values():
            link.renew()
        for source, _ in self._poller.poll(max(0, int(timeout_s * 1000))):
            if source == self._woken.fileno():
                self._drain_wakes()
            elif source in self._links:
                link = self._links[source]
                link.note_events()
                ready[id(link)] = link
        return list(ready.values())

    def watch(self, descriptor: int) -> None:
        """End waits also when that descriptor can be read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wake(self) -> None:
        """See Transport."""
        try:
            self._waker.send(b"\0")
        except (BlockingIOError, OSError):
            return  # a wake is pending already, or the transport is closed

    def close(self) -> None:
        """See Transport."""
        for link in set(self._links.values()):
            link.close()
        for listener in self._listeners:
            listener.close()
        self._woken.close()
        self._waker.close()
        self._context.destroy(linger=0)

    def _socket(self, kind: int, max_bytes: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        made.setsockopt(zmq.SNDHWM, 0)  # credits bound what is under way
        made.setsockopt(zmq.HEARTBEAT_IVL, 500)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2_000)
        made.setsockopt(zmq.HANDSHAKE_IVL, 2_000)
        made.setsockopt(zmq.RECONNECT_IVL, 50)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if self._curve:
            made.curve_publickey = self._curve[0].encode()
            made.curve_secretkey = self._curve[1].encode()
        return made

    def _forget(self, *sockets: zmq.Socket[bytes]) -> None:
        for each in sockets:
            self._poller.unregister(each)
            self._links.pop(each, None)

    def _drain_wakes(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            return


class ZmqListener:
    """A bound ROUTER."""

    seals = False

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        self.address: str = router.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """See Listener."""
        try:
            peer, *parts = self._router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return peer, parts

    def takes(self, peer: bytes) -> bool:
        """libzmq queues without a bound: credits are one."""
        return True

    def send(self, peer: bytes, header: bytes, payload: Buffer | None = None) -> bool:
        """See Listener."""
        parts: list[Any] = [peer, header] if payload is None else [peer, header, payload]
        try:
            self._router.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Unbind."""
        self._router.close()


class ZmqLink:
    """A connected DEALER and the monitor of its connection."""

    carrier = "zeromq"

    def __init__(self, address: str, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], forget: "Forget") -> None:
        self.address = address
        self.connected = False
        self.losses = 0
        self.stranger = ""  # libzmq does not tell
        self._renew_s = math.inf  # when it is to be made again, unless libzmq does so
        self._dealer = dealer
        self._monitor = monitor
        self._forget = forget

    def receive(self) -> Received | None:
        """See Link. A message of more parts than we send has an empty header."""
        try:
            frames = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        match [frame.buffer for frame in frames]:
            case [header]:
                return Received(header)
            case [header, payload]:
                return Received(header, payload, len(payload), checksum(payload))
            case _:
                return Received(b"")

    def send(self, message: bytes) -> bool:
        """See Link."""
        try:
            self._dealer.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def keep(self) -> None:
        """libzmq frees a message when nobody refers to it."""

    def divert(self, owner: object) -> None:
        """Nothing was placed."""

    def note_events(self) -> None:
        """Take what the monitor saw."""
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.losses += bool(event & LOST)
            self._renew_s = time.monotonic() + RENEW_S if event & LOST else math.inf

    def renew(self) -> None:
        """Make a lost connection again that libzmq has given up; see `shared.wire.sockets`."""
        if time.monotonic() > self._renew_s:
            self._renew_s = math.inf
            with suppress(zmq.ZMQError):
                self._dealer.disconnect(self.address)
            self._dealer.connect(self.address)

    def close(self) -> None:
        """See Link."""
        self._forget(self._dealer, self._monitor)
        _close(self._dealer, self._monitor)


def _close(dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None) -> None:
    dealer.disable_monitor()  # first the source of events: libzmq's own thread would wait for somebody to take them
    if monitor is not None:
        monitor.close()
    dealer.close()


class Forget(Protocol):
    """Takes sockets out of the poller."""

    def __call__(self, *sockets: zmq.Socket[bytes]) -> None:
        """Take them out; unknown ones are an error."""
