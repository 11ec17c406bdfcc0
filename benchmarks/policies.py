"""`polyphase bench policies`: goodput of `adaptive` beside that of fixed policies in twelve scenarios.

The simulation knows what a live cluster knows: loads as old as broadcasts, rates learned from noisy steps, output
lengths predicted correctly three times in four. `--live` runs three of the scenarios, slowed down, on emulated
instances, and compares them with a simulation of the same requests. The command also runs the scenarios of
`benchmarks.pauses`.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import ceil, floor
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cluster_files import emulated, model_with_context, write_cluster
from benchmarks.experiment import Experiment, Means, Row, judged, row_of, side_by_side, table_of
from benchmarks.goodput import Bracket, Meets, goodput
from benchmarks.pauses import ADAPTIVE, BALANCED, PAUSES, USUAL, live_scenarios, run_pauses, run_pauses_live
from benchmarks.results import Result, at_least, merged, progress, result
from benchmarks.scenarios import SLO, TARGET, Scenario, all_scenarios, instances
from shared.errors import InvalidRequest
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment
from shared.sim.spec import with_words
from tools.simulate.deployment import load_deployment

PLACEMENTS = ("least_load", "round_robin", "workload", "memory")
SPLITS = ("split=full", "fraction:fraction=0.5", "balanced")
DISPATCHES = ("power_of_two", "dispatch=random", "spread")
RESOLUTION = 1.02  # rates that are distinguished
COARSE = 1.08  # to learn how many requests it takes
LASTS_S, SHORT_S = 30.0, 10.0  # requests for so long at the rate of `adaptive`, and where to look for that rate
MIN_REQUESTS = 600
FIRST_PART = 3  # one in so many requests is simulated before the others
SURELY = 1.25  # times as many misses as all may have, among the first part: those that come later mend none of them
SCREENED_AT = 0.85  # of the rate from which a race sets out
AT_ONCE = 4  # scenarios
AIM_SCENARIO, AIM_MEAN = 0.97, 1.15
TABLE = "side by side, at the lower of both goodputs"
CLOSE, MORE_SEEDS = 0.05, 2  # so near the aim, or below it, a ratio is the median of so many more seeds


def run_policies_bench(
    scenarios: Sequence[str] = (), *, results: Path | None = None, processes: int = 2, live: bool = False, runs: int = 1
) -> Result:
    """scenarios: names; empty for all. results: a file in which runs are kept, and from which a search continues.

    live: on emulated instances; runs: then of each scenario of pauses under each policy. Raises InvalidRequest for an
    unknown scenario.
    """
    if live:
        return _run_live(scenarios, runs)
    if tuple(scenarios) == (PAUSES,):
        return run_pauses()
    kept = Runs(results)
    with ProcessPoolExecutor(processes) as pool:
        found = list(pool.map(partial(seeded, kept), named(scenarios)))
        first = [seeds[0] for seeds in found]
        single = best_single(first, lambda policy, *of: pool.map(partial(_narrowed, kept, policy), *of))
        rows = [row for one in first for row in _side_by_side(one, single, pool)]
    whole = merged(report(found, single), {"tables": {TABLE: rows}})
    return whole if scenarios else merged(whole, run_pauses())


def named(names: Sequence[str]) -> list[Scenario]:
    """The scenarios of these names, all without any. Raises InvalidRequest for one that does not exist."""
    known = {scenario.name: scenario for scenario in all_scenarios()}
    if unknown := sorted(set(names) - set(known)):
        raise InvalidRequest(f"no scenario {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


@dataclass(frozen=True, slots=True)
class Runs:
    """Whether the target is met, by scenario, policy, rate and number of requests.

    file: a line of JSON for each run, which is not repeated; it only fits the code that made it. Processes share it.
    """

    file: Path | None = None

    def meets(self, case: Scenario, policy: str, requests: int, lasts_s: float = 0.0) -> Meets:
        """By rate. lasts_s: with as many requests as arrive in that time, if they are more than `requests`."""
        return lambda rate: self._met(case, policy, rate, max(requests, round(lasts_s * rate)))

    def _met(self, case: Scenario, policy: str, rate: float, requests: int) -> bool:
        run = (case.name, case.seed, policy, f"{rate:.6g}", requests)
        known = _known(self.file).get(run) if self.file is not None else None
        met = met_by(case, policy, rate, requests) if known is None else known
        if self.file is not None and known is None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps([*run, met]) + "\n")
        return met


@cache
def _known(file: Path) -> dict[tuple[Any, ...], bool]:
    lines = file.read_text("utf-8").splitlines() if file.exists() else ()
    return {tuple(run): met for *run, met in map(json.loads, lines)}


def met_by(case: Scenario, policy: str, rate: float, requests: int) -> bool:
    """Whether the target is met; the first part of the requests may already show that it is missed."""
    head = requests // FIRST_PART
    allowed = floor((1.0 - TARGET) * requests + 1e-9)
    if head and (1.0 - case.attained(policy, rate, requests, head)) * head > SURELY * allowed:
        return False
    return case.attained(policy, rate, requests) >= TARGET


# The search.


@dataclass(frozen=True, slots=True)
class Compared:
    """Goodput in one scenario, requests a second: of `adaptive`, and what is known of all fixed combinations."""

    scenario: Scenario
    requests: int
    adaptive: float
    brackets: Mapping[str, Bracket]

    @property
    def best(self) -> str:
        return max(self.brackets, key=lambda policy: self.brackets[policy].min_rate)

    @property
    def best_fixed(self) -> float:
        return self.brackets[self.best].min_rate

    @property
    def ratio(self) -> float:
        return self.adaptive / self.best_fixed if self.best_fixed else float("inf")


@dataclass(frozen=True, slots=True)
class Single:
    """The best fixed combination over all scenarios. mean: share of the goodput of `adaptive`. goodput: by scenario."""

    policy: str
    mean: float
    goodput: Mapping[str, float]


def fixed_policies() -> tuple[str, ...]:
    """Every combination, in words. Where the decode instance computes all of a request, placement has no choice."""
    split = [f"placement={p}+{s}+{d}" for p, s, d in product(PLACEMENTS, SPLITS, DISPATCHES)]
    return tuple(split + [f"placement=least_load+split=none+{d}" for d in DISPATCHES])


def seeded(runs: Runs, scenario: Scenario) -> list[Compared]:
    """With the scenario's seed, and with others where that leaves open whether the aim is met."""
    found = [compared(runs, scenario)]
    if found[0].ratio < AIM_SCENARIO + CLOSE:
        seeds = range(scenario.seed + 1, scenario.seed + 1 + MORE_SEEDS)
        found += [compared(runs, replace(scenario, seed=seed)) for seed in seeds]
    return found


