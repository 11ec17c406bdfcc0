"""Deployments by integer programming: how many groups of which kind each pool gives, for the most requests a second.

A kind is a way to use some accelerators: of one pool, or of two pools that share a pipeline. Equal pools are one class,
so that hundreds of accelerators are as small a programme as a few nodes. Capacities are those of the estimate, without
its tails, so several programmes with different margins give candidates, which are judged elsewhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import inf

import numpy as np
from numpy.typing import NDArray

from shared.cost.network import rate_of
from shared.domain.instance import Role
from shared.plan.estimate import Estimator
from shared.plan.group import Group
from shared.plan.linear import Programme
from shared.plan.routes import Capacity, decode_capacity, prefill_capacity

# When a programme is solved well enough: (relative gap, nodes of its search tree), so that it ends at the same solution
# on any machine. Goodput is judged in the simulator afterwards; a price is not.
WELL_FOR_GOODPUT, WELL_FOR_PRICE = (0.1, 1), (0.01, 20)
_AT_ONCE = 2  # programmes
_JOINT_STAGES = 4  # at most, of two pools in one pipeline, which give as many each


@dataclass(frozen=True, slots=True)
class Margin:
    """The share of the time that prompts may take, and of the TPOT target that decodes may take.

    local: groups that decode may compute prompts. split: groups that only compute prompts are allowed. rate: requests a
    second to be served at the lowest price; 0: as many as possible. most: share of the capacity of its role that one
    group may have, of what groups of any size have together.
    """

    prefill: float = 1.0
    decode: float = 1.0
    local: bool = True
    split: bool = True
    rate: float = 0.0
    most: float = 1.0


MARGINS = (
    Margin(local=False),
    Margin(0.75),
    Margin(0.75, local=False),
    Margin(0.85, 0.85, local=False),
    Margin(0.9, 0.85),
    Margin(split=False),
)
# The loss of one group should leave most of the capacity of either role.
SPREAD = tuple(
    Margin(prefill, decode, local=False, most=most)
    for prefill, decode in ((1.0, 1.0), (0.75, 1.0), (0.85, 0.85))
    for most in (1 / 2, 1 / 3)
)


@dataclass(frozen=True, slots=True)
class Kind:
    """The accelerators of each class that such a group takes, its layout on sample pools, and its capacity."""

    uses: tuple[tuple[int, int], ...]  # (class, accelerators)
    group: Group
    capacity: Capacity

    @property
    def place(self) -> tuple[int, ...]:
        return tuple(one for one, _ in self.uses)


class _Composition:
    """The integer programme of one margin: groups of each kind, prompts that each computes itself, and flows."""

    def __init__(
        self, estimator: Estimator, classes: Mapping[int, Sequence[int]], kinds: Sequence[Kind], margin: Margin
    ) -> None:
        self._estimator = estimator
        self._classes = classes
        self._kinds = kinds
        self._margin = margin
        self._places = sorted({kind.place for kind in kinds})
        count, places = len(kinds), len(self._places)
        self._local = count  # first variable of prompts that are computed where they are decoded, one for each kind
        self._flow = 2 * count  # first variable of flows from place to place
        self._programme = Programme(2 * count + places * places)

    def counts(self) -> list[int]:
        """How many groups of each kind."""
        self._pools()
        self._sides()
        self._ports()
        gain, upper = np.zeros(self._programme.size), np.full(self._programme.size, np.inf)
        gain[self._flow :] = -1.0
        for at, kind in enumerate(self._kinds):
            if kind.group.role is Role.DECODE and self._margin.local:
                gain[self._local + at] = -1.0
            else:
                upper[self._local + at] = 0.0
        gap, nodes = WELL_FOR_PRICE if self._margin.rate else WELL_FOR_GOODPUT
        options = {"mip_rel_gap": gap, "node_limit": nodes}
        found = self._programme.minimise(self._priced(gain), upper, len(self._kinds), options)
        return [round(float(count)) for count in found[: len(self._kinds)]]

    def _priced(self, gain: NDArray[np.float64]) -> NDArray[np.float64]:
        """The objective to minimise: the requests not served, or the price of what serves the rate."""
        problem, rate = self._estimator.problem, self._margin.rate
        prices = {at: kind.group.price_usd_hour(problem.inventory) for at, kind in enumerate(self._kinds)}
        if problem.budget_usd_hour < inf:
            self._programme.add(prices, problem.budget_usd_hour)
        if not rate:
            return gain
        self._programme.add({int(at): float(gain[at]) for at in np.flatnonzero(gain)}, -rate)
        spare = 1e-4 * max(prices.values()) / rate  # of equal prices the deployment that serves more wins
        cost = spare * gain
        cost[: len(self._kinds)] = list(prices.values())
        return cost

    def _pools(self) -> None:
        """Groups of at least a size take at most what pools of at least that size have: powers of two then pack."""
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
                self._programme.add(entries, float(room))

    def _sides(self) -> None:
        """Prompts leave a place as fast as they are computed there, and arrive as fast as they are decoded."""
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
                self._programme.add({self._local + at: 1.0, at: -kind.capacity.prefills}, 0.0)
                own = kind.capacity.cuts
                for table, (most, slope) in zip(tables, [*own, *[own[-1]] * (len(tables) - len(own))], strict=True):
                    table[at] = -most
                    table[self._local + at] = 1.0 + slope / kind.capacity.prefills
            for table in (leaving, *tables):
                self._programme.add(table, 0.0)

    def _ports(self) -> None:
        """What leaves and enters the nodes of a place, in requests' KV a second."""
        inventory, places = self._estimator.problem.inventory, self._estimator.places
        for a, place in enumerate(self._places):
            nodes = self._nodes(place)
            port = sum(rate_of(inventory.network.port(node)) for node in nodes) / places.kv_bytes
            others = [b for b, other in enumerate(self._places) if self._nodes(other) != nodes]
            if others:
                out, into = {self._to(a, b): 1.0 for b in others}, {self._to(b, a): 1.0 for b in others}
                self._programme.add(out, port)
                self._programme.add(into, port)
                own = port / len(nodes)  # and each group has at most the ports of its own nodes
                for table, role in ((out, Role.PREFILL), (into, Role.DECODE)):
                    groups = {
                        at: -own * len({inventory.pools[pool].node for pool in kind.group.uses})
                        for at, kind in enumerate(self._kinds)
                        if kind.place == place and kind.group.role is role
                    }
                    self._programme.add(table | groups, 0.0)
            for b in others:
                link = self._between(place, self._places[b])
                self._programme.add({self._to(a, b): 1.0}, link * max(len(nodes), 1) / places.kv_bytes)

    def _nodes(self, place: tuple[int, ...]) -> set[str]:
        pools = self._estimator.problem.inventory.pools
        return {pools[pool].node for one in place for pool in self._classes[one]}

    def _between(self, one: tuple[int, ...], other: tuple[int, ...]) -> float:
        network = self._estimator.problem.inventory.network
        paths = [network.path(a, b) for a in self._nodes(one) for b in self._nodes(other) if a != b]
        return min(map(rate_of, paths))

    def _to(self, source: int, target: int) -> int:
        return self._flow + source * len(self._places) + target


