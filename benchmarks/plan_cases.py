"""The simulated parts of `polyphase bench plan`: the planner on the cases of ThunderServe, Huawei and ZTE, beside the
brute force and every other method on random inventories, and on 64 to 512 accelerators."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean
from time import perf_counter, process_time
from typing import Any

from benchmarks.goodput import goodput as rate_at_target
from benchmarks.papers.testbed import ACCELERATORS, azure, sharegpt
from benchmarks.papers.thunderserve import CONTEXT_TOKENS, DEPLOYMENTS, LOST, MODEL, TRACES
from benchmarks.results import Aim, Result, aim, merged, progress, result
from shared.cost.kinds import EngineModels
from shared.cost.library import Library
from shared.cost.network import Link, Network
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.domain.kv import Codec
from shared.errors import Incompatible
from shared.plan.estimate import Estimator
from shared.plan.evaluate import settled_attainment
from shared.plan.find import cheapest, fitting
from shared.plan.group import Group, Part
from shared.plan.inventory import Inventory, Pool, read_inventory
from shared.plan.methods.papers import machine_throughputs, recommended
from shared.plan.methods.registry import QUICK, method
from shared.plan.methods.simple import COUPLED, SPLIT, deployments
from shared.plan.plan import Plan, deployed, routes_of
from shared.plan.problem import Problem
from shared.plan.robust import losses
from shared.plan.running import after_loss, reschedule
from shared.plan.search import AS_SERVED, ROBUST, Outcome, ScoredPlan, Search, run_method
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, RunSpec, with_words
from shared.sim.traces import read_trace
from shared.sim.workload import CHATS, TURNS_A_CHAT, Workload, conversations, poisson, synthetic

INSIDE = Link(16e9, 1e-4, 0.8)
PLAIN = RunSpec(migration=False)  # and without a step budget, as the papers' engines
NO_ITL_S = 3600.0  # the papers name no target for the gaps between tokens


@cache
def library() -> Library:
    return Library.built_in(ACCELERATORS)


def cluster(nodes: Mapping[str, tuple[str, int]], between: Link, inside: Link = INSIDE) -> Inventory:
    """Nodes of one type each, by name, and one link between all."""
    catalogue, names = library().catalogue, sorted(nodes)
    pools = tuple(
        Pool(name, catalogue.get(kind), count, catalogue.get(kind).price_usd_hour)
        for name, (kind, count) in nodes.items()
    )
    links = {(one, other): between for one in names for other in names if one < other}
    return Inventory(pools, Network(dict.fromkeys(names, inside), links))


def ethernet(gbps: float) -> Link:
    return Link(gbps * 1e9 / 8.0)


def problem_of(inventory: Inventory, model: str, workload: Workload, slo: Slo, codec: Codec = Codec.RAW) -> Problem:
    """A problem with a workshop of its own, so that no search profits from the results of another one."""
    return Problem(inventory, EngineModels(library(), library().geometry(model)), workload, slo, codec=codec)


def search_of(problem: Problem) -> Search:
    return Search(problem, perf_counter, PLAIN)


def solved(problem: Problem, name: str, seconds: float = float("inf"), robust: float = ROBUST) -> Outcome:
    until_s = perf_counter() + seconds
    return run_method(name, method(name), Search(problem, perf_counter, PLAIN, until_s=until_s, robust=robust))


def goodput(problem: Problem, name: str) -> float:
    """The most that a plan of a method serves; 0 where nothing fits."""
    try:
        return solved(problem, name, robust=0.0).promise.goodput
    except Incompatible:
        return 0.0


def groups_text(problem: Problem, groups: Sequence[Group]) -> str:
    return ", ".join(f"{one.role.value} {one.words(problem.inventory)} {one.layout}" for one in groups)


# ThunderServe's 32 GPUs.

FILE = Path(__file__).with_name("inventories") / "thunderserve.yaml"
SLO = Slo(ttft_s=3.0, tpot_s=0.15, itl_s=NO_ITL_S)
SIZES = {16: ("a40", "a6000-0", "3090ti-0"), 24: ("a40", "a6000-0", "a6000-1", "a5000-0", "3090ti-0")}
OVER_DISTSERVE = {"coding": 1.5, "conversation": 2.1}  # the paper's
HOME = 8  # A100 of the in-house server
CONVERGED = 0.98  # of the goodput in the end
LOADED = 0.9  # of the goodput of a full search, where what is left of a plan is compared with it


@cache
def requests(data: Path, kind: str) -> Workload:
    """The Azure trace's requests that the model's context holds."""
    return replace(azure(data, TRACES[kind], 3000, CONTEXT_TOKENS), name=kind)


def thunderserve(data: Path, kind: str, nodes: Sequence[str] = ()) -> Problem:
    """The paper's inventory, or some of its nodes."""
    whole = read_inventory(FILE)[0]
    pools = tuple(pool for pool in whole.pools if not nodes or pool.node in nodes)
    return problem_of(Inventory(pools, whole.network), MODEL, requests(data, kind), SLO, Codec.INT4)


