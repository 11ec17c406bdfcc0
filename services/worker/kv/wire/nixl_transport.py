"""KV messages over TCP and payloads by NIXL, between two ends that both have it.

The exporter offers payloads in registered memory, and the importer reads them in the order of the offers.
"""

import logging
import select
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from services.worker.kv.errors import KvFault
from services.worker.kv.host_memory import Arena, Bytes
from services.worker.kv.wire.nixl_agent import (
    NIXL_SCHEME,
    NIXL_VERSION,
    AnyMessage,
    ImportMemory,
    Meet,
    Met,
    NixlAgent,
    NixlCounters,
    NixlError,
    NixlUse,
    Offer,
    Part,
    Read,
    Ready,
    Taken,
    decode_nixl,
    encode_nixl,
    this_host,
)
from services.worker.kv.wire.protocol import (
    MAX_FRAME_BYTES,
    Buffer,
    Failed,
    Frame,
    Link,
    Listener,
    Place,
    Placement,
    Received,
    checksum,
    decode_reply,
    encode_message,
)
from services.worker.kv.wire.tcp_link import TcpLink
from services.worker.kv.wire.tcp_transport import TcpListener, TcpTransport

_log = logging.getLogger(__name__)
_MEET_S = 3.0  # how long the trial may take, from the connection on
_READ_S = 5.0  # how long a read may take, its turn included
# A dead peer is found by its reads first, and a moment later by the connection, which knows the cause.
_DOUBT_S = 0.25
_MAX_WAITING = 1000
_PLACE_BYTES = 4096
_OUTGOING_BYTES = 64 << 20  # for payloads outside of staging: coded ones, and parts of segments
_TRIAL_BYTES = 64 << 10
_STUCK_S = 30.0  # how long a peer may leave an offer
_LIVELY_S = 0.02  # how long after a message peers are helped at full speed
_MEETING_S = 5.0  # how long a peer may take to read the trial
_TURN_S = 0.5
_FAST_S, _SLOW_S = 0.0001, 0.002  # between two looks at reads: nothing signals that they are done
_LONGEST_S = 0.02  # between two looks at anything else


class NixlTransport:
    """TCP, and NIXL for addresses of the scheme `nixl`, which say that the exporter has it."""

    def __init__(self, tcp: TcpTransport, use: NixlUse) -> None:
        """Raises OSError where NIXL is not available."""
        self.counters = NixlCounters()
        self._tcp = tcp
        self._use = use
        self._imports = ImportMemory(use.trusted, use.receiving_bytes) if use.receiving_bytes else None
        self._listeners: list[NixlListener] = []
        self._links: dict[int, NixlLink] = {}  # by the id of the inner link
        self._poller = select.poll()
        self._poller.register(tcp.fileno(), select.POLLIN)

    def listen(self, address: str) -> Listener:
        """Raises OSError as `__init__` does, too."""
        if not address.startswith(f"{NIXL_SCHEME}://"):
            return self._tcp.listen(address)
        exports = Exports(self._use.trusted, self._use.staging)
        listener = NixlListener(self._tcp.listen(address), exports, self.counters)
        self._listeners.append(listener)
        return listener

    def connect(self, address: str, place: Place | None = None) -> Link:
        if self._imports is None or not address.startswith(f"{NIXL_SCHEME}://"):
            return self._tcp.connect(address, place)
        link = NixlLink(address, self._tcp, self._imports, self.counters, place, self._closed)
        self._links[id(link.inner)] = link
        return link

    def wait(self, timeout_s: float) -> list[Link]:
        waited = self._wait_for_nixl(timeout_s)
        happened = self._tcp.wait(0.0 if waited else timeout_s)
        ready: dict[int, Link] = {id(link): self._links.get(id(link), link) for link in happened}
        self._go_on()
        ready |= {key: link for key, link in self._links.items() if link.ready}
        return list(ready.values())

    def wake(self) -> None:
        self._tcp.wake()

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
        self._tcp.close()
        self._listeners.clear()
        self._imports = None

    def _wait_for_nixl(self, timeout_s: float) -> bool:
        """Wait while NIXL is active, until a read is done or a socket has something; whether NIXL is active."""
        if not self._active or self._tcp.busy:
            return self._active
        until_s = time.monotonic() + min(timeout_s, _LONGEST_S)
        while not self._poller.poll(0):
            self._go_on()
            if not self._active or any(link.ready for link in self._links.values()) or time.monotonic() >= until_s:
                break
            time.sleep(_FAST_S if self._lively else _SLOW_S)
        return True

    @property
    def _active(self) -> bool:
        return any(link.reading for link in self._links.values()) or any(each.active for each in self._listeners)

    @property
    def _lively(self) -> bool:
        return any(link.reading for link in self._links.values()) or any(each.lively for each in self._listeners)

    def _go_on(self) -> None:
        now_s = time.monotonic()
        for listener in self._listeners:
            if listener.known:
                listener.help(now_s)
        for link in list(self._links.values()):
            link.go_on(now_s)
        if self._imports is not None:
            self._imports.sweep(now_s)

    def _closed(self, link: "NixlLink") -> None:
        del self._links[id(link.inner)]


