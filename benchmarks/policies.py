"""`polyphase bench policies`: `adaptive` beside fixed policies: goodput in twelve scenarios, and pauses of streams.

The simulation knows what a live cluster knows: loads as old as broadcasts, rates learned from noisy steps, output
lengths predicted correctly three times in four. `--live` runs three of the scenarios, slowed down, or scenarios of
pauses on emulated instances, and compares them with a simulation of the same requests.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import product, repeat
from math import ceil, floor
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.experiment import (
    Arm,
    Bracket,
    Experiment,
    Means,
    Meets,
    Row,
    emulated_file,
    goodput,
    judged,
    median_of,
    model_with_context,
    row_of,
)
from benchmarks.results import Result, aim, at_least, merged, progress, result
from benchmarks.scenarios import MAX_TOKENS, PREDICTION, SLO, TARGET, Scenario, all_scenarios, instances
from shared.domain.job import Slo, WhenFull
from shared.errors import InvalidRequest
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment
from shared.sim.outcomes import Outcomes, SimResult
from shared.sim.spec import with_words
from shared.sim.workload import Mix, Workload
from tools.simulate.deployment import load_deployment

ADAPTIVE = Arm("adaptive", "adaptive")
BALANCED = Arm("balanced", "least_load+balanced+power_of_two")
PAUSES = "pauses"  # the scenarios of pauses, and their table
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
        (pairs,) = one.run()
    workload, rows = one.workload(1), list[Row]()
    figures = {f"{one.name}_rate_per_s": workload.rate, f"{one.name}_times_as_slow": one.factor}
    for arm, pair in pairs.items():
        for side, seen in pair.sides.items():
            head = {"scenario": scenario.name, "policy": arm.label, "run": side}
            rows.append(head | row_of(seen, SLO, one.factor))
            figures[f"{one.name}_{arm.label}_share_{side}"] = rows[-1]["attainment"]
    means = {
        arm: tuple(Means.from_result(seen, one.factor) for seen in pair.sides.values()) for arm, pair in pairs.items()
    }
    note = f"{one.name}: {len(workload)} requests a run; times are the accelerators' own"
    return merged(judged(one.name, [means]), result(figures, notes=[note]), {"tables": {LIVE_TABLE: rows}})


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
    return emulated_file(
        folder,
        f"bench policies {scenario.name} {factor:g}",
        entries,
        model=str(folder / "model"),
        max_model_len=CONTEXT,
        gateway={"slo": {"default": SLO.slower(factor).targets}},
        instance_defaults={"emulated_slowdown": factor},
    )


# Pauses: gaps between tokens that readers of streams see. Bursts of streams that fill the KV of idle instances, bursts
# of prompts, a flood beside interactive requests, and steady load near the limit of KV memory; on equal and on unlike
# instances, with and without a length predictor. Scenarios with a predictor are only simulated: live, they would need a
# trained checkpoint.

SIMPLE = (
    Arm("full", "placement=least_load+split=full+power_of_two"),
    BALANCED,
    Arm("none", "placement=least_load+split=none+power_of_two"),
)
ARMS = (ADAPTIVE, *SIMPLE)
SEEDS = (1, 2, 3, 4, 5)
# Aim for the p90 of longest gaps: at most so long, or so many times that of the best simple policy.
ALLOWED_S, ALLOWED_FACTOR = 0.25, 1.5
SLACK = 0.01  # of attainment, for scenarios in which all or nearly all requests meet their targets
USUAL = ("burst_unlike", "prompts_unlike", "overload_unlike_classes", "overload_unlike_one_class", "kv_1.15_unlike")
SENT_S = 45.0  # of arrivals of a live run
MAX_OFF_PERCENT = 20.0
MAX_LATE_S = 0.03  # timers of the clients
COMPARED = ("longest_gap_p90_s", "longest_gap_max_s")  # live and simulated
TARGETS, BATCH = Slo(), Slo("batch", 600.0, 1.0, weight=0.1, when_full=WhenFull.DELAY)
_FAST = "A100-SXM-80"
_STEP_S = 0.05  # of instances whose steps take a fixed time


@dataclass(frozen=True, slots=True)
class PauseScenario:
    """Instances, and the requests that a generator draws.

    judged: the class whose streams count; empty: all. predicted: with a length predictor. slowdown: a live run and its
    targets take so many times as long, so that this machine can stream all tokens.
    """

    name: str
    instances: tuple[dict[str, Any], ...]
    make: Callable[[np.random.Generator], Workload]
    judged: str = ""
    max_model_len: int = 2048
    predicted: bool = False
    slowdown: float = 1.0

    def cluster_into(self, folder: Path, model: str = "demo", slowdown: float = 1.0) -> Path:
        """Write the cluster file, of a suite `slowdown` times as slow, into `folder`."""
        batch = {**BATCH.slower(slowdown).targets, "weight": BATCH.weight, "when_full": BATCH.when_full.value}
        return emulated_file(
            folder,
            self.name,
            self.instances,
            model=model,
            max_model_len=self.max_model_len,
            gateway={"slo": {"default": TARGETS.slower(slowdown).targets, "batch": batch}},
            instance_defaults={"emulated_link_gbps": 100.0, "max_seqs": 256, "emulated_slowdown": slowdown},
        )

    def workload(self, seed: int) -> Workload:
        return self.make(np.random.default_rng(seed))

    def first_requests(self, seed: int) -> Workload:
        """Those that a live run sends."""
        workload = self.workload(seed)
        return workload.head(int(np.searchsorted(workload.arrival_s, SENT_S)))

    def simulated(self, arm: Arm, seed: int, folder: Path) -> Row:
        deployment, workload = load_deployment(self.cluster_into(folder)), self.workload(seed)
        run = with_words(replace(deployment.run, seed=seed), arm.words)
        if self.predicted:
            run = replace(run, prediction=PREDICTION, max_tokens=MAX_TOKENS)
        return self.row(simulate(workload, deployment.instances, run), workload)

    def row(self, seen: SimResult, workload: Workload, slowdown: float = 1.0) -> Row:
        """Figures of the judged requests of a run that was `slowdown` times as slow, in the accelerators' own time."""
        mix = workload.mix
        if self.judged and mix is not None:
            rows = np.array([slo.name for slo in mix.classes])[mix.class_of] == self.judged
            columns = {each.name: getattr(seen.outcomes, each.name)[rows] for each in fields(Outcomes)}
            seen = replace(seen, outcomes=Outcomes(**columns))
        return row_of(seen, TARGETS, slowdown)


