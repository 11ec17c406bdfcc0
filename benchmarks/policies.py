"""`polyphase bench policies`: goodput of `adaptive` beside every combination of fixed policies, in twelve scenarios.

The simulation knows what a live cluster knows: loads as old as broadcasts, rates learned from noisy steps, output
lengths predicted correctly three times in four. A request counts as served if its TTFT, its TPOT and its gaps are
within the targets. Each run is made once, in another process, and kept in a file if one is given.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from math import floor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from threading import Lock
from typing import Protocol, TextIO

from benchmarks.comparison import Bracket, Ladder, Row, best_mean, goodput, of_result, race
from benchmarks.pauses import TABLE as PAUSES
from benchmarks.pauses import pauses_side_by_side
from benchmarks.results import Result, at_least, merged, progress, result
from benchmarks.scenarios import SLO, TARGET, Scenario, all_scenarios
from shared.errors import InvalidRequest

FIRST_PART = 3  # one in so many requests is served before the rest
SURELY = 1.25  # times as many misses as all may have, among the first part: those that come later mend none of them

Run = tuple[str, int, str, str, int]  # scenario, seed, policy, rate, requests


class Case(Protocol):
    """A scenario that can be run."""

    @property
    def name(self) -> str:
        """Unique among the scenarios."""
        ...

    @property
    def seed(self) -> int:
        """Of the draw of the requests."""
        ...

    def attained(self, policy: str, rate: float, requests: int, head: int | None = None) -> float:
        """The share of the requests within their SLO; of the first `head` alone, if given."""
        ...


class Runs:
    """Whether the target is met, by scenario, policy, rate and number of requests. May be used by several threads.

    file: what stands in it is not run again, and what is run is added to it, a line of JSON each. It only fits the
    code that made it.
    """

    def __init__(self, pool: Executor, file: Path | None = None) -> None:
        self._pool = pool
        self._lock = Lock()
        self._known: dict[Run, bool] = {}
        self._file: TextIO | None = None
        self.made = 0
        if file is not None:
            for line in file.read_text("utf-8").splitlines() if file.exists() else ():
                name, seed, policy, rate, requests, met = json.loads(line)
                self._known[name, seed, policy, rate, requests] = met
            self._file = file.open("a", encoding="utf-8")

    def __enter__(self) -> "Runs":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def of(self, case: Case, policy: str, requests: int) -> Callable[[float], bool]:
        return lambda rate: self.meets(case, policy, rate, requests)

    def lasting(self, case: Case, policy: str, seconds: float, fewest: int) -> Callable[[float], bool]:
        """By rate, with as many requests as come in so many seconds, and no fewer than that."""
        return lambda rate: self.meets(case, policy, rate, max(fewest, round(seconds * rate)))

    def meets(self, case: Case, policy: str, rate: float, requests: int) -> bool:
        """Whether the target is met. Waits for the run."""
        run = (case.name, case.seed, policy, f"{rate:.6g}", requests)
        with self._lock:
            known = self._known.get(run)
        if known is not None:
            return known
        met = self._pool.submit(met_by, case, policy, rate, requests).result()
        with self._lock:
            self._known[run] = met
            self.made += 1
            if self._file is not None:
                self._file.write(json.dumps([*run, met]) + "\n")
                self._file.flush()
        return met


def met_by(case: Case, policy: str, rate: float, requests: int) -> bool:
    """Whether the target is met, or plainly missed already by the first part of the requests."""
    head = requests // FIRST_PART
    allowed = floor((1.0 - TARGET) * requests + 1e-9)
    if head and (1.0 - case.attained(policy, rate, requests, head)) * head > SURELY * allowed:
        return False
    return case.attained(policy, rate, requests) >= TARGET


ADAPTIVE = "adaptive"
PLACEMENTS = ("least_load", "round_robin", "workload", "memory")
SPLITS = ("split=full", "fraction:fraction=0.5", "balanced")
DISPATCHES = ("power_of_two", "dispatch=random", "spread")
RESOLUTION = 1.02  # rates that are distinguished
COARSE = 1.08  # to learn how many requests it takes
LASTS_S, SHORT_S = 30.0, 10.0  # requests for so long at the rate of `adaptive`, and where to look for that rate
FEWEST = 600
AIM_SCENARIO, AIM_MEAN = 0.97, 1.15
TABLE = "side by side, at the lower of both goodputs"
CLOSE, MORE_SEEDS = 0.05, 2  # so near the aim, or below it, a ratio is the median of so many more seeds


@dataclass(frozen=True, slots=True)
class PoliciesOptions:
    """Names of scenarios, all without any (`pauses` alone: those of pauses); a file to keep runs in and to go on from;
    processes that simulate.
    """

    scenarios: tuple[str, ...] = ()
    results: Path | None = None
    processes: int = 2


@dataclass(frozen=True, slots=True)
class Found:
    """Goodput in one scenario, requests a second: of `adaptive`, and what is known of all fixed combinations."""

    scenario: Scenario
    requests: int
    adaptive: float
    brackets: dict[str, Bracket]

    @property
    def best(self) -> str:
        return max(self.brackets, key=lambda policy: self.brackets[policy].least)

    @property
    def best_fixed(self) -> float:
        return self.brackets[self.best].least

    @property
    def ratio(self) -> float:
        """Goodput of `adaptive` over it."""
        return self.adaptive / self.best_fixed if self.best_fixed else float("inf")


@dataclass(frozen=True, slots=True)
class Single:
    """The best fixed combination over all scenarios, and the mean of its goodput over that of `adaptive`.

    goodput: by scenario, at least.
    """

    policy: str
    mean: float
    goodput: dict[str, float] = field(default_factory=dict)


def fixed_policies() -> tuple[str, ...]:
    """Every combination, in words. Where the decode instance does it all, placement has nothing to choose."""
    split = [f"placement={p}+{s}+{d}" for p, s, d in product(PLACEMENTS, SPLITS, DISPATCHES)]
    return tuple(split + [f"placement=least_load+split=none+{d}" for d in DISPATCHES])


def run_policies_bench(options: PoliciesOptions | None = None) -> Result:
    """All scenarios, or those of that name."""
    options = options or PoliciesOptions()
    if options.scenarios == (PAUSES,):
        return merged(_pauses())
    scenarios = named(options.scenarios)
    with (
        ProcessPoolExecutor(options.processes, get_context("spawn")) as pool,
        Runs(pool, options.results) as runs,
        ThreadPoolExecutor(len(scenarios)) as drivers,
    ):
        found = list(drivers.map(lambda one: seeded(one, runs), scenarios))
        single = best_single([seeds[0] for seeds in found], runs, drivers)
        progress(f"{single.policy} is the best of all: {runs.made} runs")
        rows = side_by_side([seeds[0] for seeds in found], single, pool)
    whole = merged(report(found, single), {"tables": {TABLE: rows}})
    return whole if options.scenarios else merged(whole, _pauses())


def _pauses() -> Result:
    rows, parts = pauses_side_by_side()
    return {**parts, "tables": {PAUSES: rows}}


def named(names: Sequence[str]) -> list[Scenario]:
    """The scenarios of these names, all without any. Raises InvalidRequest for one that does not exist."""
    known = {scenario.name: scenario for scenario in all_scenarios()}
    if unknown := sorted(set(names) - set(known)):
        raise InvalidRequest(f"no scenario {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def seeded(scenario: Scenario, runs: Runs) -> list[Found]:
    """With the scenario's seed, and with others where that leaves open whether the aim is met."""
    found = [compared(scenario, runs)]
    if found[0].ratio < AIM_SCENARIO + CLOSE:
        seeds = range(scenario.seed + 1, scenario.seed + 1 + MORE_SEEDS)
        found += [compared(replace(scenario, seed=seed), runs) for seed in seeds]
    return found