def compared(runs: Runs, scenario: Scenario) -> Compared:
    """Goodput of `adaptive`, and which fixed combination comes nearest to it, or beyond."""
    rough = goodput(runs.meets(scenario, ADAPTIVE.words, MIN_REQUESTS, SHORT_S), 8.0, COARSE)
    rough = goodput(
        runs.meets(scenario, ADAPTIVE.words, MIN_REQUESTS, LASTS_S), rough, COARSE
    )  # a backlog takes a while
    requests = max(MIN_REQUESTS, round(LASTS_S * rough))
    adaptive = goodput(runs.meets(scenario, ADAPTIVE.words, requests), rough, RESOLUTION)
    unknown = Bracket.near(adaptive, RESOLUTION)
    brackets = race(fixed_policies(), lambda policy: runs.meets(scenario, policy, requests), unknown)
    found = Compared(scenario, requests, adaptive, brackets)
    rates = f"adaptive {adaptive:.2f}, {found.best} {found.best_fixed:.2f}, ratio {found.ratio:.3f}"
    progress(f"{scenario.name}, seed {scenario.seed}: {rates}")
    return found


def race(policies: Iterable[str], meets: Callable[[str], Meets], unknown: Bracket) -> dict[str, Bracket]:
    """Brackets of all, in which the highest goodput is exact and none of the others can be higher.

    All are tried at SCREENED_AT of the search's start, then, the survivors first, at the rung above the best so far:
    a policy that misses it is out, a policy that meets it is the best so far.
    """
    screen = unknown.start - unknown.rungs(1.0 / SCREENED_AT)
    brackets = {policy: unknown.tried(screen, meets(policy)) for policy in policies}
    best: Bracket | None = None
    for policy in sorted(brackets, key=lambda policy: -brackets[policy].low):
        found = brackets[policy]
        if best is not None:
            found = found.tried(best.low + 1, meets(policy))
        if best is None or found.low > best.low:
            best = found = found.settled(meets(policy))
        brackets[policy] = found
    return brackets


