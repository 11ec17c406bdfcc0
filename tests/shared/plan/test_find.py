"""From a request to the plan, and the errors where no plan is possible."""

from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from shared.domain.policies import PolicySet
from shared.errors import Incompatible, InvalidRequest
from shared.plan import find
from shared.plan.estimate import Estimator
from shared.plan.evaluate import Evaluator, Promise
from shared.plan.find import (
    ONE_PRECISION,
    PlanGoals,
    PlanRequest,
    cheapest,
    cluster_file,
    figures,
    find_plans,
    fitting,
    nearest,
    why,
)
from shared.plan.plan import Plan, deployed
from shared.plan.search import Outcome, ScoredPlan, Search, Stopped, no_report
from shared.sim.spec import RunSpec, with_policies
from shared.sim.workload import conversations, synthetic
from tests.shared.plan.problems import inventory, problem, search

STOCK = inventory(("a", "A100-SXM-80", 1), ("b", "A10", 1))


def asked(**goals: Any) -> PlanRequest:
    return PlanRequest(problem(STOCK, prompt=2000), PlanGoals(method="coupled", **goals), "mine", "Llama-3-8B")


def test_the_first_is_the_one_that_was_asked_for() -> None:
    one = asked(seconds=5.0)
    outcomes = find_plans(one, count(step=0.01).__next__, no_report)  # a slow machine has time for all methods, too
    names = [outcome.method for outcome in outcomes]
    assert names[0] == "coupled"
    assert len(names) == len(set(names)) > 1
    assert "coupled" in why(outcomes)
    assert figures(outcomes[0])["goodput_requests_per_s"] == outcomes[0].promise.goodput
    text = cluster_file(one, outcomes[0])
    assert "# A plan by `polyphase plan`, method coupled." in text
    assert "\nmodel: models/demo\n" in text  # as the project names it: the file is read on other machines


def test_plans_are_judged_with_the_policies_that_services_run_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[RunSpec] = []
    promise = Evaluator.promise

    def noted(evaluator: Evaluator, *plan: Any) -> Promise:
        runs.append(evaluator.run)
        return promise(evaluator, *plan)

    monkeypatch.setattr(Evaluator, "promise", noted)
    find_plans(asked(seconds=0.0), perf_counter, no_report)
    assert runs
    for run in runs:
        assert with_policies(run, PolicySet()) == run


def test_ctrl_c_among_the_comparisons_ends_them_all() -> None:
    def tell(what: str, best: ScoredPlan | None) -> None:
        if what != "coupled":
            raise KeyboardInterrupt

    (only,) = find_plans(asked(), perf_counter, tell)
    assert (only.method, only.stopped) == ("coupled", False)


def with_int8() -> PlanRequest:
    one = asked(compare=False, quantised={"int8": ""})
    return replace(one, problem=replace(one.problem, quantised=("int8",)))


def test_a_plan_with_quantised_weights_is_compared_with_one_without() -> None:
    outcomes = find_plans(with_int8(), perf_counter, no_report)
    assert {outcome.method for outcome in outcomes} == {"coupled", ONE_PRECISION}
    assert outcomes[0].promise.goodput >= outcomes[1].promise.goodput


@pytest.mark.parametrize("error", [Incompatible("nothing fits"), Stopped("stopped")])
def test_a_plan_is_kept_where_none_is_found_without_quantised_weights(
    monkeypatch: pytest.MonkeyPatch, error: Incompatible
) -> None:
    searched = find.run_method

    def fails_without(name: str, method: Any, search: Search) -> Outcome:
        if not search.problem.quantised:
            raise error
        return searched(name, method, search)

    monkeypatch.setattr(find, "run_method", fails_without)
    (only,) = find_plans(with_int8(), perf_counter, no_report)
    assert only.method == "coupled"


def test_ctrl_c_while_the_promise_is_made_costs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    promise, calls = Evaluator.promise, 0

    def interrupted(evaluator: Evaluator, *plan: Any) -> Promise:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        return promise(evaluator, *plan)

    monkeypatch.setattr(Evaluator, "promise", interrupted)
    (only,) = find_plans(asked(), perf_counter, no_report)
    assert only.stopped
    assert only.promise.goodput > 0


