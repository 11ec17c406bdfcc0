"""Our method: any mixture of groups, coupled ones and partial prefill included.

Candidates come from integer programmes, plain deployments and the papers' methods. Small changes improve the most
promising ones by the estimate, and the simulator decides. For a few accelerators all deployments are estimated instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from shared.domain.instance import Role
from shared.plan.compose import Composer
from shared.plan.estimate import Estimator
from shared.plan.evaluate import Scout, race
from shared.plan.group import Group
from shared.plan.methods.papers import exhaustive_groups, joint_groups
from shared.plan.methods.simple import deployments, smallest
from shared.plan.plan import Plan, canonical, routes_of
from shared.plan.search import ScoredPlan, Search

FEW = 8  # accelerators for which all deployments are estimated
_MAX_OF_FEW = 1500  # such deployments; unlike accelerators on many nodes may have more
_RACED_OF_FEW = 24
_CLIMBED = 2  # candidates that are improved
_STEPS = 6  # changes of each
_RACED = 6
_CROWDED = 3  # further candidates, where the first does not do what the estimate promises
_TURNED = 12  # changes of the best plan that are judged
_TURNS = 3  # rounds of small changes that the simulator judges


def best(search: Search) -> Iterator[ScoredPlan]:
    few = _all_of_few(search) if search.problem.inventory.accelerators <= FEW else None
    plans = [Plan(one) for one in few[:_RACED_OF_FEW]] if few is not None else _likely(search)
    if not plans:
        return
    scout = Scout(search.evaluator, _expected(search, plans[0]) or 1.0, search.over)
    first = [(plan, _expected(search, plan)) for plan in plans] if few is not None else _leading(search, scout, plans)
    found: ScoredPlan | None = None
    for found in race(search.evaluator, first, search.over):
        yield found
    if found is None:
        return
    others = plans if few is None else []
    for _ in range(_TURNS):
        better = None
        near = scout.challengers(found[0], [*others, *_around(search, found[0])])
        for better in race(search.evaluator, [found, *near], search.over):
            if better[1] <= found[1]:
                better = None
                continue
            yield better
        if better is None or search.over():
            break
        found, others = better, []
    yield from _routed(search, found)


def _expected(search: Search, plan: Plan) -> float:
    return search.estimator.estimate(plan.groups).goodput


def _likely(search: Search) -> list[Plan]:
    return [Plan(one) for one in _climbed(search, search.estimator, _composed(search))[:_RACED]]


def _leading(search: Search, scout: Scout, plans: Sequence[Plan]) -> list[ScoredPlan]:
    """Plans between which long runs decide: only the first where it keeps its promise, as no other promises more.

    Where it does not, also what small changes make of the plans when the estimate counts crowded batches.
    """
    if scout.meets_target(plans[0]):
        return [(plans[0], _expected(search, plans[0]))]
    crowded = _climbed(search, search.estimator.for_crowds(), [plan.groups for plan in plans])[:_CROWDED]
    return scout.leaders([*plans, *(plan for plan in map(Plan, crowded) if plan not in plans)])


def _all_of_few(search: Search) -> list[tuple[Group, ...]] | None:
    """All deployments within the budget, the most promising first; None where they are too many."""
    found = []
    for at, groups in enumerate(deployments(search, whole=search.problem.budget_usd_hour == inf)):
        if at == _MAX_OF_FEW or search.over():
            return None
        if search.problem.affords(groups):
            search.estimator.estimate(groups)
            found.append(groups)
    return sorted(found, key=lambda groups: -search.estimator.estimate(groups).goodput)


def _composed(search: Search) -> list[tuple[Group, ...]]:
    """Candidates, each once, the most promising first."""
    found: dict[object, tuple[Group, ...]] = {}
    alike = search.problem.inventory.alike
    for groups in (
        *Composer(search.estimator).candidates(),
        exhaustive_groups(search),
        joint_groups(search),
        joint_groups(search, per_accelerator=True),
        smallest(search, Role.DECODE),
    ):
        decodes = any(group.role is Role.DECODE for group in groups)
        if decodes and search.problem.affords(groups):
            found.setdefault(canonical(groups, alike), groups)
        search.report(f"best: {len(found)} candidates", None)
    return sorted(found.values(), key=lambda groups: -search.estimator.estimate(groups).goodput)


def _climbed(search: Search, estimator: Estimator, candidates: Sequence[tuple[Group, ...]]) -> list[tuple[Group, ...]]:
    """Candidates, and the most promising ones after small changes for as long as the estimate rose."""
    candidates = sorted(candidates, key=lambda groups: -estimator.estimate(groups).goodput)
    alike = search.problem.inventory.alike
    known = {canonical(groups, alike): groups for groups in candidates}
    for start in candidates[:_CLIMBED]:
        here, worth = start, estimator.estimate(start).goodput
        for _ in range(_STEPS):
            if search.over():
                break
            near, value = _highest(search, estimator, here, worth * 1.002)
            if near is None:
                break
            here, worth = near, value
        known.setdefault(canonical(here, alike), here)
    return sorted(known.values(), key=lambda groups: -estimator.estimate(groups).goodput)


def _highest(
    search: Search, estimator: Estimator, here: Sequence[Group], worth: float
) -> tuple[tuple[Group, ...] | None, float]:
    """The change with the highest estimate, and its estimate; None where none is above `worth`."""
    found: tuple[Group, ...] | None = None
    for groups in changes(search, here):
        if estimator.reaches(groups, worth) and (value := estimator.estimate(groups).goodput) > worth:
            found, worth = groups, value
    return found, worth


def changes(search: Search, groups: Sequence[Group]) -> Iterator[tuple[Group, ...]]:
    """Deployments one step away that decode: a group flipped, halved, or joined with another; equal results once."""
    alike = search.problem.inventory.alike
    seen = {canonical(groups, alike)}
    for changed in _steps_from(search, groups):
        key = canonical(changed, alike)
        if key not in seen and any(group.role is Role.DECODE for group in changed):
            seen.add(key)
            yield changed


def _steps_from(search: Search, groups: Sequence[Group]) -> Iterator[tuple[Group, ...]]:
    layouts, pools = search.estimator.layouts, search.problem.inventory.pools
    for at, group in enumerate(groups):
        others = (*groups[:at], *groups[at + 1 :])
        flipped = layouts.best(group.uses, group.role.other)
        if flipped is not None:
            yield (*others, flipped)
        if all(count % 2 == 0 for count in group.uses.values()):
            half = {pool: count // 2 for pool, count in group.uses.items()}
            for roles in product(Role, repeat=2):
                halves = [layout for role in roles if (layout := layouts.best(half, role)) is not None]
                if len(halves) == 2:
                    yield (*others, *halves)
        for other_at in range(at + 1, len(groups)):
            other = groups[other_at]
            nodes = {pools[pool].node for pool in (*group.uses, *other.uses)}
            if len({*group.uses, *other.uses}) > 2 or (search.problem.one_node and len(nodes) > 1):
                continue
            left = tuple(kept for i, kept in enumerate(groups) if i not in (at, other_at))
            for role in Role:
                joined = layouts.best(group.uses + other.uses, role)
                if joined is not None:
                    yield (*left, joined)


def _around(search: Search, plan: Plan) -> list[Plan]:
    """The most promising changes of a plan, by the estimate."""
    base = search.estimator.estimate(plan.groups).goodput or 1.0
    near = [
        (search.estimator.estimate(groups).goodput, groups)
        for groups in changes(search, plan.groups)
        if search.estimator.max_rate(groups) >= 0.8 * base
    ]
    near.sort(key=lambda one: -one[0])
    return [Plan(groups, policies=plan.policies) for _, groups in near[:_TURNED]]


def _routed(search: Search, found: ScoredPlan) -> Iterator[ScoredPlan]:
    """The same groups along routes, where that serves more than decisions request by request."""
    plan, goodput = found
    estimate = search.estimator.estimate(plan.groups)
    along = Plan(plan.groups, routes_of(estimate))
    yield replace(plan, routes=along.routes), goodput
    if along.routes and not search.over():
        routed = replace(along, policies=along.routed(search.problem))
        if search.evaluator.attainment(routed, goodput) >= search.problem.target:
            yield routed, search.evaluator.goodput(routed, goodput)
