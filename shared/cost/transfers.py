"""How fast KV comes to an instance, learned from its imports, by where they come from and how they are coded."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from statistics import median

import msgspec

from shared.domain.kv import Codec
from shared.domain.rates import LinkRate

LARGE_BYTES = 1 << 20  # of an import that says something of the bandwidth; smaller ones say what it takes besides
KEPT = 32  # imports from one exporter
PEERS = 64  # exporters that are remembered, the latest
TOLD = 16  # exporters whose own bandwidth is told
APART = 1.5  # times by which it must differ


class _Peer:
    __slots__ = ("coded", "large", "small")

    def __init__(self) -> None:
        self.large: deque[float] = deque(maxlen=KEPT)  # bytes a second
        self.small: deque[float] = deque(maxlen=KEPT)  # seconds
        self.coded: dict[Codec, deque[float]] = {}  # bytes of KV as it is stored, a second

    @property
    def bytes_s(self) -> float:
        """Of what came as it is."""
        return _typical(self.large)


class LinkLearner:
    """Imports in, a link rate out. `start`: what is taken until the first large one."""

    def __init__(self, start: LinkRate | None) -> None:
        self._start = start
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self.rate = start

    def add(self, exporter: str, codec: Codec, kv_bytes: float, wire_bytes: int, seconds: float) -> None:
        """An import of so much KV, that many bytes on the wire, took so long."""
        if seconds <= 0.0 or wire_bytes <= 0:
            return
        peer = self._peers.setdefault(exporter, _Peer())
        self._peers.move_to_end(exporter)
        if len(self._peers) > PEERS:
            self._peers.popitem(last=False)
        if wire_bytes < LARGE_BYTES:
            peer.small.append(seconds)
        elif codec.lossy:  # coding may be what took so long: the link is as fast at least
            peer.coded.setdefault(codec, deque(maxlen=KEPT)).append(kv_bytes / seconds)
            if peer.large and wire_bytes / seconds > peer.bytes_s:
                peer.large.append(wire_bytes / seconds)
        else:
            peer.large.append(wire_bytes / seconds)
        self.rate = self._learned()

    def _learned(self) -> LinkRate | None:
        known = {name: peer.bytes_s for name, peer in self._peers.items() if peer.large}
        coded = self._coded()
        if not known:
            start = self._start
            return msgspec.structs.replace(start, coded=coded) if start is not None else None
        usual = max(known.values())
        short = [seconds for peer in self._peers.values() for seconds in peer.small]
        slow = {name: bytes_s for name, bytes_s in known.items() if bytes_s * APART < usual}
        latency_s = min(short) if short else self._start.latency_s if self._start else 0.0
        return LinkRate(usual, latency_s, dict(sorted(slow.items(), key=lambda item: item[1])[:TOLD]), coded)

    def _coded(self) -> dict[str, float]:
        """By codec; and by codec and exporter, where that is much slower."""
        told: dict[str, float] = {}
        for codec in Codec:
            known = {name: _typical(peer.coded[codec]) for name, peer in self._peers.items() if codec in peer.coded}
            if not known:
                continue
            told[codec.value] = usual = max(known.values())
            slow = sorted((rate, name) for name, rate in known.items() if rate * APART < usual)
            told.update({f"{codec.value} {name}": rate for rate, name in slow[:TOLD]})
        return told


def _typical(rates: Iterable[float]) -> float:
    """Of the upper half: what is slower shared the way with others."""
    ordered = sorted(rates)
    return median(ordered[len(ordered) // 2 :])