Narrow = Callable[[str, Sequence[Compared], Sequence[Bracket]], Iterable[Bracket]]


def best_single(found: Sequence[Compared], narrow: Narrow) -> Single:
    """The combination with the highest mean over the scenarios of its share of the goodput of `adaptive`.

    narrow: a policy's brackets in some scenarios after one more run in each. The policy with the highest upper bound is
    narrowed in the scenarios where its bracket is widest for what a run costs, until its brackets are exact: then the
    bounds of all others lie below.
    """
    known = {policy: [one.brackets[policy] for one in found] for policy in found[0].brackets}
    worth = [1.0 / one.adaptive for one in found]

    def bound(policy: str) -> float:
        return fmean(value * bracket.max_rate for value, bracket in zip(worth, known[policy], strict=True))

    while True:
        best = max(known, key=bound)
        of = known[best]
        left = [at for at, bracket in enumerate(of) if not bracket.exact]
        if not left:
            rates = {one.scenario.name: bracket.min_rate for one, bracket in zip(found, of, strict=True)}
            return Single(best, bound(best), rates)
        left.sort(key=lambda at: -worth[at] * (of[at].max_rate - of[at].min_rate) / found[at].requests)
        left = left[:AT_ONCE]
        narrowed = narrow(best, [found[at] for at in left], [of[at] for at in left])
        for at, bracket in zip(left, narrowed, strict=True):
            of[at] = bracket


def _narrowed(runs: Runs, policy: str, one: Compared, bracket: Bracket) -> Bracket:
    return bracket.tried(bracket.next, runs.meets(one.scenario, policy, one.requests))


def _side_by_side(one: Compared, single: Single, pool: Executor) -> list[Row]:
    """`adaptive`, the best fixed combination and the one that is best over all, at one rate."""
    rate = min(one.adaptive, one.best_fixed) or one.adaptive
    rates = {ADAPTIVE.words: one.adaptive, one.best: one.best_fixed}
    rates.setdefault(single.policy, single.goodput.get(one.scenario.name, 0.0))
    return list(pool.map(_row, *zip(*((one, policy, served, rate) for policy, served in rates.items()), strict=True)))


def _row(one: Compared, policy: str, served: float, rate: float) -> Row:
    head: Row = {"scenario": one.scenario.name, "policy": policy}
    head |= {"goodput_per_s": round(served, 3), "rate_per_s": round(rate, 3)}
    return head | row_of(one.scenario.result(policy, rate, one.requests), SLO)


def report(found: Sequence[Sequence[Compared]], single: Single) -> Result:
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
    aims = {
        "least_ratio_to_best_fixed": at_least(AIM_SCENARIO, min(ratios.values()), 4),
        "adaptive_over_best_single": at_least(AIM_MEAN, figures["adaptive_over_best_single"], 4),
    }
    return result(figures, aims, notes)


# Live: at SHARE of the goodput that the simulator finds for `adaptive`, so slowly that TOKENS_PER_S tokens a second
# come. Emulated engines end no answer before the length that clients request, so policies know the lengths here.

