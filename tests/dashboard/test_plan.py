"""The Plan page."""

import time
from concurrent.futures import wait
from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.plan_page import (
    ATTAINMENT,
    GOODPUT,
    METHODS,
    RATE,
    TTFT,
    Metric,
    change_body,
    change_table,
    change_words,
    comparison_table,
    deviation,
    proposal_changes,
    search_body,
    search_error,
)
from shared.errors import Conflict, InvalidRequest
from shared.plan.methods.registry import METHODS as KNOWN_METHODS
from shared.wire.api.planner import Figures, Fleet, Measured, Proposal
from tests.dashboard.fake_services import FakeServices
from tests.dashboard.pages import button, confirm, finish, has, html, opened, shows
from tests.dashboard.sample_data import (
    CLUSTER_FILE,
    WAIT_S,
    WHAT_IF,
    expected,
    large_fleet,
    proposal,
    search,
    small_fleet,
)


@pytest.fixture
def plan_page(page: AppTest) -> AppTest:
    """The page, not yet run."""
    return opened(page, "plan")


def compute(page: AppTest) -> AppTest:
    """Ask the what-if question of the form."""
    button(page, "suppose").click().run()
    wait([page.session_state["plan_what_if"].answer], WAIT_S)
    return page.run()


def test_without_a_planner(plan_page: AppTest) -> None:
    assert shows(plan_page.run(), "No planner is configured")
    assert not plan_page.error


def test_the_plan_in_force_beside_measured_figures(planner: FakeServices, plan_page: AppTest) -> None:
    plan_page.run()
    assert html(plan_page).count('class="pp-plan"') == 1
    assert shows(plan_page, "1 210 prompt + 180 output tokens", "in force", "61 % longer than expected", "252 requests")
    assert shows(plan_page, "Automatic mode is off", "No open proposal", "No searches yet")
    assert not plan_page.error


def test_before_the_first_expectation(planner: FakeServices, plan_page: AppTest) -> None:
    nothing = dict.fromkeys(("demand", "expected", "measured", "promise"))
    planner.fleet = {**planner.fleet, **nothing, "instances": [], "routes": [], "trouble": "no instance is ready"}
    assert shows(plan_page.run(), "The planner knows no instance yet")
    assert plan_page.warning[0].value == "The planner cannot make proposals: no instance is ready"
    planner.fleet = {**large_fleet(), **nothing}
    assert shows(plan_page.run(), "the planner has seen too few requests", "Equal instances are drawn as one group")


def test_a_proposal_is_accepted_once_after_the_confirmation(planner: FakeServices, plan_page: AppTest) -> None:
    planner.proposals = [proposal("pr-1")]
    plan_page.run()
    assert shows(plan_page, "the demand shifted", "computed in 310 ms", "&lt;i&gt;p0&lt;/i&gt;")
    assert shows(plan_page, "33 points higher", "74 % more")
    button(plan_page, "accept-pr-1").click().run()
    assert "d1 from decode to prefill; new routes" in plan_page.markdown[-1].value
    plan_page.run()
    assert has(plan_page, "confirm"), "a refresh leaves the dialog open"
    assert planner.planned == []
    button(plan_page, "cancel").click().run()
    assert not has(plan_page, "confirm")
    confirm(plan_page, "accept-pr-1")
    assert planner.planned == [("accept", "pr-1", None, "dashboard")]
    assert plan_page.success[0].value == "The proposal is accepted. Its steps are listed under Proposals."
    assert shows(plan_page, "✓ flip d1")
    assert not has(plan_page, "accept-pr-1")


def test_a_running_decision_disables_its_buttons(planner: FakeServices, plan_page: AppTest) -> None:
    planner.proposals = [proposal("pr-1")]
    planner.go.clear()
    plan_page.run()
    button(plan_page, "refuse-pr-1").click().run()
    button(plan_page, "confirm").click().run()
    assert plan_page.info[0].value.startswith("Refusal of the proposal has been running for")
    assert button(plan_page, "accept-pr-1").disabled
    assert button(plan_page, "refuse-pr-1").disabled
    planner.go.set()
    finish(plan_page)
    assert [what for what, *_ in planner.planned] == ["refuse"]


def test_a_refusal_has_its_reason(planner: FakeServices, plan_page: AppTest) -> None:
    planner.proposals, planner.refusal = [proposal("pr-1")], Conflict("it was withdrawn a second ago")
    confirm(plan_page.run(), "accept-pr-1")
    assert plan_page.warning[0].value == "Acceptance of the proposal was refused: it was withdrawn a second ago"
    assert not plan_page.exception


