"""KV messages over TCP, payloads by NIXL between those that both have it."""

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

# MERGED nixl_link.py
# An importer's side of NIXL: payloads that are offered are read, in the order in which they are offered.


_log = logging.getLogger(__name__)
_MEET_S = 3.0  # so long the trial may take, from the connection on
_READ_S = 5.0  # so long a read may take, its turn included
_DOUBT_S = 0.25  # a peer that dies is found by its reads, and a moment later by the connection, which says what it is
_MAX_WAITING = 1000


class _State(Enum):
    MEETING = 0
    NIXL = 1
    TCP = 2


@dataclass(slots=True)
class _Pending:
    """A payload that is offered. `read` is None until there is room for it."""

    offer: Offer
    since_s: float
    read: Read | None = None
    done: bool = False
    error: str = ""

    @property
    def ready(self) -> bool:
        return self.done or bool(self.error)


class NixlLink:
    """See transport.Link: over TCP, but it reads what it is offered. Says nothing else until it is clear how payloads
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
        """Raises OSError for what is no address."""
        self.address = address
        self.carrier = "tcp"
        self._imports = imports
        self._counters = counters
        self._place = place
        self._on_close = on_close
        self._waiting: list[bytes] = []
        self._pending: deque[_Pending] = deque()
        self._held: Received | None = None  # what came behind what is pending
        self._peer = b""
        self._trial: tuple[Met, Read] | None = None
        self._doubt: tuple[str, float] | None = None  # why a read failed, and since when nothing is read
        self.inner: TcpLink = tcp.connect(address, self._asked)
        self._losses = self.inner.losses
        self._begin()

    @property
    def losses(self) -> int:
        """See transport.Link."""
        return self.inner.losses

    @property
    def stranger(self) -> str:
        """See transport.Link."""
        return self.inner.stranger

    @property
    def connected(self) -> bool:
        """See transport.Link."""
        return self.inner.connected

    @property
    def reading(self) -> bool:
        """Whether it waits for NIXL."""
        return self._trial is not None or any(not each.ready for each in self._pending)

    @property
    def ready(self) -> bool:
        """Whether `receive` has something of which no socket tells."""
        return self._pending[0].ready if self._pending else self._held is not None

    def receive(self) -> Received | None:
        """See transport.Link."""
        if self._state is _State.MEETING:
            self._listen()
            return None
        plain = self._gather()
        if plain is not None:
            self.carrier = "tcp"
            return plain
        if not self._pending or not self._pending[0].ready:
            return None
        return self._delivered(self._pending.popleft())

    def keep(self) -> None:
        """See transport.Link. What was read is kept anyway as long as it is referred to."""
        if self.carrier == "tcp":
            self.inner.keep()

    def divert(self, owner: object) -> None:
        """See transport.Link. Reads go to memory of our own."""
        self.inner.divert(owner)

    def send(self, message: bytes) -> bool:
        """See transport.Link."""
        if self._state is not _State.MEETING:
            return self.inner.send(message)
        self._waiting.append(message)
        del self._waiting[:-_MAX_WAITING]
        return True

    def close(self) -> None:
        """See transport.Link."""
        self._forget()
        self.inner.close()
        self._on_close(self)

    def go_on(self, now_s: float) -> None:
        """Look at what is being read, and at the connection; to be called whenever the transport was waited for."""
        if self.inner.losses != self._losses:
            self._losses = self.inner.losses
            self._forget()
            self._begin()
        if self._state is _State.MEETING:
            self._try(now_s)
        else:
            self._read(now_s)

    def _begin(self) -> None:
        self._state = _State.MEETING
        self._connected_s = 0.0
        self.inner.send(encode_nixl(self._imports.meet))

    def _listen(self) -> None:
        """Hear what the exporter says of NIXL, and begin the trial."""
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

    def _try(self, now_s: float) -> None:
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
        """Note what is offered; a message that is not behind any of that."""
        if self._held is not None:
            if self._pending:
                return None
            held, self._held = self._held, None
            return held
        while (received := self.inner.receive()) is not None:
            said = decode_nixl(received.header)
            if isinstance(said, Offer):
                self._note(said)
            elif said is None and self._pending:
                self._held = received  # and nothing is received before it has been taken
                return None
            elif said is None:
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
            self._read(now_s)

    def _read(self, now_s: float) -> None:
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
        """From now on payloads come over TCP; those that are offered do not come."""
        self._counters.failures += 1
        _log.warning("KV of %s goes over TCP, NIXL has failed: %s", self.address, reason)
        self._let_go()
        for each in self._pending:
            if not each.done:
                each.error = reason
        self.inner.send(encode_nixl(Part(reason)))
        self._conclude(_State.TCP)

    def _forget(self) -> None:
        """The connection is over, and all that was to come over it."""
        self._let_go()
        self._pending.clear()
        self._held = None

    def _let_go(self) -> None:
        now_s = time.monotonic()
        for read in [each.read for each in self._pending if not each.done] + [self._trial and self._trial[1]]:
            if read is not None:
                self._imports.abandon(read, now_s)
        self._trial = self._doubt = None
        if self._peer:
            self._imports.agent.part(self._peer)
            self._peer = b""

    def _asked(self, link: object, header: Buffer, size_bytes: int) -> Placement | None:
        return self._place(self, header, size_bytes) if self._place is not None else None


# MERGED nixl_listener.py
# An exporter's side of NIXL: payloads that lie in registered memory are offered to the peers that can read them.

_PLACE_BYTES = 4096
_OUTGOING_BYTES = 64 << 20  # for payloads that lie elsewhere: coded ones, and parts of what is staged
_TRIAL_BYTES = 64 << 10
_STUCK_S = 30.0  # so long a peer may leave what it is offered
_LIVELY_S = 0.02  # after something was said peers are helped as fast as we can, later only now and then
_MEETING_S = 5.0  # so long a peer may take to read the trial
_TURN_S = 0.5


class Exports:
    """What peers may read: all that is staged, and copies of what is not staged as it is sent."""

    def __init__(self, trusted: bool, staging: Sequence[Bytes]) -> None:
        """Raises OSError where NIXL is not to be had, or does not take the memory."""
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
        """Where the trial's bytes lie."""
        return Met("", _address(self.trial), self.trial.nbytes, checksum(self.trial.data))

    def registered(self, payload: Buffer) -> tuple[int, Bytes] | None:
        """Where the payload, or a copy of it, can be read, and what keeps it there; None while there is no room."""
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
    kept: Bytes  # places of an arena are not used again before nothing refers to them
    since_s: float


