"""ThunderServe's case studies for `polyphase bench plan` (32 GPUs, two bandwidths, a loss), and the inventories,
workloads and problems that all planner cases share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from benchmarks.papers.testbed import CODING, CONVERSATION, azure
from benchmarks.results import aim
from shared.cost.kinds import Workshop
from shared.cost.library import Library
from shared.cost.network import Link, Network
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.domain.kv import Codec
from shared.plan.group import Group, Part
from shared.plan.inventory import Inventory, Pool, read_inventory
from shared.plan.methods.registry import method
from shared.plan.methods.simple import COUPLED, SPLIT
from shared.plan.plan import Plan, routes_of
from shared.plan.problem import Problem
from shared.plan.running import rescheduled, survivors
from shared.plan.search import Found, Outcome, Search, searched
from shared.sim.workload import Workload, synthetic

FILE = Path(__file__).with_name("inventories") / "thunderserve.yaml"
MODEL, CONTEXT_TOKENS = "LLaMA-30B", 2048
NO_ITL_S = 3600.0  # the papers name no target for the gaps between tokens
SLO = Slo(ttft_s=3.0, tpot_s=0.15, itl_s=NO_ITL_S)
TRACES = {"coding": CODING, "conversation": CONVERSATION}
INSIDE = Link(16e9, 1e-4, 0.8)


@cache
def library() -> Library:
    return Library.built_in()


@cache
def requests(data: Path, kind: str) -> Workload:
    """The Azure trace's requests that the model's context holds."""
    return replace(azure(data, TRACES[kind], 3000, CONTEXT_TOKENS), name=kind)


def thunderserve(data: Path, kind: str, nodes: tuple[str, ...] = ()) -> Problem:
    """The paper's inventory, or some of its nodes."""
    inventory = read_inventory(FILE)[0]
    if nodes:
        inventory = part_of(inventory, nodes)
    return problem_of(inventory, MODEL, requests(data, kind), SLO, Codec.INT4)


def part_of(inventory: Inventory, nodes: tuple[str, ...]) -> Inventory:
    return Inventory(tuple(pool for pool in inventory.pools if pool.node in nodes), inventory.network)


def problem_of(inventory: Inventory, model: str, workload: Workload, slo: Slo, codec: Codec = Codec.RAW) -> Problem:
    """A problem with a workshop of its own, so that no search profits from what another one worked out."""
    return Problem(inventory, Workshop(library(), library().geometry(model)), workload, slo, codec=codec)


def solved(problem: Problem, name: str, seconds: float = float("inf"), seed: int = 1) -> Outcome:
    return searched(name, method(name), Search(problem, perf_counter, until_s=perf_counter() + seconds, seed=seed))


def cluster(nodes: dict[str, tuple[str, int]], gbps: float) -> Inventory:
    """Nodes of one type each, by name, and one link between all."""
    catalogue = library().catalogue
    pools = tuple(
        Pool(name, catalogue.get(kind), count, catalogue.get(kind).price_usd_hour)
        for name, (kind, count) in nodes.items()
    )
    names = sorted(nodes)
    between = {(one, other): Link(gbps * 1e9 / 8.0) for one in names for other in names if one < other}
    return Inventory(pools, Network(dict.fromkeys(names, INSIDE), between))