class _State(Enum):
    MEETING = 0
    NIXL = 1
    TCP = 2


@dataclass(slots=True)
class _Pending:
    """An offered payload. `read` is None until there is memory for it."""

    offer: Offer
    since_s: float
    read: Read | None = None
    done: bool = False
    error: str = ""

    @property
    def ready(self) -> bool:
        return self.done or bool(self.error)


class NixlLink:
    """A link over TCP that reads the payloads it is offered. It sends nothing else until it is known how payloads
    come.
    """

    def __init__(
        self,
        address: str,
        tcp: TcpTransport,
        imports: ImportMemory,
        counters: NixlCounters,
        place: Place | None,
        on_close: Callable[["NixlLink"], None],
    ) -> None:
        """Raises OSError for an invalid address."""
        self.address = address
        self.carrier = "tcp"
        self._imports = imports
        self._counters = counters
        self._place = place
        self._on_close = on_close
        self._waiting: list[bytes] = []
        self._pending: deque[_Pending] = deque()
        self._held: Received | None = None  # the message behind the pending payloads
        self._peer = b""
        self._trial: tuple[Met, Read] | None = None
        self._doubt: tuple[str, float] | None = None  # why a read failed, and since when reads have stopped
        self.inner: TcpLink = tcp.connect(address, self._place_payload)
        self._losses = self.inner.losses
        self._begin()

    @property
    def losses(self) -> int:
        return self.inner.losses

    @property
    def refusal(self) -> str:
        return self.inner.refusal

    @property
    def connected(self) -> bool:
        return self.inner.connected

    @property
    def reading(self) -> bool:
        """Whether it waits for a trial or a read."""
        return self._trial is not None or any(not each.ready for each in self._pending)

    @property
    def ready(self) -> bool:
        """Whether `receive` has something for which no socket becomes readable."""
        return self._pending[0].ready if self._pending else self._held is not None

    def receive(self) -> Received | None:
        if self._state is _State.MEETING:
            self._receive_answer()
            return None
        plain = self._gather()
        if plain is not None:
            self.carrier = "tcp"
            return plain
        if not self._pending or not self._pending[0].ready:
            return None
        return self._delivered(self._pending.popleft())

    def keep(self) -> None:
        """A payload that was read is kept as long as it is referred to."""
        if self.carrier == "tcp":
            self.inner.keep()

    def divert(self, owner: object) -> None:
        """Reads go to memory of this transport."""
        self.inner.divert(owner)

    def send(self, message: bytes) -> bool:
        if self._state is not _State.MEETING:
            return self.inner.send(message)
        self._waiting.append(message)
        del self._waiting[:-_MAX_WAITING]
        return True

    def close(self) -> None:
        self._forget()
        self.inner.close()
        self._on_close(self)

    def go_on(self, now_s: float) -> None:
        """Make progress with reads and look at the connection; to be called after each wait of the transport."""
        if self.inner.losses != self._losses:
            self._losses = self.inner.losses
            self._forget()
            self._begin()
        if self._state is _State.MEETING:
            self._continue_trial(now_s)
        else:
            self._continue_reads(now_s)

    def _begin(self) -> None:
        self._state = _State.MEETING
        self._connected_s = 0.0
        self.inner.send(encode_nixl(self._imports.meet))

    def _receive_answer(self) -> None:
        """Receive the exporter's answer about NIXL, and begin the trial."""
        received = self.inner.receive()
        met = decode_nixl(received.header) if received is not None else None
        if not isinstance(met, Met) or received is None or self._trial is not None:
            return
        if met.refusal:
            self._counters.refused += 1
            _log.info("KV of %s goes over TCP: %s", self.address, met.refusal)
            self._conclude(_State.TCP)
            return
        try:
            into = self._imports.take(met.size_bytes) if 0 < met.size_bytes <= MAX_FRAME_BYTES else None
            if into is None or received.payload is None:
                raise NixlError("no room for a trial")
            self._peer = self._imports.agent.meet(bytes(received.payload))
            self._trial = met, self._imports.agent.read(self._peer, met.address, into, met.size_bytes)
        except NixlError as error:
            self._fail(f"no trial: {error}")

    def _continue_trial(self, now_s: float) -> None:
        if self._trial is not None:
            met, read = self._trial
            try:
                if read.done():
                    if checksum(read.payload) != met.checksum:
                        raise NixlError("other bytes came than were to be read")
                    self._trial = None
                    self.inner.send(encode_nixl(Ready()))
                    self._conclude(_State.NIXL)
                    return
            except NixlError as error:
                self._fail(f"the trial failed: {error}")
                return
        if not self.inner.connected:
            self._connected_s = 0.0
        elif not self._connected_s:
            self._connected_s = now_s
        elif now_s - self._connected_s > _MEET_S:
            self._fail(f"no trial within {_MEET_S} s")

    def _conclude(self, state: _State) -> None:
        self._state = state
        for each in self._waiting:
            self.inner.send(each)
        self._waiting.clear()

    def _gather(self) -> Received | None:
        """Note offers; returns a message that is not behind any of them."""
        if self._held is not None:
            if self._pending:
                return None
            held, self._held = self._held, None
            return held
        while (received := self.inner.receive()) is not None:
            message = decode_nixl(received.header)
            if isinstance(message, Offer):
                self._note(message)
            elif message is None and self._pending:
                self._held = received  # nothing more is received before it has been delivered
                return None
            elif message is None:
                return received
        return None

    def _note(self, offer: Offer) -> None:
        now_s = time.monotonic()
        pending = _Pending(offer, now_s)
        self._pending.append(pending)
        if self._state is _State.TCP:
            pending.error = "offered after a read had failed"
        elif not 0 < offer.size_bytes <= MAX_FRAME_BYTES:
            self._fail(f"an offer of {offer.size_bytes} bytes")
        else:
            self._continue_reads(now_s)

    def _continue_reads(self, now_s: float) -> None:
        if self._doubt is not None:
            if now_s - self._doubt[1] > _DOUBT_S:
                self._fail(self._doubt[0])
            return
        try:
            for each in self._pending:
                if each.read is None and not each.error:
                    into = self._imports.take(each.offer.size_bytes)
                    if into is not None:
                        size = each.offer.size_bytes
                        each.read = self._imports.agent.read(self._peer, each.offer.address, into, size)
                if each.read is not None and not each.ready:
                    each.done = each.read.done()
                if not each.ready and now_s - each.since_s > _READ_S:
                    raise NixlError(f"nothing came within {_READ_S} s")
        except NixlError as error:
            self._doubt = str(error), now_s

    def _delivered(self, pending: _Pending) -> Received:
        offer, read = pending.offer, pending.read
        self.carrier = "nixl"
        if read is None or pending.error:
            frame = decode_reply(offer.header)
            pull_id = frame.pull_id if isinstance(frame, Frame) else 0
            return Received(encode_message(Failed(pull_id, KvFault.NIXL.value, pending.error)))
        self.inner.send(encode_nixl(Taken(offer.number)))
        self._counters.received_bytes += offer.size_bytes
        return Received(offer.header, read.payload, offer.size_bytes, checksum(read.payload))

    def _fail(self, reason: str) -> None:
        """Payloads come over TCP from now on; the pending ones fail."""
        self._counters.failures += 1
        _log.warning("KV of %s goes over TCP, NIXL has failed: %s", self.address, reason)
        self._abandon_reads()
        for each in self._pending:
            if not each.done:
                each.error = reason
        self.inner.send(encode_nixl(Part(reason)))
        self._conclude(_State.TCP)

    def _forget(self) -> None:
        """Forget everything that was to come over a lost connection."""
        self._abandon_reads()
        self._pending.clear()
        self._held = None

    def _abandon_reads(self) -> None:
        now_s = time.monotonic()
        for read in [each.read for each in self._pending if not each.done] + [self._trial and self._trial[1]]:
            if read is not None:
                self._imports.abandon(read, now_s)
        self._trial = self._doubt = None
        if self._peer:
            self._imports.agent.part(self._peer)
            self._peer = b""

    def _place_payload(self, link: object, header: Buffer, size_bytes: int) -> Placement | None:
        return self._place(self, header, size_bytes) if self._place is not None else None