def table_3(kind: str, inventory: Inventory) -> tuple[tuple[Group, ...], tuple[int, ...]]:
    """The paper's own plan for its 32 GPUs, and the positions of the groups that are lost (5.4)."""
    free, groups, lost = [pool.count for pool in inventory.pools], list[Group](), list[int]()
    for name, (role, count, stages) in DEPLOYMENTS[kind].items():
        for _ in range(count):
            pool_of = {}
            for accelerator, need in Counter(s.accelerator for s in stages for _ in range(s.tensor_parallel)).items():
                pool_of[accelerator] = at = next(
                    at
                    for at, pool in enumerate(inventory.pools)
                    if pool.accelerator.name == accelerator and free[at] >= need
                )
                free[at] -= need
            if name == LOST:
                lost.append(len(groups))
            parts = tuple(Part(pool_of[stage.accelerator], stage.layers) for stage in stages)
            groups.append(Group(role, stages[0].tensor_parallel, parts))
    return tuple(groups), tuple(lost)


def case_32(data: Path) -> Result:
    """The paper's inventory: time, goodput beside the paper's plan and beside 8 A100, groups by workload.

    The paper's gains of 1.5 and 2.1 (5.2, Fig 9) are in throughput and against DistServe, which splits the phases. Its
    comparison with vLLM, which serves coupled, is in latency deadlines alone.
    """
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
    notes, shares = [], {}
    for kind in TRACES:
        problem = thunderserve(data, kind)
        found, converged_s = converged(problem)
        ours, groups = found.promise.goodput, found.plan.groups
        groups_3, _ = table_3(kind, problem.inventory)
        search = search_of(problem)
        estimate = search.estimator.estimate(groups_3, local=False)
        routed = Plan(groups_3, routes_of(estimate))
        by_routes = search.evaluator.goodput(replace(routed, policies=routed.routed(problem)), estimate.goodput)
        by_adaptive = search.evaluator.goodput(Plan(groups_3), estimate.goodput)
        home = problem_of(
            cluster({"home": ("A100-SXM-80", HOME)}, ethernet(100.0)), MODEL, requests(data, kind), SLO, Codec.INT4
        )
        split = split_goodput(home)
        prefilling = sum(group.accelerators for group in groups if group.role is Role.PREFILL)
        shares[kind] = prefilling / sum(group.accelerators for group in groups)
        figures |= {
            f"{kind}_goodput_requests_per_s": ours,
            f"{kind}_paper_plan_routes_requests_per_s": by_routes,
            f"{kind}_paper_plan_adaptive_requests_per_s": by_adaptive,
            f"{kind}_8_a100_split_requests_per_s": split,
            f"{kind}_8_a100_coupled_requests_per_s": solved(home, "coupled").promise.goodput,
            f"{kind}_converged_s": converged_s,
            f"{kind}_took_s": found.took_s,
            f"{kind}_prefill_groups": found.plan.roles[Role.PREFILL],
            f"{kind}_decode_groups": found.plan.roles[Role.DECODE],
            f"{kind}_prefill_accelerators_share": shares[kind],
        }
        gain, over = ours / max(by_routes, by_adaptive), ours / split if split else float("inf")
        aims[f"{kind}: converged, s"] = aim("<= 5", f"{converged_s:.1f}", converged_s <= 5.0)
        aims[f"{kind}: against the paper's plan"] = aim(">= 1", f"{gain:.2f} x", gain >= 1.0)
        want = f"> 1 (paper: {OVER_DISTSERVE[kind]:g}, in throughput)"
        aims[f"{kind}: against phases split on 8 A100"] = aim(want, f"{over:.2f} x", over > 1.0)
        notes.append(f"{kind}: {groups_text(problem, groups)}")
    got = f"{shares['coding']:.2f} and {shares['conversation']:.2f} of the accelerators"
    more = aim("more", got, shares["coding"] > shares["conversation"])
    return result(figures, aims | {"more for prefill in coding than in conversation": more}, notes)


