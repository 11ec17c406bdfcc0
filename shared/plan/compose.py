"""Deployments by integer programming: how many groups of which kind each pool gives, for the most requests a second.

A kind is a way to use some accelerators: of one pool, or of two pools that share a pipeline. Alike pools are one class,
so that a cluster of hundreds of accelerators is as small a programme as one of a few nodes. Capacities are those of the
estimate, without its tails: several programmes with some to spare here or there give the candidates, and others judge.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations_with_replacement

from shared.domain.instance import Role
from shared.plan.estimate import Estimator
from shared.plan.group import Group
from shared.plan.programme import MARGINS, Kind, Margin, Programme
from shared.plan.routes import decode_capacity, prefill_capacity

_AT_ONCE = 2  # programmes
_JOINT_STAGES = 4  # of two pools in one pipeline, which give as much each


class Composer:
    """Programmes over the kinds of one problem."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._problem = estimator.problem
        inventory = self._problem.inventory
        self._classes: dict[int, list[int]] = {}
        for pool, one in enumerate(inventory.alike):
            self._classes.setdefault(one, []).append(pool)
        self._layouts = [(uses, group) for role in Role for uses, group in self._all_layouts(role)]

    def candidates(self, margins: Sequence[Margin] = MARGINS) -> Iterator[tuple[Group, ...]]:
        """Deployments, the best of each programme; none where nothing holds the model."""
        seen: set[tuple[Group, ...]] = set()
        with ThreadPoolExecutor(_AT_ONCE) as solvers:  # HiGHS lets go of the interpreter
            for found in solvers.map(self.best, margins):
                if found and found not in seen:
                    seen.add(found)
                    yield found

    def best(self, margin: Margin = Margin()) -> tuple[Group, ...]:
        """The deployment of one programme, on concrete pools; empty where there is none."""
        kinds = _useful(self._kinds(margin))
        if not any(kind.group.role is Role.DECODE for kind in kinds):
            return ()
        return self._packed(kinds, Programme(self._estimator, self._classes, kinds, margin).solved())

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
        """Single pools in sizes that are powers of two; pairs of pools on one node or, if groups may, on two."""
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
        """Classes whose pools may share a pipeline, and two such pools; a class with itself where it must."""
        pools = self._problem.inventory.pools
        for one, other in combinations_with_replacement(sorted(self._classes), 2):
            if one == other and self._holds(self._classes[one][0]):
                continue
            ways = [(a, b) for a in self._classes[one] for b in self._classes[other] if a != b]
            if not ways:
                continue
            near = [(a, b) for a, b in ways if pools[a].node == pools[b].node]
            if near or not self._problem.one_node:
                yield (one, other), (near or ways)[0]

    def _holds(self, pool: int) -> bool:
        """Whether a pool alone holds the model."""
        count = self._problem.inventory.pools[pool].count
        return any(self._estimator.layouts.all({pool: size}, Role.DECODE) for size in _sizes(count))

    def _packed(self, kinds: Sequence[Kind], counts: Sequence[int]) -> tuple[Group, ...]:
        """On concrete pools: large groups first, each on the pool with the most left, roles in turn."""
        pools = self._problem.inventory.pools
        left = [pool.count for pool in pools]
        wanted = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        wanted.sort(key=lambda kind: (-len(kind.uses), -kind.group.accelerators, kind.group.role.value))
        made = []
        for kind in wanted:
            places = self._places(kind, left)
            if places is None:
                continue  # what two classes share may not be on one node any more
            for (_, size), pool in zip(kind.uses, places, strict=True):
                left[pool] -= size
            made.append(_moved(kind.group, dict(zip(self._samples(kind), places, strict=True))))
        return tuple(made)

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
    """Of those that take the same accelerators in the same role: who does most, and who computes prompts fastest."""
    best: dict[tuple[object, ...], Kind] = {}
    for kind in kinds:
        capacity = kind.capacity
        for what, worth in (("decodes", capacity.decodes), ("prefills", capacity.prefills)):
            key = (kind.uses, kind.group.role, what)
            known = best.get(key)
            if known is None or worth > getattr(known.capacity, what):
                best[key] = kind
    return list(dict.fromkeys(best.values()))


def _sizes(count: int) -> list[int]:
    """Powers of two, which pack well, and the whole pool."""
    return sorted({*(1 << power for power in range(count.bit_length()) if 1 << power <= count), count})


def _moved(group: Group, to: Mapping[int, int]) -> Group:
    """The same on other pools of the same kinds."""
    parts = tuple(type(part)(to[part.pool], part.layers) for part in group.parts)
    return Group(group.role, group.tensor_parallel, parts)