class Exports:
    """The memory that peers may read: all staging, and copies of payloads outside of it."""

    def __init__(self, trusted: bool, staging: Sequence[Bytes]) -> None:
        """Raises OSError where NIXL is not available, or does not register the memory."""
        self.agent = NixlAgent(trusted)
        self.host = this_host()
        self.trusted = trusted
        self.trial: Bytes = np.random.default_rng().integers(0, 256, _TRIAL_BYTES, np.uint8)
        self._outgoing = Arena(_PLACE_BYTES, _OUTGOING_BYTES // _PLACE_BYTES)
        for each in (self.trial, *staging, *self._outgoing.slabs):
            self.agent.register(each)
        self._slabs = sorted((_address(slab), slab.nbytes) for slab in (*staging, *self._outgoing.slabs))
        self.metadata = self.agent.metadata

    def met(self) -> Met:
        return Met("", _address(self.trial), self.trial.nbytes, checksum(self.trial.data))

    def registered(self, payload: Buffer) -> tuple[int, Bytes] | None:
        """The address of the payload, or of a copy of it, and what keeps it there; None while there is no room."""
        lies = np.frombuffer(payload, np.uint8)
        address = _address(lies)
        at = bisect_right(self._slabs, (address, 1 << 62)) - 1
        if at >= 0 and address + lies.nbytes <= sum(self._slabs[at]):
            return address, lies
        copy = self._outgoing.take_bytes(lies.nbytes)
        if copy is None:
            return None
        copy[: lies.nbytes] = lies
        return _address(copy), copy


def _address(memory: Bytes) -> int:
    return int(memory.ctypes.data)


@dataclass(frozen=True, slots=True)
class _Offered:
    number: int
    kept: Bytes  # an arena's places are used again once nothing refers to them
    since_s: float


@dataclass(slots=True)
class _Peer:
    """A peer that has NIXL, in its trial until it is ready or parts."""

    since_s: float
    ready: bool = False
    number: int = 0  # of the last offer
    offers: deque[_Offered] = field(default_factory=deque)


class NixlListener:
    """TCP, except for payloads to peers that can read this instance's memory."""

    seals = False  # a read has no checksum behind it

    def __init__(self, inner: TcpListener, exports: Exports, counters: NixlCounters) -> None:
        self.address = inner.address
        self._inner = inner
        self._exports = exports
        self._counters = counters
        self._peers: dict[bytes, _Peer] = {}
        self._received_s = 0.0
        self._turn_s = 0.0

    @property
    def known(self) -> bool:
        """Whether there are peers that have NIXL."""
        return bool(self._peers)

    @property
    def active(self) -> bool:
        """Whether a peer reads or is in its trial."""
        lately_s = time.monotonic() - _MEETING_S
        return any(peer.offers or not (peer.ready or peer.since_s < lately_s) for peer in self._peers.values())

    @property
    def lively(self) -> bool:
        """Whether a message of a peer arrived a moment ago."""
        return time.monotonic() - self._received_s < _LIVELY_S

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        while (received := self._inner.receive()) is not None:
            name, parts = received
            message = decode_nixl(parts[0]) if len(parts) == 1 else None
            if message is None:
                return received
            self._received_s = time.monotonic()
            self._handle(name, message)
        return None

    def takes(self, peer: bytes) -> bool:
        return self._inner.takes(peer)

    def send(self, peer: bytes, header: bytes, payload: Buffer | None = None) -> bool:
        """A payload for which there is no room among the copies goes over TCP."""
        known = self._peers.get(peer)
        if payload is None or not len(payload) or known is None or not known.ready:
            return self._inner.send(peer, header, payload)
        found = self._exports.registered(payload)
        if found is None:
            return self._inner.send(peer, header, payload)
        address, kept = found
        known.number += 1
        self._received_s = time.monotonic()
        known.offers.append(_Offered(known.number, kept, self._received_s))
        self._counters.sent_bytes += len(payload)
        return self._inner.send(peer, encode_nixl(Offer(known.number, address, len(payload), header)))

    def help(self, now_s: float) -> None:
        """Help peers to read; now and then look for peers that are gone, or do not read what they requested."""
        self._exports.agent.progress()
        if now_s < self._turn_s:
            return
        self._turn_s = now_s + _TURN_S
        for name, peer in list(self._peers.items()):
            if not self._inner.has(name):
                del self._peers[name]
            elif peer.offers and now_s - peer.offers[0].since_s > _STUCK_S:
                del self._peers[name]
                self._inner.drop(name, "it does not read what it requested")

    def _handle(self, name: bytes, message: AnyMessage) -> None:
        peer = self._peers.get(name)
        match message:
            case Meet():
                self._meet(name, message)
            case Ready() if peer is not None:
                peer.ready = True
            case Taken(number) if peer is not None:
                while peer.offers and peer.offers[0].number <= number:
                    peer.offers.popleft()
            case Part(reason) if peer is not None:
                del self._peers[name]
                self._counters.failures += 1
                _log.warning("a peer cannot read this instance's memory by NIXL, its KV goes over TCP: %s", reason)
            case _:
                pass  # a message that makes no sense, or is late

    def _meet(self, name: bytes, meet: Meet) -> None:
        refusal = self._objection(meet)
        if refusal:
            self._inner.send(name, encode_nixl(Met(refusal)))
            return
        self._peers[name] = _Peer(self._received_s)
        self._inner.send(name, encode_nixl(self._exports.met()), self._exports.metadata)

    def _objection(self, meet: Meet) -> str:
        if meet.version != NIXL_VERSION:
            return f"version {NIXL_VERSION} of the exporter's messages, {meet.version} of the importer's"
        if meet.host != self._exports.host and not (meet.trusted and self._exports.trusted):
            return "the instances are on two hosts, and kv_nixl_trusted is not set on both"
        return ""
