"""How a file says what joins nodes: classes of links with exceptions, or a matrix. Strict: errors name the key."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.cost.network import Network, pair_of
from shared.cost.transfer import Link
from shared.errors import InvalidRequest

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
INSIDE_EFFICIENCY = 0.8  # of PCIe or NVLink, where a file says nothing


class _Part(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")


class LinkEntry(_Part):
    """A link. `gbps`: nominal, 10^9 bits a second each way; `efficiency`: the share that is reached."""

    gbps: Positive
    latency_s: Seconds = 1e-3
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.58

    @property
    def link(self) -> Link:
        """As the cost model has it."""
        return Link(self.gbps * 1e9 / 8.0, self.latency_s, self.efficiency)

    @classmethod
    def of(cls, link: Link) -> "LinkEntry":
        """As a file says it."""
        return cls(gbps=link.bandwidth_bytes_s * 8.0 / 1e9, latency_s=link.latency_s, efficiency=link.efficiency)


class PairEntry(LinkEntry):
    """The link between two nodes."""

    nodes: tuple[str, str]

    @model_validator(mode="after")
    def _two_nodes(self) -> Self:
        if self.nodes[0] == self.nodes[1]:
            raise ValueError(f"{self.nodes[0]!r} to itself is no link between nodes: write it under `nodes`")
        return self


class MatrixEntry(_Part):
    """Links between all nodes, both ways alike; on the diagonal those inside. gbps 0: no link."""

    nodes: tuple[str, ...] = Field(min_length=1)
    gbps: tuple[tuple[Seconds, ...], ...]
    latency_s: Seconds = 1e-3
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.58

    @model_validator(mode="after")
    def _square(self) -> Self:
        count = len(self.nodes)
        if len(set(self.nodes)) < count:
            raise ValueError("matrix: a node is named twice")
        if len(self.gbps) != count or any(len(row) != count for row in self.gbps):
            raise ValueError(f"matrix: gbps must have {count} rows of {count} numbers, as many as there are nodes")
        for at, other in combinations(range(count), 2):
            if self.gbps[at][other] != self.gbps[other][at]:
                raise ValueError(f"matrix: {self.nodes[at]} to {self.nodes[other]} is not as fast as back")
        return self


class NetworkEntry(_Part):
    """inside: of every node; between: of any two; `nodes` and `pairs` are exceptions. Or a matrix of all."""

    inside: LinkEntry | None = None
    between: LinkEntry | None = None
    nodes: dict[str, LinkEntry] = {}
    pairs: tuple[PairEntry, ...] = ()
    matrix: MatrixEntry | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.matrix is not None and (self.inside or self.between or self.nodes or self.pairs):
            raise ValueError("network: a matrix says it all: no inside, between, nodes or pairs beside it")
        seen: set[tuple[str, str]] = set()
        for index, pair in enumerate(self.pairs):
            if (nodes := pair_of(*pair.nodes)) in seen:
                raise ValueError(f"pairs.{index}: {nodes[0]!r} and {nodes[1]!r} have a link already")
            seen.add(nodes)
        return self

    def network(self, nodes: Sequence[str], inside: Mapping[str, Link]) -> Network:
        """Of these nodes. inside: of a node of which the file says nothing. Pairs without a link have none.

        Raises InvalidRequest for names that no node has.
        """
        if self.matrix is not None:
            return self._of_matrix(self.matrix, nodes, inside)
        known = set(nodes)
        for name in (*self.nodes, *(name for pair in self.pairs for name in pair.nodes)):
            if name not in known:
                raise InvalidRequest(f"network: no node {name!r}; there are {', '.join(nodes)}")
        default = self.inside.link if self.inside else None
        own = {name: self.nodes[name].link if name in self.nodes else default or inside[name] for name in nodes}
        between = {pair_of(*pair): self.between.link for pair in combinations(nodes, 2) if self.between}
        return Network(own, between | {pair_of(*pair.nodes): pair.link for pair in self.pairs})

    def _of_matrix(self, matrix: MatrixEntry, nodes: Sequence[str], inside: Mapping[str, Link]) -> Network:
        missing = [name for name in nodes if name not in matrix.nodes]
        if missing:
            raise InvalidRequest(f"network: matrix: node {missing[0]!r} is not in it")
        at = {name: index for index, name in enumerate(matrix.nodes)}

        def link(one: str, other: str) -> Link | None:
            gbps = matrix.gbps[at[one]][at[other]]
            return Link(gbps * 1e9 / 8.0, matrix.latency_s, matrix.efficiency) if gbps else None

        own = {name: link(name, name) or inside[name] for name in nodes}
        pairs = {pair_of(*pair): link(*pair) for pair in combinations(nodes, 2)}
        return Network(own, {pair: found for pair, found in pairs.items() if found is not None})


def entry_of(network: Network) -> NetworkEntry:
    """A network as a file says it: the usual links as classes, the others as exceptions."""
    inside = _most_usual(list(network.inside.values()))
    between = _most_usual(list(network.between.values()))
    return NetworkEntry(
        inside=LinkEntry.of(inside) if inside else None,
        between=LinkEntry.of(between) if between else None,
        nodes={name: LinkEntry.of(link) for name, link in network.inside.items() if link != inside},
        pairs=tuple(
            PairEntry(nodes=pair, **LinkEntry.of(link).model_dump())
            for pair, link in network.between.items()
            if link != between
        ),
    )


def _most_usual(links: Sequence[Link]) -> Link | None:
    return max(links, key=links.count) if links else None
