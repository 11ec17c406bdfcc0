"""From a request to the planner to its answer: the plan, what it is compared with, why it won, and its cluster file.

The command line and the planner service use this module.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

import msgspec
import numpy as np

from shared.cost.catalogue import bytes_of
from shared.cost.kinds import EngineModels
from shared.domain.instance import Role
from shared.domain.job import Slo, default_itl_s
from shared.domain.kv import Codec
from shared.domain.precision import QUANTISED
from shared.errors import Incompatible, InvalidRequest
from shared.plan.compose import MARGINS, Composer
from shared.plan.estimate import Estimator
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.plan.methods.registry import QUICK, method
from shared.plan.methods.simple import smallest
from shared.plan.plan import TOKENIZER, Plan, Target, plan_text
from shared.plan.problem import Clock, Problem
from shared.plan.search import AS_SERVED, ROBUST, Outcome, ReportProgress, Search, Stopped, run_method
from shared.sim.spec import EngineLimits, RunSpec
from shared.sim.workload import Workload

ENGINES = ("emulated", "vllm")
MAX_SEQUENCES = 256  # that an engine runs at once
ONE_PRECISION = "one precision"  # names the plan without quantised weights, where they were allowed
BEYOND = 2.0  # a rate at so many times the estimated capacity is not simulated: its queue grows without end
# Spare capacity with which programmes are tried: the estimate knows no bursts, so the tightest may serve too little.
SPARES = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
_LOOSER = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)  # multiples of a lone request's times, tried as targets


@dataclass(frozen=True, slots=True)
class PlanGoals:
    """What a plan and the search for it should be. Errors name the fields.

    rate: requests a second to be served; 0: as many as possible. target: SLO attainment at which a rate counts as
    served. budget: USD an hour that the accelerators used may cost. cheapest: find the lowest price that serves `rate`.
    compare: run the other quick methods, too. seconds: after which no new step begins. engine: of the cluster file.
    max_model_len: tokens of a request; None: the model's own. chunk_size: tokens of a step. quantised: precisions of
    weights that instances with the prefill role may have besides the model's, each with its checkpoint; empty where the
    engine quantises. prefix_cache: of the instances. robust: share of the goodput that method `best` may give up for a
    plan that keeps more when it loses any one of its groups; 0: goodput alone counts.
    """

    rate: float = 0.0
    target: float = 0.9
    budget: float | None = None
    cheapest: bool = False
    method: str = "best"
    compare: bool = True
    seconds: float = 60.0
    codec: str = "raw"
    engine: str = "emulated"
    one_node: bool = False
    max_model_len: int | None = None
    chunk_size: int = 2048
    seed: int = 1
    quantised: Mapping[str, str] = field(default_factory=dict)
    prefix_cache: bool = True
    robust: float = ROBUST

    def check(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidRequest(f"engine: {' or '.join(ENGINES)}, not {self.engine!r}")
        if self.codec not in list(Codec):
            raise InvalidRequest(f"codec: one of {', '.join(Codec)}, not {self.codec!r}")
        if self.cheapest and not self.rate > 0:
            raise InvalidRequest("cheapest needs the rate that is to be served")
        if not 0.0 <= self.robust < 1.0:
            raise InvalidRequest(f"robust must be at least 0 and less than 1, not {self.robust:g}")
        for precision, checkpoint in self.quantised.items():
            if precision not in QUANTISED:
                raise InvalidRequest(f"quantised: one of {', '.join(sorted(QUANTISED))}, not {precision!r}")
            if self.engine == "vllm" and precision != "fp8" and not checkpoint:
                raise InvalidRequest(
                    f"quantised: vLLM quantises to fp8 alone while it loads: name the checkpoint of {precision} "
                    f"({precision}=FOLDER)"
                )
        method(self.method)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A problem, and how to search it. name: the inventory's. model: as it was named in the request."""

    problem: Problem
    goals: PlanGoals
    name: str
    model: str

    @classmethod
    def build(
        cls,
        goals: PlanGoals,
        name: str,
        inventory: Inventory,
        model: str,
        models: EngineModels,
        workload: Workload,
        slo: Slo,
    ) -> "PlanRequest":
        """Raises InvalidRequest that names what is wrong."""
        goals.check()
        problem = Problem(
            inventory,
            models,
            fitting(workload, goals.max_model_len or models.geometry.max_position),
            slo=slo,
            rate=goals.rate,
            target=goals.target,
            limits=EngineLimits(batched_tokens=goals.chunk_size, sequences=min(MAX_SEQUENCES, goals.chunk_size)),
            one_node=goals.one_node or goals.engine == "vllm",
            codec=Codec(goals.codec),
            budget_usd_hour=inf if goals.budget is None else goals.budget,
            longest_tokens=goals.max_model_len or 0,
            quantised=tuple(goals.quantised),
            prefix_cache=goals.prefix_cache,
        )
        return cls(problem, goals, name, model)


