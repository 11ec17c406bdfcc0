"""KV messages over TCP and payloads by NIXL, between two ends that both have it.

The exporter offers payloads in registered memory, and the importer reads them in the order of the offers.
"""

import logging
import select
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from services.worker.kv import KvFault
from services.worker.kv.rank_messages import RankStats
from services.worker.kv.staging import Arena, Bytes
from services.worker.kv.wire.nixl_agent import (
    NIXL_SCHEME,
    NIXL_VERSION,
    Ack,
    AnyMessage,
    Bye,
    Hello,
    HelloAck,
    NixlAgent,
    NixlError,
    Offer,
    Read,
    Ready,
    decode_nixl,
    encode_nixl,
    this_host,
)
from services.worker.kv.wire.protocol import (
    MAX_FRAME_BYTES,
    Buffer,
    Failed,
    Frame,
    Received,
    checksum,
    decode_reply,
    encode_message,
)
from services.worker.kv.wire.tcp_transport import Events, Place, TcpLink, TcpListener, TcpTransport

_log = logging.getLogger(__name__)
_HELLO_S = 3.0  # how long the trial may take, from the connection on
_READ_S = 5.0  # how long a read may take, its turn included
# A dead peer is found by its reads first, and a moment later by the connection, which knows the cause.
_DOUBT_S = 0.25
_MAX_QUEUED = 1000
_PLACE_BYTES = 4096
_OUTGOING_BYTES = 64 << 20  # for payloads outside of staging: coded ones, and parts of segments
_TRIAL_BYTES = 64 << 10
_QUARANTINE_S = 30.0  # memory of a failed read is not used again for so long
_STUCK_S = 30.0  # how long a peer may leave an offer
_LIVELY_S = 0.02  # how long after a message peers are helped at full speed
_TRIAL_S = 5.0  # how long a peer may take to read the trial
_TURN_S = 0.5
_FAST_S, _SLOW_S = 0.0001, 0.002  # between two looks at reads: nothing signals that they are done
_LONGEST_S = 0.02  # between two looks at anything else


def _is_nixl(address: str) -> bool:
    return address.startswith(f"{NIXL_SCHEME}://")


class NixlTransport(TcpTransport):
    """TCP, and NIXL for addresses of the scheme `nixl`, which say that the exporter has it."""

    shared = False

    def __init__(
        self,
        curve: tuple[str, str] | None,
        stats: RankStats,
        *,
        encrypted: bool,
        trusted: bool,
        staging: Sequence[Bytes] = (),
        receiving_bytes: int = 0,
    ) -> None:
        """`stats` counts bytes and failures; `trusted`: only this cluster reaches the networks of UCX; `staging`:
        all memory that may hold KV for export; `receiving_bytes`: memory to read into, 0 for the side that exports.
        Raises OSError where NIXL is not available.
        """
        super().__init__(curve, encrypted=encrypted)
        self.stats = stats
        self._trusted = trusted
        self._staging = staging
        self._imports = ImportMemory(trusted, receiving_bytes) if receiving_bytes else None
        self._nixl_listeners: list[NixlListener] = []
        self._nixl_links: list[NixlLink] = []
        self._poller = select.poll()
        self._poller.register(self._epoll.fileno(), select.POLLIN)

    def listen(self, address: str) -> TcpListener:
        """Raises OSError as `__init__` does, too."""
        if not _is_nixl(address):
            return super().listen(address)
        listener = NixlListener(address, self, ExportMemory(self._trusted, self._staging))
        self._listeners.append(listener)
        self._nixl_listeners.append(listener)
        return listener

    def connect(self, address: str, place: Place | None = None) -> TcpLink:
        if self._imports is None or not _is_nixl(address):
            return super().connect(address, place)
        link = NixlLink(address, self, self._imports, place)
        self._links.add(link)
        self._nixl_links.append(link)
        return link

    def forget(self, link: TcpLink) -> None:
        super().forget(link)
        if isinstance(link, NixlLink):
            self._nixl_links.remove(link)

    def poll(self, timeout_s: float) -> Events:
        """Where NIXL is active it also makes progress, so it is not `shared`."""
        return super().poll(0.0 if self._wait_for_nixl(timeout_s) else timeout_s)

    def handle(self, events: Events) -> list[TcpLink]:
        ready = super().handle(events)
        self._progress()
        return [*ready, *(link for link in self._nixl_links if link.ready and link not in ready)]

    def close(self) -> None:
        super().close()
        self._nixl_listeners.clear()
        self._imports = None

    def _wait_for_nixl(self, timeout_s: float) -> bool:
        """Wait while NIXL is active, until a read is done or a socket has something; whether NIXL is active."""
        if not self.active or self.busy:
            return self.active
        until_mono = time.monotonic() + min(timeout_s, _LONGEST_S)
        while not self._poller.poll(0):
            self._progress()
            if not self.active or any(link.ready for link in self._nixl_links) or time.monotonic() >= until_mono:
                break
            lively = self._reading or any(each.lively for each in self._nixl_listeners)
            time.sleep(_FAST_S if lively else _SLOW_S)
        return True

    @property
    def active(self) -> bool:
        """Whether it has to be polled: this side or a peer reads, or a trial is under way."""
        return self._reading or any(each.active for each in self._nixl_listeners)

    @property
    def free_bytes(self) -> int:
        """Memory to read into that no read and no prefetch holds."""
        return self._imports.free_bytes if self._imports is not None else 0

    @property
    def _reading(self) -> bool:
        return any(link.reading for link in self._nixl_links)

    def _progress(self) -> None:
        now_mono = time.monotonic()
        for listener in self._nixl_listeners:
            listener.progress(now_mono)
        for link in list(self._nixl_links):
            link.progress(now_mono)
        if self._imports is not None:
            self._imports.sweep(now_mono)


