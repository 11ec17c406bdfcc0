"""An importer's side of NIXL: payloads that are offered are read, in the order in which they are offered."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from services.worker.kv.errors import KvFault
from services.worker.kv.wire.frames import (
    MAX_FRAME_BYTES,
    Buffer,
    Failed,
    Frame,
    checksum,
    decode_reply,
    encode_message,
)
from services.worker.kv.wire.nixl_agent import NixlError, Read
from services.worker.kv.wire.nixl_frames import Met, Offer, Part, Ready, Taken, decode, encode
from services.worker.kv.wire.nixl_memory import Imports
from services.worker.kv.wire.nixl_state import NixlCounters
from services.worker.kv.wire.tcp_link import TcpLink
from services.worker.kv.wire.tcp_transport import TcpTransport
from services.worker.kv.wire.transport import Place, Placement, Received

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
        imports: Imports,
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
        self.inner.send(encode(self._imports.meet))

    def _listen(self) -> None:
        """Hear what the exporter says of NIXL, and begin the trial."""
        received = self.inner.receive()
        met = decode(received.header) if received is not None else None
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
                    self.inner.send(encode(Ready()))
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
            said = decode(received.header)
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
        self.inner.send(encode(Taken(offer.number)))
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
        self.inner.send(encode(Part(reason)))
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
