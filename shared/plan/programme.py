"""The integer programme over kinds of groups: how many of each, for the most requests a second or the least money."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from shared.cost.network import rate_of
from shared.domain.instance import Role
from shared.plan.estimate import Estimator
from shared.plan.group import Group
from shared.plan.routes import Capacity

# When a programme is solved well enough: (share that it may be off, nodes of its search tree), so that it ends at the
# same place on any machine. For goodput others judge what it finds; a price is what it is.
WELL_FOR_GOODPUT, WELL_FOR_PRICE = (0.1, 1), (0.01, 20)


@dataclass(frozen=True, slots=True)
class Margin:
    """What a programme leaves: the share of the time that prompts and of the TPOT target that decodes may take.

    local: groups that decode may compute prompts. split: there are groups that only compute prompts. rate: requests a
    second that are served as cheaply as can be; 0: as many as can be.
    """

    prefill: float = 1.0
    decode: float = 1.0
    local: bool = True
    split: bool = True
    rate: float = 0.0


MARGINS = (
    Margin(local=False),
    Margin(0.75),
    Margin(0.75, local=False),
    Margin(0.85, 0.85, local=False),
    Margin(0.9, 0.85),
    Margin(split=False),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Accelerators of each class that one such group takes, its layout on sample pools, and what it can do."""

    uses: tuple[tuple[int, int], ...]  # (class, accelerators)
    group: Group
    capacity: Capacity

    @property
    def place(self) -> tuple[int, ...]:
        """Classes that it stands on."""
        return tuple(one for one, _ in self.uses)


