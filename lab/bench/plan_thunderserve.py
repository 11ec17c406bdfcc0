"""ThunderServe's case studies: 32 GPUs, two bandwidths, a loss."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from lab.bench.plan_cases import (
    CONTEXT_TOKENS,
    LOST,
    MODEL,
    SLO,
    TRACES,
    cluster,
    problem_of,
    requests,
    solved,
    table_3,
    thunderserve,
)
from shared.domain.instance import Role
from shared.domain.kv import Codec
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.plan.methods.registry import method
from shared.plan.methods.simple import COUPLED, SPLIT
from shared.plan.plan import Plan, routes_of
from shared.plan.problem import Problem
from shared.plan.running import rescheduled, survivors
from shared.plan.search import Found, Outcome, Search, searched
from shared.sim.workload import synthetic

Part = tuple[dict[str, float], dict[str, dict[str, Any]], list[str]]  # figures, aims, notes
_SIZES = {16: ("a40", "a6000-0", "3090ti-0"), 24: ("a40", "a6000-0", "a6000-1", "a5000-0", "3090ti-0")}
_PAPER_S = {16: 21.0, 24: 36.0, 32: 54.0}
_OVER_DISTSERVE = {"coding": 1.5, "conversation": 2.1}
_HOME = 8  # A100 of the in-house server
_CONVERGED = 0.98  # of the goodput in the end


def case_32(data: Path) -> Part:
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


def case_sizes(data: Path) -> Part:
    """16 and 24 GPUs: how long until it converges."""
    figures = {}
    for count, nodes in _SIZES.items():
        for kind in TRACES:
            found, curve = followed(thunderserve(data, kind, nodes))
            at = next(at for at, goodput in curve if goodput >= _CONVERGED * found.promise.goodput)
            figures[f"{kind}_{count}_converged_s"] = at
    notes = [f"The paper's search converges in {', '.join(f'{s:g} s ({n} GPUs)' for n, s in _PAPER_S.items())}."]
    return figures, {}, notes


def case_bandwidth() -> Part:
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


def case_loss(data: Path) -> Part:
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
    """Prompts of 1,024 tokens; the paper says nothing of the answers: those of coding."""
    inventory: Inventory = cluster({"a40": ("A40", 4), "3090ti": ("RTX-3090-Ti", 4)}, gbps)
    workload = synthetic(1000, 1024, 28, output_cv=1.0, longest_tokens=CONTEXT_TOKENS, seed=1)
    return problem_of(inventory, MODEL, workload, SLO, Codec.INT4)


def coupled_pair(problem: Problem) -> tuple[Group, ...]:
    """Each node one group, which does whole requests."""
    layouts = Search(problem, perf_counter).estimator.layouts
    found = [layouts.best({pool: entry.count}, Role.DECODE) for pool, entry in enumerate(problem.inventory.pools)]
    return tuple(group for group in found if group is not None)


def fixed(problem: Problem, groups: tuple[Group, ...], policies: str) -> float:
    """Goodput of given groups."""
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
    """Of the accelerators."""
    total = sum(group.accelerators for group in groups)
    return sum(group.accelerators for group in groups if group.role is Role.PREFILL) / total


def aim(want: str, got: str, met: bool) -> dict[str, Any]:
    """As `polyphase bench` shows it."""
    return {"want": want, "got": got, "met": met}
