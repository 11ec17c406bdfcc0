"""What is followed: clusters that serve what their roles were chosen for, and what happens to them.

Each accelerator is a group, so that flips can change much; roles are those that rescheduling finds for the first
workload, without any search. Under plain disaggregation instances do what their roles say and nothing else: under
`adaptive` those that decode compute prompts, too, and there is less for flips to mend.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lab.bench.plan_cases import cluster
from lab.bench.plan_live_cases import Planned, factor_for, problem_for, search_for
from lab.bench.turning import Phase
from shared.domain.instance import Role
from shared.plan.estimate import Estimator
from shared.plan.group import Group, Part
from shared.plan.plan import Plan, routes_of
from shared.plan.running import Proposal, rescheduled, survivors
from shared.plan.search import Outcome, Search

NODES = {"a100": ("A100-SXM-80", 1), "a40": ("A40", 2), "a10": ("A10", 4)}
GBPS = 100.0
PLAIN = "least_load+split=full+power_of_two"
BEFORE_S, AFTER_S = 90.0, 160.0  # on this machine's clock; answers that have ended are short ones at first
SHARE = 0.8  # of the goodput that the simulator finds for roles as they should be
AT_FIRST = 0.4  # of the goodput before a shift: what streams many tokens would slow all of it, and few requests a
# second take long to be told from others
TOKENS_PER_S = 800.0  # that come at most


@dataclass(frozen=True)
class Followed:
    """phases: before and after, in the accelerators' time. lost: the instance that is gone then, if any.

    flips: who would change roles by the cost model. before, after: the simulated goodput then of the roles that there
    are, and of those that there would be.
    """

    name: str
    one: Planned
    phases: tuple[Phase, Phase]
    factor: float
    lost: str
    flips: tuple[str, ...]
    before: float
    after: float


def followed_shift(data: Path | None) -> Followed:
    """Conversation turns into code."""
    one, search = _started("conversation", data), _search("code", data)
    proposal = turned(search.estimator, one.plan)
    before, after = _goodputs(search, one.plan, proposal)
    names = one.plan.names(one.problem)
    flips = tuple(names[at] for at in proposal.flips)
    rates = AT_FIRST * one.outcome.promise.goodput, SHARE * after
    make = partial(_followed, "shift", one, search, ("conversation", "code"), rates)
    return make("", flips, before, after)


def followed_loss(data: Path | None) -> Followed:
    """Conversation goes on, and the group is gone whose loss flips make up for best."""
    one = _started("conversation", data)
    lost, left, proposal = max(_losses(one), key=lambda found: found[2].after.goodput / found[2].before.goodput)
    before, after = _goodputs(one.search, left, proposal)
    names = one.plan.names(one.problem)
    others = [name for at, name in enumerate(names) if at != lost]
    flips = tuple(others[at] for at in proposal.flips)
    rate = SHARE * min(one.outcome.promise.goodput, after)
    make = partial(_followed, "loss", one, one.search, ("conversation",) * 2, (rate, rate))
    return make(names[lost], flips, before, after)


def by_roles(groups: tuple[Group, ...]) -> Plan:
    """These groups, doing what their roles say."""
    return Plan(groups, policies=PLAIN)


def turned(estimator: Estimator, running: Plan) -> Proposal:
    """What rescheduling finds for them: it takes no groups that decode to compute prompts only along routes."""
    groups = running.groups
    routes = routes_of(estimator.of(groups, local=False))
    found = rescheduled(estimator, Plan(groups, routes, "plan:"))
    return replace(found, plan=by_roles(found.plan.groups))


def _search(kind: str, data: Path | None) -> Search:
    return search_for(problem_for(kind, data, cluster(NODES, GBPS)))


def _started(kind: str, data: Path | None) -> Planned:
    """Roles for that kind of requests, from one instance that decodes on."""
    search = _search(kind, data)
    problem = search.problem
    layers = problem.shop.geometry.layers
    places = [at for at, pool in enumerate(problem.inventory.pools) for _ in range(pool.count)]
    roles = [Role.DECODE] + [Role.PREFILL] * (len(places) - 1)
    first = tuple(Group(role, 1, (Part(at, layers),)) for role, at in zip(roles, places, strict=True))
    plan = turned(search.estimator, by_roles(first)).plan
    goodput = search.judge.goodput(plan, search.estimator.of(plan.groups, local=False).goodput)
    return Planned(kind, search, Outcome("rescheduled", plan, search.judge.promise(plan, goodput), 0.0, 0.0, 0))


def _losses(one: Planned) -> list[tuple[int, Plan, Proposal]]:
    """By group that may be lost: who is left, and what flips make of them."""
    found = []
    for lost in range(len(one.plan.groups)):
        left = by_roles(survivors(one.plan, [lost])[0])
        if len(left.roles) == len(Role):
            found.append((lost, left, turned(one.search.estimator, left)))
    return [row for row in found if row[2].before.goodput > 0.0]


def _goodputs(search: Search, plan: Plan, proposal: Proposal) -> tuple[float, float]:
    judge = search.judge
    return judge.goodput(plan, proposal.before.goodput), judge.goodput(proposal.plan, proposal.after.goodput)


def _followed(
    name: str,
    one: Planned,
    then: Search,
    kinds: Sequence[str],
    rates: Sequence[float],
    lost: str,
    flips: tuple[str, ...],
    before: float,
    after: float,
) -> Followed:
    outputs = [float(search.problem.workload.output_tokens.mean()) for search in (one.search, then)]
    factor = factor_for(max(rate * mean for rate, mean in zip(rates, outputs, strict=True)), TOKENS_PER_S)
    seconds = (BEFORE_S / factor, AFTER_S / factor)
    first, second = (Phase(*row) for row in zip(kinds, rates, seconds, strict=True))
    return Followed(name, one, (first, second), factor, lost, flips, before, after)
