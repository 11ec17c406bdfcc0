"""Nodes and the links between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shared.cost.transfer import Link
from shared.errors import InvalidRequest

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Network:
    """What joins the nodes that instances stand on.

    inside: between two instances of a node, by node. between: from one node to the other, by pair of names, the lesser
    first; the same both ways. Instances of one node share its port.
    """

    inside: Mapping[str, Link] = field(default_factory=dict)
    between: Mapping[Pair, Link] = field(default_factory=dict)

    def path(self, source: str, target: str) -> Link:
        """From one node to another, or inside of one. Raises InvalidRequest where there is none."""
        link = self.inside.get(source) if source == target else self.between.get(pair_of(source, target))
        if link is None:
            where = f"inside of node {source!r}" if source == target else f"between the nodes {source!r} and {target!r}"
            raise InvalidRequest(f"network: no link {where}")
        return link

    def slower(self, factor: float) -> "Network":
        """The same with every link so many times as slow."""

        def of(link: Link) -> Link:
            return replace(link, bandwidth_bytes_s=link.bandwidth_bytes_s / factor)

        inside = {node: of(link) for node, link in self.inside.items()}
        return Network(inside, {pair: of(link) for pair, link in self.between.items()})

    def port(self, node: str) -> Link:
        """A node's own: as fast as the fastest path that leaves it, and without latency, which paths have."""
        leaving = [link for pair, link in self.between.items() if node in pair]
        fastest = max(leaving, key=rate_of, default=self.inside[node])
        return Link(fastest.bandwidth_bytes_s, 0.0, fastest.efficiency)


def pair_of(one: str, other: str) -> Pair:
    """Two nodes as `Network.between` names them."""
    return (one, other) if one <= other else (other, one)


def rate_of(link: Link) -> float:
    """Bytes a second that it reaches."""
    return link.bandwidth_bytes_s * link.efficiency
