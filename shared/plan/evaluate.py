"""The simulator decides how good a plan is.

`Evaluator` simulates plans and finds their goodput, `race` finds the best of several plans in few runs, and `Scout`
compares many plans in short runs first, so that long runs are only for those that lead. `helped` gives an evaluator a
second process.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, exp, inf, log, sqrt
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from shared.cost.kinds import EngineModels
from shared.plan.estimate import Estimator
from shared.plan.plan import Plan, deployed
from shared.plan.problem import Problem, Requests
from shared.sim.cluster import simulate
from shared.sim.metrics import summary
from shared.sim.outcomes import Outcomes, SimResult
from shared.sim.spec import RunSpec, with_words
from shared.sim.workload import Times, poisson

SPAN_S, LIVES = 30.0, 3.0  # of a run's arrivals, at least: seconds, and multiples of a request's lifetime
TOO_MUCH = 0.18  # a rate that exceeds what can be served without end by this share must show in a run
MIN_REQUESTS, ENOUGH, MAX_REQUESTS = 250, 2000, 20_000  # of a run; more than ENOUGH add nothing
SHORT_SHARE = 0.6  # share of a full run's requests that a short run has
_LATER = 0.5  # share of a run that does not count, because the cluster fills
_STRIDE = 1.12  # factor from a rate to the next, at first
_FIRST_STEP = 1.05  # factor from the rate where a search begins to its first two
_LEAST = 0.03  # relative step to the next rate, at least
_MAX_STEPS = 12  # until one rate meets the target and a higher one misses it
_FEW_RATES, _LESS, _LOWEST_STEP = 5, 0.7, 0.6  # rates that are tried downwards; the step by what attainment lacks
_POOR = 0.5  # attainment below which the next rate is much lower
_ABOUT = (0.96, 1.04)  # factors of the crossing at which further runs make it more certain
_NEAR = 1.2  # factor of the crossing within which runs count for it
_CLEARLY_WORSE = 0.04  # attainment by which a plan must be worse to be dropped

# Attainment relative to the target at which plans differ: below it the queues of all grow, above it none.
_PLANS_DIFFER = (-0.25, 0.05)
_SCOUT_STEP = 1.12  # factor from a rate to the next
_SCOUT_RATES = 6  # rates that are tried until plans differ
_ALIKE = 0.05  # attainment by which short runs differ by chance
_LEADING = 2  # plans between which long runs decide


@dataclass(frozen=True, slots=True)
class Promise:
    """What a plan is expected to do. figures: `shared.sim.metrics.summary` of a run at `rate`.

    goodput: the highest rate, requests a second, at which enough requests meet the SLO. attainment: at `rate`, once the
    cluster is full. usd_per_million: of prompt and output tokens at goodput.
    """

    goodput: float
    rate: float
    attainment: float
    figures: dict[str, float]
    usd_per_million: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of a plan at a rate. short: it orders plans of one rate, but overstates attainment where queues grow."""

    plan: Plan
    rate: float
    short: bool = False


