"""The planner's answer to what was asked: the plan, what it is compared with, why it won, and its cluster file."""

from collections.abc import Sequence
from math import isfinite

from shared.domain.instance import Role
from shared.errors import Incompatible
from shared.plan.advice import nearest
from shared.plan.asked import Asked
from shared.plan.cheapest import cheapest
from shared.plan.estimate import Estimator
from shared.plan.methods.registry import QUICK, method
from shared.plan.plan_file import TOKENIZER, Target, plan_text
from shared.plan.problem import Clock
from shared.plan.search import Outcome, Search, Stopped, Tell, searched
from shared.sim.spec import RunSpec


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
