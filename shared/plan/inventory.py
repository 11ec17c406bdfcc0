"""The inventory: nodes, the accelerators on them, and the links between them; and its file, in YAML.

The file is strict: errors name file, line and key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from scipy.sparse.csgraph import connected_components

from shared.cost.catalogue import Accelerator, Catalogue
from shared.cost.kinds import HOP_LATENCY_S
from shared.cost.library import Library
from shared.cost.network import INSIDE_EFFICIENCY, Link, LinkEntry, Network, NetworkEntry, entry_of, pair_of
from shared.errors import InvalidRequest, NotFound, PolyphaseError
from shared.files.faults import describe
from shared.files.places import Places
from shared.files.yaml_file import Document, read_document


@dataclass(frozen=True, slots=True)
class Pool:
    """Accelerators of one type on one node. price_usd_hour: of one of them. host_kv_bytes: of the node's memory, for KV
    that left the prefix cache of each of them.
    """

    node: str
    accelerator: Accelerator
    count: int
    price_usd_hour: float
    host_kv_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.count} x {self.accelerator.name} on {self.node}"


@dataclass(frozen=True)
class Inventory:
    """Pools, in the order of the file, and the network between their nodes.

    assumed: a note to the user on links that are assumed; empty where they are given.
    """

    pools: tuple[Pool, ...]
    network: Network
    assumed: str = field(default="", compare=False)

    @property
    def accelerators(self) -> int:
        return sum(pool.count for pool in self.pools)

    @property
    def price_usd_hour(self) -> float:
        return sum(pool.count * pool.price_usd_hour for pool in self.pools)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(pool.node for pool in self.pools))

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """The number of each pool's kind. Pools of one kind are interchangeable.

        Nodes differ by their accelerators and by their links to each other kind of node, refined until nothing changes.
        """
        colours: Mapping[str, object] = {
            node: (
                tuple(
                    (p.accelerator.name, p.count, p.price_usd_hour, p.host_kv_bytes)
                    for p in self.pools
                    if p.node == node
                ),
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
        """What is left after losses by (node, type). Raises NotFound for accelerators that do not exist."""
        known = {(pool.node, pool.accelerator.name): pool.count for pool in self.pools}
        for (node, name), count in losses.items():
            if known.get((node, name), 0) < count:
                there = ", ".join(map(str, self.pools))
                raise NotFound(f"no {count} x {name} on {node}; known: {there}")
        left = [
            replace(pool, count=pool.count - losses.get((pool.node, pool.accelerator.name), 0)) for pool in self.pools
        ]
        return replace(self, pools=tuple(pool for pool in left if pool.count))

    def on(self, pools: Sequence[int]) -> "Inventory":
        """The pools at these positions, with the links of their nodes."""
        kept = tuple(self.pools[at] for at in pools)
        nodes = {pool.node for pool in kept}
        inside = {node: link for node, link in self.network.inside.items() if node in nodes}
        between = {pair: link for pair, link in self.network.between.items() if nodes.issuperset(pair)}
        return replace(self, pools=kept, network=replace(self.network, inside=inside, between=between))

    def islands(self) -> tuple[tuple[str, ...], ...]:
        """Nodes that are connected, directly or not; more than one tuple where the network is partitioned."""
        joined = [[pair_of(one, other) in self.network.between for other in self.nodes] for one in self.nodes]
        count, labels = connected_components(np.array(joined), directed=False)
        return tuple(
            tuple(node for node, label in zip(self.nodes, labels, strict=True) if label == island)
            for island in range(count)
        )

    def require_joined(self) -> None:
        """Raises InvalidRequest that names nodes without a link between them."""
        for one, other in combinations(self.nodes, 2):
            if pair_of(one, other) not in self.network.between:
                parts = self.islands()
                how = " | ".join(", ".join(part) for part in parts)
                hint = f"the network is partitioned into {how}: plan each part" if len(parts) > 1 else "add a link"
                raise InvalidRequest(f"network: no link between the nodes {one!r} and {other!r}; {hint}")


MAX_NODES = 512
Count = Annotated[int, Field(gt=0, le=100_000)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=1 << 50)]


class _Part(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")


class DeviceEntry(_Part):
    """`count` accelerators of a type. price_usd_hour: of one; by default the catalogue's. host_kv_bytes: host memory of
    each for KV that left its prefix cache.
    """

    accelerator: str
    count: Count = 1
    price_usd_hour: Price | None = None
    host_kv_bytes: Bytes = 0


class NodeEntry(_Part):
    """One node, or `replicas` equal ones, named name-0, name-1, …: one type of accelerator, or `devices` of several."""

    name: Name
    replicas: Count = 1
    accelerator: str = ""
    count: Count = 1
    price_usd_hour: Price | None = None
    host_kv_bytes: Bytes = 0
    devices: tuple[DeviceEntry, ...] = ()

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.accelerator) == bool(self.devices):
            raise ValueError("a node needs either `accelerator` or `devices`")
        if self.devices and self.host_kv_bytes:
            raise ValueError("host_kv_bytes: give it to each of `devices`")
        kinds = [device.accelerator for device in self.devices]
        if len(set(kinds)) < len(kinds):
            raise ValueError("`devices` name a type twice: use `count`")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.replicas == 1 else tuple(f"{self.name}-{at}" for at in range(self.replicas))

    @property
    def all_devices(self) -> tuple[DeviceEntry, ...]:
        single = DeviceEntry(
            accelerator=self.accelerator,
            count=self.count,
            price_usd_hour=self.price_usd_hour,
            host_kv_bytes=self.host_kv_bytes,
        )
        return self.devices or (single,)


class InventoryFile(_Part):
    """The whole file. accelerators: a file of further catalogue entries, relative to this file."""

    name: str = ""
    accelerators: Path | None = None
    nodes: tuple[NodeEntry, ...] = Field(min_length=1)
    network: NetworkEntry = NetworkEntry()

    @model_validator(mode="after")
    def _names(self) -> Self:
        count = sum(entry.replicas for entry in self.nodes)
        if count > MAX_NODES:
            raise ValueError(f"nodes: at most {MAX_NODES} nodes can be planned, not {count}")
        seen: set[str] = set()
        for index, entry in enumerate(self.nodes):
            for name in entry.names:
                if name in seen:
                    raise ValueError(f"nodes.{index}.name: {name!r} is used twice")
                seen.add(name)
        return self

    def inventory(self, catalogue: Catalogue) -> Inventory:
        """The inventory that the file describes. Raises NotFound or InvalidRequest; messages begin with the key."""
        pools = [
            Pool(
                name,
                device := _known(catalogue, entry.accelerator, f"nodes.{index}"),
                entry.count,
                device.price_usd_hour if entry.price_usd_hour is None else entry.price_usd_hour,
                entry.host_kv_bytes,
            )
            for index, node in enumerate(self.nodes)
            for name in node.names
            for entry in node.all_devices
        ]
        inside = {
            pool.node: Link(pool.accelerator.links.scale_up, HOP_LATENCY_S, INSIDE_EFFICIENCY)
            for pool in reversed(pools)
        }
        nodes = list(dict.fromkeys(pool.node for pool in pools))
        network = self.network.network(nodes, inside)
        if len(nodes) > 1 and not (self.network.between or self.network.pairs or self.network.matrix):
            return _with_assumed_links(Inventory(tuple(pools), network))
        inventory = Inventory(tuple(pools), network)
        inventory.require_joined()
        return inventory


def _with_assumed_links(inventory: Inventory) -> Inventory:
    """With a link between each two nodes that has the bandwidth of the slower one's network in the catalogue."""
    bytes_s = {
        node: sum(pool.accelerator.links.network * pool.count for pool in inventory.pools if pool.node == node)
        for node in inventory.nodes
    }
    between = {
        pair_of(*pair): LinkEntry(gbps=min(bytes_s[node] for node in pair) * 8.0 / 1e9).link
        for pair in combinations(inventory.nodes, 2)
    }
    rates = sorted({round(link.bandwidth_bytes_s * 8.0 / 1e9, 1) for link in between.values()})
    width = " to ".join(f"{rate:g}" for rate in dict.fromkeys((rates[0], rates[-1])))
    usual = next(iter(between.values()))
    note = (
        "The inventory gives no links between its nodes. Each two are assumed to be joined by the network cards that "
        f"the catalogue has for the accelerators of the slower one ({width} Gbit/s, of which {usual.efficiency:.0%} is "
        f"reached, {usual.latency_s * 1000:g} ms). Give yours: `network: {{between: {{gbps: …}}}}`."
    )
    return replace(inventory, network=Network(inventory.network.inside, between), assumed=note)


