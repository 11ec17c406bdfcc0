"""What there is to serve with: nodes, the accelerators on them, and what joins them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

from shared.cost.catalogue import Accelerator
from shared.cost.network import Network, pair_of
from shared.errors import InvalidRequest, NotFound


@dataclass(frozen=True, slots=True)
class Pool:
    """Accelerators of one type on one node. price_usd_hour: of one of them."""

    node: str
    accelerator: Accelerator
    count: int
    price_usd_hour: float

    def __str__(self) -> str:
        return f"{self.count} x {self.accelerator.name} on {self.node}"


@dataclass(frozen=True)
class Inventory:
    """Pools, in the order of the file, and the network between their nodes.

    assumed: what is assumed of the links, for its user to correct; empty where they are given.
    """

    pools: tuple[Pool, ...]
    network: Network
    assumed: str = field(default="", compare=False)

    @property
    def accelerators(self) -> int:
        """In all."""
        return sum(pool.count for pool in self.pools)

    @property
    def price_usd_hour(self) -> float:
        """Of all of them, used or not."""
        return sum(pool.count * pool.price_usd_hour for pool in self.pools)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names, each once."""
        return tuple(dict.fromkeys(pool.node for pool in self.pools))

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Of each pool the number of its kind: pools of one kind can change places and nothing is different.

        Nodes are told apart by what is on them and by their links to each other kind of node, until no more differ.
        """
        colours: Mapping[str, object] = {
            node: (
                tuple((p.accelerator.name, p.count, p.price_usd_hour) for p in self.pools if p.node == node),
                self.network.inside.get(node),
            )
            for node in self.nodes
        }
        while True:
            kinds = {colour: at for at, colour in enumerate(dict.fromkeys(colours.values()))}
            numbers = {node: kinds[colour] for node, colour in colours.items()}
            colours = {node: (numbers[node], self._around(node, numbers)) for node in self.nodes}
            if len(set(colours.values())) == len(kinds):
                break
        found = {
            key: at for at, key in enumerate(dict.fromkeys((numbers[p.node], p.accelerator.name) for p in self.pools))
        }
        return tuple(found[numbers[p.node], p.accelerator.name] for p in self.pools)

    def _around(self, node: str, numbers: Mapping[str, int]) -> tuple[object, ...]:
        links = self.network.between
        around = [(numbers[other], links.get(pair_of(node, other))) for other in self.nodes if other != node]
        return tuple(sorted(around, key=repr))

    def without(self, losses: Mapping[tuple[str, str], int]) -> "Inventory":
        """What is left when so many accelerators of (node, type) are gone. Raises NotFound for what is not there."""
        known = {(pool.node, pool.accelerator.name): pool.count for pool in self.pools}
        for (node, name), count in losses.items():
            if known.get((node, name), 0) < count:
                there = ", ".join(map(str, self.pools))
                raise NotFound(f"no {count} x {name} on {node}: there are {there}")
        left = [
            replace(pool, count=pool.count - losses.get((pool.node, pool.accelerator.name), 0)) for pool in self.pools
        ]
        return replace(self, pools=tuple(pool for pool in left if pool.count))

    def islands(self) -> tuple[tuple[str, ...], ...]:
        """Nodes that are joined to each other, directly or not; more than one where the network is cut."""
        parent = {node: node for node in self.nodes}

        def root(node: str) -> str:
            while parent[node] != node:
                node = parent[node]
            return node

        for one, other in combinations(self.nodes, 2):
            if pair_of(one, other) in self.network.between:
                parent[root(other)] = root(one)
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            found.setdefault(root(node), []).append(node)
        return tuple(map(tuple, found.values()))

    def require_joined(self) -> None:
        """Raises InvalidRequest that names nodes without a link between them."""
        for one, other in combinations(self.nodes, 2):
            if pair_of(one, other) not in self.network.between:
                parts = self.islands()
                how = " | ".join(", ".join(part) for part in parts)
                cut = f"they are cut into {how}: plan each by itself" if len(parts) > 1 else "give each pair one"
                raise InvalidRequest(f"network: no link between the nodes {one!r} and {other!r}; {cut}")
