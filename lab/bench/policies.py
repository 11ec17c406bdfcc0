"""`polyphase bench policies`: goodput of `adaptive` beside every combination of fixed policies, in twelve scenarios.

Simulated, with what is known live: loads as old as broadcasts, rates learned from noisy steps, lengths foreseen three
times in four. Every combination is screened with few requests; the best of each scenario, and the best over all of
them, are then measured like `adaptive`, with as many requests as it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from math import ceil, floor, log
from statistics import mean
from typing import Any

from lab.bench.scenarios import TARGET, Scenario, all_scenarios

ADAPTIVE = "adaptive"
PLACEMENTS = ("least_load", "round_robin", "workload", "memory")
SPLITS = ("split=full", "fraction:fraction=0.5", "cronus")
DISPATCHES = ("power_of_two", "dispatch=random", "spread", "least_interference")
RESOLUTION = 1.02  # rates that are told apart
COARSE = 1.08  # when screening
LASTS_S, SHORT_S = 30.0, 10.0  # requests for so long at the rate of `adaptive`, and when screening
FEWEST = 600
FINALISTS = 4  # of each scenario, and overall
LOWEST = 0.02  # of the rate of `adaptive`: what serves less counts as that
WORST, AIM_SCENARIO, AIM_MEAN = "worst", 0.97, 1.15


def fixed_policies() -> tuple[str, ...]:
    """Every combination, in words. Where the decode instance does it all, placement has nothing to choose."""
    split = [f"placement={p}+{s}+{d}" for p, s, d in product(PLACEMENTS, SPLITS, DISPATCHES)]
    return tuple(split + [f"placement=least_load+split=none+{d}" for d in DISPATCHES])


@dataclass(frozen=True, slots=True)
class Found:
    """Goodput of all that were tried in one scenario, requests a second; `exact` ones with all requests."""

    scenario: Scenario
    requests: int
    adaptive: float
    screened: dict[str, float]
    exact: dict[str, float]


def run_policies_bench(scenarios: Sequence[Scenario] = (), processes: int = 2) -> dict[str, Any]:
    """All scenarios. Returns figures, aims and notes as every bench does."""
    with ProcessPoolExecutor(processes) as pool:
        screened = list(pool.map(screen, scenarios or tuple(all_scenarios()), chunksize=1))
        overall = best_overall(screened)
        found = list(pool.map(finish, screened, [overall] * len(screened), chunksize=1))
    return report(found)


def screen(scenario: Scenario) -> Found:
    """Goodput of `adaptive`, and of all fixed combinations as far as few requests tell it."""
    rough = goodput(lambda rate: scenario.attained(ADAPTIVE, rate, max(FEWEST, round(SHORT_S * rate))), 8.0, COARSE)
    requests = max(FEWEST, round(LASTS_S * rough))
    adaptive = goodput(lambda rate: scenario.attained(ADAPTIVE, rate, requests), rough, RESOLUTION)
    few = max(FEWEST // 2, round(SHORT_S * rough))
    screened = {
        policy: goodput(lambda rate, policy=policy: scenario.attained(policy, rate, few), adaptive, COARSE)  # type: ignore[misc]
        for policy in fixed_policies()
    }
    return Found(scenario, requests, adaptive, screened, {})


def best_overall(found: Sequence[Found]) -> tuple[str, ...]:
    """The combinations with the highest mean of goodput over that of `adaptive`."""
    means = {policy: mean(one.screened[policy] / one.adaptive for one in found) for policy in fixed_policies()}
    return tuple(sorted(means, key=lambda policy: -means[policy])[:FINALISTS])


def finish(found: Found, overall: Sequence[str]) -> Found:
    """Goodput of the finalists with all requests."""
    ranked = sorted(found.screened, key=lambda policy: -found.screened[policy])
    exact = {
        policy: goodput(
            lambda rate, policy=policy: found.scenario.attained(policy, rate, found.requests),  # type: ignore[misc]
            found.screened[policy],
            RESOLUTION,
        )
        for policy in dict.fromkeys((*ranked[:FINALISTS], *overall))
    }
    return Found(found.scenario, found.requests, found.adaptive, found.screened, exact)


def goodput(attained: Callable[[float], float], near: float, step: float) -> float:
    """The highest rate of the ladder `step`^k at which the target is met, just below one at which it is missed.

    Searched outwards from `near`, then by bisection. 0 when even LOWEST of `near` misses it.
    """
    start = round(log(near) / log(step))
    lowest, known = start + floor(log(LOWEST) / log(step)), dict[int, bool]()

    def meets(rung: int) -> bool:
        if rung not in known:
            known[rung] = attained(step**rung) >= TARGET
        return known[rung]

    stride = max(1, ceil(log(1.25) / log(step)))
    low = high = start
    if meets(start):
        while meets(high + stride):
            high += stride
            stride *= 2
        low, high = high, high + stride
    else:
        while low > lowest and not meets(low):
            high, low = low, max(lowest, low - stride)
            stride *= 2
        if not meets(low):
            return 0.0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return float(step**low)


def report(found: Sequence[Found]) -> dict[str, Any]:
    """Figures: goodput of `adaptive` and of the best fixed combination of each scenario, their ratio, and the means."""
    figures: dict[str, float] = {}
    notes, ratios = [], {}
    for one in found:
        name, best = one.scenario.name, max(one.exact, key=lambda policy: one.exact[policy])
        ratios[name] = one.adaptive / one.exact[best] if one.exact[best] else float("inf")
        figures[f"{name}_adaptive_per_s"] = round(one.adaptive, 3)
        figures[f"{name}_best_fixed_per_s"] = round(one.exact[best], 3)
        figures[f"{name}_ratio"] = round(ratios[name], 4)
        notes.append(f"{name}: best fixed {best}, {one.requests} requests")
    shared = set.intersection(*(set(one.exact) for one in found))
    means = {policy: mean(one.exact[policy] / one.adaptive for one in found) for policy in shared}
    single = max(means, key=lambda policy: means[policy])
    figures["best_single_mean_share"] = round(means[single], 4)
    figures["adaptive_over_best_single"] = round(1.0 / means[single], 4)
    notes.append(f"best single fixed combination: {single}; shares are of adaptive's goodput")
    worst = min(ratios.values())
    aims = {
        "least_ratio_to_best_fixed": {
            "want": f">= {AIM_SCENARIO}",
            "got": round(worst, 4),
            "met": worst >= AIM_SCENARIO,
        },
        "adaptive_over_best_single": {
            "want": f">= {AIM_MEAN}",
            "got": figures["adaptive_over_best_single"],
            "met": figures["adaptive_over_best_single"] >= AIM_MEAN,
        },
    }
    return {"figures": figures, "aims": aims, "notes": notes}