def read_inventory(file: Path) -> tuple[Inventory, Library, str]:
    """An inventory file: the inventory, the library with its own accelerators, its name.

    Raises InvalidRequest or NotFound that name the file and the key.
    """
    document = read_document(file)
    read = checked(document)
    try:
        library = Library.built_in(file.parent / read.accelerators if read.accelerators else None)
    except PolyphaseError as error:
        raise type(error)(document.places.tell("accelerators", error.message)) from error
    return located(read, library.catalogue, document.places), library, read.name or file.stem


def checked(document: Document) -> InventoryFile:
    """The content of an inventory file. Raises InvalidRequest that names file, line and key."""
    try:
        return InventoryFile.model_validate(document.mapping())
    except ValidationError as error:
        raise InvalidRequest(describe(document.places, error, kind=InventoryFile)) from error


def located(read: InventoryFile, catalogue: Catalogue, places: Places) -> Inventory:
    """`InventoryFile.inventory`, with errors that name the file, and the line of the message's key."""
    try:
        return read.inventory(catalogue)
    except PolyphaseError as error:
        raise type(error)(places.tell_of_text(error.message)) from error


def write_inventory(inventory: Inventory, name: str) -> str:
    nodes = []
    for node in inventory.nodes:
        devices = [
            {"accelerator": p.accelerator.name, "count": p.count, "price_usd_hour": p.price_usd_hour}
            | ({"host_kv_bytes": p.host_kv_bytes} if p.host_kv_bytes else {})
            for p in inventory.pools
            if p.node == node
        ]
        nodes.append({"name": node, **(devices[0] if len(devices) == 1 else {"devices": devices})})
    network = entry_of(inventory.network).model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump({"name": name, "nodes": nodes, "network": network}, sort_keys=False, default_flow_style=None)


def _known(catalogue: Catalogue, name: str, key: str) -> Accelerator:
    try:
        return catalogue.get(name)
    except NotFound as error:
        raise NotFound(f"{key}.accelerator: {error.message}") from error
