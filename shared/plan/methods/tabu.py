"""ThunderServe's tabu search over group construction and phases, with its orchestration.

Source: ThunderServe Algorithms 1 and 2 and section 3.3. F: deployments without a side are rejected; a deployment is
tabu by its canonical form; what was evaluated is remembered. The objective is the estimate; the best few are
orchestrated by the linear programme and the simulator in turn.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from shared.cost.network import rate_of
from shared.domain.instance import Role
from shared.plan.group import Group
from shared.plan.orchestrate import orchestrated
from shared.plan.plan import canonical
from shared.plan.search import Found, Search

STEPS, NEIGHBOURS, MEMORY = 100, 10, 5  # N_step, N_neigh, N_mem
_TRIES = 4  # draws for a neighbour that is one
_FINALISTS = 2

Cell = tuple[Role, tuple[tuple[int, int], ...]]  # a group before its layout: phase, and accelerators by pool
Cells = tuple[Cell, ...]


def tabu(search: Search) -> Iterator[Found]:
    """The finalists of the search, each orchestrated."""
    walk = _Walk(search)
    for groups in walk.finalists():
        yield from orchestrated(search, groups)
        if search.over():
            return


class _Walk:
    def __init__(self, search: Search) -> None:
        self._search = search
        self._rng = search.rng()
        self._layouts = search.estimator.layouts
        self._worth: dict[object, tuple[float, tuple[Group, ...]]] = {}
        self._alike = search.problem.inventory.alike

    def finalists(self) -> list[tuple[Group, ...]]:
        """The best deployments that the walk comes by."""
        start = self._start()
        if start is None:
            return []
        here, tabu_list = start, deque([self._key(start)], MEMORY)
        self._value(start)
        for step in range(STEPS):
            if self._search.over():
                break
            near = {self._key(cells): cells for cells in self._neighbours(here)}
            fresh = [cells for key, cells in near.items() if key not in tabu_list]
            if not fresh:
                continue
            here = max(fresh, key=self._value)
            tabu_list.append(self._key(here))
            if step % 10 == 0:
                self._search.tell(f"tabu: step {step} of {STEPS}, {len(self._worth)} deployments", None)
        best = sorted(self._worth.values(), key=lambda one: -one[0])
        return [groups for worth, groups in best[:_FINALISTS] if worth > 0.0]

    def _start(self) -> Cells | None:
        """Clusters of well-joined accelerators, merged until each holds the model; phases at random, both there."""
        clusters = _clusters(self._search)
        kept: list[Counter[int]] = []
        loose: Counter[int] = Counter()
        for uses in clusters:
            if self._holds(uses):
                kept.append(uses)
            else:
                loose += uses
                if self._holds(loose):
                    kept.append(loose)
                    loose = Counter()
        if len(kept) == 1:
            halves = self._halved(kept[0], 0.5)
            kept = list(halves) if halves is not None else kept
        if len(kept) < 2:
            return None
        roles = [Role.PREFILL, Role.DECODE, *self._rng.choices(list(Role), k=len(kept) - 2)]
        self._rng.shuffle(roles)
        return tuple((role, tuple(sorted(uses.items()))) for role, uses in zip(roles, kept, strict=True))

    def _neighbours(self, here: Cells) -> Iterator[Cells]:
        for _ in range(NEIGHBOURS):
            for _ in range(_TRIES):
                move = self._rng.choice((self._flip, self._split, self._merge, self._move))
                found = move(list(here))
                if found is not None and len({role for role, _ in found}) == 2:
                    yield tuple(sorted(found, key=repr))
                    break

    def _flip(self, cells: list[Cell]) -> list[Cell] | None:
        at = self._rng.randrange(len(cells))
        role, uses = cells[at]
        cells[at] = (role.other, uses)
        return cells

    def _split(self, cells: list[Cell]) -> list[Cell] | None:
        """floor(g_t * r) of each type go to the first half."""
        _, uses = cells.pop(self._rng.randrange(len(cells)))
        halves = self._halved(Counter(dict(uses)), self._rng.random())
        return None if halves is None else [*cells, *((self._phase(), tuple(sorted(half.items()))) for half in halves)]

    def _merge(self, cells: list[Cell]) -> list[Cell] | None:
        if len(cells) < 3:
            return None
        (_, one), (_, other) = (cells.pop(self._rng.randrange(len(cells))) for _ in range(2))
        merged = Counter(dict(one)) + Counter(dict(other))
        return [*cells, (self._phase(), tuple(sorted(merged.items())))] if self._holds(merged) else None

    def _move(self, cells: list[Cell]) -> list[Cell] | None:
        if len(cells) < 2:
            return None
        source, target = self._rng.sample(range(len(cells)), 2)
        given, taken = Counter(dict(cells[source][1])), Counter(dict(cells[target][1]))
        pool = self._rng.choice(sorted(given))
        count = self._rng.randint(1, given[pool])
        given -= Counter({pool: count})
        taken += Counter({pool: count})
        if not self._holds(taken) or (given and not self._holds(given)):
            return None
        moved = [cell for at, cell in enumerate(cells) if at not in (source, target)]
        moved.append((cells[target][0], tuple(sorted(taken.items()))))
        return [*moved, (cells[source][0], tuple(sorted(given.items())))] if given else moved

    def _halved(self, uses: Counter[int], ratio: float) -> tuple[Counter[int], Counter[int]] | None:
        first = +Counter({pool: int(count * ratio) for pool, count in uses.items()})
        second = uses - first
        return (first, second) if first and second and self._holds(first) and self._holds(second) else None

    def _phase(self) -> Role:
        return self._rng.choice(list(Role))

    def _holds(self, uses: Counter[int]) -> bool:
        """The early check: the memory holds a copy of the model."""
        problem = self._search.problem
        room = sum(problem.inventory.pools[pool].accelerator.memory_bytes * count for pool, count in uses.items())
        if problem.one_node and len({problem.inventory.pools[pool].node for pool in uses}) > 1:
            return False
        return room >= problem.shop.geometry.weight_bytes(2.0) and bool(self._layouts.all(uses, Role.DECODE))

    def _key(self, cells: Cells) -> object:
        return tuple(
            sorted((role.value, tuple(sorted((self._alike[pool], n) for pool, n in uses))) for role, uses in cells)
        )

    def _value(self, cells: Cells) -> float:
        """f of Algorithm 1: the best layout of each group, and what the estimate says of all."""
        groups = self._groups(cells)
        key = canonical(groups, self._alike)
        if key not in self._worth:
            self._worth[key] = (self._search.estimator.of(groups, local=False).goodput, groups)
        return self._worth[key][0]

    def _groups(self, cells: Cells) -> tuple[Group, ...]:
        found = (self._layouts.best(dict(uses), role) for role, uses in cells)
        return tuple(group for group in found if group is not None)


def _clusters(search: Search) -> list[Counter[int]]:
    """Accelerators by hierarchical clustering of their bandwidths, cut where one node ends and the next begins."""
    inventory = search.problem.inventory
    devices = [pool for pool, entry in enumerate(inventory.pools) for _ in range(entry.count)]
    if len(devices) == 1:
        return [Counter(devices)]
    nodes = [inventory.pools[pool].node for pool in devices]
    rates = np.array([[rate_of(inventory.network.path(one, other)) for other in nodes] for one in nodes])
    apart = 1.0 / rates
    np.fill_diagonal(apart, 0.0)
    cut = max(1.0 / rate_of(link) for link in inventory.network.inside.values())
    labels: Sequence[int] = fcluster(linkage(squareform(apart, checks=False), "average"), cut * 1.001, "distance")
    found: dict[int, Counter[int]] = {}
    for label, pool in zip(labels, devices, strict=True):
        found.setdefault(int(label), Counter())[pool] += 1
    return list(found.values())