class ImportMemory:
    """The memory that links read into, and abandoned reads that may still write to it."""

    def __init__(self, trusted: bool, receiving_bytes: int) -> None:
        """Raises OSError where NIXL is not available, or does not register the memory."""
        self.agent = NixlAgent(trusted)
        self.hello = Hello(NIXL_VERSION, this_host(), trusted)
        self._arena = Arena(_PLACE_BYTES, -(-receiving_bytes // _PLACE_BYTES))
        for slab in self._arena.slabs:
            self.agent.register(slab)
        self._abandoned: list[tuple[Read, float]] = []

    @property
    def free_bytes(self) -> int:
        return self._arena.free * _PLACE_BYTES

    def read(self, peer: bytes, address: int, size: int) -> Read | None:
        """Begin to read a peer's bytes; None while there is no memory for them. Raises NixlError."""
        into = self._arena.take_bytes(size)
        return self.agent.read(peer, address, into, size) if into is not None else None

    def abandon(self, read: Read, now_mono: float) -> None:
        """Keep the memory of a read that is no longer wanted until it cannot be written any more."""
        self._abandoned.append((read, now_mono))

    def sweep(self, now_mono: float) -> None:
        """Release the memory of abandoned reads that have ended."""
        self._abandoned = [each for each in self._abandoned if not _is_over(*each, now_mono)]


def _is_over(read: Read, since_mono: float, now_mono: float) -> bool:
    try:
        return read.done()
    except NixlError:
        return now_mono - since_mono > _QUARANTINE_S


class _Phase(Enum):
    HELLO = 0  # until the trial has ended
    NIXL = 1
    TCP = 2


@dataclass(slots=True)
class _Pending:
    """An offered payload. `read` is None until there is memory for it."""

    offer: Offer
    since_mono: float
    read: Read | None = None
    done: bool = False
    error: str = ""

    @property
    def ready(self) -> bool:
        return self.done or bool(self.error)


class NixlLink(TcpLink):
    """TCP, whose payloads are read once a trial has succeeded. Messages keep their order."""

    def __init__(self, address: str, transport: NixlTransport, imports: ImportMemory, place: Place | None) -> None:
        self._imports = imports
        self._stats = transport.stats
        self._phase = _Phase.HELLO
        self._queued: list[bytes] = []  # messages that wait for the end of the trial
        self._nixl_peer = b""
        self._connected_mono = 0.0  # since when the trial may have been under way, or 0
        self._trial: tuple[HelloAck, Read] | None = None
        self._pending: deque[_Pending] = deque()
        self._held: Received | None = None  # a message that came behind pending offers
        self._doubt: tuple[str, float] | None = None  # why a read failed, and since when reads have stopped
        super().__init__(address, transport, place)
        self._known_losses = self.losses
        self._say_hello()

    @property
    def reading(self) -> bool:
        """Whether it waits for a trial or a read."""
        return self._trial is not None or any(not each.ready for each in self._pending)

    @property
    def ready(self) -> bool:
        """Whether `receive` has something for which no socket becomes readable."""
        return self._pending[0].ready if self._pending else self._held is not None

    def receive(self) -> Received | None:
        if self._phase is _Phase.HELLO:
            self._receive_answer()
            return None
        plain = self._gather()
        if plain is not None:
            self.carrier = "tcp"
            return plain
        if not self._pending or not self._pending[0].ready:
            return None
        return self._deliver(self._pending.popleft())

    def keep(self) -> None:
        """A payload that was read is kept as long as it is referred to."""
        if self.carrier == "tcp":
            super().keep()

    def send(self, message: bytes, *, lingers: bool = False) -> None:
        if self._phase is not _Phase.HELLO:
            super().send(message, lingers=lingers)
        else:
            self._queued.append(message)
            del self._queued[:-_MAX_QUEUED]

    def close(self) -> None:
        self._reset()
        super().close()

    def progress(self, now_mono: float) -> None:
        """Make progress with reads and look at the connection; to be called after each wait of the transport."""
        if self.losses != self._known_losses:
            self._known_losses = self.losses
            self._reset()
            self._say_hello()
        if self._phase is _Phase.HELLO:
            self._continue_trial(now_mono)
        else:
            self._continue_reads(now_mono)

    def _say_hello(self) -> None:
        self._phase = _Phase.HELLO
        self._connected_mono = 0.0
        super().send(encode_nixl(self._imports.hello))

    def _receive_answer(self) -> None:
        """Receive the exporter's answer about NIXL, and begin the trial."""
        received = super().receive()
        answer = decode_nixl(received.header) if received is not None else None
        if not isinstance(answer, HelloAck) or received is None or self._trial is not None:
            return
        if answer.refusal:
            self._stats.nixl_refused += 1
            _log.info("KV of %s goes over TCP: %s", self.address, answer.refusal)
            self._conclude(_Phase.TCP)
            return
        try:
            if received.payload is None or not 0 < answer.size_bytes <= MAX_FRAME_BYTES:
                raise NixlError(f"{answer.size_bytes} bytes to try with")
            self._nixl_peer = self._imports.agent.connect(bytes(received.payload))
            read = self._imports.read(self._nixl_peer, answer.address, answer.size_bytes)
            if read is None:
                raise NixlError("no room for a trial")
            self._trial = answer, read
        except NixlError as error:
            self._fail(f"no trial: {error}")

    def _continue_trial(self, now_mono: float) -> None:
        if self._trial is not None:
            answer, read = self._trial
            try:
                if read.done():
                    if checksum(read.payload) != answer.checksum:
                        raise NixlError("other bytes came than were to be read")
                    self._trial = None
                    super().send(encode_nixl(Ready()))
                    self._conclude(_Phase.NIXL)
                    return
            except NixlError as error:
                self._fail(f"the trial failed: {error}")
                return
        if not self.connected:
            self._connected_mono = 0.0
        elif not self._connected_mono:
            self._connected_mono = now_mono
        elif now_mono - self._connected_mono > _HELLO_S:
            self._fail(f"no trial within {_HELLO_S} s")

    def _conclude(self, phase: _Phase) -> None:
        self._phase = phase
        for each in self._queued:
            super().send(each)
        self._queued.clear()

    def _gather(self) -> Received | None:
        """Note offers; returns a message that is not behind any of them."""
        if self._held is not None:
            if self._pending:
                return None
            held, self._held = self._held, None
            return held
        while (received := super().receive()) is not None:
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
        now_mono = time.monotonic()
        pending = _Pending(offer, now_mono)
        self._pending.append(pending)
        if self._phase is _Phase.TCP:
            pending.error = "offered after a read had failed"
        elif not 0 < offer.size_bytes <= MAX_FRAME_BYTES:
            self._fail(f"an offer of {offer.size_bytes} bytes")
        else:
            self._continue_reads(now_mono)

    def _continue_reads(self, now_mono: float) -> None:
        if self._doubt is not None:
            if now_mono - self._doubt[1] > _DOUBT_S:
                self._fail(self._doubt[0])
            return
        try:
            for each in self._pending:
                if each.read is None and not each.error:
                    each.read = self._imports.read(self._nixl_peer, each.offer.address, each.offer.size_bytes)
                if each.read is not None and not each.ready:
                    each.done = each.read.done()
                if not each.ready and now_mono - each.since_mono > _READ_S:
                    raise NixlError(f"nothing came within {_READ_S} s")
        except NixlError as error:
            self._doubt = str(error), now_mono

    def _deliver(self, pending: _Pending) -> Received:
        offer, read = pending.offer, pending.read
        self.carrier = "nixl"
        if read is None or pending.error:
            frame = decode_reply(offer.header)
            pull_id = frame.pull_id if isinstance(frame, Frame) else 0
            return Received(encode_message(Failed(pull_id, KvFault.NIXL.value, pending.error)))
        super().send(encode_nixl(Ack(offer.number)))
        self._stats.nixl_received_bytes += offer.size_bytes
        return Received(offer.header, read.payload, offer.size_bytes, checksum(read.payload))

    def _fail(self, reason: str) -> None:
        """Payloads come over TCP from now on; the pending ones fail."""
        self._stats.nixl_failures += 1
        _log.warning("KV of %s goes over TCP, NIXL has failed: %s", self.address, reason)
        self._abandon_reads()
        for each in self._pending:
            if not each.done:
                each.error = reason
        super().send(encode_nixl(Bye(reason)))
        self._conclude(_Phase.TCP)

    def _reset(self) -> None:
        """Forget everything that was to come over a lost connection."""
        self._abandon_reads()
        self._pending.clear()
        self._held = None

    def _abandon_reads(self) -> None:
        now_mono = time.monotonic()
        for read in [each.read for each in self._pending if not each.done] + [self._trial and self._trial[1]]:
            if read is not None:
                self._imports.abandon(read, now_mono)
        self._trial = self._doubt = None
        if self._nixl_peer:
            self._imports.agent.disconnect(self._nixl_peer)
            self._nixl_peer = b""


class ExportMemory:
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

    def hello_ack(self) -> HelloAck:
        return HelloAck("", _address(self.trial), self.trial.nbytes, checksum(self.trial.data))

    def registered(self, payload: Buffer) -> tuple[int, Bytes] | None:
        """The address of the payload, or of a copy of it, and what keeps it there; None while there is no room."""
        memory = np.frombuffer(payload, np.uint8)
        address = _address(memory)
        at = bisect_right(self._slabs, (address, 1 << 62)) - 1
        if at >= 0 and address + memory.nbytes <= sum(self._slabs[at]):
            return address, memory
        copy = self._outgoing.take_bytes(memory.nbytes)
        if copy is None:
            return None
        copy[: memory.nbytes] = memory
        return _address(copy), copy


def _address(memory: Bytes) -> int:
    return int(memory.ctypes.data)


@dataclass(frozen=True, slots=True)
class _Offered:
    number: int
    kept: Bytes  # an arena's places are used again once nothing refers to them
    since_mono: float


@dataclass(slots=True)
class _NixlPeer:
    """A peer that has NIXL, in its trial until it is ready or says good-bye."""

    since_mono: float
    ready: bool = False
    number: int = 0  # of the last offer
    offers: deque[_Offered] = field(default_factory=deque)


class NixlListener(TcpListener):
    """TCP, except for payloads to peers that can read this instance's memory."""

    seals = False  # a read has no checksum behind it

    def __init__(self, address: str, transport: NixlTransport, exports: ExportMemory) -> None:
        super().__init__(address, transport)
        self._stats = transport.stats
        self._exports = exports
        self._nixl_peers: dict[bytes, _NixlPeer] = {}
        self._received_mono = 0.0
        self._turn_mono = 0.0

    @property
    def active(self) -> bool:
        """Whether a peer reads or is in its trial."""
        lately_mono = time.monotonic() - _TRIAL_S
        return any(
            peer.offers or not (peer.ready or peer.since_mono < lately_mono) for peer in self._nixl_peers.values()
        )

    @property
    def lively(self) -> bool:
        """Whether a message of a peer arrived a moment ago."""
        return time.monotonic() - self._received_mono < _LIVELY_S

    def receive(self) -> tuple[bytes, bytes] | None:
        while (received := super().receive()) is not None:
            name, body = received
            message = decode_nixl(body)
            if message is None:
                return received
            self._received_mono = time.monotonic()
            self._handle(name, message)
        return None

    def send(self, peer: bytes, header: bytes, payload: Buffer | None = None, digest: int | None = None) -> bool:
        """A payload for which there is no room among the copies goes over TCP."""
        known = self._nixl_peers.get(peer)
        registered = None
        if payload is not None and len(payload) and known is not None and known.ready:
            registered = self._exports.registered(payload)
        if payload is None or known is None or registered is None:
            return super().send(peer, header, payload, digest)
        address, kept = registered
        known.number += 1
        self._received_mono = time.monotonic()
        known.offers.append(_Offered(known.number, kept, self._received_mono))
        self._stats.nixl_sent_bytes += len(payload)
        return super().send(peer, encode_nixl(Offer(known.number, address, len(payload), header)))

    def progress(self, now_mono: float) -> None:
        """Help peers to read; now and then look for peers that are gone, or do not read what they requested."""
        if not self._nixl_peers:
            return
        self._exports.agent.progress()
        if now_mono < self._turn_mono:
            return
        self._turn_mono = now_mono + _TURN_S
        for name, peer in list(self._nixl_peers.items()):
            if not self.has(name):
                del self._nixl_peers[name]
            elif peer.offers and now_mono - peer.offers[0].since_mono > _STUCK_S:
                del self._nixl_peers[name]
                self.drop(name, "it does not read what it requested")

    def _handle(self, name: bytes, message: AnyMessage) -> None:
        peer = self._nixl_peers.get(name)
        match message:
            case Hello():
                self._greet(name, message)
            case Ready() if peer is not None:
                peer.ready = True
            case Ack(number) if peer is not None:
                while peer.offers and peer.offers[0].number <= number:
                    peer.offers.popleft()
            case Bye(reason) if peer is not None:
                del self._nixl_peers[name]
                _log.warning("a peer cannot read this instance's memory by NIXL, its KV goes over TCP: %s", reason)
            case _:
                pass  # a message that makes no sense, or is late

    def _greet(self, name: bytes, hello: Hello) -> None:
        if refusal := self._objection(hello):
            super().send(name, encode_nixl(HelloAck(refusal)))
            return
        self._nixl_peers[name] = _NixlPeer(self._received_mono)
        super().send(name, encode_nixl(self._exports.hello_ack()), self._exports.metadata)

    def _objection(self, hello: Hello) -> str:
        if hello.version != NIXL_VERSION:
            return f"version {NIXL_VERSION} of the exporter's messages, {hello.version} of the importer's"
        if hello.host != self._exports.host and not (hello.trusted and self._exports.trusted):
            return "the instances are on two hosts, and kv_nixl_trusted is not set on both"
        return ""
