"""A running plan meets another workload, or loses groups: other roles and routes, and nothing is loaded anew.

Source: ThunderServe 3.4: of the tabu search only flips of the phase, the layouts as they are, the orchestration again.
Ours: all deployments within a few flips of alike groups, by the estimate; so it takes milliseconds, not seconds.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from shared.domain.instance import Role
from shared.plan.estimate import Estimate, Estimator
from shared.plan.group import Group
from shared.plan.plan import Plan, canonical, routes_of
from shared.plan.routes import Route

LOOKED_AT = 4  # of the deployments within reach, those that can get most through: what they serve in time is estimated
STRIDES = (1, 2, 4, 8)  # flips of alike groups in one step of a climb, which goes on while it gains
WORTH_IT = 1.1  # times the goodput: less is not worth a drain, and less than the estimate can tell


@dataclass(frozen=True, slots=True)
class Proposal:
    """New roles and routes of groups that stay. flips: their positions. before, after: what the estimate says."""

    plan: Plan
    flips: tuple[int, ...]
    before: Estimate
    after: Estimate

    @property
    def changes(self) -> bool:
        """Whether any role is another."""
        return bool(self.flips)


def rescheduled(estimator: Estimator, running: Plan, fixed: Collection[int] = ()) -> Proposal:
    """The roles that serve most of the problem's workload; those there are where no others are clearly better.

    fixed: groups, by position, whose roles are not to change.
    Raises Incompatible for a group whose memory does not hold that workload's longest request.
    """
    policies, problem = running.policies, estimator.problem
    local = not policies.startswith("plan:") or any(route.prefill is None for route in running.routes)
    start = running.groups
    before = estimator.of(start, local=local)
    here, best = start, before
    while True:
        turned = _flipped(problem.inventory.alike, here, frozenset(fixed))
        able = nlargest(LOOKED_AT, turned, key=lambda one: estimator.most(one, local=local))
        near = max(able, key=lambda one: estimator.of(one, local=local).goodput, default=here)
        found = estimator.of(near, local=local)
        if found.goodput <= best.goodput * WORTH_IT:
            break
        here, best = near, found
    flips = tuple(at for at, (one, other) in enumerate(zip(start, here, strict=True)) if one.role is not other.role)
    plan = Plan(here, routes_of(best), policies)
    if policies.startswith("plan:"):
        plan = Plan(here, plan.routes, plan.routed(problem))
    return Proposal(plan, flips, before, best)


def survivors(plan: Plan, lost: Sequence[int]) -> tuple[tuple[Group, ...], tuple[Route, ...]]:
    """The groups that are left and the routes between them, in proportion."""
    kept = [at for at in range(len(plan.groups)) if at not in set(lost)]
    number = {at: new for new, at in enumerate(kept)}
    routes = [
        Route(None if route.prefill is None else number[route.prefill], number[route.decode], route.share)
        for route in plan.routes
        if route.decode in number and (route.prefill is None or route.prefill in number)
    ]
    whole = sum(route.share for route in routes)
    shares = tuple(Route(route.prefill, route.decode, route.share / whole) for route in routes)
    return tuple(plan.groups[at] for at in kept), shares


def _flipped(alike: Sequence[int], groups: Sequence[Group], fixed: frozenset[int]) -> Iterator[tuple[Group, ...]]:
    """`STRIDES` flips of alike groups in one direction, alike results once; one group decodes at least."""
    seen = {canonical(groups, alike)}
    for role in Role:
        for at, group in enumerate(groups):
            if group.role is not role or at in fixed:
                continue
            turned, made = list(groups), 0
            for other in range(at, len(groups)):
                same = groups[other].role is role and canonical((groups[other],), alike) == canonical((group,), alike)
                if not same or other in fixed:
                    continue
                turned[other] = groups[other].flipped()
                made += 1
                if made not in STRIDES:
                    continue
                key = canonical(turned, alike)
                if key not in seen and any(one.role is Role.DECODE for one in turned):
                    seen.add(key)
                    yield tuple(turned)