def test_earlier_proposals(planner: FakeServices, plan_page: AppTest) -> None:
    steps = [{"at_s": time.time(), "what": "routes", "ok": False, "text": "the monitor did not answer"}]
    planner.proposals = [
        proposal("pr-2", "failed", cause="loss", who="anna", steps=steps, error="routes were not set"),
        proposal("pr-1", "withdrawn", flips=[], changes_routes=False),
    ]
    assert shows(plan_page.run(), "an instance was lost", "✕ routes", "routes were not set", "anna", "withdrawn")


def test_automatic_mode(planner: FakeServices, plan_page: AppTest) -> None:
    confirm(plan_page.run(), "auto")
    assert planner.planned == [("mode", "", {"auto": True}, "dashboard")]
    assert shows(plan_page, "Automatic mode is on")
    confirm(plan_page, "auto")
    assert planner.planned[-1][2] == {"auto": False}


def test_what_if(planner: FakeServices, plan_page: AppTest) -> None:
    plan_page.run().multiselect(key="suppose_lost").set_value(["p0"])
    plan_page.number_input(key="suppose_rate_factor").set_value(1.5)
    compute(plan_page)
    assert (planner.planned[0][2]["lost"], planner.planned[0][2]["rate_factor"]) == (["p0"], 1.5)
    assert shows(plan_page, "Without p0; request rate × 1.5", "Then, with the best flips", "50 % less", "Best flips")
    planner.what_if_answer = {"now": expected(), "then": expected(3.0), "best": None, "why": "no better roles"}
    assert shows(compute(plan_page), "no better roles")
    planner.what_if_answer = {**WHAT_IF, "best": {"flips": [], "expected": expected()}}
    assert shows(compute(plan_page), "the present roles are best")
    planner.refusal = InvalidRequest("unknown instance 'p9'")
    assert any("unknown instance 'p9'" in each.value for each in compute(plan_page).warning)
    assert not plan_page.exception


def test_a_search_is_cancelled_and_its_result_shown(planner: FakeServices, plan_page: AppTest) -> None:
    planner.plans = [search("plan-1", "running"), search("plan-0", "failed")]
    assert shows(plan_page.run(), "judging candidates", "best goodput 6.8/s", "no deployment fits")
    confirm(plan_page, "cancel-plan-1")
    assert planner.planned == [("cancel", "plan-1", None, "dashboard")]
    assert shows(plan_page, "2 × A40 on a40-0", "3.60 USD/h", "tabu", "the decode instance", "7.4/s")
    assert shows(plan_page, "Without any one group", "5.9/s", "worst: decode 2 × A40 on a40-0 after 1 flip; costs 3")
    assert len(plan_page.get("download_button")) == 1
    assert plan_page.session_state["plan_search"].result.cluster_file == CLUSTER_FILE