class Composer:
    """Deployments of one problem: it makes the kinds, has programmes solved, and packs the groups on pools."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._problem = estimator.problem
        inventory = self._problem.inventory
        self._classes: dict[int, list[int]] = {}
        for pool, one in enumerate(inventory.alike):
            self._classes.setdefault(one, []).append(pool)
        self._layouts = [(uses, group) for role in Role for uses, group in self._all_layouts(role)]

    def candidates(self, margins: Sequence[Margin] = MARGINS) -> Iterator[tuple[Group, ...]]:
        """The best deployment of each programme; none where no group holds the model."""
        seen: set[tuple[Group, ...]] = set()
        with ThreadPoolExecutor(_AT_ONCE) as solvers:  # HiGHS lets go of the interpreter
            for found in solvers.map(self.best, margins):
                if found and found not in seen:
                    seen.add(found)
                    yield found

    def best(self, margin: Margin = Margin()) -> tuple[Group, ...]:
        """The deployment of one programme, on concrete pools; empty where there is none."""
        kinds = _useful(self._kinds(margin))
        if margin.most < 1.0 and kinds:
            kinds = _spread(kinds, self._counts(kinds, margin), margin.most)
        if not any(kind.group.role is Role.DECODE for kind in kinds):
            return ()
        return self._packed(kinds, self._counts(kinds, margin))

    def _counts(self, kinds: Sequence[Kind], margin: Margin) -> list[int]:
        return _Composition(self._estimator, self._classes, kinds, margin).counts()

    def _kinds(self, margin: Margin) -> list[Kind]:
        problem, found = self._problem, []
        slo, output = problem.slo, problem.sample.output
        for uses, group in self._layouts:
            cost = self._estimator.cost(group)
            late = float((cost.prefill_s > slo.ttft_s).mean())
            if group.role is Role.PREFILL:
                if margin.split and late <= 1.0 - problem.target:
                    found.append(Kind(uses, group, prefill_capacity(cost, margin.prefill)))
                continue
            capacity = decode_capacity(cost, margin.decode * slo.tpot_s, output, 1.0)
            if capacity.decodes > 0.0:
                found.append(Kind(uses, group, capacity))
        return found

    def _all_layouts(self, role: Role) -> Iterator[tuple[tuple[tuple[int, int], ...], Group]]:
        """Single pools in sizes that are powers of two; pairs of pools on one node or, if allowed, on two."""
        layouts, pools = self._estimator.layouts, self._problem.inventory.pools
        for one, members in self._classes.items():
            for size in _sizes(pools[members[0]].count):
                for group in layouts.all({members[0]: size}, role):
                    yield ((one, size),), group
        for pair, (first, second) in self._pairs():
            for size in _sizes(min(pools[first].count, pools[second].count)):
                for group in layouts.all({first: size, second: size}, role):
                    if len(group.parts) <= _JOINT_STAGES:
                        yield ((pair[0], size), (pair[1], size)), group

    def _pairs(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Classes whose pools may share a pipeline, and two such pools. A class with itself only where no pool of it
        holds the model alone.
        """
        pools = self._problem.inventory.pools
        for one, other in combinations_with_replacement(sorted(self._classes), 2):
            if one == other:
                pool = self._classes[one][0]
                layouts = self._estimator.layouts
                if any(layouts.all({pool: size}, Role.DECODE) for size in _sizes(pools[pool].count)):
                    continue
            ways = [(a, b) for a in self._classes[one] for b in self._classes[other] if a != b]
            if not ways:
                continue
            near = [(a, b) for a, b in ways if pools[a].node == pools[b].node]
            if near or not self._problem.one_node:
                yield (one, other), (near or ways)[0]

    def _packed(self, kinds: Sequence[Kind], counts: Sequence[int]) -> tuple[Group, ...]:
        """Groups on concrete pools: large groups first, each on the pool with the most accelerators left."""
        pools = self._problem.inventory.pools
        left = [pool.count for pool in pools]
        wanted = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        wanted.sort(key=lambda kind: (-len(kind.uses), -kind.group.accelerators, kind.group.role.value))
        groups = []
        for kind in wanted:
            places = self._places(kind, left)
            if places is None:
                continue  # two classes may not have accelerators left on one node
            for (_, size), pool in zip(kind.uses, places, strict=True):
                left[pool] -= size
            groups.append(kind.group.moved(dict(zip(self._samples(kind), places, strict=True))))
        return tuple(groups)

    def _samples(self, kind: Kind) -> tuple[int, ...]:
        """The pools on which the kind's layout was made, in the order of its classes."""
        alike, left = self._problem.inventory.alike, list(kind.group.uses)
        found = []
        for one, _ in kind.uses:
            found.append(next(pool for pool in left if alike[pool] == one))
            left.remove(found[-1])
        return tuple(found)

    def _places(self, kind: Kind, left: Sequence[int]) -> tuple[int, ...] | None:
        ways = [[pool for pool in self._classes[one] if left[pool] >= size] for one, size in kind.uses]
        if not all(ways):
            return None
        first = max(ways[0], key=lambda pool: left[pool])
        if len(ways) == 1:
            return (first,)
        pools = self._problem.inventory.pools
        near = [(a, b) for a in ways[0] for b in ways[1] if a != b and pools[a].node == pools[b].node]
        if near:
            return max(near, key=lambda pair: left[pair[0]] + left[pair[1]])
        others = [pool for pool in ways[1] if pool != first]
        if self._problem.one_node or not others:
            return None
        return (first, max(others, key=lambda pool: left[pool]))


