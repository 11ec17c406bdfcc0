"""An exporter's side of NIXL: payloads that lie in registered memory are offered to the peers that can read them."""

import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.worker.kv.arena import Arena, Bytes
from services.worker.kv.wire.frames import Buffer, checksum
from services.worker.kv.wire.nixl_agent import NixlAgent, this_host
from services.worker.kv.wire.nixl_frames import (
    VERSION,
    AnyMessage,
    Meet,
    Met,
    Offer,
    Part,
    Ready,
    Taken,
    decode,
    encode,
)
from services.worker.kv.wire.nixl_state import NixlCounters
from services.worker.kv.wire.tcp_listener import TcpListener

_log = logging.getLogger(__name__)
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
            said = decode(parts[0]) if len(parts) == 1 else None
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
        return self._inner.send(peer, encode(Offer(known.number, address, len(payload), header)))

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
            self._inner.send(name, encode(Met(refusal)))
            return
        self._peers[name] = _Peer(self._heard_s)
        self._inner.send(name, encode(self._exports.met()), self._exports.metadata)

    def _objection(self, meet: Meet) -> str:
        if meet.version != VERSION:
            return f"version {VERSION} of the exporter's messages, {meet.version} of the importer's"
        if meet.host != self._exports.host and not (meet.trusted and self._exports.trusted):
            return "the instances are on two hosts, and kv_nixl_trusted is not set on both"
        return ""