def pause_scenarios() -> Iterator[PauseScenario]:
    for name, sizes in (("equal", (8192, 8192)), ("unlike", (11_264, 5_632))):
        fixed = tuple(_fixed(f"d{at}", "decode", tokens) for at, tokens in enumerate(sizes))
        fits = 16 + 16 if name == "equal" else 22 + 11  # streams of 6 + 500 tokens, which take 512
        yield PauseScenario(f"burst_{name}", (_fixed("p0", "prefill", 8192), *fixed), partial(_burst, fits, 500))
    for name, second in (("equal", _FAST), ("unlike", "L4"), ("unlike_a10", "A10")):
        ample = _four(second, 48, 48 if second == _FAST else 4)
        yield PauseScenario(f"prompts_{name}", ample, _prompts, max_model_len=8192, slowdown=2.0)
    for name, second, gib in (("equal", _FAST, 16), ("unlike", "A10", 4)):
        sized = _four(second, 16, gib)
        for kind, whose in (("classes", "default"), ("one_class", "")):
            make = partial(_flood, bool(whose))
            yield PauseScenario(f"overload_{name}_{kind}", sized, make, whose, max_model_len=8192, slowdown=2.0)
    for name, kv_tokens in (("equal", (8192, 8192, 8192)), ("unlike", (12_288, 8192, 4096))):
        decodes = tuple(_fixed(f"d{at}", "decode", size) for at, size in enumerate(kv_tokens))
        prefills = (_fixed("p0", "prefill", 8192), _fixed("p1", "prefill", 8192))
        for share in (0.85, 1.0, 1.15):
            make = partial(_steady, share * sum(kv_tokens))
            for predicted in (False, True):
                word = "_predicted" if predicted else ""
                yield PauseScenario(f"kv_{share:g}_{name}{word}", (*prefills, *decodes), make, predicted=predicted)


