"""A search for a plan: what methods work with, and how the best plan is kept."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

from shared.domain.policies import PolicySet
from shared.errors import Incompatible
from shared.plan.compose import Composer, Margin
from shared.plan.estimate import Estimator
from shared.plan.evaluate import Evaluator, Promise, helped
from shared.plan.inventory import Inventory
from shared.plan.plan import Plan
from shared.plan.problem import Clock, Problem, mixed
from shared.plan.robust import Endurance
from shared.sim.spec import RunSpec, with_policies

ScoredPlan = tuple[Plan, float]  # a plan and its simulated goodput
ROBUST = 0.05  # of goodput that a plan may cost which survives losses better
AS_SERVED = with_policies(RunSpec(), PolicySet())  # engines and schedulers as the services run them by default
ReportProgress = Callable[[str, ScoredPlan | None], None]  # with a message, and the best plan so far


def no_report(message: str, best: ScoredPlan | None) -> None:
    """Reports nothing."""


@dataclass(slots=True)
class Search:
    """clock: seconds, from any origin. run: how clusters are run, before the policies of a plan. until_s: time of that
    clock after which no new step begins.

    helped: a second process runs some trials; the results are the same. robust: share of goodput that may be given up
    for a plan that keeps more when it loses any one of its groups. copies: the plan is for that many equal inventories.

    preferred, endurance: set by a method that has such a plan: the plan that it prefers to the one with the most
    goodput, and what that plan keeps. part_runs: runs for a part of the inventory.
    """

    problem: Problem
    clock: Clock
    run: RunSpec
    until_s: float = float("inf")
    seed: int = 1
    report: ReportProgress = no_report
    helped: bool = False
    robust: float = ROBUST
    copies: int = 1
    preferred: ScoredPlan | None = field(init=False, default=None)
    endurance: Endurance | None = field(init=False, default=None)
    part_runs: int = field(init=False, default=0)
    estimator: Estimator = field(init=False)
    evaluator: Evaluator = field(init=False)

    def __post_init__(self) -> None:
        self.problem = _with_cache_rate(self.problem)
        self.estimator = Estimator(self.problem)
        self.evaluator = Evaluator(self.problem, self.estimator, self.run, self.seed)

    def over(self) -> bool:
        return self.clock() >= self.until_s

    def for_part(self, inventory: Inventory, copies: int, share: float) -> "Search":
        """A search of one of so many equal parts of the inventory, in a share of the time that is left."""
        problem, now = self.problem, self.clock()
        part = replace(
            problem.on(inventory),
            workload=problem.workload if problem.caches else mixed(problem.workload, self.seed),
            rate=problem.rate / copies,
            budget_usd_hour=problem.budget_usd_hour / copies,
            cache_rate=problem.cache_rate / copies,
        )
        until_s = now + share * max(0.0, self.until_s - now)
        found = Search(part, self.clock, self.run, until_s, self.seed, lambda what, _: self.report(what, None))
        found.robust, found.copies = self.robust, copies
        return found

    def rng(self) -> Random:
        return Random(self.seed)

    def score(self, plan: Plan, local: bool) -> ScoredPlan:
        """A plan with its goodput. local: whether its policies let groups that decode compute prompts."""
        estimate = self.estimator.estimate(plan.groups, local=local)
        near = max(estimate.goodput, 0.3 * estimate.most)
        return plan, self.evaluator.goodput(plan, near) if near > 0 else 0.0


_ROUNDS = 2


def _with_cache_rate(problem: Problem) -> Problem:
    """The problem with estimates of prefix caches at about the rate that the inventory serves with them."""
    if not problem.caches or problem.cache_rate:
        return problem
    if problem.rate:
        return replace(problem, cache_rate=problem.rate)
    for _ in range(_ROUNDS):
        estimator = Estimator(problem)
        groups = Composer(estimator).best(Margin(0.75))
        if not groups:
            break
        found = estimator.estimate(groups)
        problem = replace(problem, cache_rate=max(found.goodput, found.most / 2.0))
    return problem


class Stopped(Incompatible):
    """Ctrl-C ended the search before there was a plan."""


Method = Callable[[Search], Iterator[ScoredPlan]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best plan of a method. took_s: in all; found_s: until this plan was found. runs: of the simulator.
    endurance: where the method has worked it out.
    """

    method: str
    plan: Plan
    promise: Promise
    took_s: float
    found_s: float
    runs: int
    stopped: bool = False
    endurance: Endurance | None = None


def run_method(name: str, method: Method, search: Search) -> Outcome:
    """Run a method to its end, its deadline, or Ctrl-C, and evaluate its best plan.

    Raises Incompatible when it finds none.
    """
    began, before = search.clock(), search.evaluator.runs
    best: ScoredPlan | None = None
    found_s, stopped = began, False
    try:
        with helped(search.evaluator) if search.helped else nullcontext():
            for plan, goodput in method(search):
                if not search.problem.affords(plan.groups):
                    continue
                better = best is None or goodput > best[1]
                if best is None or goodput >= best[1]:  # of equal plans the later one says more, such as routes
                    best = plan, goodput
                if better:
                    found_s = search.clock()
                    search.report(name, best)
    except KeyboardInterrupt:
        stopped = True
    if best is None:
        what = f"for {search.problem.models.geometry.name} on this inventory"
        if stopped:
            raise Stopped(f"method {name} was stopped before it had a plan {what}")
        budget = search.problem.budget_usd_hour
        within = f" within {budget:g} USD/h" if budget < inf else ""
        raise Incompatible(f"method {name} finds no deployment {what}{within}")
    if search.preferred is not None:
        best, found_s = search.preferred, search.clock()
    plan, goodput = best
    try:
        promise = search.evaluator.promise(plan, goodput)
    except KeyboardInterrupt:  # there is a plan: its last run is made again
        stopped, promise = True, search.evaluator.promise(plan, goodput)
    took_s = search.clock() - began
    runs = search.evaluator.runs - before + search.part_runs
    return Outcome(name, plan, promise, took_s, found_s - began, runs, stopped, search.endurance)