def find_plans(request: PlanRequest, clock: Clock, report: ReportProgress, helped: bool = False) -> list[Outcome]:
    """The requested plan, then those of the methods that it is compared with. helped: see `Search`.

    Ctrl-C ends the search with the best plan so far, and the comparison with what is complete. Raises Incompatible that
    says what is possible instead; Stopped where Ctrl-C came before there was a plan.
    """
    goals, problem, began = request.goals, request.problem, clock()

    def search(helped: bool, problem: Problem = problem) -> Search:
        # Emulated engines send KV when the whole prompt is computed.
        run = replace(AS_SERVED, streaming=goals.engine != "emulated")
        return Search(problem, clock, run, began + goals.seconds, goals.seed, report, helped, goals.robust)

    if goals.cheapest:
        offers = search(helped=False)
        plan = cheapest(offers)
        promise = offers.evaluator.promise(plan, offers.evaluator.goodput(plan, problem.rate))
        took_s = clock() - began
        return [Outcome("cheapest", plan, promise, took_s, took_s, offers.evaluator.runs)]
    try:
        chosen = run_method(goals.method, method(goals.method), search(helped))
    except Incompatible as error:
        if goals.method != "best" or isinstance(error, Stopped):
            raise
        raise Incompatible(f"{error.message}\n{nearest(problem, clock)}") from error
    if chosen.promise.goodput <= 0.0:
        raise Incompatible(f"no deployment serves this within the SLO\n{nearest(problem, clock)}")
    outcomes = [chosen]
    if problem.quantised and not chosen.stopped:
        try:
            alike = run_method(goals.method, method(goals.method), search(helped, replace(problem, quantised=())))
        except (Stopped, KeyboardInterrupt):
            return outcomes
        except Incompatible:
            pass  # without quantised weights nothing fits, or nothing in the time that is left
        else:
            if alike.stopped:
                return outcomes
            outcomes.append(replace(alike, method=ONE_PRECISION))
            outcomes.sort(key=lambda one: -one.promise.goodput)
    for name in QUICK if goals.compare and not chosen.stopped else ():
        if name == goals.method or clock() - began >= goals.seconds:
            continue
        try:
            other = run_method(name, method(name), search(helped))
        except (Stopped, KeyboardInterrupt):
            break
        except Incompatible:
            continue
        if other.stopped:  # an incomplete search is not compared
            break
        outcomes.append(other)
    return outcomes


def cheapest(search: Search) -> Plan:
    """The plan with the lowest price that serves the problem's rate in the simulator.

    Raises Incompatible that names the highest rate that the whole inventory serves, or says that the time was up;
    Stopped after Ctrl-C: the first offer that serves the rate ends the search, so there is no best so far.
    """
    problem, composer = search.problem, Composer(search.estimator)
    offers: dict[tuple[Group, ...], float] = {}  # deployments and their prices
    try:
        margins = [replace(side, rate=problem.rate * spare) for spare in SPARES for side in MARGINS[1:]]
        priced = [composer.best(margin) for margin in margins]
        whole = [*composer.candidates(), smallest(search, Role.DECODE)]
        for groups in (*priced, *whole):
            if groups:
                offers.setdefault(groups, problem.price_usd_hour(groups))
        for groups, price in sorted(offers.items(), key=lambda offer: offer[1]):
            if BEYOND * search.estimator.estimate(groups).most < problem.rate:
                continue
            if search.evaluator.attainment(Plan(groups), problem.rate) >= problem.target:
                search.report(f"cheapest: {price:.2f} USD/h serves it", None)
                return Plan(groups)
            if search.over():
                raise Incompatible("the time is up before an offer was found that serves the rate (seconds)")
    except KeyboardInterrupt as error:
        raise Stopped("stopped before an offer was found that serves the rate") from error
    most = max((search.score(Plan(groups), local=True)[1] for groups in whole), default=0.0)
    raise Incompatible(
        f"the whole inventory serves {most:.2f} requests/s of {problem.workload.name} within TTFT "
        f"{problem.slo.ttft_s:g} s and TPOT {problem.slo.tpot_s:g} s, not {problem.rate:g}"
    )


def nearest(problem: Problem, clock: Clock) -> str:
    """What is possible where the request is not: the memory that is missing, or the tightest SLO that can be met."""
    missing = _missing_memory(problem)
    return missing or _tightest_slo(problem, clock) or "no deployment serves any request in time"


