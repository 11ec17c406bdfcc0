"""What the picture of a plan consists of: instances, or groups of alike ones, and the routes between them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dashboard.plan.records import FleetInstance, Route
from shared.domain.instance import Role

GROUPED_ABOVE = 40  # instances


@dataclass(frozen=True, slots=True)
class Node:
    """Alike instances, mostly one. own: the share of all requests whose prompts they compute and then decode."""

    members: tuple[FleetInstance, ...]
    own: float = 0.0

    @property
    def first(self) -> FleetInstance:
        """What the others are like."""
        return self.members[0]

    @property
    def name(self) -> str:
        """Its id, or how many they are and of what."""
        if len(self.members) == 1:
            return self.first.instance_id
        return f"{len(self.members)} × {hardware(self.first) or self.first.role.value}"

    @property
    def load(self) -> float | None:
        """Mean, 0..1; None where nobody told any."""
        told = [one.load for one in self.members if one.load is not None]
        return min(1.0, max(0.0, sum(told) / len(told))) if told else None


@dataclass(frozen=True, slots=True)
class Link:
    """A route between two nodes, by their places; share: of all requests, 0..1."""

    prefill: int
    decode: int
    share: float


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order in which they are drawn from above, and links among them."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]

    def column(self, role: Role) -> list[int]:
        """Places of the nodes of one role."""
        return [place for place, node in enumerate(self.nodes) if node.first.role is role]


def graph(instances: Sequence[FleetInstance], routes: Sequence[Route], grouped_above: int = GROUPED_ABOVE) -> Graph:
    """One node an instance; of more than `grouped_above`, one for all that are alike.

    Ids that routes name and nobody has are drawn as lost. Shares are made to sum to one.
    """
    routes = [route for route in routes if route.share > 0.0]
    total = sum(route.share for route in routes) or 1.0
    everybody = [*instances, *_missing(instances, routes)]
    own: dict[str, float] = defaultdict(float)
    for route in routes:
        if route.prefill is None:
            own[route.decode] += route.share / total
    groups = _groups(everybody, own, together=len(everybody) > grouped_above)
    nodes = tuple(Node(tuple(group), sum(own.get(one.instance_id, 0.0) for one in group)) for group in groups)
    place = {one.instance_id: at for at, node in enumerate(nodes) for one in node.members}
    links: dict[tuple[int, int], float] = defaultdict(float)
    for route in routes:
        if route.prefill is not None:
            links[place[route.prefill], place[route.decode]] += route.share / total
    return Graph(nodes, tuple(Link(*ends, share) for ends, share in sorted(links.items())))


def hardware(one: FleetInstance) -> str:
    """Accelerator and degrees of parallelism: `A40 TP2 PP2`."""
    degrees = (("TP", one.tensor_parallel), ("PP", one.pipeline_parallel))
    return " ".join([one.accelerator, *(f"{name}{degree}" for name, degree in degrees if degree > 1)]).strip()


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A key that sorts p2 before p10."""
    parts = (part for part in re.split(r"(\d+)", name) if part)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def _missing(instances: Iterable[FleetInstance], routes: Iterable[Route]) -> list[FleetInstance]:
    known = {one.instance_id for one in instances}
    missing: dict[str, FleetInstance] = {}
    for route in routes:
        for name, role in ((route.prefill, Role.PREFILL), (route.decode, Role.DECODE)):
            if name is not None and name not in known:
                missing.setdefault(name, FleetInstance(name, role, "lost"))
    return list(missing.values())


def _groups(
    everybody: Sequence[FleetInstance], own: dict[str, float], *, together: bool
) -> Iterable[list[FleetInstance]]:
    groups: dict[tuple[object, ...], list[FleetInstance]] = defaultdict(list)
    for one in sorted(everybody, key=lambda one: natural(one.instance_id)):
        alike = (one.role, hardware(one), one.state, one.instance_id in own)
        groups[alike if together else (one.instance_id,)].append(one)
    return groups.values()
