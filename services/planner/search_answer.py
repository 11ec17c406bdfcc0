"""One search, from its request to the result that `GET /plans/{id}` shows."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from services.planner.edge import SearchIn
from services.planner.search_process import Answer
from shared.cost.library import Library
from shared.plan.find import PlanRequest, cluster_file, figures, find_plans, why
from shared.plan.search import Outcome, ReportProgress


def answer(request: str, seconds: float, tell: ReportProgress) -> Answer:
    """The plan for a request, JSON of `SearchIn`. Raises errors of `shared.errors`; see `shared.plan.find`."""
    asked = SearchIn.model_validate_json(request).resolved(Library.built_in(), seconds)
    outcomes = find_plans(asked, perf_counter, tell)
    return Answer(result(asked, outcomes), outcomes[0].stopped)


def result(asked: PlanRequest, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The first outcome as JSON, with those that it is compared with."""
    problem, chosen = asked.problem, outcomes[0]
    plan, names = chosen.plan, chosen.plan.names(problem)
    groups = [
        {
            "name": name,
            "role": "both" if plan.coupled else group.role.value,
            "accelerators": group.words(problem.inventory),
            "layout": group.layout,
            "tensor_parallel": group.tensor_parallel,
            "price_usd_hour": group.price_usd_hour(problem.inventory),
        }
        for name, group in zip(names, plan.groups, strict=True)
    ]
    routes = [
        {
            "prefill": None if route.prefill is None else names[route.prefill],
            "decode": names[route.decode],
            "share": route.share,
        }
        for route in plan.routes
    ]
    return {
        "method": chosen.method,
        "workload": problem.workload.name,
        "groups": groups,
        "routes": routes,
        "policies": plan.policies,
        "promise": _promise(asked, chosen),
        "compared": [{"method": one.method, **_promise(asked, one)} for one in outcomes[1:]],
        "why": why(outcomes) if len(outcomes) > 1 else "",
        "stopped": chosen.stopped,
        "took_s": chosen.took_s,
        "cluster_file": cluster_file(asked, chosen),
    }


def _promise(asked: PlanRequest, one: Outcome) -> dict[str, float | None]:
    known = figures(one)
    return {
        "goodput": one.promise.goodput,
        "rate": one.promise.rate,
        "attainment": one.promise.attainment,
        "ttft_mean_s": known.get("ttft_mean_s"),
        "tpot_mean_s": known.get("tpot_mean_s"),
        "usd_per_million_tokens": known.get("usd_per_million_tokens"),
        "usd_per_hour": sum(group.price_usd_hour(asked.problem.inventory) for group in one.plan.groups),
    }