def cluster_file(request: PlanRequest, chosen: Outcome) -> str:
    emulated = request.goals.engine == "emulated"
    problem, estimator = request.problem, Estimator(request.problem)
    target = Target(
        f"{request.name}: {problem.models.geometry.name} for {problem.workload.name}",
        TOKENIZER if emulated else request.model,
        request.model,
        "emulated" if emulated else "vllm",
        request.goals.quantised,
    )
    head, promise = _head(request, chosen), promised(chosen)
    return plan_text(problem, chosen.plan, estimator.costs, estimator.places, target, head, promise)


def promised(chosen: Outcome) -> dict[str, float]:
    """The figures with which the planner service compares the running plan."""
    promise, simulated = chosen.promise, chosen.promise.figures
    found = {
        "goodput": promise.goodput,
        "rate": promise.rate,
        "attainment": promise.attainment,
        "ttft_mean_s": simulated["ttft_mean_s"],
        "tpot_mean_s": simulated["tpot_mean_s"],
    }
    return {name: float(f"{value:.4g}") for name, value in found.items() if isfinite(value)}


def _head(request: PlanRequest, chosen: Outcome) -> str:
    problem, promise, figures = request.problem, chosen.promise, chosen.promise.figures
    slo = problem.slo
    return (
        f"A plan by `polyphase plan`, method {chosen.method}.\n"
        f"{problem.models.geometry.name}, {problem.workload.name}; SLO: TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s, "
        f"ITL {slo.itl_s:g} s, for {100 * problem.target:g} % of the requests.\n"
        f"Goodput {promise.goodput:.2f} requests/s. At {promise.rate:.2f} requests/s: mean TTFT "
        f"{figures['ttft_mean_s']:.3f} s, mean TPOT {figures['tpot_mean_s']:.4f} s, attainment "
        f"{100 * promise.attainment:.1f} %."
        + (f"\n{endurance_in_words(chosen)}" if chosen.endurance else "")
        + (f"\n{problem.inventory.assumed}" if problem.inventory.assumed else "")
    )


def endurance_in_words(outcome: Outcome) -> str:
    """What is left of the plan when it loses a group; empty where the method has not worked it out."""
    kept = outcome.endurance
    if kept is None:
        return ""
    flips = f" after {kept.flips} flip{'s' if kept.flips > 1 else ''} of roles" if kept.flips else ""
    cost = f" For this the plan gives up {100 * kept.given_up:.1f} % of goodput." if kept.given_up >= 0.0005 else ""
    share = 100 * kept.goodput / outcome.promise.goodput if outcome.promise.goodput > 0 else 0.0
    return (
        f"Without any one of its groups it serves about {kept.goodput:.2f} requests/s ({share:.0f} %) or more: the "
        f"loss of {kept.lost} costs most{flips}.{cost}"
    )


def figures(outcome: Outcome) -> dict[str, float]:
    """What an outcome promises, by name and unit; figures that are not finite are left out."""
    simulated = outcome.promise.figures
    found = {
        "goodput_requests_per_s": outcome.promise.goodput,
        "attainment_share": outcome.promise.attainment,
        "ttft_mean_s": simulated.get("ttft_mean_s"),
        "tpot_mean_s": simulated.get("tpot_mean_s"),
        "usd_per_million_tokens": outcome.promise.usd_per_million,
        "goodput_without_a_group_requests_per_s": outcome.endurance.goodput if outcome.endurance else None,
        "given_up_for_robustness_share": outcome.endurance.given_up if outcome.endurance else None,
        "took_s": outcome.took_s,
    }
    return {name: value for name, value in found.items() if value is not None and isfinite(value)}


def why(outcomes: Sequence[Outcome]) -> str:
    """Why the first outcome was chosen: how far ahead of the next one it is, and what differs."""
    chosen, others = outcomes[0], outcomes[1:]
    second = max(others, key=lambda one: one.promise.goodput)
    ahead = chosen.promise.goodput / second.promise.goodput - 1.0 if second.promise.goodput > 0 else float("inf")
    if ahead < 0:
        more = -100 * ahead / (1 + ahead)
        return f"{second.method} serves {more:.1f} % more than {chosen.method}, which was requested."
    sizes = f"{len(chosen.plan.groups)} groups against {len(second.plan.groups)}"
    roles = (
        f"{chosen.plan.roles[Role.PREFILL]}:{chosen.plan.roles[Role.DECODE]} against "
        f"{second.plan.roles[Role.PREFILL]}:{second.plan.roles[Role.DECODE]} prefill to decode"
    )
    much = f"{100 * ahead:.1f} % more goodput" if isfinite(ahead) else "goodput where the others have none"
    return f"{chosen.method}: {much} than the next, {second.method} ({sizes}, {roles})."


