"""Plain deployments to compare with: all coupled, thirds, the best single type; and all of a small inventory."""

from collections.abc import Iterator
from itertools import product

from shared.domain.instance import Role
from shared.errors import Incompatible
from shared.plan.compose import Composer, Margin
from shared.plan.evaluate import race
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.plan.plan import Plan, canonical
from shared.plan.search import ScoredPlan, Search

COUPLED = "least_load+split=none+dispatch=random"
SPLIT = "least_load+split=full+power_of_two"
MAX_DEPLOYMENTS = 60_000
_BEHIND = 0.75  # of the best estimate: deployments below are not simulated
_JUDGED = 60


def coupled(search: Search) -> Iterator[ScoredPlan]:
    """Each group serves whole requests; each pool is cut into the groups that decode most."""
    groups = smallest(search, Role.DECODE)
    if groups:
        yield search.score(Plan(groups, policies=COUPLED), local=True)


def thirds(search: Search) -> Iterator[ScoredPlan]:
    """Every third group computes prompts, the others decode; adaptive policies let those compute some, too."""
    groups = list(smallest(search, Role.DECODE))
    if len(groups) < 2:
        return
    for at, group in enumerate(groups):
        if at % 3 == 0:
            groups[at] = search.estimator.layouts.best(group.uses, Role.PREFILL) or group.flipped()
    yield search.score(Plan(tuple(groups)), local=True)


def single_type(search: Search) -> Iterator[ScoredPlan]:
    """The best split or coupled deployment of one type of accelerators alone; the other types idle."""
    inventory = search.problem.inventory
    for name in sorted({pool.accelerator.name for pool in inventory.pools}):
        kept = Inventory(tuple(pool for pool in inventory.pools if pool.accelerator.name == name), inventory.network)
        part = Search(search.problem.on(kept), search.clock, search.run, search.until_s, search.seed)
        pools = dict(enumerate(inventory.pools.index(pool) for pool in kept.pools))
        for margin in (Margin(), Margin(split=False)):
            groups = Composer(part.estimator).best(margin)
            if groups:
                yield search.score(Plan(tuple(group.moved(pools) for group in groups)), local=True)


def smallest(search: Search, role: Role) -> tuple[Group, ...]:
    """Each pool cut into as many equal groups as hold the model, in the best layout."""
    layouts, found = search.estimator.layouts, []
    for pool, entry in enumerate(search.problem.inventory.pools):
        for size in range(1, entry.count + 1):
            group = layouts.best({pool: size}, role)
            if group is not None:
                found += [group] * (entry.count // size)
                break
    return tuple(found)


def bruteforce(search: Search) -> Iterator[ScoredPlan]:
    """The best of all deployments of a small inventory, under adaptive policies: the oracle.

    All are estimated; those not far behind the best estimate are simulated. Raises Incompatible for too many.
    """
    estimated: list[tuple[Plan, float]] = []
    for groups in deployments(search):
        estimated.append((Plan(groups), search.estimator.estimate(groups).goodput))
        if len(estimated) % 500 == 0:
            search.report(f"bruteforce: {len(estimated)} deployments estimated", None)
        if search.over():
            break
    top = max((near for _, near in estimated), default=0.0)
    kept = sorted((one for one in estimated if one[1] >= _BEHIND * top > 0.0), key=lambda one: -one[1])
    yield from race(search.evaluator, kept[:_JUDGED], search.over)


def deployments(search: Search, whole: bool = True) -> Iterator[tuple[Group, ...]]:
    """Each way to cut the inventory into groups, with each role and its best layouts; of symmetrical ones, one.

    whole: only deployments that leave no accelerators which would make another group.
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
                if len(seen) > MAX_DEPLOYMENTS:
                    raise Incompatible(f"bruteforce: more than {MAX_DEPLOYMENTS} deployments; use method best")
                yield chosen
        for at in range(first, len(groups)):
            if all(left[pool] >= count for pool, count in uses[at].items()):
                after = [room - uses[at].get(pool, 0) for pool, room in enumerate(left)]
                yield from extend(at, after, (*chosen, groups[at]))

    yield from extend(0, [pool.count for pool in pools], ())


def _groups(search: Search) -> list[Group]:
    """Each set of accelerators of one or two pools, in either role, in the layouts that may be best."""
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
