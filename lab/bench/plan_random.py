"""Small random inventories beside the brute force, ten beside every method, and large ones."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import log
from multiprocessing import get_context
from statistics import fmean
from time import perf_counter
from typing import Any

from lab.bench.plan_cases import cluster, drawn, problem_of, solved
from lab.bench.plan_thunderserve import Part, aim
from shared.domain.job import Slo
from shared.errors import Incompatible
from shared.plan.answer import cheapest
from shared.plan.inventory import Inventory
from shared.plan.methods.registry import QUICK
from shared.plan.methods.simple import deployments
from shared.plan.problem import Problem
from shared.plan.search import Search
from shared.sim.workload import synthetic

ORACLE, BESIDE = 50, 10  # inventories
_TIE, _NEAR = 0.01, 0.02  # goodputs that are equal, and near, as runs differ by chance
_FIRST_SEED = 100
SCALES = (64, 128, 512)
_PLAIN = ("coupled", "thirds", "exhaustive")
_TYPES = ("A100-SXM-80", "L40S", "A40", "RTX-3090-Ti")


def case_oracle(processes: int = 2) -> Part:
    """50 inventories of up to 8 accelerators: how near `best` comes to the optimum."""
    rows = mapped(beside_oracle, range(_FIRST_SEED, _FIRST_SEED + 3 * ORACLE), processes, ORACLE)
    ratios = [ratio for ratio, *_ in rows]
    optimal = sum(ratio >= 1.0 - _TIE for ratio in ratios) / len(ratios)
    worst = min(ratios)
    figures = {
        "oracle_inventories": len(rows),
        "oracle_optimal_share": optimal,
        "oracle_worst_ratio": worst,
        "oracle_mean_ratio": fmean(ratios),
        "oracle_deployments_mean": fmean(count for _, count, _ in rows),
    }
    aims = {
        "the brute-force optimum": aim(">= 95 % of them", f"{100 * optimal:.0f} %", optimal >= 0.95),
        "else within": aim("2 %", f"{100 * (1 - worst):.1f} %", worst >= 1.0 - _NEAR),
    }
    notes = [f"{ratio:.3f} of the optimum: {words}" for ratio, _, words in sorted(rows)[:5] if ratio < 1.0 - _TIE]
    return figures, aims, notes


def beside_oracle(seed: int) -> tuple[float, int, str] | None:
    """Goodput of `best` over the oracle's, on the same judge; the oracle's deployments. None where nothing fits."""
    case = drawn(seed)
    try:
        found = solved(case.problem, "best")
        oracle = solved(case.problem, "bruteforce")
    except Incompatible:
        return None
    if oracle.promise.goodput <= 0.0:
        return None
    count = sum(1 for _ in deployments(Search(case.problem, perf_counter)))
    return found.promise.goodput / max(oracle.promise.goodput, found.promise.goodput), count, case.words


def case_beside(processes: int = 2) -> Part:
    """Ten inventories, every method on each, at the price of the inventory; and the cheapest plan for a rate."""
    rows = mapped(beside_methods, range(_FIRST_SEED, _FIRST_SEED + 4 * BESIDE), processes, BESIDE)
    figures: dict[str, float] = {}
    for name in QUICK:
        ratios = [row[name] for row in rows if name in row]
        figures[f"best_over_{name}_mean_ratio"] = fmean(ratios)
        figures[f"best_over_{name}_least_ratio"] = min(ratios)
    least = min(min(row[name] for name in QUICK if name in row) for row in rows)
    gains = [min(row[name] for name in QUICK if name in row) for row in rows]
    saved = [row["saved"] for row in rows if "saved" in row]
    figures |= {"best_over_next_mean_ratio": fmean(gains), "cheapest_saved_mean_share": fmean(saved) if saved else 0.0}
    aims = {
        "best behind no other method by more than 1 %": aim(">= 0.99", f"{least:.3f}", least >= 0.99),
        "cheapest against the best single type": aim(
            "no dearer",
            f"{100 * fmean(saved):.0f} % saved on average, least {100 * min(saved):.0f} %",
            min(saved) >= -0.001,
        ),
    }
    return figures, aims, []


def beside_methods(seed: int) -> dict[str, float] | None:
    """`best` over each other method's goodput, and the share of the price that the cheapest plan saves."""
    case = drawn(seed, most=12)
    if len({pool.accelerator.name for pool in case.problem.inventory.pools}) < 2:
        return None
    row: dict[str, float] = {}
    try:
        best = solved(case.problem, "best")
    except Incompatible:
        return None
    if best.promise.goodput <= 0.0:
        return None
    for name in QUICK:
        try:
            other = solved(case.problem, name).promise.goodput
        except Incompatible:
            continue
        if other > 0.0:
            row[name] = best.promise.goodput / other
    saved = savings(case.problem, 0.5 * best.promise.goodput)
    return row | ({"saved": saved} if saved is not None else {})


