"""Publish and subscribe for state of which only the latest matters."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import msgspec
import xxhash
import zmq

from shared.domain.cluster import ClusterDelta
from shared.domain.policies import PolicySet
from shared.errors import Conflict, WireVersionMismatch
from shared.runtime.logs import get_log
from shared.wire.addresses import several
from shared.wire.envelope import MALFORMED
from shared.wire.sockets import Connection, LoopSocket, Sockets, whole_messages

# MERGED sealed.py
# Messages of state end with a checksum: what came over the wire with other bits is dropped, not believed.


SEAL_BYTES = 8


def sealed(body: bytes) -> bytes:
    """The message for a body."""
    return body + xxhash.xxh3_64_digest(body)


def opened(message: bytes) -> memoryview | None:
    """The body of a message, no copy; None where its bits are not those that were sealed."""
    view = memoryview(message)
    body = view[:-SEAL_BYTES]
    return body if xxhash.xxh3_64_digest(body) == view[-SEAL_BYTES:] else None


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


# MERGED cluster_feed.py
# What the cluster monitor publishes, by topic, so that nobody hears of more than it asks for.
#
# Whoever follows the cluster hears of changes, and asks for all of it once, by a subscription, and again where a change
# is missing. Instances need the policies, and to be told when the monitor does not know them; few follow the cluster.
#
# Every message carries the epoch of the monitor that sends it: one that has lost its lease, and may not know it yet, is
# told by it from the one that has taken over.

CHANGES, WHOLE, POLICIES = b"changes", b"whole", b"policies"
_STRANGER = b"stranger:"  # and an instance's id
MAX_CLUSTER_BYTES = 32 << 20
ASK_AGAIN_S = 0.3  # without an answer to a subscription
_EPOCH_BYTES = 8
_SUBSCRIBED = 1  # the first byte of what libzmq tells of a subscription


class ClusterPublisher:
    """The monitor's end. `on_wanted(topic)` is called when somebody begins to wait for WHOLE or POLICIES."""

    def __init__(self, sockets: Sockets, address: str, on_wanted: Callable[[bytes], None] = lambda _: None) -> None:
        """Raises zmq.ZMQError when the address is taken."""
        socket = sockets.unbound(zmq.XPUB)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # tell of the second who subscribes, too
        try:
            socket.bind(address)
        except zmq.ZMQError:
            socket.close()
            raise
        self.on_wanted = on_wanted
        self._header = sockets.wire.header
        self._socket = LoopSocket(socket, self._told, whole_messages(socket))
        self._encoder = msgspec.msgpack.Encoder()
        self.epoch = 0  # see `ClusterFeed`
        self.sent_bytes = 0  # each message once, however many listen

    def change(self, delta: ClusterDelta) -> None:
        """To all that follow the cluster."""
        self._send(CHANGES, delta)

    def whole(self, delta: ClusterDelta) -> None:
        """To those that have asked for it."""
        self._send(WHOLE, delta)

    def policies(self, policies: PolicySet) -> None:
        """To all instances."""
        self._send(POLICIES, policies)

    def stranger(self, instance_id: str, generation: int) -> None:
        """To that instance: it is not known here, and is to register."""
        self._send(_STRANGER + instance_id.encode(), generation)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _send(self, topic: bytes, value: object) -> None:
        body = sealed(self._header + self.epoch.to_bytes(_EPOCH_BYTES, "big") + self._encoder.encode(value))
        self.sent_bytes += len(body)
        self._socket.send([topic, body])

    def _told(self, frames: list[bytes]) -> None:
        subscription = frames[0]
        if subscription[:1] == bytes([_SUBSCRIBED]) and subscription[1:] in (WHOLE, POLICIES):
            self.on_wanted(subscription[1:])


