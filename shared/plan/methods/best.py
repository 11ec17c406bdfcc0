"""Our method: any mixture of groups, coupled ones and partial prefill included.

Candidates come from integer programmes, plain deployments and the papers' methods. Small changes improve the most
promising ones by the estimate, and the simulator decides. For a few accelerators all deployments are estimated instead,
and of many accelerators a part is planned. Of plans with almost as much goodput as the best, the one is chosen that
keeps most when it loses any one of its groups.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from math import inf

from shared.domain.instance import Role
from shared.plan.compose import SPREAD, Composer
from shared.plan.divide import Division, divide
from shared.plan.estimate import Estimator
from shared.plan.evaluate import Scout, helped, race
from shared.plan.group import Group
from shared.plan.methods.papers import exhaustive_groups, joint_groups
from shared.plan.methods.simple import deployments, smallest
from shared.plan.plan import Plan, canonical, routes_of
from shared.plan.robust import Endurance, Loss, kept_as_it_is, losses
from shared.plan.search import ScoredPlan, Search

FEW = 8  # accelerators for which all deployments are estimated
_MAX_OF_FEW = 1500  # such deployments; unlike accelerators on many nodes may have more
_RACED_OF_FEW = 24
_CLIMBED = 2  # candidates that are improved
_STEPS = 6  # changes of each
_RACED = 6
_CROWDED = 3  # further candidates, where the first does not do what the estimate promises
_TURNED, _TURNS = 12, 3  # changes of the best plan that the simulator judges, and rounds of such changes
_MANY, _TURNED_OF_MANY, _TURNS_OF_MANY = 16, 8, 2  # the same for more accelerators, whose runs take longer
_FOR_PART = 0.5  # share of the time in which a part of the inventory is planned
_FEW_PARTS = 4  # whose plan is judged in several runs; that of more parts in one, at a rate near that of the parts
_NEAR = 0.97  # of the parts' goodput, where that run is
_MAX_PARTS = 8  # of more parts, one group has so little that its loss does not matter
_SLACK = 0.07  # share by which a plan may have more goodput than its estimate
_COMPARED = 10  # plans whose losses are estimated
_TRIED, _FINALISTS = 6, 3  # plans that survive losses better: whose goodput is simulated, and whose losses are
_WORST = 2  # losses of each finalist that are simulated


def best(search: Search) -> Iterator[ScoredPlan]:
    division = divide(search.problem.inventory)
    yield from _of_all(search) if division is None else _of_parts(search, division)


def _of_parts(search: Search, division: Division) -> Iterator[ScoredPlan]:
    """The plan of one part on all parts."""
    part, copies = search.for_part(division.part, division.copies, _FOR_PART), division.copies
    found: ScoredPlan | None = None
    try:
        with helped(part.evaluator) if search.helped else nullcontext():
            for plan, goodput in _of_all(part):
                if part.problem.affords(plan.groups) and (found is None or goodput >= found[1]):
                    found = plan, goodput
                    search.report("best", (division.plan(plan), copies * goodput))
    except KeyboardInterrupt:
        if found is not None:
            yield division.plan(found[0]), copies * found[1]
        raise
    search.part_runs = part.evaluator.runs
    found = part.preferred or found
    if found is None:  # no part of that size holds a plan
        yield from _of_all(search)
        return
    whole, near = _on_all(search, division, found[0]), copies * found[1]
    if copies <= _FEW_PARTS:
        goodput = search.evaluator.goodput(whole, near)
    else:
        goodput = search.evaluator.served(whole, near * _NEAR)
    if (kept := part.endurance) is not None:
        share = (copies - 1 + kept.goodput / found[1]) / copies  # the other parts have not lost anything
        search.endurance = replace(kept, goodput=share * goodput)
    yield whole, goodput


def _on_all(search: Search, division: Division, plan: Plan) -> Plan:
    """The plan of a part on all parts, and as far as the budget goes on what is in no part."""
    whole = division.plan(plan)
    groups = whole.groups
    for group in division.groups_of_the_rest(plan):
        if search.problem.affords((*groups, group)):
            groups = (*groups, group)
    if len(groups) > len(whole.groups):
        return _run_as(search, plan, groups)
    routed = plan.policies.startswith("plan:")
    return replace(whole, policies=whole.routed(search.problem)) if routed else whole


def _of_all(search: Search) -> Iterator[ScoredPlan]:
    """The plan of an inventory as a whole."""
    count = search.problem.inventory.accelerators
    few = _all_of_few(search) if count <= FEW else None
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
    turned, turns = (_TURNED_OF_MANY, _TURNS_OF_MANY) if count > _MANY else (_TURNED, _TURNS)
    for _ in range(turns):
        better = None
        near = [_run_as(search, found[0], plan.groups) for plan in others]
        near += _around(search, found[0], turned)
        for better in race(search.evaluator, [found, *scout.challengers(found[0], near)], search.over):
            if better[1] <= found[1]:
                better = None
                continue
            yield better
        if better is None or search.over():
            break
        found, others = better, []
    for routed in _routed(search, found):
        found = routed
        yield found
    if search.robust and search.copies > _MAX_PARTS:
        search.endurance = _estimated_endurance(search, found)
    elif search.robust:
        spread = [] if few is not None else Composer(search.estimator).candidates(SPREAD)
        _choose_robust(search, found, [*(few or (plan.groups for plan in plans)), *spread])


def _choose_robust(search: Search, found: ScoredPlan, known: Sequence[tuple[Group, ...]]) -> None:
    """Set the search's preferred plan: of those with almost the goodput of the best, the one that keeps most when it
    loses any one of its groups.
    """
    best, goodput = found
    least = (1.0 - search.robust) * goodput
    finalists = [best]
    near = _robust_plans(search, best, known)
    search.report(f"best: {len(near)} plans may survive losses better", None)
    for plan in near[:_TRIED]:
        if search.over() or len(finalists) > _FINALISTS:
            break
        if search.evaluator.attainment(plan, least) >= search.problem.target:
            finalists.append(plan)
    worst = {plan: losses(search.estimator, plan)[:_WORST] for plan in finalists}
    if len(finalists) > 1:
        crowded = search.estimator.for_crowds()
        rate = least * max(lost[0].goodput / crowded.estimate(plan.groups).goodput for plan, lost in worst.items())
        finalists.sort(key=lambda plan: -min(_attainment_after(search, loss, rate) for loss in worst[plan]))
    plan, reached = finalists[0], goodput
    if plan is not best:
        reached = max(least, search.evaluator.goodput(plan, least))  # it has met the target at `least`
        along = _along(search, plan.groups)
        search.preferred = (plan if along is None or plan.routes else replace(plan, routes=along.routes)), reached
    loss = worst[plan][0]
    kept = search.evaluator.goodput(loss.plan, loss.goodput)
    words, given_up = _in_words(search, plan.groups[loss.lost]), max(0.0, 1.0 - reached / goodput)
    search.endurance = Endurance(words, min(kept, reached), loss.flips, given_up)


def _estimated_endurance(search: Search, found: ScoredPlan) -> Endurance:
    """What one of many equal parts keeps, by the estimate: it is little beside what the others serve."""
    plan, goodput = found
    loss = losses(search.estimator, plan)[0]
    whole = search.estimator.for_crowds().estimate(plan.groups).goodput
    kept = min(1.0, loss.goodput / whole) if whole > 0.0 else 0.0
    return Endurance(_in_words(search, plan.groups[loss.lost]), kept * goodput, loss.flips)


def _in_words(search: Search, group: Group) -> str:
    return f"{group.role.value} {group.words(search.problem.inventory)}"


def _attainment_after(search: Search, loss: Loss, rate: float) -> float:
    return search.evaluator.attainment(loss.plan, rate) if min(loss.goodput, rate) > 0.0 else 0.0


def _robust_plans(search: Search, best: Plan, known: Sequence[tuple[Group, ...]]) -> list[Plan]:
    """Plans whose estimated goodput is almost the best's, and that keep more than it does, the most first."""
    estimator, alike = search.estimator, search.problem.inventory.alike
    crowded = estimator.for_crowds()
    least = (1.0 - search.robust - _SLACK) * crowded.estimate(best.groups).goodput
    found: dict[object, tuple[Group, ...]] = {}
    for groups in (*known, *changes(search, best.groups)):
        decodes = any(group.role is Role.DECODE for group in groups)
        if decodes and len(groups) > 1 and search.problem.affords(groups):
            found.setdefault(canonical(groups, alike), groups)
    near = [groups for groups in found.values() if crowded.max_rate(groups) >= least]
    near = [groups for groups in near if crowded.estimate(groups).goodput >= least]
    near.sort(key=lambda groups: -kept_as_it_is(estimator, groups))
    kept = {groups: losses(estimator, Plan(groups))[0].goodput for groups in near[:_COMPARED]}
    now = losses(estimator, best)[0].goodput
    more = sorted((groups for groups in kept if kept[groups] > now), key=lambda groups: -kept[groups])
    return [_run_as(search, best, groups) for groups in more]