def compared(scenario: Scenario, runs: Runs) -> Found:
    """Goodput of `adaptive`, and which fixed combination comes nearest to it, or goes beyond."""
    rough = goodput(runs.lasting(scenario, ADAPTIVE, SHORT_S, FEWEST), 8.0, COARSE)
    rough = goodput(runs.lasting(scenario, ADAPTIVE, LASTS_S, FEWEST), rough, COARSE)  # a backlog takes a while
    requests = max(FEWEST, round(LASTS_S * rough))
    adaptive = goodput(runs.of(scenario, ADAPTIVE, requests), rough, RESOLUTION)
    ladder = Ladder.near(adaptive, RESOLUTION)
    brackets = race(fixed_policies(), lambda policy: runs.of(scenario, policy, requests), ladder)
    found = Found(scenario, requests, adaptive, brackets)
    progress(
        f"{scenario.name}, seed {scenario.seed}: adaptive {adaptive:.2f}, {found.best} {found.best_fixed:.2f}, "
        f"ratio {found.ratio:.3f}"
    )
    return found


def best_single(found: Sequence[Found], runs: Runs, drivers: Executor) -> Single:
    """The combination with the highest mean over the scenarios."""
    by_name = {one.scenario.name: one for one in found}

    def once(policy: str, one: Found, bracket: Bracket) -> Bracket:
        return bracket.tried(bracket.next, runs.of(one.scenario, policy, one.requests))

    def narrowed(policy: str, brackets: dict[str, Bracket]) -> dict[str, Bracket]:
        tried = drivers.map(lambda name: once(policy, by_name[name], brackets[name]), brackets)
        return dict(zip(brackets, tried, strict=True))

    worth = {name: 1.0 / one.adaptive for name, one in by_name.items()}
    cost = {name: float(one.requests) for name, one in by_name.items()}
    brackets = {policy: {name: one.brackets[policy] for name, one in by_name.items()} for policy in fixed_policies()}
    best, of = best_mean(brackets, worth, cost, narrowed)
    goodput = {name: bracket.least for name, bracket in of.items()}
    return Single(best, fmean(worth[name] * served for name, served in goodput.items()), goodput)


