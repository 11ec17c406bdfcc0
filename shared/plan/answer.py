"""The planner's answer to what was asked: the plan, what it is compared with, why it won, and its cluster file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import msgspec
import numpy as np

from shared.cost.catalogue import bytes_of
from shared.cost.kinds import Workshop
from shared.domain.instance import Role
from shared.domain.job import Slo, default_itl_s
from shared.domain.kv import Codec
from shared.errors import Incompatible, InvalidRequest
from shared.plan.compose import MARGINS, Composer, Margin
from shared.plan.estimate import Estimator
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.plan.methods.registry import QUICK, method
from shared.plan.methods.simple import smallest
from shared.plan.plan import TOKENIZER, Plan, Target, plan_text
from shared.plan.problem import Clock, Problem
from shared.plan.search import Found, Outcome, Search, Stopped, Tell, searched
from shared.sim.spec import EngineLimits, RunSpec
from shared.sim.workload import Workload

# MERGED asked.py
# What a person asks of the planner, whoever takes it: the command line or the planner's service.


ENGINES = ("emulated", "vllm")
MOST_SEQUENCES = 256  # that an engine runs at once


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of a plan, and of the search for it, in a person's words; errors name the fields as they are here.

    rate: requests a second to be served; 0: as many as can be. target: SLO attainment at which a rate counts as served.
    budget: USD an hour that the accelerators used may cost. cheapest: the least USD an hour that serves `rate`.
    compare: beside the other methods. seconds: after which nothing new is begun. engine: of the file. max_model_len:
    tokens of a request; None: the model's own. chunk_size: tokens of a step.
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

    def check(self) -> None:
        """Raises InvalidRequest that names the field and the choices."""
        if self.engine not in ENGINES:
            raise InvalidRequest(f"engine: {' or '.join(ENGINES)}, not {self.engine!r}")
        if self.codec not in list(Codec):
            raise InvalidRequest(f"codec: one of {', '.join(Codec)}, not {self.codec!r}")
        if self.cheapest and not self.rate > 0:
            raise InvalidRequest("cheapest needs the rate that is to be served")
        method(self.method)


@dataclass(frozen=True, slots=True)
class Asked:
    """A problem, and how it is to be searched. name: the inventory's. model: by the name that it was asked for."""

    problem: Problem
    wanted: Wanted
    name: str
    model: str

    @classmethod
    def of(
        cls, wanted: Wanted, name: str, inventory: Inventory, model: str, shop: Workshop, workload: Workload, slo: Slo
    ) -> "Asked":
        """Put together. Raises InvalidRequest that names what is wrong."""
        wanted.check()
        problem = Problem(
            inventory,
            shop,
            fitting(workload, wanted.max_model_len or shop.geometry.max_position),
            slo=slo,
            rate=wanted.rate,
            target=wanted.target,
            limits=EngineLimits(batched_tokens=wanted.chunk_size, sequences=min(MOST_SEQUENCES, wanted.chunk_size)),
            one_node=wanted.one_node or wanted.engine == "vllm",
            codec=Codec(wanted.codec),
            budget_usd_hour=inf if wanted.budget is None else wanted.budget,
            longest_tokens=wanted.max_model_len or 0,
        )
        return cls(problem, wanted, name, model)


def fitting(workload: Workload, longest: int) -> Workload:
    """The requests that a context of `longest` tokens holds. Raises InvalidRequest where none is left."""
    fits = workload.prompt_tokens + workload.output_tokens <= longest
    if not fits.any():
        raise InvalidRequest(f"{workload.name}: every request is longer than {longest} tokens (max_model_len)")
    if fits.all():
        return workload
    return replace(
        workload,
        name=f"{workload.name} (without {int((~fits).sum())} of {len(fits)} requests of more than {longest} tokens)",
        arrival_s=workload.arrival_s[fits],
        prompt_tokens=workload.prompt_tokens[fits],
        output_tokens=workload.output_tokens[fits],
        prefixes=None,
        mix=None,
    )


