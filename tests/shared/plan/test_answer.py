"""What is asked and answered, whoever asks."""

from time import perf_counter
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.plan.answer import PlanGoals, PlanRequest, answered, cluster_file, figures, fitting, why
from shared.plan.judge import Judge, Promise
from shared.plan.search import Found, silent
from shared.sim.workload import synthetic
from tests.shared.plan.problems import inventory, problem

STOCK = inventory(("a", "A100-SXM-80", 1), ("b", "A10", 1))


def asked(**goals: Any) -> PlanRequest:
    return PlanRequest(problem(STOCK, prompt=2000), PlanGoals(method="coupled", **goals), "mine", "Llama-3-8B")


def test_the_first_is_the_one_that_was_asked_for() -> None:
    one = asked(seconds=5.0)
    outcomes = answered(one, perf_counter, silent)
    names = [outcome.method for outcome in outcomes]
    assert names[0] == "coupled"
    assert len(names) == len(set(names)) > 1
    assert "coupled" in why(outcomes)
    assert figures(outcomes[0])["goodput_requests_per_s"] == outcomes[0].promise.goodput
    text = cluster_file(one, outcomes[0])
    assert "# A plan by `polyphase plan`, method coupled." in text
    assert "\nmodel: models/demo\n" in text  # as the project names it: the file is read on other machines


def test_ctrl_c_among_the_comparisons_ends_them_all() -> None:
    def tell(what: str, best: Found | None) -> None:
        if what != "coupled":
            raise KeyboardInterrupt

    (only,) = answered(asked(), perf_counter, tell)
    assert (only.method, only.stopped) == ("coupled", False)


def test_ctrl_c_while_the_promise_is_made_costs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    promise, calls = Judge.promise, 0

    def interrupted(judge: Judge, *plan: Any) -> Promise:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        return promise(judge, *plan)

    monkeypatch.setattr(Judge, "promise", interrupted)
    (only,) = answered(asked(), perf_counter, silent)
    assert only.stopped
    assert only.promise.goodput > 0


@pytest.mark.parametrize(
    ("goals", "message"),
    [
        (PlanGoals(engine="steam"), "engine: emulated or vllm, not 'steam'"),
        (PlanGoals(codec="zip"), "codec: one of raw"),
        (PlanGoals(cheapest=True), "cheapest needs the rate"),
        (PlanGoals(method="luck"), "unknown method 'luck'"),
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
