"""Links between instances and nodes: how long KV takes over them, and how a file describes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.cost.geometry import ModelGeometry
from shared.domain.kv import GROUP_BYTES, TOKEN_GROUP, UNIT_BYTES, Codec, channel_group, coded_bytes
from shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Link:
    """A path between two instances. `bandwidth_bytes_s` is nominal; `efficiency` is the share that is reached."""

    bandwidth_bytes_s: float
    latency_s: float = 1e-3
    efficiency: float = 0.58  # ours: what two transfer times of ThunderServe (Table 8) come to, 0.56 and 0.61

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_s <= 0 or not 0 < self.efficiency <= 1 or self.latency_s < 0:
            raise InvalidRequest(
                f"a link needs a positive bandwidth, an efficiency in (0, 1] and a latency >= 0: {self}"
            )


def wire_bytes(geometry: ModelGeometry, tokens: int, codec: Codec = Codec.RAW, dtype_bytes: float = 2.0) -> float:
    """Bytes that `tokens` tokens of KV take on the wire. RAW sends elements as they are stored; no codec sends more."""
    raw = tokens * geometry.kv_bytes_per_token(dtype_bytes)
    if codec is Codec.RAW or tokens <= 0:
        return raw
    kv = geometry.kv_geometry()
    values = float(tokens * kv.kv_heads * kv.head_dim)  # of one layer's K, or V
    coded = 2.0 * values * coded_bytes(codec)
    if codec is Codec.FP8:
        return min(raw, kv.layers * (coded + 2.0 * UNIT_BYTES * kv.kv_heads))
    groups = -(-tokens // TOKEN_GROUP) * kv.kv_heads * kv.head_dim + values / channel_group(kv.head_dim)
    return min(raw, kv.layers * (coded + GROUP_BYTES * groups + 2.0 * UNIT_BYTES))


def transfer_time_s(
    geometry: ModelGeometry, tokens: int, link: Link, codec: Codec = Codec.RAW, dtype_bytes: float = 2.0
) -> float:
    """Seconds to move the KV of `tokens` tokens; 0 for none.

    Source: ThunderServe eq. 1, to which we add the layer count and grouped-query attention:
    `α + b·s·κ·(bits/16)/(η·β)`, where κ is `KvGeometry.bytes_per_token`.
    """
    if tokens <= 0:
        return 0.0
    moved = wire_bytes(geometry, tokens, codec, dtype_bytes)
    return link.latency_s + moved / (link.efficiency * link.bandwidth_bytes_s)


Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Network:
    """The links of the nodes that instances stand on.

    inside: between two instances of a node, by node. between: from one node to the other, by pair of names, the lesser
    first; the same in both directions. Instances of one node share its port.
    """

    inside: Mapping[str, Link] = field(default_factory=dict)
    between: Mapping[Pair, Link] = field(default_factory=dict)

    def path(self, source: str, target: str) -> Link:
        """The link from one node to another, or inside one. Raises InvalidRequest where there is none."""
        link = self.inside.get(source) if source == target else self.between.get(pair_of(source, target))
        if link is None:
            where = f"inside node {source!r}" if source == target else f"between the nodes {source!r} and {target!r}"
            raise InvalidRequest(f"network: no link {where}")
        return link

    def slower(self, factor: float) -> "Network":
        """The same network with all links slower by that factor."""

        def of(link: Link) -> Link:
            return replace(link, bandwidth_bytes_s=link.bandwidth_bytes_s / factor)

        inside = {node: of(link) for node, link in self.inside.items()}
        return Network(inside, {pair: of(link) for pair, link in self.between.items()})

    def port(self, node: str) -> Link:
        """A node's port: as fast as the fastest path that leaves the node; latency belongs to the paths."""
        leaving = [link for pair, link in self.between.items() if node in pair]
        fastest = max(leaving, key=rate_of, default=self.inside[node])
        return Link(fastest.bandwidth_bytes_s, 0.0, fastest.efficiency)


def pair_of(one: str, other: str) -> Pair:
    """Two nodes as `Network.between` names them."""
    return (one, other) if one <= other else (other, one)


def rate_of(link: Link) -> float:
    return link.bandwidth_bytes_s * link.efficiency


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
INSIDE_EFFICIENCY = 0.8  # default of PCIe or NVLink


