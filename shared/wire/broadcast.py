"""Publish and subscribe for state of which only the latest value matters.

Messages end with a checksum: one that arrives with other bits is dropped. `Publisher` and `Subscriber` carry one type
of value; `ClusterPublisher` and `ClusterFeed` carry the cluster's state, by topic, so that nothing is sent to a process
that does not need it. A follower of the cluster gets the changes, and requests the whole state by a subscription, at
first and whenever a change is missing; instances get the policies, and a notice when the monitor does not know them.
Each message of the cluster feed carries the epoch of its monitor: so a monitor that has lost its lease, and may not
know it yet, is distinguished from the one that has taken over.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

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

CHANGES, WHOLE, POLICIES = b"changes", b"whole", b"policies"
_ON_REQUEST = (WHOLE, POLICIES)
_UNKNOWN = b"stranger:"  # and an instance's id
SEAL_BYTES = 8
MAX_STATE_BYTES = 8 << 20
MAX_CLUSTER_BYTES = 32 << 20
ASK_AGAIN_S = 0.3  # without the whole state after a subscription
_EPOCH_BYTES = 8
_SUBSCRIBED = 1  # the first byte of libzmq's message about a new subscription

log = get_log(__name__)
Value = TypeVar("Value")


def sealed(body: bytes) -> bytes:
    """The body with its checksum."""
    return body + xxhash.xxh3_64_digest(body)


def opened(message: bytes) -> memoryview | None:
    """The body of a message, without a copy; None when the checksum is wrong."""
    body = memoryview(message)[:-SEAL_BYTES]
    return body if message.endswith(xxhash.xxh3_64_digest(body)) else None


class Publisher:
    """PUB sockets that connect to bound subscribers, one for each address of `address` (see `several`). Sending does
    not block: messages to a subscriber that does not read are dropped.
    """

    def __init__(self, sockets: Sockets, address: str) -> None:
        self._header = sockets.wire.header
        self._sockets = [sockets.unconnected(zmq.PUB) for _ in several(address)]
        pairs = zip(self._sockets, several(address), strict=True)
        self._connections = [Connection(socket, each) for socket, each in pairs]
        self._encoder = msgspec.msgpack.Encoder()

    def publish(self, value: object) -> None:
        message = sealed(self._header + self._encoder.encode(value))
        for socket in self._sockets:
            socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        for connection, socket in zip(self._connections, self._sockets, strict=True):
            connection.close()
            socket.close()


class Subscriber(Generic[Value]):
    """A bound SUB socket that decodes each message and passes it on. Malformed messages and those of an incompatible
    wire version are dropped and counted by cause; the first of the latter is logged. `watched`: see `LoopSocket`.
    """

    def __init__(
        self, sockets: Sockets, address: str, kind: type[Value], on_value: Callable[[Value], None], watched: bool = True
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._on_value = on_value
        self._wire = sockets.wire
        self._address = address
        self.dropped: Counter[str] = Counter()
        socket = sockets.bind(zmq.SUB, address)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket = LoopSocket(socket, self._receive, partial(socket.recv, zmq.NOBLOCK), watched)

    def take(self, most: int) -> int:
        """Pass up to `most` messages on that have arrived, and return their number."""
        return self._socket.take(most)

    def _receive(self, frame: bytes) -> None:
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
        self._socket.close()


class ClusterPublisher:
    """The monitor's end. `on_wanted(topic)` is called for each new subscription to `WHOLE` or `POLICIES`."""

    def __init__(self, sockets: Sockets, address: str, on_wanted: Callable[[bytes], None] = lambda _: None) -> None:
        """Raises zmq.ZMQError when the address is taken."""
        socket = sockets.unbound(zmq.XPUB)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # report each subscription to a topic, not only the first
        try:
            socket.bind(address)
        except zmq.ZMQError:
            socket.close()
            raise
        self.on_wanted = on_wanted
        self._header = sockets.wire.header
        self._socket = LoopSocket(socket, self._on_subscription, whole_messages(socket))
        self._encoder = msgspec.msgpack.Encoder()
        self.near: list[ClusterFeed] = []  # followers in this process
        self._unlisten = partial(sockets.listens, address, None)
        sockets.listens(address, self)
        self.epoch = 0  # see `ClusterFeed`
        self.sent_bytes = 0  # each message counted once, whatever the number of followers

    def change(self, delta: ClusterDelta) -> None:
        """Send a change to all followers of the cluster."""
        self._send(CHANGES, delta)

    def whole(self, delta: ClusterDelta) -> None:
        """Send the whole state to the followers that have requested it."""
        self._send(WHOLE, delta)

    def policies(self, policies: PolicySet) -> None:
        """Send the policies to all instances."""
        self._send(POLICIES, policies)

    def stranger(self, instance_id: str, generation: int) -> None:
        """Tell an instance that the monitor does not know it, so that it registers."""
        self._send(_UNKNOWN + instance_id.encode(), generation)

    def close(self) -> None:
        self._unlisten()
        self._socket.close()

    def _send(self, topic: bytes, value: object) -> None:
        for feed in self.near:
            feed.hand(topic, self.epoch, value)
        body = sealed(self._header + self.epoch.to_bytes(_EPOCH_BYTES, "big") + self._encoder.encode(value))
        self.sent_bytes += len(body)
        self._socket.send([topic, body])

    def _on_subscription(self, frames: list[bytes]) -> None:
        subscription = frames[0]
        if subscription[:1] == bytes([_SUBSCRIBED]) and subscription[1:] in _ON_REQUEST:
            self.on_wanted(subscription[1:])


