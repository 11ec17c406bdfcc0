"""One search, from its request to the result that `GET /plans/{id}` shows."""

from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter

from msgspec import structs

from services.planner.edge import SearchIn
from services.planner.search_process import Answer
from shared.cost.library import Library
from shared.plan.find import PlanRequest, cluster_file, figures, find_plans, why
from shared.plan.search import Outcome, ReportProgress
from shared.wire.api.planner import ComparedMethod, PlanEndurance, PlanGroup, Promise, RouteShare, SearchResult


def answer(request: str, seconds: float, tell: ReportProgress) -> Answer:
    """The plan for a request, JSON of `SearchIn`. Raises errors of `shared.errors`; see `shared.plan.find`."""
    resolved = SearchIn.model_validate_json(request).resolved(Library.built_in(), seconds)
    outcomes = find_plans(resolved, perf_counter, tell)
    return Answer(result(resolved, outcomes), outcomes[0].stopped)


def result(request: PlanRequest, outcomes: Sequence[Outcome]) -> SearchResult:
    """The first outcome, with those that it is compared with."""
    problem, chosen = request.problem, outcomes[0]
    plan, names = chosen.plan, chosen.plan.names(problem)
    groups = [
        PlanGroup(
            name=name,
            role="both" if plan.coupled else group.role.value,
            accelerators=group.words(problem.inventory),
            layout=group.layout,
            tensor_parallel=group.tensor_parallel,
            price_usd_hour=group.price_usd_hour(problem.inventory),
        )
        for name, group in zip(names, plan.groups, strict=True)
    ]
    routes = [
        RouteShare(None if route.prefill is None else names[route.prefill], names[route.decode], route.share)
        for route in plan.routes
    ]
    return SearchResult(
        method=chosen.method,
        workload=problem.workload.name,
        groups=groups,
        routes=routes,
        policies=plan.policies,
        promise=_promise(request, chosen),
        compared=[
            ComparedMethod(method=each.method, **structs.asdict(_promise(request, each))) for each in outcomes[1:]
        ],
        why=why(outcomes) if len(outcomes) > 1 else "",
        stopped=chosen.stopped,
        took_s=chosen.took_s,
        cluster_file=cluster_file(request, chosen),
        endurance=PlanEndurance(**asdict(chosen.endurance)) if chosen.endurance else None,
    )


def _promise(request: PlanRequest, outcome: Outcome) -> Promise:
    known = figures(outcome)
    return Promise(
        rate=outcome.promise.rate,
        goodput=outcome.promise.goodput,
        attainment=outcome.promise.attainment,
        ttft_s=known.get("ttft_mean_s"),
        tpot_s=known.get("tpot_mean_s"),
        usd_per_million_tokens=known.get("usd_per_million_tokens"),
        usd_per_hour=sum(group.price_usd_hour(request.problem.inventory) for group in outcome.plan.groups),
    )