class Evaluator:
    """Runs plans of one problem in the simulator, each plan at each rate once.

    run: how clusters are run, before the plan's policies. A run lasts so long that the cluster is full, and that a
    queue which grows without end exceeds what the SLO allows.
    """

    def __init__(self, problem: Problem, estimator: Estimator, run: RunSpec, seed: int = 1) -> None:
        self.problem = problem
        self.runs = 0  # runs that were needed
        self._estimator = estimator
        self.helper: TrialProcess | None = None
        self.run = replace(run, slo=problem.slo, codec=problem.codec)
        self.seed = seed
        self._attainments: dict[Trial, float] = {}
        self._prefetched: dict[Trial, float] = {}  # runs made before they were needed
        self._goodput: dict[Plan, float] = {}
        self._latest: tuple[Trial, SimResult] | None = None  # the last run of this process

    def requests(self, trial: Trial) -> Requests:
        """The requests of a run, as a Poisson process."""
        problem, slo, rate = self.problem, self.problem.slo, trial.rate
        estimate = self._estimator.estimate(trial.plan.groups)
        life_s = estimate.ttft_s + estimate.tpot_s * problem.sample.output if estimate.goodput > 0 else 0.0
        slack_s = max(slo.ttft_s, slo.tpot_s * problem.sample.output - life_s)
        filled = rate * max(LIVES * life_s, slack_s / TOO_MUCH)
        least = (
            SHORT_SHARE * max(MIN_REQUESTS, filled)
            if trial.short
            else max(MIN_REQUESTS, filled, min(ENOUGH, rate * SPAN_S))
        )
        count = ceil(min(MAX_REQUESTS, least))
        drawn = problem.requests(count, rate)
        return replace(drawn, workload=poisson(drawn.workload, rate, self.seed))

    def spec(self, plan: Plan) -> RunSpec:
        return with_words(self.run, plan.policies)

    def result(self, trial: Trial) -> SimResult:
        if self._latest is None or self._latest[0] != trial:
            self._latest = trial, self._simulated(trial)
        return self._latest[1]

    def _simulated(self, trial: Trial) -> SimResult:
        plan = trial.plan
        instances, network = deployed(self.problem, plan, self._estimator.costs, self._estimator.places)
        drawn, run = self.requests(trial), replace(self.spec(plan), network=network)
        return simulate(drawn.workload, instances, run, before=drawn.before)

    def run_trial(self, trial: Trial) -> float:
        """The share of requests within the SLO, once the cluster is full."""
        return settled_attainment(self.result(trial).outcomes, self.problem)

    def attainment(self, plan: Plan, rate: float, *, short: bool = False) -> float:
        """As `run_trial`, each plan at each rate once."""
        trial = Trial(plan, rate, short)
        if trial not in self._attainments:
            self.runs += 1
            self._attainments[trial] = self._prefetched[trial] if trial in self._prefetched else self.run_trial(trial)
        return self._attainments[trial]

    def prefetch(self, trials: Iterable[Trial]) -> None:
        """Run trials that are likely to be needed, if a helper runs some of them meanwhile. Changes no result."""
        fresh = [
            trial for trial in dict.fromkeys(trials) if trial not in self._attainments and trial not in self._prefetched
        ]
        if self.helper is not None and len(fresh) > 1:
            try:
                self._prefetched |= self.helper.share(fresh, self.run_trial)
            except (EOFError, OSError):
                self.helper = None  # it has ended, and its runs are made here

    def goodput(self, plan: Plan, near: float) -> float:
        """The highest rate, requests a second, that meets the target. near: where to look first.

        Attainment varies a little from rate to rate, as bursts fall on busy groups or not, so the goodput is read from
        a line through several runs around it.
        """
        if plan not in self._goodput:
            self._goodput[plan] = self._find_goodput(plan, near)
        return self._goodput[plan]

    def _find_goodput(self, plan: Plan, near: float) -> float:
        target, curve = self.problem.target, Curve(self.problem.target)
        if near <= 0.0:
            return 0.0
        self._try_rates(plan, curve, [near / _FIRST_STEP, near * _FIRST_STEP])
        stride, least = _STRIDE, _LEAST
        for _ in range(_MAX_STEPS):
            rate, attained = curve.highest if curve.best else curve.lowest
            if curve.bracketed or rate <= 0.0:
                break
            step = min(stride, 1.0 + max(least, abs(attained - target)))
            step = step if curve.best else 1.0 / step
            self._try_rates(plan, curve, [rate * step, rate * step * step])  # two at once where there is a helper
            stride *= _STRIDE if attained >= _POOR else 1.5
            least *= 2.0  # where the curve is flat, the target is farther away than it seems
        if not curve.bracketed:
            return curve.best
        self._try_rates(plan, curve, [curve.crossing * share for share in _ABOUT])
        return curve.crossing

    def served(self, plan: Plan, rate: float) -> float:
        """A rate that meets the target, from `rate` downwards, in as few runs as possible: for clusters whose runs take
        long. 0 where none of them does.
        """
        for _ in range(_FEW_RATES):
            attained = self.attainment(plan, rate)
            if attained >= self.problem.target:
                return rate
            rate *= max(_LOWEST_STEP, 1.0 - _LESS * (self.problem.target - attained) - _LEAST / 2.0)
        return 0.0

    def _try_rates(self, plan: Plan, curve: "Curve", rates: Sequence[float]) -> None:
        self.prefetch(Trial(plan, rate) for rate in rates)
        for rate in rates:
            curve.add(rate, self.attainment(plan, rate))

    def promise(self, plan: Plan, goodput: float) -> Promise:
        """What the plan does at the problem's rate, or at the highest rate up to goodput that met the target."""
        problem = self.problem
        own = (
            (trial, share) for trial, share in self._attainments.items() if trial.plan.runs_as(plan) and not trial.short
        )
        met = [trial.rate for trial, share in own if share >= problem.target]
        rate = problem.rate or max((rate for rate in met if rate <= goodput), default=goodput)
        if rate <= 0.0:
            return Promise(0.0, 0.0, 0.0, {}, inf)
        result = self.result(Trial(plan, rate))
        workload = problem.workload
        tokens = float((workload.prompt_tokens + workload.output_tokens).mean()) * goodput * 3600.0
        price = problem.price_usd_hour(plan.groups)
        usd = 1e6 * price / tokens if tokens > 0 else inf
        return Promise(goodput, rate, settled_attainment(result.outcomes, problem), summary(result, problem.slo), usd)