def savings(problem: Problem, rate: float) -> float | None:
    """What the cheapest plan for a rate saves against the cheapest of one type; None where no single type serves it."""
    prices = []
    for name in sorted({pool.accelerator.name for pool in problem.inventory.pools}):
        alone = Inventory(
            tuple(p for p in problem.inventory.pools if p.accelerator.name == name), problem.inventory.network
        )
        price = _price(problem.on(alone), rate)
        if price is not None:
            prices.append(price)
    mixed = _price(problem, rate)
    return 1.0 - min(mixed, *prices) / min(prices) if prices and mixed is not None else None


def _price(problem: Problem, rate: float) -> float | None:
    asked = replace(problem, rate=rate)
    try:
        plan = cheapest(Search(asked, perf_counter))
    except Incompatible:
        return None
    return sum(group.price_usd_hour(asked.inventory) for group in plan.groups)


def case_scale() -> Part:
    """64, 128 and 512 accelerators of four types: time, and goodput beside the best plain deployment."""
    figures: dict[str, float] = {}
    notes = []
    for count in SCALES:
        nodes = {f"n{at}": (_TYPES[at % len(_TYPES)], 8) for at in range(count // 8)}
        workload = synthetic(3000, 1000, 200, prompt_cv=0.9, output_cv=0.8, longest_tokens=4096, seed=1)
        problem = problem_of(cluster(nodes, 100.0), "Llama-2-70B", workload, Slo(ttft_s=3.0, tpot_s=0.15))
        found = solved(problem, "best", seconds=240.0)
        plain = {
            name: solved(problem, name, seconds=120.0).promise.goodput for name in ("coupled", "thirds", "exhaustive")
        }
        best = max(plain.values())
        figures |= {
            f"scale_{count}_found_s": found.found_s,
            f"scale_{count}_took_s": found.took_s,
            f"scale_{count}_goodput_requests_per_s": found.promise.goodput,
            f"scale_{count}_over_plain_ratio": found.promise.goodput / best if best else float("inf"),
        }
        notes.append(f"{count}: {len(found.plan.groups)} groups, {found.runs} simulations")
    growth = log(figures["scale_512_took_s"] / figures["scale_64_took_s"]) / log(512 / 64)
    figures["scale_growth_exponent"] = growth
    ahead = min(figures[f"scale_{count}_over_plain_ratio"] for count in SCALES)
    return figures, {"ahead of the best plain deployment": aim(">= 1", f"{ahead:.2f} x", ahead >= 1.0)}, notes


def mapped(work: Callable[[int], Any], seeds: range, processes: int, want: int) -> list[Any]:
    """The first `want` results that are any, in the order of their seeds."""
    found: list[Any] = []
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for at in range(seeds.start, seeds.stop, 2 * processes):
            batch = range(at, min(at + 2 * processes, seeds.stop))
            found += [one for one in pool.map(work, batch) if one is not None]
            if len(found) >= want:
                break
    return found[:want]