class _Part(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")


class LinkEntry(_Part):
    """A link. gbps: nominal, 10^9 bits a second in each direction; efficiency: the share that is reached."""

    gbps: Positive
    latency_s: Seconds = 1e-3
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.58

    @property
    def link(self) -> Link:
        return Link(self.gbps * 1e9 / 8.0, self.latency_s, self.efficiency)

    @classmethod
    def from_link(cls, link: Link) -> "LinkEntry":
        return cls(gbps=link.bandwidth_bytes_s * 8.0 / 1e9, latency_s=link.latency_s, efficiency=link.efficiency)


class PairEntry(LinkEntry):
    nodes: tuple[str, str]

    @model_validator(mode="after")
    def _two_nodes(self) -> Self:
        if self.nodes[0] == self.nodes[1]:
            raise ValueError(f"a pair needs two nodes, not {self.nodes[0]!r} twice; `nodes` has links inside nodes")
        return self


class MatrixEntry(_Part):
    """Links between all nodes, symmetric, and inside them on the diagonal. gbps 0: no link."""

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
            raise ValueError(f"matrix: gbps must have {count} rows of {count} numbers, one for each node")
        for at, other in combinations(range(count), 2):
            if self.gbps[at][other] != self.gbps[other][at]:
                raise ValueError(f"matrix: {self.nodes[at]} to {self.nodes[other]} must be as fast as back")
        return self


class NetworkEntry(_Part):
    """inside: the link of each node; between: of any two nodes; `nodes`, `pairs`: exceptions. Or a `matrix` of all."""

    inside: LinkEntry | None = None
    between: LinkEntry | None = None
    nodes: dict[str, LinkEntry] = {}
    pairs: tuple[PairEntry, ...] = ()
    matrix: MatrixEntry | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.matrix is not None and (self.inside or self.between or self.nodes or self.pairs):
            raise ValueError("network: a matrix excludes inside, between, nodes and pairs")
        seen: set[tuple[str, str]] = set()
        for index, pair in enumerate(self.pairs):
            if (nodes := pair_of(*pair.nodes)) in seen:
                raise ValueError(f"pairs.{index}: the link of {nodes[0]!r} and {nodes[1]!r} is given twice")
            seen.add(nodes)
        return self

    def network(self, nodes: Sequence[str], inside: Mapping[str, Link]) -> Network:
        """The network of these nodes. inside: links of nodes for which the file gives none.

        Raises InvalidRequest for names that no node has.
        """
        if self.matrix is not None:
            return self._of_matrix(self.matrix, nodes, inside)
        known = set(nodes)
        for name in (*self.nodes, *(name for pair in self.pairs for name in pair.nodes)):
            if name not in known:
                raise InvalidRequest(f"network: no node {name!r}; known: {', '.join(nodes)}")
        default = self.inside.link if self.inside else None
        own = {name: self.nodes[name].link if name in self.nodes else default or inside[name] for name in nodes}
        between = {pair_of(*pair): self.between.link for pair in combinations(nodes, 2) if self.between}
        return Network(own, between | {pair_of(*pair.nodes): pair.link for pair in self.pairs})

    def _of_matrix(self, matrix: MatrixEntry, nodes: Sequence[str], inside: Mapping[str, Link]) -> Network:
        missing = [name for name in nodes if name not in matrix.nodes]
        if missing:
            raise InvalidRequest(f"network: matrix: node {missing[0]!r} is missing")
        at = {name: index for index, name in enumerate(matrix.nodes)}

        def link(one: str, other: str) -> Link | None:
            gbps = matrix.gbps[at[one]][at[other]]
            return Link(gbps * 1e9 / 8.0, matrix.latency_s, matrix.efficiency) if gbps else None

        own = {name: link(name, name) or inside[name] for name in nodes}
        pairs = {pair_of(*pair): link(*pair) for pair in combinations(nodes, 2)}
        return Network(own, {pair: found for pair, found in pairs.items() if found is not None})


def entry_of(network: Network) -> NetworkEntry:
    """A network as a file describes it: the most frequent links as classes, the others as exceptions."""
    inside = _most_frequent(list(network.inside.values()))
    between = _most_frequent(list(network.between.values()))
    return NetworkEntry(
        inside=LinkEntry.from_link(inside) if inside else None,
        between=LinkEntry.from_link(between) if between else None,
        nodes={name: LinkEntry.from_link(link) for name, link in network.inside.items() if link != inside},
        pairs=tuple(
            PairEntry(nodes=pair, **LinkEntry.from_link(link).model_dump())
            for pair, link in network.between.items()
            if link != between
        ),
    )


def _most_frequent(links: Sequence[Link]) -> Link | None:
    return max(links, key=links.count) if links else None