def case_precision(data: Path) -> Result:
    """The paper's inventory without and with int8 weights for prompts, which all its types compute at twice the rate:
    goodput for a dollar, and what the rate that is served without them costs.
    """
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
    notes = []
    for kind in TRACES:
        plain = thunderserve(data, kind)
        mixed = replace(thunderserve(data, kind), quantised=("int8",))
        found = {"one": converged(plain, robust=0.0)[0], "mixed": converged(mixed, robust=0.0)[0]}
        for name, problem in (("one", plain), ("mixed", mixed)):
            plan, goodput = found[name].plan, found[name].promise.goodput
            dollars = problem.price_usd_hour(plan.groups)
            figures |= {
                f"{kind}_{name}_precision_goodput_requests_per_s": goodput,
                f"{kind}_{name}_precision_requests_per_usd": 3600.0 * goodput / dollars,
            }
            notes.append(f"{kind}, {name} precision: {groups_text(problem, plan.groups)}")
        gain = found["mixed"].promise.goodput / found["one"].promise.goodput
        aims[f"{kind}: goodput with int8 prefill"] = aim(">= 1", f"{gain:.2f} x", gain >= 1.0)
    return result(figures, aims, notes)


def case_sizes(data: Path) -> Result:
    """16 and 24 GPUs: how long until it converges."""
    return result(
        {
            f"{kind}_{count}_converged_s": converged(thunderserve(data, kind, nodes))[1]
            for count, nodes in SIZES.items()
            for kind in TRACES
        }
    )


def converged(problem: Problem, robust: float = ROBUST) -> tuple[Outcome, float]:
    """The outcome of `best`, and the seconds until its goodput was near that of the end."""
    began = perf_counter()
    curve: list[tuple[float, float]] = []

    def report(_: str, found: ScoredPlan | None) -> None:
        if found:
            curve.append((perf_counter() - began, found[1]))

    search = Search(problem, perf_counter, PLAIN, report=report, helped=True, robust=robust)
    outcome = run_method("best", method("best"), search)
    return outcome, next(at_s for at_s, goodput in curve if goodput >= CONVERGED * outcome.promise.goodput)


