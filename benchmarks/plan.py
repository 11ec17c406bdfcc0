"""`polyphase bench plan`: Huawei's ranking of tensor-parallel degrees, ZTE's P:D recommendations, small random
inventories beside brute force, large inventories, and refusals of impossible requests.

The parts `thunderserve`, `sizes`, `bandwidth` and `loss` are in `plan_thunderserve`, the part `live` in `plan_live`.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import log
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from benchmarks.papers.testbed import ACCELERATORS, sharegpt
from benchmarks.plan_live import case_live
from benchmarks.plan_thunderserve import (
    NO_ITL_S,
    CaseResult,
    case_32,
    case_bandwidth,
    case_loss,
    case_sizes,
    cluster,
    drawn,
    library,
    problem_of,
    solved,
)
from benchmarks.results import aim
from shared.cost.kinds import Workshop
from shared.cost.library import Library
from shared.cost.network import Link, Network
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.errors import Incompatible, InvalidRequest, PolyphaseError
from shared.plan.answer import cheapest, nearest
from shared.plan.group import Group
from shared.plan.group import Part as StagePart
from shared.plan.inventory import Inventory, Pool
from shared.plan.methods.papers import machine_throughputs, recommended
from shared.plan.methods.registry import QUICK
from shared.plan.methods.simple import deployments
from shared.plan.plan import Plan, deployed
from shared.plan.problem import Problem
from shared.plan.search import Search
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, RunSpec, with_words
from shared.sim.workload import Workload, synthetic

# Refusals of impossible requests, which name the nearest possible one.


def case_impossible() -> CaseResult:
    """A model that fits nowhere, an SLO that nothing meets, nodes without a link, an unknown accelerator."""
    pair = cluster({"one": ("A10", 2), "two": ("L4", 1)}, 25.0)
    workload = synthetic(300, 900, 200, seed=1)

    def too_large() -> str:
        return nearest(problem_of(pair, "Llama-2-70B", workload, Slo()), perf_counter)

    def too_tight() -> str:
        return nearest(problem_of(pair, "Llama-3-8B", workload, Slo(ttft_s=0.001, tpot_s=0.0001)), perf_counter)

    def apart() -> str:
        return error_of(lambda: Inventory(pair.pools, Network(pair.network.inside)).require_joined())

    def unknown() -> str:
        return error_of(lambda: library().catalogue.get("A1000-SXM"))

    aims = {}
    for what, ask, want in (
        ("a model that fits nowhere", too_large, "GB are missing"),
        ("an SLO that nothing meets", too_tight, "the nearest possible SLO: TTFT"),
        ("nodes without a link", apart, "no link between the nodes 'one' and 'two'"),
        ("an unknown accelerator", unknown, "did you mean"),
    ):
        message = ask()
        aims[what] = aim(want, message, want in message)
    return {}, aims, []


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except PolyphaseError as error:
        return error.message
    return "no error"


# Huawei's ranking of tensor-parallel degrees, and ZTE's P:D recommendations.

# The machine and the model whose degrees Huawei ranks (5.1, Fig 4).
_MACHINE = ("V100-32-PCIe", 8, "Llama-3-8B")
_SAMPLE, _SENT = 200, 250
# ZTE's Figs 7, 8, 9 and 10: prompt, output, requests a second. The lengths of Fig 6 are not in its text.
_SCENARIOS = ((256, 256, 2.0), (1024, 1024, 3.0), (512, 1024, 3.0), (1024, 1024, 2.0))
_ZTE_SLO = Slo(ttft_s=2.0, tpot_s=0.1, itl_s=NO_ITL_S)


def case_huawei(data: Path) -> CaseResult:
    """The estimate's order of the degrees beside the simulator's."""
    figures: dict[str, float] = {}
    sample, sent = sharegpt(data, _SAMPLE, seed=1), sharegpt(data, _SENT, seed=2)
    pairs = list(zip(sample.prompt_tokens.tolist(), sample.output_tokens.tolist(), strict=True))
    lab = Library.built_in(ACCELERATORS)
    name, count, model = _MACHINE
    search = Search(_alone(lab, name, count, model, sent), perf_counter)
    estimated = machine_throughputs(search, name, count, pairs)
    simulated = {degree: _throughput(search, degree, count, sent) for degree in estimated}
    ours, real = (sorted(by, key=lambda t: -by[t]) for by in (estimated, simulated))
    for degree in estimated:
        figures[f"huawei_t{degree}_estimated_tokens_per_s"] = estimated[degree]
        figures[f"huawei_t{degree}_simulated_tokens_per_s"] = simulated[degree]
    ranking = f"estimate {' > '.join(map(str, ours))}; simulated {' > '.join(map(str, real))}"
    return figures, {f"Huawei: degrees of {count} x {name}, {model}": aim("the same order", ranking, ours == real)}, []


def case_zte() -> CaseResult:
    """P:D for its scenarios over its two GPUs, at the rates that it runs."""
    figures: dict[str, float] = {}
    notes = []
    lab = Library.built_in(ACCELERATORS)
    aims = {}
    for prompt, output, rate in _SCENARIOS:
        pools = tuple(
            Pool(node, lab.catalogue.get(name), 4, lab.catalogue.get(name).price_usd_hour)
            for node, name in (("a", "ZTE-GPU-A"), ("b", "ZTE-GPU-B"))
        )
        network = Network(dict.fromkeys("ab", Link(32e9, 1e-4, 0.8)), {("a", "b"): Link(25e9, efficiency=0.8)})
        workload = synthetic(500, prompt, output)
        problem = Problem(
            Inventory(pools, network), Workshop(lab, lab.geometry("Llama-2-7B")), workload, _ZTE_SLO, rate=rate
        )
        search = Search(problem, perf_counter)
        ratio = recommended(search)
        if ratio is None:
            aims[f"ZTE {prompt}+{output} at {rate:g}/s"] = aim("a ratio", "none", False)
            continue
        what, key = f"ZTE {prompt}+{output} at {rate:g}/s", f"zte_{prompt}_{output}_{rate:g}"
        figures |= {
            f"{key}_prefill": ratio.prefills,
            f"{key}_decode": ratio.decodes,
            f"{key}_requests_per_s": ratio.rate,
        }
        first, then = ratio.prefill, ratio.decode
        notes.append(
            f"{what}: {ratio.prefills}P{ratio.decodes}D, prefill on {first.accelerator} ({first.group.layout}, "
            f"{first.rate:.2f} requests/s each), decode on {then.accelerator} ({then.group.layout}, "
            f"{then.rate:.2f} each)"
        )
        aims[what] = aim(f"serves {rate:g}/s", f"{ratio.rate:.2f}", ratio.rate >= rate)
    return figures, aims, notes


def _alone(lab: Library, name: str, count: int, model: str, sent: Workload) -> Problem:
    pool = Pool("machine", lab.catalogue.get(name), count, lab.catalogue.get(name).price_usd_hour)
    link = Link(16e9, 1e-4, 0.8)
    limits = EngineLimits(batched_tokens=8192, sequences=256, prefill_first=True)
    inventory = Inventory((pool,), Network({"machine": link}))
    return Problem(inventory, Workshop(lab, lab.geometry(model)), sent, limits=limits)


def _throughput(search: Search, degree: int, count: int, sent: Workload) -> float:
    """Tokens a second of the whole machine, each of its instances with its share of all requests at once."""
    problem = search.problem
    groups = (Group(Role.DECODE, degree, (StagePart(0, problem.shop.geometry.layers),)),) * (count // degree)
    plan = Plan(groups, policies="round_robin+split=none+dispatch=random")
    instances, network = deployed(problem, plan, search.estimator.costs, search.estimator.places)
    run = with_words(RunSpec(network=network), plan.policies)
    result = simulate(sent.at_once(), instances[:1], run)
    done = result.outcomes.completed
    tokens = float((result.outcomes.prompt_tokens[done] + result.outcomes.output_tokens[done]).sum())
    return (count // degree) * tokens / result.duration_s


# Small random inventories beside brute force, others beside every method, and large ones.

ORACLE, BESIDE = 50, 10  # inventories
_TIE, _NEAR = 0.01, 0.02  # goodputs that are equal, and near, as runs differ by chance
_FIRST_SEED = 100
SCALES = (64, 128, 512)
_PLAIN = ("coupled", "thirds", "exhaustive")
_TYPES = ("A100-SXM-80", "L40S", "A40", "RTX-3090-Ti")


def case_oracle(processes: int = 2) -> CaseResult:
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


def case_beside(processes: int = 2) -> CaseResult:
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
    problem_at_rate = replace(problem, rate=rate)
    try:
        plan = cheapest(Search(problem_at_rate, perf_counter))
    except Incompatible:
        return None
    return sum(group.price_usd_hour(problem_at_rate.inventory) for group in plan.groups)


def case_scale() -> CaseResult:
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


@dataclass(frozen=True, slots=True)
class PlanBenchOptions:
    """parts: names of `PARTS`; all without any. processes: that search, where there are many inventories."""

    data: Path
    parts: tuple[str, ...] = ()
    processes: int = 2


PARTS: dict[str, Callable[[PlanBenchOptions], CaseResult]] = {
    "thunderserve": lambda options: case_32(options.data),
    "sizes": lambda options: case_sizes(options.data),
    "bandwidth": lambda _: case_bandwidth(),
    "loss": lambda options: case_loss(options.data),
    "oracle": lambda options: case_oracle(options.processes),
    "huawei": lambda options: case_huawei(options.data),
    "zte": lambda _: case_zte(),
    "scale": lambda _: case_scale(),
    "beside": lambda options: case_beside(options.processes),
    "impossible": lambda _: case_impossible(),
    "live": lambda options: case_live(options.data),
}


def run_plan_bench(options: PlanBenchOptions) -> dict[str, Any]:
    """Each part in turn. Raises InvalidRequest for an unknown part."""
    for name in options.parts:
        if name not in PARTS:
            raise InvalidRequest(f"no part {name!r}; there are {', '.join(PARTS)}")
    figures: dict[str, float] = {}
    aims: dict[str, Any] = {}
    notes: list[str] = []
    for name in options.parts or PARTS:
        found, met, more = PARTS[name](options)
        figures |= found
        aims |= met
        notes += more
    return {"figures": figures, "aims": aims, "notes": notes}