@dataclass(slots=True)
class _Peer:
    """One that has NIXL. It meets us until it is ready, or parts."""

    since_s: float
    ready: bool = False
    number: int = 0  # of the last offer
    offers: deque[_Offered] = field(default_factory=deque)


class NixlListener:
    """See transport.Listener: TCP, but for payloads to peers that can read our memory."""

    seals = False  # what is read from our memory has no checksum behind it

    def __init__(self, inner: TcpListener, exports: Exports, counters: NixlCounters) -> None:
        self.address = inner.address
        self._inner = inner
        self._exports = exports
        self._counters = counters
        self._peers: dict[bytes, _Peer] = {}
        self._heard_s = 0.0
        self._turn_s = 0.0

    @property
    def known(self) -> bool:
        """Whether there are peers that have NIXL."""
        return bool(self._peers)

    @property
    def active(self) -> bool:
        """Whether a peer reads, or tries to."""
        lately_s = time.monotonic() - _MEETING_S
        return any(peer.offers or not (peer.ready or peer.since_s < lately_s) for peer in self._peers.values())

    @property
    def lively(self) -> bool:
        """Whether it does so at this moment, as far as we know."""
        return time.monotonic() - self._heard_s < _LIVELY_S

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """See transport.Listener."""
        while (message := self._inner.receive()) is not None:
            name, parts = message
            said = decode_nixl(parts[0]) if len(parts) == 1 else None
            if said is None:
                return message
            self._heard_s = time.monotonic()
            self._handle(name, said)
        return None

    def takes(self, peer: bytes) -> bool:
        """See transport.Listener."""
        return self._inner.takes(peer)

    def send(self, peer: bytes, header: bytes, payload: Buffer | None = None) -> bool:
        """See transport.Listener. What finds no room among the copies goes over TCP."""
        known = self._peers.get(peer)
        if payload is None or not len(payload) or known is None or not known.ready:
            return self._inner.send(peer, header, payload)
        found = self._exports.registered(payload)
        if found is None:
            return self._inner.send(peer, header, payload)
        address, kept = found
        known.number += 1
        self._heard_s = time.monotonic()
        known.offers.append(_Offered(known.number, kept, self._heard_s))
        self._counters.sent_bytes += len(payload)
        return self._inner.send(peer, encode_nixl(Offer(known.number, address, len(payload), header)))

    def help(self, now_s: float) -> None:
        """Go on with what peers read; now and then look for those that are gone, or do not take what they asked for."""
        self._exports.agent.progress()
        if now_s < self._turn_s:
            return
        self._turn_s = now_s + _TURN_S
        for name, peer in list(self._peers.items()):
            if not self._inner.has(name):
                del self._peers[name]
            elif peer.offers and now_s - peer.offers[0].since_s > _STUCK_S:
                del self._peers[name]
                self._inner.drop(name, "it does not read what it asked for")

    def _handle(self, name: bytes, said: AnyMessage) -> None:
        peer = self._peers.get(name)
        match said:
            case Meet():
                self._meet(name, said)
            case Ready() if peer is not None:
                peer.ready = True
            case Taken(number) if peer is not None:
                while peer.offers and peer.offers[0].number <= number:
                    peer.offers.popleft()
            case Part(reason) if peer is not None:
                del self._peers[name]
                self._counters.failures += 1
                _log.warning("a peer does not read our memory by NIXL, its KV goes over TCP: %s", reason)
            case _:
                pass  # what makes no sense, or comes late

    def _meet(self, name: bytes, meet: Meet) -> None:
        refusal = self._objection(meet)
        if refusal:
            self._inner.send(name, encode_nixl(Met(refusal)))
            return
        self._peers[name] = _Peer(self._heard_s)
        self._inner.send(name, encode_nixl(self._exports.met()), self._exports.metadata)

    def _objection(self, meet: Meet) -> str:
        if meet.version != NIXL_VERSION:
            return f"version {NIXL_VERSION} of the exporter's messages, {meet.version} of the importer's"
        if meet.host != self._exports.host and not (meet.trusted and self._exports.trusted):
            return "the instances are on two hosts, and kv_nixl_trusted is not set on both"
        return ""