class Programme:
    """The integer programme: groups of each kind, prompts that each computes for itself, flows between places."""

    def __init__(
        self, estimator: Estimator, classes: Mapping[int, Sequence[int]], kinds: Sequence[Kind], margin: Margin
    ) -> None:
        self._estimator = estimator
        self._classes = classes
        self._kinds = kinds
        self._margin = margin
        self._rows: list[tuple[dict[int, float], float]] = []  # coefficients by variable, and the most of their sum
        self._places = sorted({kind.place for kind in kinds})
        count, places = len(kinds), len(self._places)
        self._local = count  # first of the variables of prompts computed where they are decoded, one a kind
        self._flow = 2 * count  # of flows from place to place
        self._size = 2 * count + places * places

    def solved(self) -> list[int]:
        """Groups of each kind."""
        self._pools()
        self._sides()
        self._ports()
        gain, upper = np.zeros(self._size), np.full(self._size, np.inf)
        gain[self._flow :] = -1.0
        for at, kind in enumerate(self._kinds):
            if kind.group.role is Role.DECODE and self._margin.local:
                gain[self._local + at] = -1.0
            else:
                upper[self._local + at] = 0.0
        gain = self._priced(gain)
        table = lil_array((len(self._rows), self._size))
        for row, (entries, _) in enumerate(self._rows):
            for column, value in entries.items():
                table[row, column] = value
        most = np.array([bound for _, bound in self._rows])
        whole = np.zeros(self._size)
        whole[: len(self._kinds)] = 1
        gap, nodes = WELL_FOR_PRICE if self._margin.rate else WELL_FOR_GOODPUT
        found = milp(
            gain,
            constraints=LinearConstraint(table.tocsr(), -np.inf, most),
            integrality=whole,
            bounds=Bounds(0.0, upper),
            options={"mip_rel_gap": gap, "node_limit": nodes},
        )
        if found.x is None:
            return [0] * len(self._kinds)
        return [round(float(x)) for x in found.x[: len(self._kinds)]]

    def _priced(self, gain: NDArray[np.float64]) -> NDArray[np.float64]:
        """What is to be as small as can be: what is left unserved, or the price of what serves the rate."""
        problem, rate = self._estimator.problem, self._margin.rate
        prices = {at: kind.group.price_usd_hour(problem.inventory) for at, kind in enumerate(self._kinds)}
        if problem.budget_usd_hour < inf:
            self._rows.append((dict(prices), problem.budget_usd_hour))
        if not rate:
            return gain
        self._rows.append(({int(at): float(gain[at]) for at in np.flatnonzero(gain)}, -rate))
        spare = 1e-4 * max(prices.values()) / rate  # of equal prices the one that serves more
        cost = spare * gain
        cost[: len(self._kinds)] = list(prices.values())
        return cost

    def _pools(self) -> None:
        """Groups of a size or more take no more than the pools that have so many: in powers of two they pack."""
        pools = self._estimator.problem.inventory.pools
        for one, members in self._classes.items():
            sizes = sorted({size for kind in self._kinds for of, size in kind.uses if of == one})
            for least in sizes:
                entries: dict[int, float] = {}
                for at, kind in enumerate(self._kinds):
                    for of, size in kind.uses:
                        if of == one and size >= least:
                            entries[at] = entries.get(at, 0.0) + size
                room = sum(pools[pool].count for pool in members if pools[pool].count >= least)
                self._rows.append((entries, float(room)))

    def _sides(self) -> None:
        """Prompts leave a place as fast as they are computed there, and come to one as fast as they are decoded."""
        for a, place in enumerate(self._places):
            leaving = {self._to(a, b): 1.0 for b in range(len(self._places))}
            coming = {self._to(b, a): 1.0 for b in range(len(self._places))}
            cuts = max((len(k.capacity.cuts) for k in self._kinds if k.place == place), default=0)
            tables = [dict(coming) for _ in range(max(1, cuts))]
            for at, kind in enumerate(self._kinds):
                if kind.place != place:
                    continue
                if kind.group.role is Role.PREFILL:
                    leaving[at] = -kind.capacity.prefills
                    continue
                self._rows.append(({self._local + at: 1.0, at: -kind.capacity.prefills}, 0.0))
                for table, (most, slope) in zip(tables, _padded(kind.capacity.cuts, len(tables)), strict=True):
                    table[at] = -most
                    table[self._local + at] = 1.0 + slope / kind.capacity.prefills
            self._rows.append((leaving, 0.0))
            self._rows += [(table, 0.0) for table in tables]

    def _ports(self) -> None:
        """What leaves and comes to the nodes of a class, in requests' KV a second."""
        inventory, places = self._estimator.problem.inventory, self._estimator.places
        for a, place in enumerate(self._places):
            nodes = {inventory.pools[pool].node for one in place for pool in self._classes[one]}
            port = sum(rate_of(inventory.network.port(node)) for node in nodes) / places.kv_bytes
            others = [b for b in range(len(self._places)) if b != a and not self._beside(place, self._places[b])]
            if others:
                out, into = {self._to(a, b): 1.0 for b in others}, {self._to(b, a): 1.0 for b in others}
                self._rows += [(out, port), (into, port)]
                own = port / len(nodes)  # and each group has no more than the ports of its own nodes
                for table, role in ((out, Role.PREFILL), (into, Role.DECODE)):
                    groups = {
                        at: -own * len(self._spans(kind))
                        for at, kind in enumerate(self._kinds)
                        if kind.place == place and kind.group.role is role
                    }
                    self._rows.append((table | groups, 0.0))
            for b in others:
                link = self._between(place, self._places[b])
                self._rows.append(({self._to(a, b): 1.0}, link * max(len(nodes), 1) / places.kv_bytes))

    def _spans(self, kind: Kind) -> set[str]:
        """Nodes of one such group."""
        pools = self._estimator.problem.inventory.pools
        return {pools[pool].node for pool in kind.group.uses}

    def _beside(self, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        """Whether groups of both stand on the same nodes."""
        return self._nodes(one) == self._nodes(other)

    def _nodes(self, place: tuple[int, ...]) -> set[str]:
        pools = self._estimator.problem.inventory.pools
        return {pools[pool].node for one in place for pool in self._classes[one]}

    def _between(self, one: tuple[int, ...], other: tuple[int, ...]) -> float:
        network = self._estimator.problem.inventory.network
        paths = [network.path(a, b) for a in self._nodes(one) for b in self._nodes(other) if a != b]
        return min(map(rate_of, paths))

    def _to(self, source: int, target: int) -> int:
        return self._flow + source * len(self._places) + target


def _padded(cuts: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    return [*cuts, *[cuts[-1]] * (count - len(cuts))]
