"""Large inventories: equal parts, of which one is planned and the others do the same.

The time of a search grows with the accelerators, and what is best for a part with all its types in the same proportions
is best for the whole, too: groups are small beside either.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.cost.network import pair_of
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.plan.plan import Plan
from shared.plan.routes import Route

MIN_PART = 32  # accelerators of a part
MAX_LEFT = 0.1  # share of the accelerators that may be in no part


@dataclass(frozen=True)
class Division:
    """Equal parts of an inventory.

    part: the first of them. pools: of each part its pools in the whole inventory, by their positions in `part`. left:
    pools of the whole inventory that are in no part, with an equal pool of `part` for each.
    """

    part: Inventory
    pools: tuple[Mapping[int, int], ...]
    left: Mapping[int, int]

    @property
    def copies(self) -> int:
        return len(self.pools)

    def plan(self, plan: Plan) -> Plan:
        """The plan of a part on all parts, each with its own routes. Pools in no part are without groups."""
        size, copies = len(plan.groups), self.copies
        groups = tuple(group.moved(pools) for pools in self.pools for group in plan.groups)
        routes = tuple(
            Route(
                None if route.prefill is None else route.prefill + copy * size,
                route.decode + copy * size,
                route.share / copies,
            )
            for copy in range(copies)
            for route in plan.routes
        )
        return Plan(groups, routes, plan.policies)

    def groups_of_the_rest(self, plan: Plan) -> tuple[Group, ...]:
        """Groups on pools in no part: those of the plan that an equal pool holds alone."""
        return tuple(
            group.moved({model: pool})
            for pool, model in self.left.items()
            for group in plan.groups
            if set(group.uses) == {model}
        )


def divide(inventory: Inventory) -> Division | None:
    """As many equal parts as possible of at least `MIN_PART` accelerators; None where there are no two.

    Parts have as many nodes of each kind, and equal links between them.
    """
    nodes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # the pools of each node, by the kind of node
    for node in inventory.nodes:
        at = tuple(number for number, pool in enumerate(inventory.pools) if pool.node == node)
        nodes.setdefault(tuple(inventory.alike[pool] for pool in at), []).append(at)
    fewest = min(len(alike) for alike in nodes.values())
    for copies in range(fewest, 1, -1):
        each = {kind: len(alike) // copies for kind, alike in nodes.items()}
        size = sum(inventory.pools[pool].count for kind, n in each.items() for at in nodes[kind][:n] for pool in at)
        if size < MIN_PART or size * copies < (1.0 - MAX_LEFT) * inventory.accelerators:
            continue
        parts = [
            sorted(pool for kind, n in each.items() for at in nodes[kind][copy * n : (copy + 1) * n] for pool in at)
            for copy in range(copies)
        ]
        found = _division(inventory, nodes, parts)
        if found is not None:
            return found
    return None


def _division(
    inventory: Inventory, nodes: Mapping[tuple[int, ...], list[tuple[int, ...]]], parts: list[list[int]]
) -> Division | None:
    """The division into those pools; None where their links differ."""
    first, alike = parts[0], inventory.alike
    pools = []
    for part in parts:
        waiting: dict[int, list[int]] = {}
        for pool in part:
            waiting.setdefault(alike[pool], []).append(pool)
        pools.append({at: waiting[alike[pool]].pop(0) for at, pool in enumerate(first)})
    node_of = [pool.node for pool in inventory.pools]
    links = inventory.network.between
    for to in pools[1:]:
        place = {node_of[pool]: node_of[to[at]] for at, pool in enumerate(first)}
        names = list(place)
        for number, one in enumerate(names):
            for other in names[:number]:
                if links.get(pair_of(one, other)) != links.get(pair_of(place[one], place[other])):
                    return None
    used = {pool for part in parts for pool in part}
    position = {pool: at for at, pool in enumerate(first)}
    left = {}
    for equal in nodes.values():
        models = [at for at in equal if at[0] in position]
        for number, at in enumerate(at for at in equal if at[0] not in used):
            for pool, model in zip(at, models[number % len(models)], strict=True):
                left[pool] = position[model]
    return Division(inventory.on(first), tuple(pools), left)