def table_3(kind: str) -> tuple[Group, ...]:
    """The paper's own plan for 32 GPUs, on the pools of the inventory file in its order."""
    a6000, b6000, a5000, b5000, a40, first, second = range(7)
    layers = 60

    def tensor(role: Role, pool: int, degree: int) -> Group:
        return Group(role, degree, (Part(pool, layers),))

    def halves(role: Role, degree: int, one: int, other: int) -> Group:
        return Group(role, degree, (Part(one, layers // 2), Part(other, layers // 2)))

    p, d = Role.PREFILL, Role.DECODE
    if kind == "coding":
        return (
            *[tensor(p, a40, 2)] * 4,
            tensor(p, a5000, 4),
            *[tensor(p, a6000, 2)] * 2,
            halves(p, 2, b5000, first),
            halves(d, 2, second, second),
            *[halves(d, 1, b6000, b6000)] * 2,
            halves(d, 2, b5000, first),
        )
    return (
        *[tensor(p, a40, 2)] * 3,
        halves(p, 2, b5000, first),
        halves(d, 2, second, second),
        halves(d, 1, a40, a40),
        halves(d, 2, a5000, a5000),
        *[halves(d, 1, b6000, b6000)] * 2,
        *[halves(d, 1, a6000, a6000)] * 2,
        halves(d, 2, b5000, first),
    )


LOST = {"coding": (9, 10), "conversation": (7, 8)}  # of `table_3`: the decode instances on 4 A6000


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn problem, and what it is in words."""

    problem: Problem
    words: str


KINDS = ("A100-SXM-80", "A100-PCIe-40", "A10", "A40", "L40S", "RTX-A5000", "RTX-A6000", "RTX-3090-Ti", "RTX-4090", "L4")
MODELS = ("Llama-3-8B", "Llama-2-13B", "Qwen2.5-14B")
SHAPES = ((900, 200), (2000, 40), (300, 400))  # mean prompt and output tokens
GBPS = (5.0, 25.0, 100.0)


def drawn(seed: int, most: int = 8, kinds: tuple[str, ...] = KINDS) -> Drawn:
    """A random inventory of up to `most` accelerators on one to three nodes, a model and a workload."""
    rng = Random(seed)
    left, nodes = rng.randint(2, most), {}
    for at in range(rng.randint(1, 3)):
        count = min(left, rng.choice((1, 2, 2, 4)))
        if count:
            nodes[f"n{at}"] = (rng.choice(kinds), count)
            left -= count
    inventory = cluster(nodes, rng.choice(GBPS))
    prompt, output = rng.choice(SHAPES)
    workload = synthetic(1000, prompt, output, prompt_cv=0.8, output_cv=0.8, longest_tokens=4096, seed=seed)
    model = rng.choice(MODELS)
    words = f"{model}, {prompt}+{output} tokens on {', '.join(map(str, inventory.pools))}"
    return Drawn(problem_of(inventory, model, workload, Slo(ttft_s=2.0, tpot_s=0.1)), words)


CaseResult = tuple[dict[str, float], dict[str, dict[str, Any]], list[str]]  # figures, aims, notes
_SIZES = {16: ("a40", "a6000-0", "3090ti-0"), 24: ("a40", "a6000-0", "a6000-1", "a5000-0", "3090ti-0")}
_PAPER_S = {16: 21.0, 24: 36.0, 32: 54.0}
_OVER_DISTSERVE = {"coding": 1.5, "conversation": 2.1}
_HOME = 8  # A100 of the in-house server
_CONVERGED = 0.98  # of the goodput in the end


def case_32(data: Path) -> CaseResult:
    """The paper's inventory: time, goodput beside the paper's plan and beside 8 A100, groups by workload.

    The paper's gains of 1.5 and 2.1 (5.2, Fig 9) are in throughput and against DistServe, which splits the phases. Its
    comparison with vLLM, which serves coupled, is in latency deadlines alone.
    """
    figures: dict[str, float] = {}
    aims: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    shares = {}
    for kind in TRACES:
        problem = thunderserve(data, kind)
        found, curve = followed(problem)
        paper = paper_goodput(problem, kind)
        split, coupled = home_split_goodput(data, kind), home_coupled_goodput(data, kind)
        converged_s = next(at for at, goodput in curve if goodput >= _CONVERGED * found.promise.goodput)
        roles = found.plan.roles
        shares[kind] = prefill_share(found.plan.groups)
        figures |= {
            f"{kind}_goodput_requests_per_s": found.promise.goodput,
            f"{kind}_paper_plan_routes_requests_per_s": paper["routes"],
            f"{kind}_paper_plan_adaptive_requests_per_s": paper["adaptive"],
            f"{kind}_8_a100_split_requests_per_s": split,
            f"{kind}_8_a100_coupled_requests_per_s": coupled,
            f"{kind}_converged_s": converged_s,
            f"{kind}_took_s": found.took_s,
            f"{kind}_prefill_groups": roles[Role.PREFILL],
            f"{kind}_decode_groups": roles[Role.DECODE],
            f"{kind}_prefill_accelerators_share": shares[kind],
        }
        gain = found.promise.goodput / max(paper.values())
        aims[f"{kind}: converged, s"] = aim("<= 5", f"{converged_s:.1f}", converged_s <= 5.0)
        aims[f"{kind}: against the paper's plan"] = aim(">= 1", f"{gain:.2f} x", gain >= 1.0)
        over = found.promise.goodput / split if split else float("inf")
        aims[f"{kind}: against phases split on 8 A100"] = aim(
            f"> 1 (paper: {_OVER_DISTSERVE[kind]:g}, in throughput)", f"{over:.2f} x", over > 1.0
        )
        listed = ", ".join(f"{one.role.value} {one.words(problem.inventory)} {one.layout}" for one in found.plan.groups)
        notes.append(f"{kind}: {listed}")
    more = shares["coding"] > shares["conversation"]
    aims["more for prefill in coding than in conversation"] = aim(
        "more", f"{shares['coding']:.2f} and {shares['conversation']:.2f} of the accelerators", more
    )
    return figures, aims, notes


def case_sizes(data: Path) -> CaseResult:
    """16 and 24 GPUs: how long until it converges."""
    figures = {}
    for count, nodes in _SIZES.items():
        for kind in TRACES:
            found, curve = followed(thunderserve(data, kind, nodes))
            at = next(at for at, goodput in curve if goodput >= _CONVERGED * found.promise.goodput)
            figures[f"{kind}_{count}_converged_s"] = at
    notes = [f"The paper's search converges in {', '.join(f'{s:g} s ({n} GPUs)' for n, s in _PAPER_S.items())}."]
    return figures, {}, notes


def case_bandwidth() -> CaseResult:
    """Appendix H: 4 A40 and 4 3090 Ti at 40 and at 5 Gb/s."""
    figures: dict[str, float] = {}
    aims: dict[str, dict[str, Any]] = {}
    notes = []
    for gbps, want in ((40.0, "A40 prefills, 3090 Ti decodes"), (5.0, "each node holds both phases")):
        problem = appendix_h(gbps)
        found = solved(problem, "best")
        if gbps == 40.0:
            prefill, decode = (nodes_of(problem, found.plan.groups, role) for role in Role)
            met = (prefill, decode) == ({"a40"}, {"3090ti"})
        else:
            met = phases_of(problem, found.plan) == ({"a40", "3090ti"}, {"a40", "3090ti"})
        listed = ", ".join(f"{one.role.value} {one.words(problem.inventory)} {one.layout}" for one in found.plan.groups)
        figures[f"link_{gbps:g}_goodput_requests_per_s"] = found.promise.goodput
        aims[f"{gbps:g} Gb/s"] = aim(want, listed, met)
        base = fixed(problem, coupled_pair(problem), COUPLED)
        figures[f"link_{gbps:g}_coupled_requests_per_s"] = base
        gain, paper = found.promise.goodput / base, "2" if gbps > 5 else "1.4"
        notes.append(f"{gbps:g} Gb/s: {gain:.2f} x two coupled groups (paper: {paper})")
    return figures, aims, notes


def case_loss(data: Path) -> CaseResult:
    """Appendix G, Fig 11: 4 of 32 GPUs are gone; flips alone against a whole new search."""
    figures: dict[str, float] = {}
    aims: dict[str, dict[str, Any]] = {}
    notes = []
    for kind in TRACES:
        problem = thunderserve(data, kind)
        began, _ = followed(problem)
        for name, plan, lost in (
            ("ours", began.plan, losing(problem, began.plan)),
            ("paper's plan", Plan(table_3(kind)), LOST[kind]),
        ):
            groups, _ = survivors(plan, lost)
            search = Search(problem, perf_counter)
            search.estimator.of(plan.groups)  # as a planner that watches it knows it
            at = perf_counter()
            proposal = rescheduled(search.estimator, Plan(groups))
            took_s = perf_counter() - at
            flipped = search.judge.goodput(proposal.plan, proposal.after.goodput)
            nothing = search.judge.goodput(Plan(groups), flipped)
            key = f"{kind}_{name.split()[0].removesuffix(chr(39) + 's')}"
            figures |= {f"{key}_reschedule_s": took_s, f"{key}_flipped_requests_per_s": flipped}
            figures |= {f"{key}_unchanged_requests_per_s": nothing, f"{key}_flips": len(proposal.flips)}
            aims[f"{kind}, {name}: time of flips, s"] = aim("<= 0.5 (paper: 13)", f"{took_s:.2f}", took_s <= 0.5)
            words = ", ".join(f"{groups[i].words(problem.inventory)} {groups[i].layout}" for i in proposal.flips)
            notes.append(f"{kind}, {name}: flips {words or 'nothing'}")
            if name == "ours":
                aims |= _beside_full(kind, problem, plan, lost, proposal.plan, flipped, figures)
    return figures, aims, notes


def _beside_full(
    kind: str, problem: Problem, plan: Plan, lost: Sequence[int], flips: Plan, flipped: float, figures: dict[str, float]
) -> dict[str, dict[str, Any]]:
    gone: dict[tuple[str, str], int] = {}
    for at in lost:
        for pool, count in plan.groups[at].uses.items():
            entry = problem.inventory.pools[pool]
            key = (entry.node, entry.accelerator.name)
            gone[key] = gone.get(key, 0) + count
    full = solved(replace(problem, inventory=problem.inventory.without(gone)), "best")
    search = Search(problem, perf_counter)
    rate = 0.9 * full.promise.goodput
    own = search.judge.attained(flips, rate)
    figures |= {f"{kind}_full_search_requests_per_s": full.promise.goodput, f"{kind}_flips_attainment_share": own}
    met = own >= 0.95 * problem.target
    return {
        f"{kind}: attainment of flips where a full search has its target": aim(
            "within 5 %", f"{own:.3f} at 0.9 of the full search's {full.promise.goodput:.2f} (flips {flipped:.2f})", met
        )
    }


def losing(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """Groups that decode and hold 4 accelerators together, or the smallest that decodes."""
    decode = [at for at, group in enumerate(plan.groups) if group.role is Role.DECODE]
    sizes = {at: plan.groups[at].accelerators for at in decode}
    whole = [at for at in decode if sizes[at] == 4]
    return (whole[0],) if whole else (min(decode, key=lambda at: sizes[at]),)


def followed(problem: Problem) -> tuple[Outcome, list[tuple[float, float]]]:
    """The outcome of `best`, and when it had which goodput."""
    began = perf_counter()
    curve: list[tuple[float, float]] = []

    def tell(_: str, found: Found | None) -> None:
        if found:
            curve.append((perf_counter() - began, found[1]))

    search = Search(problem, perf_counter, tell=tell, helped=True)
    return searched("best", method("best"), search), curve


def paper_goodput(problem: Problem, kind: str) -> dict[str, float]:
    """Of the paper's plan: along its routes, as the paper runs it, and under adaptive policies."""
    groups = table_3(kind)
    search = Search(problem, perf_counter)
    estimate = search.estimator.of(groups, local=False)
    routed = Plan(groups, routes_of(estimate))
    return {
        "routes": search.judge.goodput(replace(routed, policies=routed.routed(problem)), estimate.goodput),
        "adaptive": search.judge.goodput(Plan(groups), estimate.goodput),
    }


def home_split_goodput(data: Path, kind: str) -> float:
    """Phases split on the in-house server, as DistServe does: the best of all numbers of prefill and decode groups.

    Groups of a phase are alike, of one size, in the layout that does most; the estimate chooses three, the simulator
    one of them. Requests go through both phases (`SPLIT`).
    """
    problem = _home(data, kind)
    search = Search(problem, perf_counter)
    layouts = search.estimator.layouts
    made: list[tuple[Group, ...]] = []
    for prefill_size, decode_size in product((1, 2, 4), repeat=2):
        prefill = layouts.best({0: prefill_size}, Role.PREFILL)
        decode = layouts.best({0: decode_size}, Role.DECODE)
        if prefill is None or decode is None:
            continue
        for prefills in range(1, _HOME // prefill_size + 1):
            decodes = (_HOME - prefills * prefill_size) // decode_size
            if decodes:
                made.append((prefill,) * prefills + (decode,) * decodes)
    made.sort(key=lambda groups: -search.estimator.of(groups, local=False).goodput)
    return max(search.judged(Plan(groups, policies=SPLIT), local=False)[1] for groups in made[:3])


def home_coupled_goodput(data: Path, kind: str) -> float:
    """Coupled serving on the in-house server: groups of two, each of which does whole requests."""
    return solved(_home(data, kind), "coupled").promise.goodput


def _home(data: Path, kind: str) -> Problem:
    return problem_of(cluster({"home": ("A100-SXM-80", _HOME)}, 100.0), MODEL, requests(data, kind), SLO, Codec.INT4)


def appendix_h(gbps: float) -> Problem:
    """Prompts of 1,024 tokens; the paper does not give the answers; these are those of coding."""
    inventory: Inventory = cluster({"a40": ("A40", 4), "3090ti": ("RTX-3090-Ti", 4)}, gbps)
    workload = synthetic(1000, 1024, 28, output_cv=1.0, longest_tokens=CONTEXT_TOKENS, seed=1)
    return problem_of(inventory, MODEL, workload, SLO, Codec.INT4)


def coupled_pair(problem: Problem) -> tuple[Group, ...]:
    """Each node one group, which does whole requests."""
    layouts = Search(problem, perf_counter).estimator.layouts
    found = [layouts.best({pool: entry.count}, Role.DECODE) for pool, entry in enumerate(problem.inventory.pools)]
    return tuple(group for group in found if group is not None)


def fixed(problem: Problem, groups: tuple[Group, ...], policies: str) -> float:
    return Search(problem, perf_counter).judged(Plan(groups, policies=policies), local=True)[1]


def nodes_of(problem: Problem, groups: Sequence[Group], role: Role) -> set[str]:
    """On which groups of a role stand."""
    return {problem.inventory.pools[pool].node for group in groups if group.role is role for pool in group.uses}


def phases_of(problem: Problem, plan: Plan) -> tuple[set[str], set[str]]:
    """Nodes on which prompts are computed, and on which requests are decoded, by the plan's routes."""
    pools, groups = problem.inventory.pools, plan.groups
    computing = [groups[route.decode if route.prefill is None else route.prefill] for route in plan.routes]
    decoding = [groups[route.decode] for route in plan.routes]
    prefill, decode = ({pools[p].node for group in side for p in group.uses} for side in (computing, decoding))
    return prefill, decode


def prefill_share(groups: Sequence[Group]) -> float:
    total = sum(group.accelerators for group in groups)
    return sum(group.accelerators for group in groups if group.role is Role.PREFILL) / total