def side_by_side(found: Sequence[Found], single: Single, pool: Executor) -> list[Row]:
    """In each scenario `adaptive`, the best fixed combination and the one that is best over all, at one rate."""
    waiting = []
    for one in found:
        rate = min(one.adaptive, one.best_fixed) or one.adaptive
        goodput = {ADAPTIVE: one.adaptive, one.best: one.best_fixed}
        goodput.setdefault(single.policy, single.goodput.get(one.scenario.name, 0.0))
        for policy, most in goodput.items():
            waiting.append(pool.submit(_looked_at, one, policy, most, rate))
    return [each.result() for each in waiting]


def _looked_at(one: Found, policy: str, most: float, rate: float) -> Row:
    head = {
        "scenario": one.scenario.name,
        "policy": policy,
        "goodput_per_s": round(most, 3),
        "rate_per_s": round(rate, 3),
    }
    return of_result(head, one.scenario.result(policy, rate, one.requests), SLO)


def report(found: Sequence[Sequence[Found]], single: Single) -> Result:
    """Figures: goodput of `adaptive` and of the best fixed combination of each scenario, their ratio, and the means."""
    figures: dict[str, float] = {}
    notes, ratios = [], {}
    for seeds in found:
        one, name = seeds[0], seeds[0].scenario.name
        ratios[name] = median(each.ratio for each in seeds)
        figures[f"{name}_adaptive_per_s"] = round(one.adaptive, 3)
        figures[f"{name}_best_fixed_per_s"] = round(one.best_fixed, 3)
        figures[f"{name}_ratio"] = round(ratios[name], 4)
        by_seed = ", ".join(f"{each.ratio:.3f}" for each in seeds)
        notes.append(f"{name}: best fixed {one.best}, {one.requests} requests; ratio by seed {by_seed}")
    figures["best_single_mean_share"] = round(single.mean, 4)
    figures["adaptive_over_best_single"] = round(1.0 / single.mean, 4)
    notes.append(f"best single fixed combination: {single.policy}; shares are of adaptive's goodput")
    worst, ahead = min(ratios.values()), figures["adaptive_over_best_single"]
    aims = {
        "least_ratio_to_best_fixed": at_least(AIM_SCENARIO, worst, 4),
        "adaptive_over_best_single": at_least(AIM_MEAN, ahead, 4),
    }
    return result(figures, aims, notes)