_FAST_S, _SLOW_S = 0.0001, 0.002  # reads are looked at so often: nothing tells that they are done
_LONGEST_S = 0.02  # what else is due is looked at so often


class NixlTransport:
    """See transport.Transport: TCP, where addresses of the scheme `nixl` say that the exporter has NIXL."""

    def __init__(self, tcp: TcpTransport, use: NixlUse) -> None:
        """Raises OSError where NIXL is not to be had."""
        self.counters = NixlCounters()
        self._tcp = tcp
        self._use = use
        self._imports = ImportMemory(use.trusted, use.receiving_bytes) if use.receiving_bytes else None
        self._listeners: list[NixlListener] = []
        self._links: dict[int, NixlLink] = {}  # by the id of the inner link
        self._poller = select.poll()
        self._poller.register(tcp.fileno(), select.POLLIN)

    def listen(self, address: str) -> Listener:
        """See transport.Transport. Raises OSError as `__init__` does, too."""
        if not address.startswith(f"{NIXL_SCHEME}://"):
            return self._tcp.listen(address)
        exports = Exports(self._use.trusted, self._use.staging)
        listener = NixlListener(self._tcp.listen(address), exports, self.counters)
        self._listeners.append(listener)
        return listener

    def connect(self, address: str, place: Place | None = None) -> Link:
        """See transport.Transport."""
        if self._imports is None or not address.startswith(f"{NIXL_SCHEME}://"):
            return self._tcp.connect(address, place)
        link = NixlLink(address, self._tcp, self._imports, self.counters, place, self._closed)
        self._links[id(link.inner)] = link
        return link

    def wait(self, timeout_s: float) -> list[Link]:
        """See transport.Transport."""
        waited = self._wait_for_nixl(timeout_s)
        happened = self._tcp.wait(0.0 if waited else timeout_s)
        ready: dict[int, Link] = {id(link): self._links.get(id(link), link) for link in happened}
        self._go_on()
        ready |= {key: link for key, link in self._links.items() if link.ready}
        return list(ready.values())

    @property
    def busy(self) -> bool:
        """See TcpTransport.busy; also while NIXL is at it, of which no socket tells."""
        return self._tcp.busy or self._active

    def fileno(self) -> int:
        """See TcpTransport.fileno."""
        return self._tcp.fileno()

    def wake(self) -> None:
        """See transport.Transport."""
        self._tcp.wake()

    def close(self) -> None:
        """See transport.Transport."""
        for link in list(self._links.values()):
            link.close()
        self._tcp.close()
        self._listeners.clear()
        self._imports = None

    def _wait_for_nixl(self, timeout_s: float) -> bool:
        """Wait as long as NIXL is at it, until something of it is done or a socket has something; whether it was."""
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

    def _closed(self, link: NixlLink) -> None:
        del self._links[id(link.inner)]