def _four(second: str, gib: int, second_gib: int) -> tuple[dict[str, Any], ...]:
    """In each role a fast accelerator and another one, with so much KV."""
    return tuple(
        {"id": f"{role[0]}{at}", "role": role, "accelerator": each, "kv_cache_bytes": size << 30}
        for role in ("prefill", "decode")
        for at, (each, size) in enumerate(((_FAST, gib), (second, second_gib)))
    )


def _fixed(name: str, role: str, tokens: int) -> dict[str, Any]:
    """An instance with KV for so many tokens of 128 KiB, whose steps take a fixed time."""
    speed = {"accelerator": _FAST, "emulated_step_s": _STEP_S}
    return {"id": name, "role": role, "kv_cache_bytes": tokens << 17, **speed}


def _burst(count: int, answer: int, rng: np.random.Generator) -> Workload:
    """Three bursts of as many streams as fit exactly."""
    arrivals = np.concatenate([60.0 * number + np.sort(rng.uniform(0.0, 0.05, count)) for number in range(3)])
    return Workload("bursts", arrivals, np.full(3 * count, 6), np.full(3 * count, answer))


def _prompts(rng: np.random.Generator) -> Workload:
    """Three bursts of 24 prompts of 400 to 4,000 tokens."""
    count = 24
    arrivals = np.concatenate([30.0 * number + np.sort(rng.uniform(0.0, 0.2, count)) for number in range(3)])
    return Workload("prompts", arrivals, rng.integers(400, 4001, 3 * count), rng.integers(50, 200, 3 * count))


def _flood(classes: bool, rng: np.random.Generator) -> Workload:
    """Three interactive requests a second beside 300 of 500 to 3,000 + 200 tokens at once."""
    few, many = 120, 300
    arrivals = np.concatenate([rng.uniform(0.0, 40.0, few), rng.uniform(1.0, 1.5, many)])
    order = np.argsort(arrivals, kind="stable")
    prompts = np.concatenate([rng.integers(50, 400, few), rng.integers(500, 3001, many)])[order]
    answers = np.concatenate([rng.integers(50, 200, few), np.full(many, 200)])[order]
    class_of = np.concatenate([np.zeros(few, np.int64), np.full(many, int(classes))])[order]
    mix = Mix((TARGETS, BATCH), class_of, ("",), np.zeros(few + many, np.int64))
    return Workload("flood", arrivals[order], prompts, answers, mix=mix)


def _steady(held_tokens: float, rng: np.random.Generator) -> Workload:
    """Prompts of 50 to 400 and answers of 200 to 900 tokens, which hold so many tokens of KV on average, for 90 s."""
    rate = held_tokens / ((225 + 550 / 2) * 550 * _STEP_S)
    count = round(90.0 * rate)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count))
    return Workload("steady", arrivals, rng.integers(50, 401, count), rng.integers(200, 901, count))


def run_pauses() -> Result:
    """Medians over the seeds, simulated."""
    found: dict[str, dict[str, Row]] = {}
    with TemporaryDirectory(prefix="polyphase-pauses-") as folder:
        for one in pause_scenarios():
            found[one.name] = {
                arm.label: median_of([one.simulated(arm, seed, Path(folder)) for seed in SEEDS]) for arm in ARMS
            }
    rows = [{"scenario": name, "policy": policy, **row} for name, of in found.items() for policy, row in of.items()]
    return merged(beside_simple(found, "pauses"), {"tables": {PAUSES: rows}})


def live_scenarios() -> dict[str, PauseScenario]:
    return {one.name: one for one in pause_scenarios() if not one.predicted}


