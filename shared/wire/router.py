"""The serving socket: who is connected to it, and what is due to each of them.

How it knows that somebody is gone: libzmq tells of each connection that it accepted or lost by its descriptor, and
each message says by which descriptor it came. Its own thread finds lost connections, those of frozen peers by
heartbeats, so it takes neither a message to them nor time of our interpreter.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import zmq

from shared.wire.connections import ConnectionWatch
from shared.wire.envelope import Envelope, pack, pack_batches, reset
from shared.wire.sockets import LoopSocket, Sockets

BACKLOG_BYTES = 8 << 20  # what may wait for a peer that does not read, beyond what libzmq and the kernel hold
RETRY_S = 0.01


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. A peer that connects again is another one: the identity is the ROUTER's, never its own."""

    identity: bytes
    calls: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)
    notices: "set[asyncio.Task[None]]" = field(default_factory=set)
    last_call: int = 0  # the highest number of a call that came
    gone: bool = False
    due: list[Envelope] = field(default_factory=list)  # in this turn of the loop
    backlog: deque[bytes] = field(default_factory=deque)  # messages that could not be sent
    backlog_bytes: int = 0
    refused: bool = False  # for its wire version, and the log has said so


class _Received(NamedTuple):
    identity: bytes
    descriptor: int | None  # None: of a stranger that speaks a protocol older than ours
    frames: list[bytes]


class Router:
    """One ROUTER. `on_message(peer, frames)` gets what comes; `on_lost(peer)` is called when a peer is `gone`, or given
    up because it does not read; then its connection may live on.
    """

    def __init__(
        self,
        sockets: Sockets,
        address: str,
        on_message: Callable[[Peer, list[bytes]], None],
        on_lost: Callable[[Peer], None],
        dropped: Counter[str],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._dropped = dropped
        self._wire = sockets.wire
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, list[Peer]] = {}  # by descriptor, those that are open
        self._peers: dict[bytes, Peer] = {}
        self._due: list[Peer] = []
        self._blocked: list[Peer] = []
        socket = sockets.unbound(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._watch = ConnectionWatch(socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED, self._connection_event)
        self._socket = LoopSocket(socket, self._receive, partial(_read, socket))
        try:
            socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise

    def queue(self, peer: Peer, envelope: Envelope) -> None:
        """Send with all that is due to the peer in this turn of the loop."""
        if peer.gone:
            return
        if not peer.due:
            if not self._due:
                # One turn later: a handler that was woken by its last item gets to add its reply.
                self._loop.call_soon(self._loop.call_soon, self.flush)
            self._due.append(peer)
        peer.due.append(envelope)

    def flush(self) -> None:
        """Send what is due."""
        ready, self._due = self._due, []
        for peer in ready:
            envelopes, peer.due = peer.due, []
            if not envelopes:  # lost or given up since
                continue
            for _, message in pack_batches(envelopes, self._wire):
                if peer.backlog or not self._send(peer, message):
                    self._keep(peer, message)
            if peer.backlog_bytes > BACKLOG_BYTES:
                self._give_up(peer)

    def close(self) -> None:
        """Close the socket."""
        self._blocked.clear()
        self._watch.close()
        self._socket.close()

    def _send(self, peer: Peer, message: bytes) -> bool:
        """Whether that is done with."""
        if peer.gone:
            return True
        try:
            self._socket.send([peer.identity, message])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(peer)
        return True

    def _keep(self, peer: Peer, message: bytes) -> None:
        if not peer.backlog:
            if not self._blocked:
                self._loop.call_later(RETRY_S, self._retry)
            self._blocked.append(peer)
        peer.backlog.append(message)
        peer.backlog_bytes += len(message)

    def _retry(self) -> None:
        blocked, self._blocked = self._blocked, []
        for peer in blocked:
            while peer.backlog and self._send(peer, peer.backlog[0]):
                if peer.backlog:  # not lost meanwhile
                    peer.backlog_bytes -= len(peer.backlog.popleft())
        self._blocked = [peer for peer in blocked if peer.backlog] + self._blocked
        if self._blocked:
            self._loop.call_later(RETRY_S, self._retry)

    def _give_up(self, peer: Peer) -> None:
        """It does not read: instead of what waits for it, tell it what it has lost, for when it does again."""
        message = pack([reset(peer.last_call)], self._wire)
        peer.due.clear()
        peer.backlog = deque([message])
        peer.backlog_bytes = len(message)
        self._dropped["peer_slow"] += 1
        self._on_lost(peer)

    def _receive(self, message: _Received) -> None:
        peer = self._peers.get(message.identity) or self._met(message)
        if peer is not None:
            self._on_message(peer, message.frames)

    def _met(self, message: _Received) -> Peer | None:
        identity = message.identity
        if message.descriptor is None or len(identity) != 5 or identity[0]:
            # Not an identity that the ROUTER gave. One that a peer brings, another could bring, and get its answers.
            self._dropped["frame"] += 1
            return None
        self._watch.catch_up()
        sharing = self._connections.get(message.descriptor)
        if sharing is None:
            self._dropped["peer_gone"] += 1  # its last words
            return None
        # A descriptor may have been reused before such last words are read. Then both share it: the one that is gone
        # is found out when something is due to it, or with the other at the latest.
        peer = self._peers[identity] = Peer(identity)
        sharing.append(peer)
        return peer

    def _connection_event(self, event: int, descriptor: int) -> None:
        for peer in self._connections.pop(descriptor, ()):
            self._lose(peer)
        if event == zmq.EVENT_ACCEPTED:
            self._connections[descriptor] = []

    def _lose(self, peer: Peer) -> None:
        if peer.gone:
            return
        peer.gone = True
        del self._peers[peer.identity]
        if peer.calls or peer.due or peer.backlog:
            self._dropped["peer_gone"] += 1
        peer.due.clear()
        peer.backlog.clear()
        self._on_lost(peer)


def _read(socket: zmq.Socket[bytes]) -> _Received:
    first = socket.recv(zmq.NOBLOCK, copy=False)
    frames = []
    while socket.getsockopt(zmq.RCVMORE):
        frames.append(socket.recv(zmq.NOBLOCK))
    try:
        descriptor = int(first.get(zmq.SRCFD))
    except zmq.ZMQError:
        descriptor = None
    return _Received(first.bytes, descriptor, frames)