_CLOSE_S = 5.0
_Task = tuple[Problem, RunSpec, int]  # what the process makes its evaluator from


class TrialProcess:
    """A second process that runs some of the trials, one at a time, with the results that the evaluator would get.

    It ends with the process that started it, which alone handles Ctrl-C.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        spawn = get_context("spawn")  # the process starts while plans are still being composed
        self._here, there = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        there.close()
        models = evaluator.problem.models
        problem = replace(evaluator.problem, models=EngineModels(models.library, models.geometry))  # an empty cache
        self._task: _Task | None = problem, evaluator.run, evaluator.seed  # until it is sent

    def share(self, trials: Sequence[Trial], run_here: Callable[[Trial], float]) -> dict[Trial, float]:
        """The attainment of each trial. run_here: runs one in this process; the other one takes trials from the end.

        Raises EOFError or OSError when the process has ended.
        """
        if self._task is not None:
            self._here.send(self._task)  # late, so that no caller waits for the process to start
            self._task = None
        left, found = deque(trials), dict[Trial, float]()
        sent: Trial | None = None
        while left or sent is not None:
            if sent is None:
                sent = left.pop()
                self._here.send(sent)
            if left:
                trial = left.popleft()
                found[trial] = run_here(trial)
            if not left or self._here.poll():
                found[sent], sent = float(self._here.recv()), None
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.join(_CLOSE_S)
        self._here.close()


@contextmanager
def helped(evaluator: Evaluator) -> Iterator[None]:
    """Gives the evaluator a second process for the duration of the context."""
    evaluator.helper = helper = TrialProcess(evaluator)
    try:
        yield
    finally:
        evaluator.helper = None
        helper.close()


def _serve(trials: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        task: _Task = trials.recv()
        problem, run, seed = task
        evaluator = Evaluator(problem, Estimator(problem), run, seed)
        while True:
            trial: Trial = trials.recv()
            trials.send(evaluator.run_trial(trial))
    except EOFError:
        return


def settled_attainment(outcomes: Outcomes, problem: Problem) -> float:
    """The share of a run's later requests within the SLO."""
    return float(outcomes.met(problem.slo)[later(outcomes.arrival_s)].mean())


def later(arrival_s: Times) -> NDArray[np.bool_]:
    """Which requests of a run count as arrived at a full cluster. arrival_s: shape [n], in their order."""
    found: NDArray[np.bool_] = arrival_s >= arrival_s[0] + _LATER * (arrival_s[-1] - arrival_s[0])
    return found


