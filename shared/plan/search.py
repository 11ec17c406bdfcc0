"""A search for a plan: what methods work with, how the best plan is kept, and a second process that makes runs."""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random

from shared.cost.kinds import EngineModels
from shared.errors import Incompatible
from shared.plan.estimate import Estimator
from shared.plan.judge import Ask, Judge, Promise
from shared.plan.plan import Plan
from shared.plan.problem import Clock, Problem
from shared.sim.spec import RunSpec

_CLOSE_S = 5.0
_Task = tuple[Problem, RunSpec, str, int]  # what the helper makes its judge from


class Helper:
    """A second process that makes some of the judge's runs, one at a time, with the results that the judge would get.

    It ends with the process that started it, which alone handles Ctrl-C.
    """

    def __init__(self, judge: Judge) -> None:
        spawn = get_context("spawn")  # the process starts while plans are still being composed
        self._here, there = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        there.close()
        models = judge.problem.models
        uncached = EngineModels(models.library, models.geometry)
        problem = replace(judge.problem, models=uncached)
        self._task: _Task | None = problem, judge.run, judge.arrivals, judge.seed  # until it is sent

    def share(self, asks: Sequence[Ask], own: Callable[[Ask], float]) -> dict[Ask, float]:
        """See `Sharer`. The process takes runs from the end. Raises EOFError or OSError when it has ended."""
        if self._task is not None:
            self._here.send(self._task)  # late, so that no caller waits for the process to start
            self._task = None
        left, found = deque(asks), dict[Ask, float]()
        asked: Ask | None = None
        while left or asked is not None:
            if asked is None:
                asked = left.pop()
                self._here.send(asked)
            if left:
                ask = left.popleft()
                found[ask] = own(ask)
            if not left or self._here.poll():
                found[asked], asked = float(self._here.recv()), None
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.join(_CLOSE_S)
        self._here.close()


@contextmanager
def helped(judge: Judge) -> Iterator[None]:
    """Gives the judge a helper for the duration of the context."""
    judge.helper = helper = Helper(judge)
    try:
        yield
    finally:
        judge.helper = None
        helper.close()


def _serve(asks: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        task: _Task = asks.recv()
        problem, run, arrivals, seed = task
        judge = Judge(problem, Estimator(problem), run, arrivals, seed)
        while True:
            ask: Ask = asks.recv()
            asks.send(judge.told(ask))
    except EOFError:
        return


Found = tuple[Plan, float]  # a plan and its simulated goodput
Tell = Callable[[str, Found | None], None]  # reports progress: a message, and the best plan so far


def silent(message: str, best: Found | None) -> None:
    """Reports nothing."""


@dataclass(slots=True)
class Search:
    """clock: seconds, from any origin. until_s: time of that clock after which no new step begins. tell: gets progress.

    helped: a second process makes some of the runs; the results are the same.
    """

    problem: Problem
    clock: Clock
    run: RunSpec = field(default_factory=RunSpec)
    until_s: float = float("inf")
    seed: int = 1
    tell: Tell = silent
    helped: bool = False
    estimator: Estimator = field(init=False)
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.estimator = Estimator(self.problem)
        self.judge = Judge(self.problem, self.estimator, self.run, seed=self.seed)

    def over(self) -> bool:
        return self.clock() >= self.until_s

    def rng(self) -> Random:
        return Random(self.seed)

    def judged(self, plan: Plan, local: bool) -> Found:
        """A plan with its goodput. local: whether its policies let groups that decode compute prompts."""
        estimate = self.estimator.of(plan.groups, local=local)
        near = max(estimate.goodput, 0.3 * estimate.most)
        return plan, self.judge.goodput(plan, near) if near > 0 else 0.0


class Stopped(Incompatible):
    """Ctrl-C ended the search before there was a plan."""


Method = Callable[[Search], Iterator[Found]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best plan of a method. took_s: in all; found_s: until this plan was found. runs: of the simulator."""

    method: str
    plan: Plan
    promise: Promise
    took_s: float
    found_s: float
    runs: int
    stopped: bool = False


def searched(name: str, method: Method, search: Search) -> Outcome:
    """Run a method to its end, its deadline, or Ctrl-C, and judge its best plan.

    Raises Incompatible when it finds none.
    """
    began, before = search.clock(), search.judge.runs
    best: Found | None = None
    found_s, stopped = began, False
    try:
        with helped(search.judge) if search.helped else nullcontext():
            for plan, goodput in method(search):
                price = sum(group.price_usd_hour(search.problem.inventory) for group in plan.groups)
                if price > search.problem.budget_usd_hour * (1.0 + 1e-9):
                    continue
                better = best is None or goodput > best[1]
                if best is None or goodput >= best[1]:  # of equal plans the later one says more, such as routes
                    best = plan, goodput
                if better:
                    found_s = search.clock()
                    search.tell(name, best)
    except KeyboardInterrupt:
        stopped = True
    if best is None:
        what = f"for {search.problem.models.geometry.name} on this inventory"
        if stopped:
            raise Stopped(f"method {name} was stopped before it had a plan {what}")
        budget = search.problem.budget_usd_hour
        within = f" within {budget:g} USD/h" if budget < inf else ""
        raise Incompatible(f"method {name} finds no deployment {what}{within}")
    plan, goodput = best
    try:
        promise = search.judge.promise(plan, goodput)
    except KeyboardInterrupt:  # there is a plan: its last run is made again
        stopped, promise = True, search.judge.promise(plan, goodput)
    took_s = search.clock() - began
    return Outcome(name, plan, promise, took_s, found_s - began, search.judge.runs - before, stopped)