def test_a_search_is_submitted(planner: FakeServices, plan_page: AppTest) -> None:
    plan_page.run()
    button(plan_page, "search_submit").click().run()
    assert plan_page.warning[0].value == "The inventory is missing."
    plan_page.text_area(key="search_inventory").set_value("nodes: []")
    plan_page.text_input(key="search_model").set_value("LLaMA-30B")
    plan_page.number_input(key="search_itl_s").set_value(0.05)
    button(plan_page, "search_submit").click().run()
    assert plan_page.warning[0].value.startswith("ITL is too short: itl_s must be at least tpot_s (0.1), got 0.05")
    plan_page.number_input(key="search_itl_s").set_value(0.3)
    confirm(plan_page, "search_submit")
    ((what, _, body, who),) = planner.planned
    assert (what, who, body["inventory"], body["method"]) == ("submit", "dashboard", "nodes: []", "best")
    assert body["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1, "itl_s": 0.3}
    assert shows(plan_page, "waiting")


def test_stale_data_stays_and_disables_the_buttons(planner: FakeServices, plan_page: AppTest) -> None:
    planner.proposals, planner.plans = [proposal("pr-1")], [search("plan-1", "running")]
    planner.fleet["trouble"] = "too few requests"
    plan_page.run()
    planner.broken.add("planner")
    assert shows(plan_page.run(), 'class="pp pp-stale"')
    assert "Greyed-out data" in plan_page.error[0].value
    assert not plan_page.warning, "the problem may have ended"
    for key in ("accept-pr-1", "auto", "cancel-plan-1", "suppose", "search_submit"):
        assert button(plan_page, key).disabled, key
    planner.broken.clear()
    plan_page.run()
    assert not plan_page.error
    assert not button(plan_page, "accept-pr-1").disabled


def test_a_planner_that_does_not_answer(
    planner: FakeServices, plan_page: AppTest, monkeypatch: pytest.MonkeyPatch, refusing_url: str
) -> None:
    monkeypatch.setenv("POLYPHASE_DASHBOARD_PLANNER_URL", refusing_url)
    assert shows(plan_page.run(), "No data: the planner does not answer")
    assert refusing_url in plan_page.error[0].value


def test_an_answer_that_cannot_be_decoded(planner: FakeServices, plan_page: AppTest) -> None:
    planner.fleet["instances"][0]["role"] = "juggler"
    plan_page.run()
    assert not plan_page.exception
    assert "juggler" in plan_page.error[0].value


@pytest.mark.parametrize(
    ("metric", "before", "after", "text", "problem", "gain"),
    [
        (TTFT, 1.0, 1.05, "the same", False, False),
        (TTFT, 1.0, 1.15, "15 % longer", False, False),
        (TTFT, 1.0, 1.5, "50 % longer", True, False),
        (TTFT, 1.0, 3.4, "3.4 times as long", True, False),
        (TTFT, 1.0, 0.6, "40 % shorter", False, True),
        (GOODPUT, 4.0, 3.0, "25 % less", True, False),
        (GOODPUT, 4.0, 9.0, "2.2 times as much", False, True),
        (GOODPUT, 0.0, 9.0, "more", False, True),
        (GOODPUT, 0.0, 0.0, "the same", False, False),
        (RATE, 4.0, 2.0, "50 % less", False, False),
        (ATTAINMENT, 0.97, 0.96, "the same", False, False),
        (ATTAINMENT, 0.97, 0.81, "16 points lower", True, False),
        (ATTAINMENT, 0.0, 0.9, "90 points higher", False, True),
        (TTFT, None, 1.0, "", False, False),
        (TTFT, 1.0, None, "", False, False),
    ],
)
def test_deviations(
    metric: Metric, before: float | None, after: float | None, text: str, problem: bool, gain: bool
) -> None:
    found = deviation(metric, before, after, "the same")
    assert (found.text, found.problem, found.gain) == (text, problem, gain)


def test_tables_of_figures() -> None:
    fleet = msgspec.convert(small_fleet(), Fleet)
    table = comparison_table(fleet.expected, fleet.measured, fleet.promise)
    for part in ("16 points lower than expected", "61 % longer than expected", "as expected", "room for 40 % more"):
        assert part in table, part
    assert "Promised by the plan file" in table
    assert "500 ms" in table
    assert "Promised" not in comparison_table(fleet.expected, fleet.measured, None)
    measured = Measured(9, 60.0, 0.9, None, None, rate=4.0)
    assert "50 % below the rate" in comparison_table(Figures(goodput=2.0), measured, None)
    assert comparison_table(None, None, None).count("–") == 15
    assert "50 % more" in change_table(["Now", "Then", "Best"], [Figures(goodput=4.0), None, Figures(goodput=6.0)])
    assert change_table(["Now", "Then"], [None, Figures(goodput=6.0)]).count("6/s") == 1


def test_the_body_and_words_of_a_what_if_question() -> None:
    fields = {"suppose_lost": ["p0"], "suppose_count": 2, "suppose_like": "d0", "suppose_role": "decode"}
    change = change_body({**fields, "suppose_rate_factor": 1.5})
    added = [{"like": "d0", "count": 2, "role": "decode"}]
    factors = {"rate_factor": 1.5, "prompt_factor": 1.0, "output_factor": 1.0}
    assert change == {"lost": ["p0"], "added": added, **factors}
    assert change_words(change) == "without p0; 2 more like d0 as decode; request rate × 1.5"
    assert change_words(change_body({})) == "no change"
    nothing = msgspec.convert(proposal("pr", flips=[], changes_routes=False), Proposal)
    assert proposal_changes(nothing) == "no changes"


def test_the_body_of_a_search() -> None:
    texts = {"inventory": "nodes: []", "model": " LLaMA-30B ", "workload": "azure-conv", "method": "best"}
    numbers = {"ttft_s": 2, "tpot_s": 0.1, "rate": 0}
    fields: dict[str, Any] = {f"search_{name}": value for name, value in {**texts, **numbers}.items()}
    assert search_body(fields)["model"] == "LLaMA-30B"
    assert search_body({**fields, "search_itl_s": None})["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1}
    assert search_body({**fields, "search_itl_s": 0.3})["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1, "itl_s": 0.3}
    assert search_error(fields) == search_error({**fields, "search_itl_s": 0.1}) == ""
    assert search_error({**fields, "search_model": " "}) == "The model is missing."
    assert search_error({}) == "The inventory is missing."


def test_the_methods_are_those_of_the_planner() -> None:
    assert tuple(KNOWN_METHODS) == METHODS