class ClusterFeed:
    """A follower's end. Damaged messages are dropped and counted in `dropped`; their content is sent again or
    requested.

    on_delta(delta): applies a delta, and returns False when a delta before it is missing (`ClusterState.apply`).
    on_policies: called whenever policies are published. on_stranger(generation): the monitor does not know the process
    of `instance_id` with this generation. `address`: one or several (see `several`). Of several monitors one is
    followed at a time: messages of an older epoch than the newest are dropped. A single monitor without a lease has
    epoch 0: it is followed, and after it no older one. on_epoch(epoch): called when another monitor is followed from
    now on; when it raises Conflict, that monitor is not followed.
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
        self._wire = sockets.wire
        self._address = address
        self.dropped: Counter[str] = Counter()
        self.received_bytes = 0  # of changes and whole states
        self._on_delta = on_delta
        deltas = msgspec.msgpack.Decoder(ClusterDelta)
        self._topics: dict[bytes, tuple[msgspec.msgpack.Decoder[Any], Callable[[Any], None]]] = {
            CHANGES: (deltas, self._change),
            WHOLE: (deltas, self._whole),
        }
        if on_policies is not None:
            self._topics[POLICIES] = msgspec.msgpack.Decoder(PolicySet), on_policies
        if on_stranger is not None:
            self._topics[_UNKNOWN + instance_id.encode()] = msgspec.msgpack.Decoder(int), on_stranger
        self._on_epoch = on_epoch
        self._newest_epoch = 0
        self._followed_epoch = 0  # of the monitor that sent the last message
        self._needs_whole = False  # another monitor is followed, and has not sent the whole state yet
        self._near = sockets.near(address, ClusterPublisher)
        addresses = several(address) if self._near is None else ()
        self._sockets = [sockets.unconnected(zmq.SUB) for _ in addresses]
        self._requested_mono: float | None = None  # when the whole state was requested, until it arrives
        self._following = False
        self._messages = [LoopSocket(each, self._receive, whole_messages(each)) for each in self._sockets]
        for topic in self._topics.keys() - {CHANGES, WHOLE}:
            self._set(zmq.SUBSCRIBE, topic)
        self.follow(following)
        pairs = zip(self._sockets, addresses, strict=True)
        self._connections = [Connection(socket, each) for socket, each in pairs]
        if self._near is not None:
            self._near.near.append(self)

    def hand(self, topic: bytes, epoch: int, value: object) -> None:
        """Take what a publisher of this process publishes, as a message of it."""
        if topic not in self._topics or not self._follows(epoch):
            return
        if self._following or topic not in (CHANGES, WHOLE):
            _, take = self._topics[topic]
            take(value)

    def follow(self, wanted: bool) -> None:
        """Follow the cluster from now on, or no longer."""
        if wanted == self._following:
            return
        self._following = wanted
        self._set(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, CHANGES)
        self._request_whole(wanted)

    def close(self) -> None:
        if self._near is not None:
            self._near.near.remove(self)
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
        if not self._follows(int.from_bytes(body[:_EPOCH_BYTES], "big")):
            self.dropped["old monitor"] += 1
            return
        if topic in (CHANGES, WHOLE):
            if not self._following:
                return  # it was sent before the end of the subscription
            self.received_bytes += len(message)
        decoder, take = self._topics[topic]
        try:
            take(decoder.decode(body[_EPOCH_BYTES:]))
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

    def _follows(self, epoch: int) -> bool:
        """Whether the monitor of that epoch is followed."""
        if epoch != self._followed_epoch:
            if 0 < epoch < self._newest_epoch:
                return False
            try:
                if self._on_epoch is not None:
                    self._on_epoch(epoch)
            except Conflict:  # the caller knows a later epoch
                return False
            self._needs_whole = self._needs_whole or self._followed_epoch != 0
            self._followed_epoch, self._newest_epoch = epoch, max(self._newest_epoch, epoch)
        return True

    def _change(self, delta: ClusterDelta) -> None:
        if self._needs_whole:  # the sequence numbers of two monitors are not comparable
            self._needs_whole = False
            self._request_whole(True)
            return
        taken, requested_mono = self._on_delta(delta), self._requested_mono
        if taken and requested_mono is None:
            return
        if not taken and requested_mono is None:
            self.dropped["gap"] += 1
        if (
            taken or requested_mono is None or time.monotonic() - requested_mono > ASK_AGAIN_S
        ):  # else the state is on its way
            self._request_whole(not taken)

    def _whole(self, delta: ClusterDelta) -> None:
        if self._requested_mono is not None:
            self._needs_whole = False
            self._on_delta(delta)
            self._request_whole(False)

    def _request_whole(self, wanted: bool) -> None:
        if self._requested_mono is not None:
            self._set(zmq.UNSUBSCRIBE, WHOLE)
            self._requested_mono = None
        if wanted:
            self._set(zmq.SUBSCRIBE, WHOLE)
            self._requested_mono = time.monotonic()

    def _set(self, option: int, topic: bytes) -> None:
        if self._near is not None and option == zmq.SUBSCRIBE and topic in _ON_REQUEST:
            asyncio.get_running_loop().call_soon(self._near.on_wanted, topic)  # the answer may be immediate
        for socket, messages in zip(self._sockets, self._messages, strict=True):
            socket.setsockopt(option, topic)
            messages.look_again()