class ClusterFeed:
    """A listener's end. What came with other bits is dropped and counted in `dropped`; it is told again, or asked for.

    on_policies hears of them as often as they are published. on_stranger(generation): the monitor does not know the
    process of `instance_id` that has this generation. Of several monitors one speaks at a time; one of an older epoch
    than was heard of is not listened to any more. A single monitor without a lease, of epoch 0, is always
    listened to, and admits no older one again. on_epoch(epoch): another one speaks from now on; where it raises
    Conflict, that one is not listened to either.
    """

    def __init__(
        self,
        sockets: Sockets,
        address: str,
        on_delta: Callable[[ClusterDelta], bool],
        *,
        following: bool = True,
        instance_id: str = "",
        on_policies: Callable[[PolicySet], None] | None = None,
        on_stranger: Callable[[int], None] | None = None,
        on_epoch: Callable[[int], None] | None = None,
    ) -> None:
        """`on_delta` takes a delta in, or says False where one before it is missing: see `ClusterState.apply`.

        `address`: one, or several as `several` reads them.
        """
        self._wire = sockets.wire
        self._address = address
        self.dropped: Counter[str] = Counter()
        self.received_bytes = 0  # of what concerns the cluster
        self._on_delta = on_delta
        self._topics: dict[bytes, Callable[[memoryview], None]] = {CHANGES: self._change, WHOLE: self._whole}
        if on_policies is not None:
            self._topics[POLICIES] = _typed(PolicySet, on_policies)
        if on_stranger is not None:
            self._topics[_STRANGER + instance_id.encode()] = _typed(int, on_stranger)
        self._deltas = msgspec.msgpack.Decoder(ClusterDelta)
        self._on_epoch = on_epoch
        self._epoch = 0  # the highest that was received
        self._speaker = 0  # the epoch of the monitor that spoke last
        self._newcomer = False  # another monitor speaks, and has not told all of it yet
        addresses = several(address)
        self._sockets = [sockets.unconnected(zmq.SUB) for _ in addresses]
        self._asked_mono: float | None = None  # for all of it
        self._following = False
        self._messages = [LoopSocket(each, self._receive, whole_messages(each)) for each in self._sockets]
        for topic in self._topics.keys() - {CHANGES, WHOLE}:
            self._set(zmq.SUBSCRIBE, topic)
        self.follow(following)
        pairs = zip(self._sockets, addresses, strict=True)
        self._connections = [Connection(socket, each) for socket, each in pairs]

    def follow(self, wanted: bool) -> None:
        """Hear of the cluster from now on, or of it no more."""
        if wanted == self._following:
            return
        self._following = wanted
        self._set(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, CHANGES)
        self._ask(wanted)

    def close(self) -> None:
        """Close the sockets."""
        for connection, messages in zip(self._connections, self._messages, strict=True):
            connection.close()
            messages.close()

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) != 2 or len(frames[1]) > MAX_CLUSTER_BYTES or frames[0] not in self._topics:
            self.dropped["frame"] += 1
            return
        topic, message = frames
        body = self._open(message)
        if body is None:
            return
        if not self._speaks(int.from_bytes(body[:_EPOCH_BYTES], "big")):
            self.dropped["old monitor"] += 1
            return
        if topic in (CHANGES, WHOLE):
            if not self._following:
                return  # it was on its way
            self.received_bytes += len(message)
        try:
            self._topics[topic](body[_EPOCH_BYTES:])
        except MALFORMED:
            self.dropped["garbage"] += 1

    def _open(self, message: bytes) -> memoryview | None:
        """Epoch and body of a message; None for one that is dropped."""
        try:
            body = opened(message)
            body = None if body is None else self._wire.body(body, "a monitor")
        except WireVersionMismatch as error:
            if not self.dropped["wire_version"]:
                log.warning("messages of a monitor are dropped", address=self._address, reason=error.message)
            self.dropped["wire_version"] += 1
            return None
        if body is None or len(body) < _EPOCH_BYTES:
            self.dropped["garbage"] += 1
            return None
        return body

    def _speaks(self, epoch: int) -> bool:
        """Whether the monitor of that epoch is to be listened to."""
        if epoch != self._speaker:
            if 0 < epoch < self._epoch:
                return False
            try:
                if self._on_epoch is not None:
                    self._on_epoch(epoch)
            except Conflict:  # a later one is known by another way
                return False
            self._newcomer = self._newcomer or self._speaker != 0
            self._speaker, self._epoch = epoch, max(self._epoch, epoch)
        return True

    def _change(self, body: memoryview) -> None:
        if self._newcomer:  # its numbers say nothing beside those of the one before it
            self._newcomer = False
            self._ask(True)
            return
        taken, asked_mono = self._on_delta(self._deltas.decode(body)), self._asked_mono
        if taken and asked_mono is None:
            return
        if not taken and asked_mono is None:
            self.dropped["gap"] += 1
        if taken or asked_mono is None or time.monotonic() - asked_mono > ASK_AGAIN_S:  # else the answer is on its way
            self._ask(not taken)

    def _whole(self, body: memoryview) -> None:
        if self._asked_mono is not None:
            self._newcomer = False
            self._on_delta(self._deltas.decode(body))
            self._ask(False)

    def _ask(self, wanted: bool) -> None:
        if self._asked_mono is not None:
            self._set(zmq.UNSUBSCRIBE, WHOLE)
            self._asked_mono = None
        if wanted:
            self._set(zmq.SUBSCRIBE, WHOLE)
            self._asked_mono = time.monotonic()

    def _set(self, option: int, topic: bytes) -> None:
        for socket, messages in zip(self._sockets, self._messages, strict=True):
            socket.setsockopt(option, topic)
            messages.look_again()


def _typed(kind: type[Value], on_value: Callable[[Value], None]) -> Callable[[memoryview], None]:
    decoder = msgspec.msgpack.Decoder(kind)
    return lambda body: on_value(decoder.decode(body))