def split_goodput(home: Problem) -> float:
    """Phases split on one server, as DistServe does: the best of all numbers of prefill and decode groups.

    Groups of a phase are alike, of one size, in the layout that does most; the estimate chooses three, the simulator
    one of them. Requests go through both phases (`SPLIT`).
    """
    search = search_of(home)
    layouts = search.estimator.layouts
    candidates: list[tuple[Group, ...]] = []
    for prefill_size, decode_size in product((1, 2, 4), repeat=2):
        prefill = layouts.best({0: prefill_size}, Role.PREFILL)
        decode = layouts.best({0: decode_size}, Role.DECODE)
        if prefill is None or decode is None:
            continue
        for prefills in range(1, HOME // prefill_size + 1):
            decodes = (HOME - prefills * prefill_size) // decode_size
            if decodes:
                candidates.append((prefill,) * prefills + (decode,) * decodes)
    candidates.sort(key=lambda groups: -search.estimator.estimate(groups, local=False).goodput)
    return max(search.score(Plan(groups, policies=SPLIT), local=False)[1] for groups in candidates[:3])


def case_bandwidth() -> Result:
    """Appendix H: 4 A40 and 4 3090 Ti at 40 and at 5 Gb/s; the paper does not give the answers of its prompts of 1,024
    tokens, which are those of coding here."""
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
    notes = []
    workload = synthetic(1000, 1024, 28, output_cv=1.0, longest_tokens=CONTEXT_TOKENS, seed=1)
    for gbps, want, paper in ((40.0, "A40 prefills, 3090 Ti decodes", 2.0), (5.0, "each node holds both phases", 1.4)):
        inventory = cluster({"a40": ("A40", 4), "3090ti": ("RTX-3090-Ti", 4)}, ethernet(gbps))
        problem = problem_of(inventory, MODEL, workload, SLO, Codec.INT4)
        found = solved(problem, "best", robust=0.0)
        ours, groups = found.promise.goodput, found.plan.groups
        if gbps == 40.0:
            met = [_nodes(problem, [g for g in groups if g.role is role]) for role in Role] == [{"a40"}, {"3090ti"}]
        else:
            decoding = [groups[route.decode] for route in found.plan.routes]
            computing = [groups[r.decode if r.prefill is None else r.prefill] for r in found.plan.routes]
            met = _nodes(problem, decoding) == _nodes(problem, computing) == {"a40", "3090ti"}
        search = search_of(problem)  # each node one group, which computes whole requests
        pair = [search.estimator.layouts.best({at: pool.count}, Role.DECODE) for at, pool in enumerate(inventory.pools)]
        coupled = Plan(tuple(group for group in pair if group is not None), policies=COUPLED)
        base = search_of(problem).score(coupled, local=True)[1]
        figures[f"link_{gbps:g}_goodput_requests_per_s"] = ours
        figures[f"link_{gbps:g}_coupled_requests_per_s"] = base
        aims[f"{gbps:g} Gb/s"] = aim(want, groups_text(problem, groups), met)
        notes.append(f"{gbps:g} Gb/s: {ours / base:.2f} x two coupled groups (paper: {paper:g})")
    return result(figures, aims, notes)


def _nodes(problem: Problem, groups: Sequence[Group]) -> set[str]:
    return {problem.inventory.pools[pool].node for group in groups for pool in group.uses}


def case_loss(data: Path) -> Result:
    """Each group of our plan is lost in turn, and of the paper's plan 4 of 32 GPUs (Appendix G, Fig 11): flips alone
    against a whole new search for what is left.
    """
    parts = []
    for kind in TRACES:
        problem = thunderserve(data, kind)
        found = converged(problem)[0]
        parts += [_without_each_group(kind, problem, found), _paper_without_4(kind, problem)]
    return merged(*parts)


def _without_each_group(kind: str, problem: Problem, found: Outcome) -> Result:
    search, notes = search_of(problem), list[str]()
    shares, took_s = list[tuple[float, float]](), list[float]()
    search.estimator.estimate(found.plan.groups)  # as a planner that watches the plan has done
    for loss in losses(search.estimator, found.plan):
        left, lost = after_loss(found.plan, [loss.lost])[0], found.plan.groups[loss.lost]
        began_mono = perf_counter()
        reschedule(search.estimator, Plan(left, policies=found.plan.policies))
        took_s.append(perf_counter() - began_mono)
        gone: Counter[tuple[str, str]] = Counter()
        for pool, count in lost.uses.items():
            entry = problem.inventory.pools[pool]
            gone[entry.node, entry.accelerator.name] += count
        anew = search_of(replace(problem, inventory=problem.inventory.without(dict(gone))))
        anew.robust = 0.0
        full = run_method("best", method("best"), anew)
        rate = LOADED * full.promise.goodput
        own, other = search.evaluator.attainment(loss.plan, rate), anew.evaluator.attainment(full.plan, rate)
        shares.append((own, own / other))
        words = f"{lost.role.value} {lost.words(problem.inventory)}"
        notes.append(f"{kind}, without {words}, {loss.flips} flips: {own:.3f} at {rate:.2f}/s; anew {other:.3f}")
        progress(notes[-1])
    worst, ratio = min(own for own, _ in shares), min(ratio for _, ratio in shares)
    given_up = found.endurance.given_up if found.endurance else 0.0
    figures = {
        f"{kind}_goodput_requests_per_s": found.promise.goodput,
        f"{kind}_given_up_share": given_up,
        f"{kind}_worst_loss_attainment_share": worst,
        f"{kind}_worst_loss_over_full_search_ratio": ratio,
        f"{kind}_reschedule_max_s": max(took_s),
    }
    got = f"{worst:.3f} at worst, {ratio:.3f} x a full search; costs {100 * given_up:.1f} % of goodput"
    aims = {
        f"{kind}: any one group lost, against a full search": aim("within 5 %", got, ratio >= 0.95),
        f"{kind}, ours: time of flips, s": aim("<= 0.5 (paper: 13)", f"{max(took_s):.2f}", max(took_s) <= 0.5),
    }
    return result(figures, aims, notes)


def _paper_without_4(kind: str, problem: Problem) -> Result:
    paper, lost = table_3(kind, problem.inventory)
    groups, _ = after_loss(Plan(paper), lost)
    search = search_of(problem)
    search.estimator.estimate(paper)
    began_mono = perf_counter()
    proposal = reschedule(search.estimator, Plan(groups))
    took_s = perf_counter() - began_mono
    flipped = search.evaluator.goodput(proposal.plan, proposal.after.goodput)
    figures = {
        f"{kind}_paper_reschedule_s": took_s,
        f"{kind}_paper_flipped_requests_per_s": flipped,
        f"{kind}_paper_unchanged_requests_per_s": search.evaluator.goodput(Plan(groups), flipped),
        f"{kind}_paper_flips": len(proposal.flips),
    }
    listed = groups_text(problem, [groups[at] for at in proposal.flips]) or "nothing"
    aims = {f"{kind}, paper's plan: time of flips, s": aim("<= 0.5 (paper: 13)", f"{took_s:.2f}", took_s <= 0.5)}
    return result(figures, aims, [f"{kind}, paper's plan: flips {listed}"])


# Huawei's ranking of tensor-parallel degrees (5.1, Fig 4), and ZTE's P:D recommendations.

MACHINE = ("V100-32-PCIe", 8, "Llama-3-8B")
# ZTE's Figs 7, 8, 9 and 10: prompt, output, requests a second. The lengths of Fig 6 are not in its text.
SCENARIOS = ((256, 256, 2.0), (1024, 1024, 3.0), (512, 1024, 3.0), (1024, 1024, 2.0))


def case_huawei(data: Path) -> Result:
    """The estimate's order of the degrees beside the simulator's."""
    sample, sent = sharegpt(data, 200, seed=1), sharegpt(data, 250, seed=2)
    pairs = list(zip(sample.prompt_tokens.tolist(), sample.output_tokens.tolist(), strict=True))
    name, count, model = MACHINE
    limits = EngineLimits(batched_tokens=8192, sequences=256, prefill_first=True)
    machine = cluster({"machine": (name, count)}, INSIDE)
    search = search_of(Problem(machine, EngineModels(library(), library().geometry(model)), sent, limits=limits))
    estimated = machine_throughputs(search, name, count, pairs)
    simulated = {degree: _machine_tokens_per_s(search, degree, sent) for degree in estimated}
    figures = {}
    for degree in estimated:
        figures[f"huawei_t{degree}_estimated_tokens_per_s"] = estimated[degree]
        figures[f"huawei_t{degree}_simulated_tokens_per_s"] = simulated[degree]
    ours, real = (" > ".join(map(str, sorted(by, key=lambda t: -by[t]))) for by in (estimated, simulated))
    same = aim("the same order", f"estimate {ours}; simulated {real}", ours == real)
    return result(figures, {f"Huawei: degrees of {count} x {name}, {model}": same})


def _machine_tokens_per_s(search: Search, degree: int, sent: Workload) -> float:
    """Of the whole machine, each of its instances with its share of all requests at once."""
    problem, count = search.problem, MACHINE[1] // degree
    groups = (Group(Role.DECODE, degree, (Part(0, problem.models.geometry.layers),)),) * count
    plan = Plan(groups, policies="round_robin+split=none+dispatch=random")
    instances, network = deployed(problem, plan, search.estimator.costs, search.estimator.places)
    run = simulate(sent.at_once(), instances[:1], with_words(RunSpec(network=network), plan.policies))
    done = run.outcomes.completed
    tokens = float((run.outcomes.prompt_tokens[done] + run.outcomes.output_tokens[done]).sum())
    return count * tokens / run.duration_s


def case_zte() -> Result:
    """P:D for its scenarios over its two GPUs, at the rates that it runs."""
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
    notes = []
    nodes = {"a": ("ZTE-GPU-A", 4), "b": ("ZTE-GPU-B", 4)}
    inventory = cluster(nodes, Link(25e9, efficiency=0.8), Link(32e9, 1e-4, 0.8))
    for prompt, output, rate in SCENARIOS:
        slo, workload = Slo(ttft_s=2.0, tpot_s=0.1, itl_s=NO_ITL_S), synthetic(500, prompt, output)
        what, key = f"ZTE {prompt}+{output} at {rate:g}/s", f"zte_{prompt}_{output}_{rate:g}"
        ratio = recommended(search_of(replace(problem_of(inventory, "Llama-2-7B", workload, slo), rate=rate)))
        if ratio is None:
            aims[what] = aim("a ratio", "none", False)
            continue
        figures |= {
            f"{key}_prefill": ratio.prefills,
            f"{key}_decode": ratio.decodes,
            f"{key}_requests_per_s": ratio.rate,
        }
        phases = ", ".join(
            f"{phase} on {one.accelerator} ({one.group.layout}, {one.rate:.2f} requests/s each)"
            for phase, one in (("prefill", ratio.prefill), ("decode", ratio.decode))
        )
        notes.append(f"{what}: {ratio.prefills}P{ratio.decodes}D, {phases}")
        aims[what] = aim(f"serves {rate:g}/s", f"{ratio.rate:.2f}", ratio.rate >= rate)
    return result(figures, aims, notes)


# Random inventories beside the brute force and beside every method, and large inventories.

ORACLE, BESIDE = 50, 10  # inventories
TIE, NEAR = 0.01, 0.02  # goodputs that are equal, and near, as runs differ by chance
FIRST_SEED = 100
KINDS = ("A100-SXM-80", "A100-PCIe-40", "A10", "A40", "L40S", "RTX-A5000", "RTX-A6000", "RTX-3090-Ti", "RTX-4090", "L4")
MODELS = ("Llama-3-8B", "Llama-2-13B", "Qwen2.5-14B")
LENGTHS = ((900, 200), (2000, 40), (300, 400))  # mean prompt and output tokens
GBPS = (5.0, 25.0, 100.0)
SCALES = (64, 128, 512)
TYPES = ("A100-SXM-80", "L40S", "A40", "RTX-3090-Ti")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A random problem, and its description."""

    problem: Problem
    words: str


def drawn(seed: int, max_accelerators: int = 8) -> Drawn:
    """A random inventory of up to `max_accelerators` accelerators on one to three nodes, a model and a workload."""
    rng = Random(seed)
    left, nodes = rng.randint(2, max_accelerators), {}
    for at in range(rng.randint(1, 3)):
        count = min(left, rng.choice((1, 2, 2, 4)))
        if count:
            nodes[f"n{at}"] = (rng.choice(KINDS), count)
            left -= count
    inventory = cluster(nodes, ethernet(rng.choice(GBPS)))
    prompt, output = rng.choice(LENGTHS)
    workload = synthetic(1000, prompt, output, prompt_cv=0.8, output_cv=0.8, longest_tokens=4096, seed=seed)
    model = rng.choice(MODELS)
    words = f"{model}, {prompt}+{output} tokens on {', '.join(map(str, inventory.pools))}"
    return Drawn(problem_of(inventory, model, workload, Slo(ttft_s=2.0, tpot_s=0.1)), words)


def mapped(work: Callable[[int], Any], seeds: range, processes: int, want: int) -> list[Any]:
    """The first `want` results that are not None, in the order of their seeds."""
    found: list[Any] = []
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for at in range(seeds.start, seeds.stop, 2 * processes):
            batch = range(at, min(at + 2 * processes, seeds.stop))
            found += [one for one in pool.map(work, batch) if one is not None]
            if len(found) >= want:
                break
    return found[:want]


def case_oracle(processes: int = 2) -> Result:
    """50 inventories of up to 8 accelerators: how near `best` comes to the optimum."""
    rows = mapped(beside_oracle, range(FIRST_SEED, FIRST_SEED + 3 * ORACLE), processes, ORACLE)
    ratios = [ratio for ratio, *_ in rows]
    optimal, worst = sum(ratio >= 1.0 - TIE for ratio in ratios) / len(ratios), min(ratios)
    figures = {
        "oracle_inventories": len(rows),
        "oracle_optimal_share": optimal,
        "oracle_worst_ratio": worst,
        "oracle_mean_ratio": fmean(ratios),
        "oracle_deployments_mean": fmean(count for _, count, _ in rows),
    }
    aims = {
        "the brute-force optimum": aim(">= 95 % of them", f"{100 * optimal:.0f} %", optimal >= 0.95),
        "else within": aim("2 %", f"{100 * (1 - worst):.1f} %", worst >= 1.0 - NEAR),
    }
    notes = [f"{ratio:.3f} of the optimum: {words}" for ratio, _, words in sorted(rows)[:5] if ratio < 1.0 - TIE]
    return result(figures, aims, notes)


def beside_oracle(seed: int) -> tuple[float, int, str] | None:
    """Goodput of `best` over the oracle's, on the same judge; the oracle's deployments. None where nothing fits."""
    case = drawn(seed)
    best, oracle = goodput(case.problem, "best"), goodput(case.problem, "bruteforce")
    if oracle <= 0.0:
        return None
    return best / max(oracle, best), sum(1 for _ in deployments(search_of(case.problem))), case.words


def case_beside(processes: int = 2) -> Result:
    """Ten inventories, every method on each, at the price of the inventory; and the cheapest plan for a rate."""
    rows = mapped(beside_methods, range(FIRST_SEED, FIRST_SEED + 4 * BESIDE), processes, BESIDE)
    figures: dict[str, float] = {}
    for name in QUICK:
        ratios = [row[name] for row in rows if name in row]
        figures[f"best_over_{name}_mean_ratio"] = fmean(ratios)
        figures[f"best_over_{name}_least_ratio"] = min(ratios)
    gains = [min(row[name] for name in QUICK if name in row) for row in rows]
    saved = [row["saved"] for row in rows if "saved" in row]
    figures |= {"best_over_next_mean_ratio": fmean(gains), "cheapest_saved_mean_share": fmean(saved) if saved else 0.0}
    shown = f"{100 * fmean(saved):.0f} % saved on average, least {100 * min(saved):.0f} %"
    aims = {
        "best behind no other method by more than 1 %": aim(">= 0.99", f"{min(gains):.3f}", min(gains) >= 0.99),
        "cheapest against the best single type": aim("no dearer", shown, min(saved) >= -0.001),
    }
    return result(figures, aims)


def beside_methods(seed: int) -> dict[str, float] | None:
    """Goodput of `best` over each other method's, and the share of the price that the cheapest plan saves."""
    problem = drawn(seed, max_accelerators=12).problem
    if len({pool.accelerator.name for pool in problem.inventory.pools}) < 2:
        return None
    best = goodput(problem, "best")
    if best <= 0.0:
        return None
    row = {name: best / other for name in QUICK if (other := goodput(problem, name)) > 0.0}
    saved = savings(problem, 0.5 * best)
    return row | ({"saved": saved} if saved is not None else {})


def savings(problem: Problem, rate: float) -> float | None:
    """What the cheapest plan for a rate saves against the cheapest of one type; None where no single type serves it."""

    def price(at_rate: Problem) -> float | None:
        try:
            plan = cheapest(search_of(at_rate))
        except Incompatible:
            return None
        return at_rate.price_usd_hour(plan.groups)

    problem, inventory = replace(problem, rate=rate), problem.inventory
    prices = []
    for name in sorted({pool.accelerator.name for pool in inventory.pools}):
        pools = tuple(pool for pool in inventory.pools if pool.accelerator.name == name)
        if (found := price(replace(problem.on(Inventory(pools, inventory.network)), rate=rate))) is not None:
            prices.append(found)
    mixed = price(problem)
    return 1.0 - min(mixed, *prices) / min(prices) if prices and mixed is not None else None


def case_scale() -> Result:
    """64, 128 and 512 accelerators of four types: CPU time, and goodput beside the best plain deployment."""
    figures: dict[str, float] = {}
    notes, over = [], []
    for count in SCALES:
        nodes = {f"n{at}": (TYPES[at % len(TYPES)], 8) for at in range(count // 8)}
        workload = synthetic(3000, 1000, 200, prompt_cv=0.9, output_cv=0.8, longest_tokens=4096, seed=1)
        problem = problem_of(cluster(nodes, ethernet(100.0)), "Llama-2-70B", workload, Slo(ttft_s=3.0, tpot_s=0.15))
        began_s = process_time()
        found = solved(problem, "best")
        cpu_s = process_time() - began_s
        progress(f"{count}: {found.promise.goodput:.2f} requests/s, {cpu_s:.0f} s of CPU time, {found.runs} runs")
        plain = max(solved(problem, name, 120.0).promise.goodput for name in ("coupled", "thirds", "exhaustive"))
        over.append(found.promise.goodput / plain if plain else float("inf"))
        figures |= {
            f"scale_{count}_cpu_s": cpu_s,
            f"scale_{count}_goodput_requests_per_s": found.promise.goodput,
            f"scale_{count}_over_plain_ratio": over[-1],
        }
        notes.append(f"{count}: {len(found.plan.groups)} groups, {found.runs} simulations")
    most_s = figures[f"scale_{SCALES[-1]}_cpu_s"]
    aims = {
        "ahead of the best plain deployment": aim(">= 1", f"{min(over):.2f} x", min(over) >= 1.0),
        f"CPU time for {SCALES[-1]} accelerators, s": aim("<= 60", f"{most_s:.0f}", most_s <= 60.0),
    }
    return result(figures, aims, notes)


# Workloads with prefixes: the plan with prefix caches and host tiers beside the plan without.

PREFIXED = {"conversation": Path("traces/mooncake/conversation_trace.jsonl"), CHATS: None}  # synthetic chats
PREFIXED_TTFT_S = {"conversation": 5.0, CHATS: 2.0}
PREFIXED_TPOT_S = 0.05
ARMS = ("without_caches", "caches", "host_tier")
PREFIXED_MODEL, PREFIXED_CONTEXT, PREFIXED_REQUESTS = "Llama-3-8B", 32_768, 3_000
PREFIXED_NODES = {"a": ("A100-SXM-80", 4), "b": ("A40", 4)}
PREFIXED_GBPS = 40.0
HOST_KV_BYTES = 128_000_000_000  # of each accelerator
LADDER = 1.04  # factor from a rate to the next
LASTING = 2_500  # requests of the runs that show what a plan serves, of which the second half counts
CHAT_SEED, CHECK_SEED = 1, 7  # of the chats that are planned for, and of what comes


def case_prefixes(data: Path, processes: int = 2) -> Result:
    known = [name for name, file in PREFIXED.items() if file is None or (data / file).is_file()]
    missing = [f"no {data / file}" for name, file in PREFIXED.items() if file is not None and name not in known]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = pool.map(planned_and_served, *zip(*product(known, ARMS), strict=True), repeat(data))
        return merged(*found, result({}, notes=missing))


def planned_and_served(name: str, arm: str, data: Path) -> Result:
    """What a plan promises, and what it serves in long runs of engines that have prefix caches."""
    file = PREFIXED[name]
    work = conversations(PREFIXED_REQUESTS, CHAT_SEED)
    if file is not None:
        work = read_trace(data / file).head(PREFIXED_REQUESTS)
    stock = cluster(PREFIXED_NODES, ethernet(PREFIXED_GBPS))
    if arm == "host_tier":
        stock = replace(stock, pools=tuple(replace(pool, host_kv_bytes=HOST_KV_BYTES) for pool in stock.pools))
    slo = Slo(ttft_s=PREFIXED_TTFT_S[name], tpot_s=PREFIXED_TPOT_S)
    problem = problem_of(stock, PREFIXED_MODEL, fitting(work, PREFIXED_CONTEXT), slo)
    cached = replace(problem, longest_tokens=PREFIXED_CONTEXT)
    problem = replace(cached, prefix_cache=arm != "without_caches")
    began = process_time()
    outcome = run_method("best", method("best"), Search(problem, perf_counter, AS_SERVED, robust=0.0))
    took_s, plan, promised = process_time() - began, outcome.plan, outcome.promise.goodput
    progress(f"{name}, {arm}: {promised:.2f} promised, {took_s:.0f} s: {groups_text(problem, plan.groups)}")
    served = lasting_goodput(cached, plan, promised, chats=file is None)
    prefill = sum(group.accelerators for group in plan.groups if group.role is Role.PREFILL)
    found = {
        "promised_per_s": round(promised, 2),
        "served_per_s": round(served, 2),
        "error": round(promised / max(1e-9, served) - 1.0, 3),
        "prefill_accelerators": prefill,
        "cpu_s": round(took_s, 1),
        "runs": outcome.runs,
        "groups": groups_text(problem, plan.groups),
    }
    progress(f"{name}, {arm}: {found}")
    return result({f"prefixes_{name}_{arm}_{what}": value for what, value in found.items()})


def lasting_goodput(problem: Problem, plan: Plan, near: float, *, chats: bool) -> float:
    """The goodput of a plan in long runs: of other chats at each rate, or of the trace's requests."""
    estimator = Estimator(problem)
    instances, network = deployed(problem, plan, estimator.costs, estimator.places)
    run = replace(with_words(AS_SERVED, plan.policies), slo=problem.slo, network=network)

    def meets(rate: float) -> bool:
        if chats:
            work = conversations(LASTING, CHECK_SEED, rate / TURNS_A_CHAT)
        else:
            work = poisson(problem.workload.head(LASTING), rate, CHECK_SEED)
        return settled_attainment(simulate(work, instances, run).outcomes, problem) >= problem.target

    return rate_at_target(meets, near, LADDER)
