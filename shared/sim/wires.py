"""Network ports and paths during a run: when sent KV arrives, and what policies know about the links."""

from collections import Counter
from collections.abc import Sequence

from shared.cost.network import Link, Network, Pair, rate_of
from shared.domain.rates import LinkRate


class Port:
    """A network port. Outgoing and incoming traffic do not disturb each other (full duplex)."""

    __slots__ = ("in_free_s", "link", "out_free_s", "rate")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.rate = rate_of(link)
        self.out_free_s = 0.0
        self.in_free_s = 0.0

    def out_bytes(self, now: float) -> int:
        return int(max(0.0, self.out_free_s - now) * self.rate)

    def in_bytes(self, now: float) -> int:
        return int(max(0.0, self.in_free_s - now) * self.rate)

    def clear(self, now: float) -> None:
        """Forget what was under way: the instance died."""
        self.out_free_s = self.in_free_s = now


class Wires:
    """The ports of all instances, by their positions, and the paths between them while a run lasts.

    nodes: of each instance; an instance on no node ("") has its own one of `links` as its port.
    """

    def __init__(
        self, ids: Sequence[str], nodes: Sequence[str], links: Sequence[Link], network: Network = Network()
    ) -> None:
        self.known = known_rates(ids, nodes, links, network)
        self._nodes = nodes
        self._network = network
        shared = {node: Port(network.port(node)) for node in sorted(set(nodes)) if node}
        self.ports = [shared[node] if node else Port(link) for node, link in zip(nodes, links, strict=True)]
        self._inner = [Port(network.path(node, node)) if node else None for node in nodes]
        self._paths: dict[Pair, Port] = {}

    def send(self, source: int, target: int, wire_bytes: float, now: float) -> float:
        """When `wire_bytes` that are ready at `now` have arrived.

        Inside a node they pass the ports that both ends have there; else both nodes' ports and the path between them.
        """
        one, other = self._nodes[source], self._nodes[target]
        if not one or not other:
            return send(self.ports[source], self.ports[target], wire_bytes, now)
        if one == other:
            out, into = self._inner[source], self._inner[target]
            assert out is not None
            assert into is not None
            return send(out, into, wire_bytes, now)
        path = self._paths.get((one, other))
        if path is None:
            path = self._paths[one, other] = Port(self._network.path(one, other))
        path.out_free_s = max(now, path.out_free_s) + wire_bytes / path.rate
        passed = send(self.ports[source], self.ports[target], wire_bytes, now)
        return max(passed, path.out_free_s) + path.link.latency_s

    def clear(self, position: int, now: float) -> None:
        """An instance died: forget what was under way to and from it, except on the port that its node shares."""
        if not self._nodes[position]:
            self.ports[position].clear(now)
        inner = self._inner[position]
        if inner is not None:
            inner.clear(now)

    def out_bytes(self, position: int, now: float) -> int:
        inner = self._inner[position]
        return self.ports[position].out_bytes(now) + (inner.out_bytes(now) if inner is not None else 0)

    def in_bytes(self, position: int, now: float) -> int:
        inner = self._inner[position]
        return self.ports[position].in_bytes(now) + (inner.in_bytes(now) if inner is not None else 0)


def send(source: Port, target: Port, wire_bytes: float, now: float) -> float:
    """When `wire_bytes` that are ready at `now` have passed both ports.

    Each port passes its transfers on in order at its own rate and does not wait for the other end: a fast port serves
    others while a slow peer sends. A transfer has arrived when both ports have passed it. So the slower port sets the
    pace (ThunderServe eq. 1 with effective rates), ports carry what they can, and transfers end in order instead of all
    late. The longer of the two latencies is added, and delays this transfer alone.
    """
    source.out_free_s = max(now, source.out_free_s) + wire_bytes / source.rate
    target.in_free_s = max(now, target.in_free_s) + wire_bytes / target.rate
    return max(source.out_free_s, target.in_free_s) + max(source.link.latency_s, target.link.latency_s)


def known_rates(ids: Sequence[str], nodes: Sequence[str], links: Sequence[Link], network: Network) -> list[LinkRate]:
    """What policies know about each instance's links: the best path's rate, and the peers whose KV comes slower."""
    standing = Counter(node for node in nodes if node)
    by_node: dict[str, LinkRate] = {}
    for node in standing:
        paths = {other: network.path(other, node) for other in standing}
        if standing[node] == 1 and len(standing) > 1:
            del paths[node]  # no other instance of its node sends to it
        best = max(paths.values(), key=rate_of)
        slower = {other for other, path in paths.items() if rate_of(path) < rate_of(best)}
        slow = {name: rate_of(paths[other]) for name, other in zip(ids, nodes, strict=True) if other in slower}
        by_node[node] = LinkRate(rate_of(best), best.latency_s, slow)
    return [
        by_node[node] if node else LinkRate(rate_of(link), link.latency_s)
        for node, link in zip(nodes, links, strict=True)
    ]