def _run_as(search: Search, plan: Plan, groups: Sequence[Group]) -> Plan:
    """The groups under the plan's policies; along their own routes where the plan's requests go along routes."""
    if not plan.policies.startswith("plan:"):
        return Plan(tuple(groups), policies=plan.policies)
    return _along(search, groups) or Plan(tuple(groups))


def _along(search: Search, groups: Sequence[Group]) -> Plan | None:
    """The groups along the routes of the estimate; None where it has none."""
    plan = Plan(tuple(groups), routes_of(search.estimator.estimate(groups)))
    return replace(plan, policies=plan.routed(search.problem)) if plan.routes else None


def _expected(search: Search, plan: Plan) -> float:
    return search.estimator.estimate(plan.groups).goodput


def _likely(search: Search) -> list[Plan]:
    return [Plan(one) for one in _climbed(search, search.estimator, _composed(search))[:_RACED]]


def _leading(search: Search, scout: Scout, plans: Sequence[Plan]) -> list[ScoredPlan]:
    """Plans between which long runs decide: only the first where it keeps its promise, as no other promises more.

    Where it does not, and its requests do much better along routes, those of all plans go along routes. Otherwise also
    what small changes make of the plans when the estimate counts crowded batches.
    """
    if scout.meets_target(plans[0]):
        return [(plans[0], _expected(search, plans[0]))]
    routed = [plan for plan in (_along(search, plan.groups) for plan in plans) if plan is not None]
    if routed and scout.is_ahead(routed[0], plans[0]):
        return scout.leaders(routed)
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


def _around(search: Search, plan: Plan, count: int) -> list[Plan]:
    """The most promising changes of a plan, by the estimate."""
    base = search.estimator.estimate(plan.groups).goodput or 1.0
    near = [
        (search.estimator.estimate(groups).goodput, groups)
        for groups in changes(search, plan.groups)
        if search.estimator.max_rate(groups) >= 0.8 * base
    ]
    near.sort(key=lambda one: -one[0])
    return [_run_as(search, plan, groups) for _, groups in near[:count]]


def _routed(search: Search, found: ScoredPlan) -> Iterator[ScoredPlan]:
    """The same groups along routes, where that serves more than decisions request by request."""
    plan, goodput = found
    routed = _along(search, plan.groups)
    if plan.routes or routed is None:
        return
    yield replace(plan, routes=routed.routes), goodput
    if not search.over() and search.evaluator.attainment(routed, goodput) >= search.problem.target:
        reached = search.evaluator.goodput(routed, goodput)
        if reached >= goodput:
            yield routed, reached