def _useful(kinds: Sequence[Kind]) -> list[Kind]:
    """Of the kinds with the same accelerators and role, those that decode most, and that compute prompts fastest."""
    best: dict[tuple[object, ...], Kind] = {}
    for kind in kinds:
        capacity = kind.capacity
        for what, worth in (("decodes", capacity.decodes), ("prefills", capacity.prefills)):
            key = (kind.uses, kind.group.role, what)
            known = best.get(key)
            if known is None or worth > getattr(known.capacity, what):
                best[key] = kind
    return list(dict.fromkeys(best.values()))


def _spread(kinds: Sequence[Kind], counts: Sequence[int], most: float) -> list[Kind]:
    """The kinds of which one group has at most that share of the capacity that the counted groups of its role have."""

    def capacity(kind: Kind) -> float:
        return kind.capacity.prefills if kind.group.role is Role.PREFILL else kind.capacity.decodes

    whole = dict.fromkeys(Role, 0.0)
    for kind, count in zip(kinds, counts, strict=True):
        whole[kind.group.role] += count * capacity(kind)
    return [kind for kind in kinds if capacity(kind) <= most * whole[kind.group.role]]


def _sizes(count: int) -> list[int]:
    """Powers of two, which pack well, and the whole pool."""
    return sorted({*(1 << power for power in range(count.bit_length()) if 1 << power <= count), count})
