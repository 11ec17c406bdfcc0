"""Plain deployments, to compare with: all coupled, thirds, the best single type."""

from collections.abc import Iterator, Sequence
from itertools import product

from shared.domain.instance import Role
from shared.errors import Incompatible
from shared.plan.compose import Composer, Margin
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.plan.judge import race
from shared.plan.plan import Plan, canonical
from shared.plan.search import Found, Search

COUPLED = "least_load+split=none+dispatch=random"
SPLIT = "least_load+split=full+power_of_two"


def coupled(search: Search) -> Iterator[Found]:
    """Every group does whole requests, each pool cut into the groups that decode most."""
    groups = smallest(search, Role.DECODE)
    if groups:
        yield search.judged(Plan(groups, policies=COUPLED), local=True)


def thirds(search: Search) -> Iterator[Found]:
    """Every third group computes prompts, the others decode; adaptive policies let those compute some, too."""
    decode = smallest(search, Role.DECODE)
    if len(decode) < 2:
        return
    turned = [_as(search, group, Role.PREFILL) if at % 3 == 0 else group for at, group in enumerate(decode)]
    yield search.judged(Plan(tuple(turned)), local=True)


def single_type(search: Search) -> Iterator[Found]:
    """The best split or coupled deployment of one type of accelerators alone; the other types idle."""
    inventory = search.problem.inventory
    for name in sorted({pool.accelerator.name for pool in inventory.pools}):
        kept = Inventory(tuple(pool for pool in inventory.pools if pool.accelerator.name == name), inventory.network)
        part = Search(search.problem.on(kept), search.clock, search.run, search.until_s, search.seed)
        at = [inventory.pools.index(pool) for pool in kept.pools]
        for margin in (Margin(), Margin(split=False)):
            groups = Composer(part.estimator).best(margin)
            if groups:
                yield search.judged(Plan(_moved(groups, at)), local=True)


def smallest(search: Search, role: Role) -> tuple[Group, ...]:
    """Each pool cut into alike groups, as many as hold the model, in the layout that does most."""
    layouts, found = search.estimator.layouts, []
    for pool, entry in enumerate(search.problem.inventory.pools):
        for size in range(1, entry.count + 1):
            group = layouts.best({pool: size}, role)
            if group is not None:
                found += [group] * (entry.count // size)
                break
    return tuple(found)


def _as(search: Search, group: Group, role: Role) -> Group:
    best = search.estimator.layouts.best(group.uses, role)
    return best or group.as_role(role)


def _moved(groups: Sequence[Group], at: Sequence[int]) -> tuple[Group, ...]:
    """Groups of a part of the inventory as groups of all of it."""
    return tuple(
        Group(group.role, group.tensor_parallel, tuple(type(p)(at[p.pool], p.layers) for p in group.parts))
        for group in groups
    )


# MERGED bruteforce.py
# Every deployment of a small inventory: the oracle.
#
# All are estimated; those that the estimate does not put far behind its best are judged in the simulator.


MOST = 60_000  # deployments
_BEHIND = 0.75  # of the best estimate: what is estimated at less is not simulated
_JUDGED = 60


def bruteforce(search: Search) -> Iterator[Found]:
    """The best of all, under adaptive policies. Raises Incompatible for an inventory with too many deployments."""
    estimated: list[tuple[Plan, float]] = []
    for groups in deployments(search):
        estimated.append((Plan(groups), search.estimator.of(groups).goodput))
        if len(estimated) % 500 == 0:
            search.tell(f"bruteforce: {len(estimated)} deployments estimated", None)
        if search.over():
            break
    top = max((near for _, near in estimated), default=0.0)
    kept = sorted((one for one in estimated if one[1] >= _BEHIND * top > 0.0), key=lambda one: -one[1])
    yield from race(search.judge, kept[:_JUDGED], search.over)


def deployments(search: Search, whole: bool = True) -> Iterator[tuple[Group, ...]]:
    """Every way to cut the inventory into groups, with every phase and its best layouts; of symmetrical ones, one.

    whole: none is left over that would make a group; else also those that use less.
    """
    pools = search.problem.inventory.pools
    groups = _groups(search)
    uses = [group.uses for group in groups]
    seen: set[object] = set()
    alike = search.problem.inventory.alike
    alone = [[use[pool] for use in uses if set(use) == {pool}] for pool in range(len(pools))]
    smallest = [min(sizes, default=0) for sizes in alone]

    def filled(left: list[int]) -> bool:
        return all(not least or room < least for room, least in zip(left, smallest, strict=True))

    def extend(first: int, left: list[int], chosen: tuple[Group, ...]) -> Iterator[tuple[Group, ...]]:
        if chosen and (not whole or filled(left)) and any(group.role is Role.DECODE for group in chosen):
            key = canonical(chosen, alike)
            if key not in seen:
                seen.add(key)
                if len(seen) > MOST:
                    raise Incompatible(f"bruteforce: more than {MOST} deployments: take another method, such as best")
                yield chosen
        for at in range(first, len(groups)):
            if all(left[pool] >= count for pool, count in uses[at].items()):
                after = [room - uses[at].get(pool, 0) for pool, room in enumerate(left)]
                yield from extend(at, after, (*chosen, groups[at]))

    yield from extend(0, [pool.count for pool in pools], ())


def _groups(search: Search) -> list[Group]:
    """Every set of accelerators of one or two pools, in either phase, in the layouts that may be best."""
    problem, layouts = search.problem, search.estimator.layouts
    pools = problem.inventory.pools
    sets = [{pool: size} for pool, entry in enumerate(pools) for size in range(1, entry.count + 1)]
    for one in range(len(pools)):
        for other in range(one + 1, len(pools)):
            if problem.one_node and pools[one].node != pools[other].node:
                continue
            sizes = product(range(1, pools[one].count + 1), range(1, pools[other].count + 1))
            sets += [{one: a, other: b} for a, b in sizes]
    found: dict[Group, None] = {}
    for uses in sets:
        for role in Role:
            known = layouts.all(uses, role)
            if not known:
                continue
            for worth in (layouts.worth, lambda group: layouts.cost(group).prefills_per_s):
                found[max(known, key=worth)] = None
    return list(found)