# MERGED advice.py
# What is possible where what was asked is not: the memory that is missing, the tightest SLO that can be reached.


_LOOSER = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 8.0)  # than a request that is alone


def nearest(problem: Problem, clock: Clock) -> str:
    """In words. Looks at memory first, then at targets, one at a time and both together."""
    missing = missing_memory(problem)
    return missing or tightest_slo(problem, clock) or "no deployment of it serves any request in time"


def missing_memory(problem: Problem) -> str:
    """Why the model fits nowhere; empty where it fits somewhere."""
    search = Search(problem, lambda: 0.0)
    if next(_holding(search), None) is not None:
        return ""
    inventory, geometry = problem.inventory, problem.shop.geometry
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
            f"{geometry.name} would fit the {room / 1e9:.1f} GB that {where}, but no group of one type, or of two that "
            f"give as many, holds it: give a node more accelerators of one type"
        )
    return (
        f"{geometry.name} needs {weights / 1e9:.1f} GB of weights and {kv / 1e9:.2f} GB of KV for a request of "
        f"{problem.longest} tokens; {where} {room / 1e9:.1f} GB, of which nine tenths are usable: "
        f"{(need - room) / 1e9:.1f} GB are missing"
    )


def tightest_slo(problem: Problem, clock: Clock) -> str:
    """The tightest targets that a deployment keeps: what the fastest groups take alone, and then by steps more."""
    fastest = _fastest(Search(problem, clock))
    if fastest is None:
        return ""
    slo = problem.slo
    for looser in _LOOSER:
        ttft_s, tpot_s = max(slo.ttft_s, looser * fastest[0]), max(slo.tpot_s, looser * fastest[1])
        wider = msgspec.structs.replace(slo, ttft_s=ttft_s, tpot_s=tpot_s, itl_s=max(slo.itl_s, default_itl_s(tpot_s)))
        found = _served(replace(problem, slo=wider, rate=0.0), clock)
        if found > 0.0:
            return (
                f"the nearest that is possible here: TTFT {ttft_s:.3g} s and TPOT {tpot_s:.3g} s, at up to "
                f"{found:.2g} requests/s"
            )
    return ""


def _fastest(search: Search) -> tuple[float, float] | None:
    """Seconds of a long prompt, and of a token, on the fastest group of each role with nothing else to do."""
    layouts, share = search.estimator.layouts, search.problem.target
    costs = [layouts.cost(group) for group in _holding(search)]
    if not costs:
        return None
    return min(float(np.quantile(c.prefill_s, share)) for c in costs), min(c.decode_s(1.0) for c in costs)


def _served(problem: Problem, clock: Clock) -> float:
    """Goodput of the most promising deployment, by the estimate, checked by a run at half of it."""
    search = Search(problem, clock)
    best = max(
        ((search.estimator.of(groups).goodput, groups) for groups in Composer(search.estimator).candidates()),
        key=lambda one: one[0],
        default=(0.0, ()),
    )
    goodput, groups = best
    if goodput <= 0.0:
        return 0.0
    return goodput / 2.0 if search.judge.attained(Plan(groups), goodput / 2.0) >= problem.target else 0.0


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


# MERGED cheapest.py
# The cheapest accelerators out of what is on offer that serve a rate within the SLO.


# Spare capacity with which programmes are tried: the estimate knows no bursts, so the first may serve too little.
SPARES = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
_SIDES = MARGINS[1:]


def cheapest(search: Search) -> Plan:
    """The plan with the lowest price that serves the problem's rate in the simulator.

    Raises Incompatible that names the highest rate that all that is on offer serves, or says that the time was up;
    Stopped after Ctrl-C: an offer that serves the rate ends the search, so there is no best so far.
    """
    found = _first_that_serves(search)
    if found is not None:
        return found
    most = max((goodput for _, goodput in _all_of_it(search)), default=0.0)
    raise Incompatible(
        f"all that is on offer serves {most:.2f} requests/s of {search.problem.workload.name} within TTFT "
        f"{search.problem.slo.ttft_s:g} s and TPOT {search.problem.slo.tpot_s:g} s, not {search.problem.rate:g}"
    )


