"""Where groups stand, and how fast KV gets from one to another."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

import numpy as np

from shared.cost.network import Network, pair_of, rate_of
from shared.cost.transfer import Link
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.plan.routes import Joints

Place = tuple[tuple[str, int], ...]  # (node, layers) in the order of the layers


class Places:
    """The places of one inventory and the links between them, each worked out once. kv_bytes: of a mean request."""

    def __init__(self, inventory: Inventory, kv_bytes_per_request: float) -> None:
        self._inventory = inventory
        self.kv_bytes = kv_bytes_per_request
        self._links: dict[tuple[Place, Place], Link] = {}
        self._ports: dict[str, float] = {}

    def link(self, source: Place, target: Place) -> Link:
        """The path of KV: each layer's goes from its node to its node, all at once; the slowest sets the pace."""
        key = (source, target)
        if key not in self._links:
            self._links[key] = self._joined(source, target)
        return self._links[key]

    def joints(self, prefill: Sequence[Group], decode: Sequence[Group]) -> Joints:
        """What joins these groups, in requests a second."""
        froms = [group.place(self._inventory) for group in prefill]
        tos = [group.place(self._inventory) for group in decode]
        pairs = np.array([[rate_of(self.link(a, b)) for b in tos] for a in froms]).reshape(len(froms), len(tos))
        out: dict[str, list[tuple[int, int, float]]] = {}
        into: dict[str, list[tuple[int, int, float]]] = {}
        for i, a in enumerate(froms):
            for j, b in enumerate(tos):
                for (one, other), share in _shares(a, b).items():
                    if one != other:
                        out.setdefault(one, []).append((i, j, share))
                        into.setdefault(other, []).append((i, j, share))
        ports = [(passing, self._port(node) / self.kv_bytes) for way in (out, into) for node, passing in way.items()]
        return Joints(pairs / self.kv_bytes, ports)

    def _port(self, node: str) -> float:
        if node not in self._ports:
            self._ports[node] = rate_of(self._inventory.network.port(node))
        return self._ports[node]

    def _joined(self, source: Place, target: Place) -> Link:
        network = self._inventory.network
        paths = {pair: (network.path(*pair), share) for pair, share in _shares(source, target).items()}
        if len(paths) == 1:
            return next(iter(paths.values()))[0]
        passing: dict[tuple[str, str], float] = {}  # what leaves and enters by each node's port
        for (one, other), (_, share) in paths.items():
            if one != other:
                passing["out", one] = passing.get(("out", one), 0.0) + share
                passing["into", other] = passing.get(("into", other), 0.0) + share
        ports_s = (share / self._port(node) for (_, node), share in passing.items())
        slowest_s = max((share / rate_of(link) for link, share in paths.values()))
        slowest_s = max((slowest_s, *ports_s))
        return Link(1.0 / slowest_s, max(link.latency_s for link, _ in paths.values()), 1.0)

    def network(self, places: Sequence[Place]) -> Network:
        """For the simulator: each place as a node of its own name."""
        inside: dict[str, Link] = {}
        between: dict[tuple[str, str], Link] = {}
        for one, other in combinations_with_replacement(dict.fromkeys(places), 2):
            if one == other:
                inside[place_name(one)] = self.link(one, one)
            else:
                between[pair_of(place_name(one), place_name(other))] = self.link(one, other)
        return Network(inside, between)


def place_name(place: Place) -> str:
    """The node's, or those of the nodes that hold its stages with their layers."""
    return place[0][0] if len(place) == 1 else "+".join(f"{node}.{layers}" for node, layers in place)


def _shares(source: Place, target: Place) -> Counter[tuple[str, str]]:
    """Of a token's KV, what goes from which node to which."""
    found: Counter[tuple[str, str]] = Counter()
    total = sum(layers for _, layers in source)
    for one, other, layers in _overlaps(source, target):
        found[one, other] += layers / total  # type: ignore[assignment]
    return found


def _overlaps(source: Place, target: Place) -> Iterator[tuple[str, str, int]]:
    ends_a, ends_b = list(source), list(target)
    a = b = 0
    left_a, left_b = ends_a[0][1], ends_b[0][1]
    while True:
        step = min(left_a, left_b)
        yield ends_a[a][0], ends_b[b][0], step
        left_a -= step
        left_b -= step
        if not left_a:
            a += 1
            if a == len(ends_a):
                return
            left_a = ends_a[a][1]
        if not left_b:
            b += 1
            left_b = ends_b[b][1]