def fitting(workload: Workload, longest: int) -> Workload:
    """The requests that fit a context of `longest` tokens. Raises InvalidRequest where none does."""
    fits = workload.prompt_tokens + workload.output_tokens <= longest
    if not fits.any():
        raise InvalidRequest(f"{workload.name}: every request is longer than {longest} tokens (max_model_len)")
    if fits.all():
        return workload
    return replace(
        workload.rows(fits),
        name=f"{workload.name} (without {int((~fits).sum())} of {len(fits)} requests of more than {longest} tokens)",
    )


def _missing_memory(problem: Problem) -> str:
    """Why the model fits nowhere; empty where it fits somewhere."""
    search = Search(problem, lambda: 0.0, RunSpec())
    if next(_holding(search), None) is not None:
        return ""
    inventory, geometry = problem.inventory, problem.models.geometry
    weights = geometry.weight_bytes(bytes_of(problem.dtype or geometry.dtype))
    kv = problem.longest * search.estimator.costs.kv_bytes
    nodes = dict.fromkeys(inventory.nodes, 0.0)
    for pool in inventory.pools:
        nodes[pool.node] += pool.count * pool.accelerator.memory_bytes
    largest = max(nodes, key=lambda node: nodes[node])
    room = nodes[largest] if problem.one_node else sum(nodes.values())
    where = f"the largest node, {largest}, has" if problem.one_node else "all accelerators together have"
    need = (weights + kv) / 0.9
    if need <= room:
        return (
            f"{geometry.name} would fit the {room / 1e9:.1f} GB that {where}, but no group of one type, or of two "
            f"types with as many each, holds it: give a node more accelerators of one type"
        )
    return (
        f"{geometry.name} needs {weights / 1e9:.1f} GB of weights and {kv / 1e9:.2f} GB of KV for a request of "
        f"{problem.longest} tokens; {where} {room / 1e9:.1f} GB, of which nine tenths are usable: "
        f"{(need - room) / 1e9:.1f} GB are missing"
    )


def _tightest_slo(problem: Problem, clock: Clock) -> str:
    """The tightest targets that a deployment meets, in steps from what the fastest groups take for a lone request."""
    fastest = _fastest(Search(problem, clock, RunSpec()))
    if fastest is None:
        return ""
    slo = problem.slo
    for looser in _LOOSER:
        ttft_s, tpot_s = max(slo.ttft_s, looser * fastest[0]), max(slo.tpot_s, looser * fastest[1])
        wider = msgspec.structs.replace(slo, ttft_s=ttft_s, tpot_s=tpot_s, itl_s=max(slo.itl_s, default_itl_s(tpot_s)))
        found = _served(replace(problem, slo=wider, rate=0.0), clock)
        if found > 0.0:
            targets = f"TTFT {ttft_s:.3g} s and TPOT {tpot_s:.3g} s"
            return f"the nearest possible SLO: {targets}, at up to {found:.2g} requests/s"
    return ""


def _fastest(search: Search) -> tuple[float, float] | None:
    """Seconds of a long prompt, and of a token, on the fastest idle group of each role."""
    layouts, share = search.estimator.layouts, search.problem.target
    costs = [layouts.cost(group) for group in _holding(search)]
    if not costs:
        return None
    return min(float(np.quantile(c.prefill_s, share)) for c in costs), min(c.decode_s(1.0) for c in costs)


def _served(problem: Problem, clock: Clock) -> float:
    """Goodput of the most promising deployment, by the estimate, checked by a run at half of it.

    The run is without a step budget, unlike those that judge plans.
    """
    search = Search(problem, clock, RunSpec())
    best = max(
        ((search.estimator.estimate(groups).goodput, groups) for groups in Composer(search.estimator).candidates()),
        key=lambda one: one[0],
        default=(0.0, ()),
    )
    goodput, groups = best
    if goodput <= 0.0:
        return 0.0
    return goodput / 2.0 if search.evaluator.attainment(Plan(groups), goodput / 2.0) >= problem.target else 0.0


def _holding(search: Search) -> Iterator[Group]:
    """Layouts that hold the model: of single pools, then of pairs."""
    pools, layouts = search.problem.inventory.pools, search.estimator.layouts
    for one, entry in enumerate(pools):
        for size in range(1, entry.count + 1):
            yield from layouts.all({one: size}, Role.DECODE)
    for one, first in enumerate(pools):
        for other in range(one + 1, len(pools)):
            if search.problem.one_node and first.node != pools[other].node:
                continue
            for size in range(1, min(first.count, pools[other].count) + 1):
                yield from layouts.all({one: size, other: size}, Role.DECODE)