def run_pauses_live(scenarios: Sequence[PauseScenario], runs: int) -> list[Result]:
    """Medians over so many runs of each scenario and policy, each with another seed, live and simulated."""
    parts: list[Result] = []
    live: dict[str, dict[str, Row]] = {}
    for one in scenarios:
        with TemporaryDirectory(prefix="polyphase-pauses-") as folder:
            model = model_with_context(Path(folder) / "model", max(4096, one.max_model_len))
            file, seeds = one.cluster_into(Path(folder), str(model), one.slowdown), range(1, runs + 1)
            factor, max_late_s = one.slowdown, MAX_LATE_S
            rounds = Experiment(one.name, file, one.first_requests, ARMS, TARGETS, factor, seeds, max_late_s).run()
        work, live[one.name] = [one.first_requests(seed) for seed in seeds], {}
        for arm in ARMS:
            sides = [found[arm].sides for found in rounds]
            rows = {
                side: median_of([*map(one.row, (found[side] for found in sides), work, repeat(factor))])
                for side in sides[0]
            }
            live[one.name][arm.label] = rows["live"]
            table = [{"scenario": one.name, "policy": arm.label, "run": side, **row} for side, row in rows.items()]
            parts.append({"tables": {f"{PAUSES}, live and simulated": table}})
            if arm is ADAPTIVE:
                parts.append(off_of(one, **rows))
        sent = [pair.live for found in rounds for pair in found.values()]
        late_s, foreign = max(run.late_s for run in sent), fmean(run.foreign_cores for run in sent)
        noise = {f"{one.name}_timers_late_max_s": round(late_s, 3), f"{one.name}_foreign_cores": round(foreign, 3)}
        parts.append({"figures": noise})
    return [*parts, beside_simple(live, "pauses_live")] if live else []


def beside_simple(found: Mapping[str, Mapping[str, Row]], prefix: str) -> Result:
    """Aims and figures of rows by scenario and policy: where `adaptive` is most behind the best simple policy."""
    gap, behind = (0.0, ""), (0.0, "")
    for name, of in found.items():
        ours, simple = of[ADAPTIVE.label], [of[arm.label] for arm in SIMPLE]
        allowed_s = max(ALLOWED_S, ALLOWED_FACTOR * min(row["longest_gap_p90_s"] for row in simple))
        gap = max(gap, (ours["longest_gap_p90_s"] / allowed_s, name))
        behind = max(behind, (max(row["attainment"] for row in simple) - ours["attainment"], name))
    over, less = f"{prefix}_longest_gap_p90_over_allowed", f"{prefix}_attainment_behind_best_simple"
    aims = {
        over: aim("<= 1", f"{gap[0]:.3f} ({gap[1]})", gap[0] <= 1.0),
        less: aim(f"<= {SLACK}", f"{behind[0]:.4f} ({behind[1]})", behind[0] <= SLACK),
    }
    return {"aims": aims, "figures": {over: round(gap[0], 4), less: round(behind[0], 4)}}


def off_of(scenario: PauseScenario, live: Row, simulated: Row) -> Result:
    """By how many percent the simulator is off.

    Where steps take a fixed time, a gap may differ by one of them: a stream joins between two steps, and live the
    phases of two instances' steps differ by chance.
    """
    step_s = max(one.get("emulated_step_s", 0.0) for one in scenario.instances)
    parts: Result = {"figures": {}, "aims": {}}
    for column in COMPARED:
        name = f"{scenario.name}_adaptive_{column.removesuffix('_s')}_off_percent"
        off_s = simulated[column] - live[column]
        parts["figures"][name] = round(100.0 * off_s / live[column], 1)
        want = f"within {MAX_OFF_PERCENT:g}" + (f", or {step_s:g} s" if step_s else "")
        met = abs(off_s) <= max(MAX_OFF_PERCENT / 100.0 * live[column], step_s)
        parts["aims"][name] = aim(want, f"{parts['figures'][name]:g} ({off_s:.3f} s)", met)
    return parts