def _first_that_serves(search: Search) -> Plan | None:
    """Of the offers, the cheapest first; None where none of them does."""
    try:
        for price, plan in _offers(search):
            if search.judge.attained(plan, search.problem.rate) >= search.problem.target:
                search.tell(f"cheapest: {price:.2f} USD/h serves it", None)
                return plan
            if search.over():
                raise Incompatible("the time is up before an offer was found that serves the rate (seconds)")
    except KeyboardInterrupt as error:
        raise Stopped("stopped before an offer was found that serves the rate") from error
    return None


def _offers(search: Search) -> Iterator[tuple[float, Plan]]:
    """Deployments and their prices, the cheapest of each programme; the tightest first."""
    composer, inventory = Composer(search.estimator), search.problem.inventory
    offers: dict[tuple[Group, ...], float] = {}
    for spare in SPARES:
        for side in _SIDES:
            margin = Margin(side.prefill, side.decode, side.local, side.split, search.problem.rate * spare)
            groups = composer.best(margin)
            if groups:
                offers[groups] = sum(group.price_usd_hour(inventory) for group in groups)
    for groups in (*composer.candidates(), smallest(search, Role.DECODE)):
        if groups:
            offers.setdefault(groups, sum(group.price_usd_hour(inventory) for group in groups))
    for groups, price in sorted(offers.items(), key=lambda one: one[1]):
        yield price, Plan(groups)


def _all_of_it(search: Search) -> Iterator[Found]:
    for groups in (*Composer(search.estimator).candidates(), smallest(search, Role.DECODE)):
        yield search.judged(Plan(groups), local=True)


def answered(asked: Asked, clock: Clock, tell: Tell, helped: bool = False) -> list[Outcome]:
    """The plan that was asked for, then those of the methods that it is compared with. helped: see `Search`.

    After Ctrl-C it is the best so far, and compared with what was compared already. Raises Incompatible that says what
    is the nearest that is possible; Stopped where Ctrl-C came before there was a plan.
    """
    wanted, problem, began = asked.wanted, asked.problem, clock()
    if wanted.cheapest:
        return [_cheapest(asked, clock, tell)]
    try:
        chosen = _searched(asked, wanted.method, clock, began, tell, helped)
    except Incompatible as error:
        if wanted.method != "best" or isinstance(error, Stopped):
            raise
        raise Incompatible(f"{error.message}\n{nearest(problem, clock)}") from error
    if chosen.promise.goodput <= 0.0:
        raise Incompatible(f"nothing serves this within the SLO\n{nearest(problem, clock)}")
    if not wanted.compare or chosen.stopped:
        return [chosen]
    return [chosen, *_others(asked, clock, began, tell, helped)]


def _others(asked: Asked, clock: Clock, began: float, tell: Tell, helped: bool) -> list[Outcome]:
    """What the quick methods find in the time that is left; none of those that find nothing."""
    found: list[Outcome] = []
    for name in QUICK:
        if name == asked.wanted.method or clock() - began >= asked.wanted.seconds:
            continue
        try:
            found.append(_searched(asked, name, clock, began, tell, helped))
        except (Stopped, KeyboardInterrupt):
            break
        except Incompatible:
            continue
        if found[-1].stopped:  # half a search is nothing to be compared with
            found.pop()
            break
    return found


def _searched(asked: Asked, name: str, clock: Clock, began: float, tell: Tell, helped: bool) -> Outcome:
    return searched(name, method(name), _search(asked, clock, began, tell, helped))


def _cheapest(asked: Asked, clock: Clock, tell: Tell) -> Outcome:
    began = clock()
    search = _search(asked, clock, began, tell)
    plan = cheapest(search)
    promise = search.judge.promise(plan, search.judge.goodput(plan, asked.problem.rate))
    took_s = clock() - began
    return Outcome("cheapest", plan, promise, took_s, took_s, search.judge.runs)