LIVE = (Scenario("equal", "conversation"), Scenario("fast_slow", "code"), Scenario("prefill_heavy", "mixed"))
LIVE_TABLE = "side by side, live and simulated"
SHARE = 0.7  # of goodput
ARRIVALS_S = 15.0  # in the time of the accelerators
TOKENS_PER_S = 1_800.0
MIN_FACTOR = 3.0  # what the services add is small beside the accelerators' times, as it is in a real cluster
START_PER_S = 16.0  # of the search for goodput
CONTEXT = 16384


def _run_live(chosen: Sequence[str], runs: int) -> Result:
    pauses = live_scenarios()
    names = [each for name in chosen for each in (USUAL if name == PAUSES else (name,))]
    others = [name for name in names if name not in pauses]
    try:
        scenarios = named(others) if others else () if names else LIVE
    except InvalidRequest as error:
        raise InvalidRequest(f"{error.message}; of pauses, live: {PAUSES}, {', '.join(pauses)}") from error
    of_pauses = [pauses[name] for name in dict.fromkeys(names) if name in pauses]
    return merged(*map(_compared_live, scenarios), *run_pauses_live(of_pauses, runs))


def _compared_live(scenario: Scenario) -> Result:
    with TemporaryDirectory(prefix="polyphase-policies-") as folder:
        model_with_context(Path(folder) / "model", CONTEXT)
        one = slowed(scenario, Path(folder))
        rounds = one.run()
    workload, arms = one.workload(1), side_by_side(rounds, lambda seen, _: row_of(seen, SLO, one.factor))
    means = [
        {arm: [Means.from_result(seen, one.factor) for seen in pair.sides.values()] for arm, pair in by_arm.items()}
        for by_arm in rounds
    ]
    figures = {f"{one.name}_rate_per_s": workload.rate, f"{one.name}_times_as_slow": one.factor}
    note = f"{one.name}: {len(workload)} requests a run; times are the accelerators' own"
    table = {"tables": {LIVE_TABLE: table_of(scenario.name, arms)}}
    return merged(judged(one.name, means), result(figures, notes=[note]), table)


def slowed(scenario: Scenario, folder: Path) -> Experiment:
    """The scenario as slow as this machine can serve it, with its cluster file in `folder`."""
    deployment = load_deployment(cluster_into(folder, scenario, 1.0))
    run = with_words(deployment.run, ADAPTIVE.words)

    def served(rate: float) -> bool:
        workload = scenario.workload(rate, max(MIN_REQUESTS, round(ARRIVALS_S * rate)))
        return attainment(simulate(workload, deployment.instances, run).outcomes, SLO).every >= TARGET

    rate = SHARE * goodput(served, START_PER_S, RESOLUTION)
    workload = scenario.workload(rate, max(50, round(ARRIVALS_S * rate)))
    factor = float(max(MIN_FACTOR, ceil(rate * float(workload.output_tokens.mean()) / TOKENS_PER_S)))
    file = cluster_into(folder, scenario, factor)
    return Experiment(
        f"live_{scenario.name}", file, lambda _: workload, (ADAPTIVE, replace(BALANCED, label="fixed")), SLO, factor
    )


def cluster_into(folder: Path, scenario: Scenario, factor: float) -> Path:
    """A cluster file with the scenario's instances, `factor` times as slow."""
    entries = [
        {
            "id": one.instance_id,
            "role": one.role.value,
            "accelerator": one.accelerator,
            "chunk_size": one.limits.batched_tokens,
            "max_seqs": one.limits.sequences,
            "kv_cache_bytes": int(one.kv_tokens * one.kv_bytes_per_token),
            "emulated_link_gbps": one.link.bandwidth_bytes_s * 8e-9,
        }
        for one in instances(scenario.cluster)
    ]
    cluster = emulated(
        f"policies {scenario.name} {factor:g}",
        entries,
        {"emulated_slowdown": factor},
        model=str(folder / "model"),
        max_model_len=CONTEXT,
        gateway={"slo": {"default": SLO.slower(factor).targets}},
    )
    return write_cluster(folder, cluster)
