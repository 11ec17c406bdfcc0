"""Plain deployments, to compare with: all coupled, thirds, the best single type."""

from collections.abc import Iterator, Sequence

from shared.domain.instance import Role
from shared.plan.compose import Composer
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.plan.plan import Plan
from shared.plan.programme import Margin
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