def _search(asked: Asked, clock: Clock, began: float, tell: Tell, helped: bool = False) -> Search:
    """Emulated engines send KV when the whole prompt is computed."""
    run = RunSpec(streaming=asked.wanted.engine != "emulated", step_budget=True)
    return Search(asked.problem, clock, run, began + asked.wanted.seconds, asked.wanted.seed, tell, helped)


def cluster_file(asked: Asked, chosen: Outcome) -> str:
    """The text of the cluster file that the plan is."""
    emulated = asked.wanted.engine == "emulated"
    problem, estimator = asked.problem, Estimator(asked.problem)
    target = Target(
        f"{asked.name}: {problem.shop.geometry.name} for {problem.workload.name}",
        TOKENIZER if emulated else asked.model,
        asked.model,
        "emulated" if emulated else "vllm",
    )
    head, promise = _head(asked, chosen), promised(chosen)
    return plan_text(problem, chosen.plan, estimator.costs, estimator.places, target, head, promise)


def promised(chosen: Outcome) -> dict[str, float]:
    """What the planner service compares the running plan with."""
    promise, told = chosen.promise, chosen.promise.figures
    found = {
        "goodput": promise.goodput,
        "rate": promise.rate,
        "attainment": promise.attainment,
        "ttft_mean_s": told["ttft_mean_s"],
        "tpot_mean_s": told["tpot_mean_s"],
    }
    return {name: float(f"{value:.4g}") for name, value in found.items() if isfinite(value)}


def _head(asked: Asked, chosen: Outcome) -> str:
    problem, promise, figures = asked.problem, chosen.promise, chosen.promise.figures
    slo = problem.slo
    return (
        f"A plan by `polyphase plan`, method {chosen.method}.\n"
        f"{problem.shop.geometry.name}, {problem.workload.name}; SLO: TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s, "
        f"ITL {slo.itl_s:g} s, for {100 * problem.target:g} % of the requests.\n"
        f"Goodput {promise.goodput:.2f} requests/s. At {promise.rate:.2f} requests/s: mean TTFT "
        f"{figures['ttft_mean_s']:.3f} s, mean TPOT {figures['tpot_mean_s']:.4f} s, attainment "
        f"{100 * promise.attainment:.1f} %." + (f"\n{problem.inventory.assumed}" if problem.inventory.assumed else "")
    )


def figures(outcome: Outcome) -> dict[str, float]:
    """What an outcome promises, by name and unit; what is not finite is left out."""
    told = outcome.promise.figures
    found = {
        "goodput_requests_per_s": outcome.promise.goodput,
        "attainment_share": outcome.promise.attainment,
        "ttft_mean_s": told.get("ttft_mean_s"),
        "tpot_mean_s": told.get("tpot_mean_s"),
        "usd_per_million_tokens": outcome.promise.usd_per_million,
        "took_s": outcome.took_s,
    }
    return {name: value for name, value in found.items() if value is not None and isfinite(value)}


def why(outcomes: Sequence[Outcome]) -> str:
    """Why the first of several is the one: how far ahead of the next it is, and what is different."""
    chosen, others = outcomes[0], outcomes[1:]
    second = max(others, key=lambda one: one.promise.goodput)
    ahead = chosen.promise.goodput / second.promise.goodput - 1.0 if second.promise.goodput > 0 else float("inf")
    if ahead < 0:
        more = -100 * ahead / (1 + ahead)
        return f"{second.method} serves {more:.1f} % more than {chosen.method}, which was asked for."
    sizes = f"{len(chosen.plan.groups)} groups against {len(second.plan.groups)}"
    roles = (
        f"{chosen.plan.roles[Role.PREFILL]}:{chosen.plan.roles[Role.DECODE]} against "
        f"{second.plan.roles[Role.PREFILL]}:{second.plan.roles[Role.DECODE]} prefill to decode"
    )
    much = f"{100 * ahead:.1f} % more goodput" if isfinite(ahead) else "goodput where none of them has any"
    return f"{chosen.method}: {much} than the next, {second.method} ({sizes}, {roles})."