class Curve:
    """Attainment by rate, and the rate at which it meets the target."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._points: dict[float, float] = {}

    def add(self, rate: float, attained: float) -> None:
        self._points[rate] = attained

    @property
    def best(self) -> float:
        """The highest rate that met the target; 0 if none did."""
        return max((rate for rate, attained in self._points.items() if attained >= self._target), default=0.0)

    @property
    def highest(self) -> tuple[float, float]:
        return max(self._points.items())

    @property
    def lowest(self) -> tuple[float, float]:
        return min(self._points.items())

    @property
    def bracketed(self) -> bool:
        """Whether a rate met the target and a higher one missed it."""
        missed = [rate for rate, attained in self._points.items() if attained < self._target]
        return bool(missed) and self.best > 0.0 and max(missed) > self.best

    @property
    def crossing(self) -> float:
        """Where a line through the runs near the target meets it; between two runs where there is no such line."""
        middle = self._middle()
        near = [(log(rate), met) for rate, met in self._points.items() if middle / _NEAR <= rate <= middle * _NEAR]
        if len(near) < 3:
            return middle
        rates, shares = np.array(near).T
        slope, at_0 = np.polyfit(rates, shares, 1)
        if slope >= 0.0:
            return middle
        return float(np.clip(exp((self._target - at_0) / slope), middle / _NEAR, middle * _NEAR))

    def _middle(self) -> float:
        """Between the two neighbouring rates that best separate those that meet the target from those that miss it."""
        points = sorted(self._points.items())

        def wrong(cut: int) -> int:
            below = sum(met < self._target for _, met in points[:cut])
            return below + sum(met >= self._target for _, met in points[cut:])

        cut = min(range(1, len(points)), key=wrong)
        return sqrt(points[cut - 1][0] * points[cut][0])


def race(
    evaluator: Evaluator, plans: Iterable[tuple[Plan, float]], stop: Callable[[], bool]
) -> Iterator[tuple[Plan, float]]:
    """Yields the best plan so far with its simulated goodput, each time that it changes. plans: with estimates.

    The most promising plan comes first. A plan that is clearly worse at the best one's goodput is dropped after one
    run. After `stop` no further plan is tried, but the first is finished.
    """
    best = 0.0
    order = sorted(plans, key=lambda one: -one[1])
    for at, (plan, near) in enumerate(order):
        if near <= 0.0 or (best and stop()):
            continue
        if best:
            evaluator.prefetch(Trial(one, best) for one, likely in islice(order, at, at + 2) if likely > 0.0)
            if evaluator.attainment(plan, best) < evaluator.problem.target - _CLEARLY_WORSE:
                continue
        found = evaluator.goodput(plan, best or near)
        if found > best:
            best = found
            yield plan, found


class Scout:
    """Compares many plans in short runs at one rate, about where the best of them meets the target.

    Short runs overestimate goodput, but about equally for all plans: their order is that of long runs, within `_ALIKE`.
    rate: requests a second, where to begin.
    """

    def __init__(self, evaluator: Evaluator, rate: float, stop: Callable[[], bool]) -> None:
        self._evaluator = evaluator
        self._stop = stop
        self._rate = rate

    def meets_target(self, plan: Plan) -> bool:
        return self._short_attainment(plan) >= self._evaluator.problem.target

    def is_ahead(self, plan: Plan, other: Plan) -> bool:
        """Whether the plan is better by more than chance."""
        return self._short_attainment(plan) > self._short_attainment(other) + 2.0 * _ALIKE

    def leaders(self, plans: Sequence[Plan]) -> list[tuple[Plan, float]]:
        """The plans that lead, with an expected goodput according to how far ahead they are."""
        order = self._ranked_near_target(plans)
        top = self._short_attainment(order[0])
        near = [(plan, self._short_attainment(plan)) for plan in order[:_LEADING]]
        return [(plan, self._rate * (1.0 + share - top)) for plan, share in near if share > top - _ALIKE]

    def challengers(self, leader: Plan, plans: Sequence[Plan]) -> list[tuple[Plan, float]]:
        """The plans that may be better than the leader, with their attainment at a rate at which plans differ."""
        self._ranked_near_target([leader])
        least = self._short_attainment(leader) - _ALIKE
        return [(plan, share) for share, plan in self._ranked(plans) if share >= least]

    def _ranked_near_target(self, plans: Sequence[Plan]) -> list[Plan]:
        """The plans, best first, at a rate at which the best is about the target."""
        order = [plan for _, plan in self._ranked(plans)]
        for _ in range(_SCOUT_RATES):
            off = self._short_attainment(order[0]) - self._evaluator.problem.target
            if _PLANS_DIFFER[0] <= off <= _PLANS_DIFFER[1] or self._stop():
                break
            self._rate = self._rate * _SCOUT_STEP if off > 0.0 else self._rate / _SCOUT_STEP
            half = max(_LEADING, len(order) // 2)
            order = [*(plan for _, plan in self._ranked(order[:half])), *order[half:]]
        return order

    def _ranked(self, plans: Sequence[Plan]) -> list[tuple[float, Plan]]:
        """Plans with their attainment at the rate, the highest first; when the time is up, the first plan alone."""
        self._evaluator.prefetch(Trial(plan, self._rate, short=True) for plan in plans)
        found = [(self._short_attainment(plan), plan) for plan in plans[:1]]
        found += [(self._short_attainment(plan), plan) for plan in plans[1:] if not self._stop()]
        return sorted(found, key=lambda one: -one[0])

    def _short_attainment(self, plan: Plan) -> float:
        return self._evaluator.attainment(plan, self._rate, short=True)