@pytest.mark.parametrize(
    ("goals", "message"),
    [
        (PlanGoals(engine="steam"), "engine: emulated or vllm, not 'steam'"),
        (PlanGoals(codec="zip"), "codec: one of raw"),
        (PlanGoals(cheapest=True), "cheapest needs the rate"),
        (PlanGoals(method="luck"), "unknown method 'luck'"),
        (PlanGoals(quantised={"int2": ""}), "quantised: one of fp4, fp8, int4, int8, not 'int2'"),
        (PlanGoals(engine="vllm", quantised={"int8": ""}), "name the checkpoint of int8"),
    ],
)
def test_what_cannot_be_wanted_is_named(goals: PlanGoals, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        goals.check()


def test_what_a_context_cannot_hold_is_left_out() -> None:
    workload = synthetic(50, 1000, 100, prompt_cv=1.0, seed=2)
    longest = int((workload.prompt_tokens + workload.output_tokens).max())
    assert fitting(workload, longest) is workload
    fewer = fitting(workload, longest - 1)
    assert len(fewer) == 49
    assert f"without 1 of 50 requests of more than {longest - 1} tokens" in fewer.name
    with pytest.raises(InvalidRequest, match="every request is longer than 50 tokens"):
        fitting(workload, 50)


def test_what_is_left_keeps_its_prefixes_and_sessions() -> None:
    chats = conversations(300, seed=4)
    fewer = fitting(chats, 4_000)
    kept = np.flatnonzero(chats.prompt_tokens + chats.output_tokens <= 4_000).tolist()
    assert 50 < len(fewer) < 300
    for ours, theirs in ((fewer.prefixes, chats.prefixes), (fewer.answers, chats.answers)):
        assert ours == tuple((theirs or ())[row] for row in kept)
    assert fewer.sessions == tuple((chats.sessions or ())[row] for row in kept)
    assert fewer.arrival_s.tolist() == chats.arrival_s[kept].tolist()


@pytest.mark.parametrize("caches", [True, False])
def test_prefix_caches_are_planned_with_unless_switched_off(caches: bool) -> None:
    goals = PlanGoals(method="coupled", prefix_cache=caches, compare=False, max_model_len=16_384)
    base = problem(STOCK)
    one = PlanRequest.build(goals, "mine", STOCK, "Llama-3-8B", base.models, conversations(600, seed=4), base.slo)
    assert one.problem.caches is caches
    (outcome,) = find_plans(one, count(step=0.01).__next__, no_report)
    estimator = Estimator(one.problem)
    instances, _ = deployed(one.problem, outcome.plan, estimator.costs, estimator.places)
    assert {instance.limits.prefix_cache for instance in instances} == {caches}
    assert ("emulated_prefix_cache: false" in cluster_file(one, outcome)) is not caches


NODES_OF_4 = inventory(("a", "A10", 4), ("b", "A10", 4), gbps=100.0)


def test_the_cheapest_is_cheaper_than_all_of_it_and_serves_the_rate() -> None:
    wanted = problem(NODES_OF_4, rate=3.0)
    found = search(wanted)
    plan = cheapest(found)
    price = sum(group.price_usd_hour(NODES_OF_4) for group in plan.groups)
    assert price < NODES_OF_4.price_usd_hour / 2
    assert found.evaluator.attainment(plan, 3.0) >= wanted.target


def test_a_rate_that_nothing_serves_says_what_can_be_served() -> None:
    with pytest.raises(Incompatible, match=r"the whole inventory serves \d+\.\d+ requests/s .* not 1000"):
        cheapest(search(problem(inventory(("a", "A10", 1)), rate=1000.0)))


def test_advice_names_the_memory_that_is_missing() -> None:
    said = nearest(problem(inventory(("a", "A10", 1)), "Llama-2-70B"), lambda: 0.0)
    assert "needs 138.0 GB of weights" in said
    assert "GB are missing" in said


def test_ctrl_c_during_the_cheapest_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(problem(NODES_OF_4, rate=3.0))

    def pressed(plan: Plan, rate: float) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(found.evaluator, "attainment", pressed)
    with pytest.raises(Stopped, match="stopped before an offer was found"):
        cheapest(found)
