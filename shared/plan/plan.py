"""A plan: groups with their roles, routes between them, policies; and all of it as the simulator's instances."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shared.cost.network import Network
from shared.cost.transfer import Link
from shared.domain.instance import Role
from shared.plan.costs import EngineCosts
from shared.plan.estimate import Estimate
from shared.plan.group import Group
from shared.plan.places import Places, place_name
from shared.plan.problem import Problem
from shared.plan.routes import Route
from shared.sim.spec import InstanceSpec

ADAPTIVE = "adaptive"
LEAST_SHARE = 0.002  # of the requests; a route with less is rounding


@dataclass(frozen=True)
class Plan:
    """What each accelerator does. policies: in words, as `polyphase simulate --policy` takes them."""

    groups: tuple[Group, ...]
    routes: tuple[Route, ...] = ()
    policies: str = ADAPTIVE
    method: str = field(default="", compare=False)

    @cached_property
    def roles(self) -> Counter[Role]:
        """How many groups there are of either."""
        return Counter(group.role for group in self.groups)

    @cached_property
    def coupled(self) -> bool:
        """Whether every group does whole requests."""
        return not self.roles[Role.PREFILL]

    def runs_as(self, other: "Plan") -> bool:
        """Whether both do the same: under policies that decide request by request, routes only say what to expect."""
        return self.groups == other.groups and self.policies == other.policies

    def names(self, problem: Problem) -> tuple[str, ...]:
        """Of the groups as instances: what they are made of, and a number."""
        pools = problem.inventory.pools
        stems = [
            ".".join(
                dict.fromkeys(
                    pools[part.pool].accelerator.name.lower().removeprefix("rtx-").replace("-", "")
                    for part in group.parts
                )
            )
            for group in self.groups
        ]
        seen: Counter[str] = Counter()
        found = []
        for stem in stems:
            found.append(f"{stem}-{seen[stem]}")
            seen[stem] += 1
        return tuple(found)

    def routed(self, problem: Problem) -> str:
        """Policies that send requests along the routes and nowhere else."""
        names = self.names(problem)
        rows = ",".join(
            f'["{"" if route.prefill is None else names[route.prefill]}","{names[route.decode]}",{route.share:.4g}]'
            for route in self.routes
        )
        return f"plan:routes=[{rows}]+split=full+power_of_two"


def routes_of(estimate: Estimate) -> tuple[Route, ...]:
    """The routes that an estimate's flows are, largest first, their shares summing to 1."""
    flows, total = estimate.flows, estimate.flows.rate
    if total <= 0.0:
        return ()
    found = [
        Route(estimate.prefill[i], estimate.decode[j], float(flows.sent[i, j]) / total)
        for i in range(len(estimate.prefill))
        for j in range(len(estimate.decode))
    ]
    found += [Route(None, estimate.decode[j], float(flows.local[j]) / total) for j in range(len(estimate.decode))]
    kept = sorted((route for route in found if route.share >= LEAST_SHARE), key=lambda route: -route.share)
    whole = sum(route.share for route in kept)
    return tuple(replace(route, share=route.share / whole) for route in kept)


def canonical(groups: Sequence[Group], alike: Sequence[int]) -> tuple[object, ...]:
    """The same for deployments that differ only in which of alike nodes does what, and in the order of groups.

    alike: see `Inventory.alike`.
    """

    def shape(group: Group) -> tuple[object, ...]:
        return (group.role.value, group.tensor_parallel, tuple((alike[p.pool], p.layers) for p in group.parts))

    by_pool: dict[int, list[tuple[object, ...]]] = {}
    joint: list[tuple[object, ...]] = []
    for group in groups:
        if len(group.uses) == 1:
            by_pool.setdefault(next(iter(group.uses)), []).append(shape(group))
        else:
            joint.append((shape(group), tuple(sorted(group.uses))))
            for pool in group.uses:
                by_pool.setdefault(pool, []).append(("joint", *shape(group)))
    pools = sorted(((alike[pool], tuple(sorted(shapes, key=repr))) for pool, shapes in by_pool.items()), key=repr)
    return (*pools, *sorted((shape for shape, _ in joint), key=repr))


def deployed(
    problem: Problem, plan: Plan, costs: EngineCosts, places: Places
) -> tuple[tuple[InstanceSpec, ...], Network]:
    """The plan's groups as the simulator takes them, and the network between the places where they stand."""
    shop, inventory, limits = problem.shop, problem.inventory, problem.limits
    made = []
    for name, group in zip(plan.names(problem), plan.groups, strict=True):
        kind = group.kind(inventory, problem.dtype)
        price = group.price_usd_hour(inventory)
        made.append(
            InstanceSpec(
                instance_id=name,
                model=shop.times(kind),
                role=group.role,
                kv_tokens=shop.kv_tokens(kind),
                kv_bytes_per_token=costs.kv_bytes,
                limits=replace(limits, sequences=max(1, limits.sequences // kind.lanes), max_model_len=problem.longest),
                link=Link(1.0),  # its place's paths count
                node=place_name(group.place(inventory)),
                accelerator="+".join(dict.fromkeys(stage.accelerator for stage in kind.stages)),
                accelerators=group.accelerators,
                price_per_hour=price,
                lanes=kind.lanes,
                rates=shop.rates(kind, limits.batched_tokens, price),
            )
        )
    return tuple(made), places.network([group.place(inventory) for group in plan.groups])
