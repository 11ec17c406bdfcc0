"""How fast KV comes to an instance, learned from its imports, by where they come from."""

from collections import OrderedDict, deque
from statistics import median

from shared.domain.rates import LinkRate

LARGE_BYTES = 1 << 20  # of an import that says something of the bandwidth; smaller ones say what it takes besides
KEPT = 32  # imports from one exporter
PEERS = 64  # exporters that are remembered, the latest
TOLD = 16  # exporters whose own bandwidth is told
APART = 1.5  # times by which it must differ


class _Peer:
    __slots__ = ("large", "small")

    def __init__(self) -> None:
        self.large: deque[float] = deque(maxlen=KEPT)  # bytes a second
        self.small: deque[float] = deque(maxlen=KEPT)  # seconds

    @property
    def bytes_s(self) -> float:
        """Of the upper half: what is slower shared the way with others."""
        ordered = sorted(self.large)
        return median(ordered[len(ordered) // 2 :])


class LinkLearner:
    """Imports in, a link rate out. `start`: what is taken until the first large one."""

    def __init__(self, start: LinkRate | None) -> None:
        self._start = start
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self.rate = start

    def add(self, exporter: str, wire_bytes: int, seconds: float) -> None:
        """An import of so many bytes took so long."""
        if seconds <= 0.0 or wire_bytes <= 0:
            return
        peer = self._peers.setdefault(exporter, _Peer())
        self._peers.move_to_end(exporter)
        if len(self._peers) > PEERS:
            self._peers.popitem(last=False)
        if wire_bytes >= LARGE_BYTES:
            peer.large.append(wire_bytes / seconds)
        else:
            peer.small.append(seconds)
        self.rate = self._learned()

    def _learned(self) -> LinkRate | None:
        known = {name: peer.bytes_s for name, peer in self._peers.items() if peer.large}
        if not known:
            return self._start
        usual = max(known.values())
        short = [seconds for peer in self._peers.values() for seconds in peer.small]
        slow = {name: bytes_s for name, bytes_s in known.items() if bytes_s * APART < usual}
        latency_s = min(short) if short else self._start.latency_s if self._start else 0.0
        return LinkRate(usual, latency_s, dict(sorted(slow.items(), key=lambda item: item[1])[:TOLD]))
