"""The page Plan over a planner of one process."""

import time
from concurrent.futures import wait

import pytest
from streamlit.testing.v1 import AppTest

from shared.errors import Conflict, InvalidRequest
from tests.dashboard.pages import button, has, html
from tests.dashboard.plan.conftest import URL
from tests.dashboard.planner import CLUSTER_FILE, WAIT_S, FakePlanner, expected, large_fleet, proposal, search

SUPPOSED = {
    "now": expected(6.0),
    "then": expected(3.0, attainment=0.5),
    "best": {
        "flips": [{"instance_id": "d1", "from_role": "decode", "to_role": "prefill"}],
        "expected": expected(5.0, attainment=0.96),
    },
    "why": "",
}


def answer(page: AppTest, key: str) -> AppTest:
    """Click a button, say yes, wait for what comes of it."""
    button(page, key).click().run()
    button(page, "confirm").click().run()
    wait([deed.future for deed in page.session_state["plan_operations"]], WAIT_S)
    return page.run()


def suppose(page: AppTest) -> AppTest:
    button(page, "suppose").click().run()
    wait([page.session_state["plan_supposed"].future], WAIT_S)
    return page.run()


def test_without_a_planner_it_says_so(plan_page: AppTest) -> None:
    plan_page.run()
    assert not plan_page.exception
    assert "No planner is configured" in html(plan_page)
    assert not plan_page.error


def test_the_plan_in_force_beside_what_is_measured(planner: FakePlanner, plan_page: AppTest) -> None:
    plan_page.run()
    assert not plan_page.exception
    assert len(plan_page.get("plotly_chart")) == 1
    shown = html(plan_page)
    for said in ("1 210 prompt + 180 output tokens", "in force", "61 % longer than expected", "252 requests"):
        assert said in shown, said
    assert "Auto is off" in shown
    assert "No proposal is open" in shown
    assert "Nobody has searched for a plan yet" in shown
    assert not plan_page.error


def test_nothing_is_known_yet(planner: FakePlanner, plan_page: AppTest) -> None:
    none = dict.fromkeys(("demand", "expected", "measured", "promise"))
    planner.fleet = {**planner.fleet, **none, "instances": [], "routes": [], "trouble": "no instance is ready"}
    plan_page.run()
    assert not plan_page.exception
    assert plan_page.warning[0].value == "Nothing can be proposed: no instance is ready"
    planner.fleet = {**large_fleet(), **none}
    plan_page.run()
    assert not plan_page.exception
    assert "the planner has seen too few requests" in html(plan_page)
    assert "Alike instances are drawn as one" in html(plan_page)


def test_a_proposal_is_accepted_once_and_only_after_a_yes(planner: FakePlanner, plan_page: AppTest) -> None:
    planner.proposals = [proposal("pr-1")]
    plan_page.run()
    shown = html(plan_page)
    for said in (
        "the demand shifted",
        "worked out in 310 ms",
        "&lt;i&gt;p0&lt;/i&gt;",
        "33 points higher",
        "74 % more",
    ):
        assert said in shown, said
    button(plan_page, "accept-pr-1").click().run()
    assert has(plan_page, "confirm")
    plan_page.run()
    assert has(plan_page, "confirm")
    assert planner.done == []
    button(plan_page, "cancel").click().run()
    assert not has(plan_page, "confirm")
    answer(plan_page, "accept-pr-1")
    assert planner.done == [("accept", "pr-1", None, "dashboard")]
    assert plan_page.success[0].value == "The proposal is accepted; its steps are told below."
    assert "✓ flip d1" in html(plan_page)
    assert not has(plan_page, "accept-pr-1")


def test_a_decision_under_way_is_not_asked_for_again(planner: FakePlanner, plan_page: AppTest) -> None:
    planner.proposals = [proposal("pr-1")]
    planner.go.clear()
    plan_page.run()
    button(plan_page, "refuse-pr-1").click().run()
    button(plan_page, "confirm").click().run()
    assert plan_page.info[0].value.startswith("Refusing the proposal:")
    assert button(plan_page, "accept-pr-1").disabled
    assert button(plan_page, "refuse-pr-1").disabled
    planner.go.set()
    wait([deed.future for deed in plan_page.session_state["plan_operations"]], WAIT_S)
    plan_page.run()
    assert [what for what, *_ in planner.done] == ["refuse"]


def test_a_refusal_is_told_with_its_reason(planner: FakePlanner, plan_page: AppTest) -> None:
    planner.proposals, planner.refusal = [proposal("pr-1")], Conflict("it was withdrawn a second ago")
    answer(plan_page.run(), "accept-pr-1")
    said = "Accepting the proposal was refused by the planner: it was withdrawn a second ago"
    assert plan_page.warning[0].value == said
    assert not plan_page.exception


def test_what_became_of_earlier_ones(planner: FakePlanner, plan_page: AppTest) -> None:
    steps = [{"at_s": time.time(), "what": "routes", "ok": False, "text": "the monitor did not answer"}]
    planner.proposals = [
        proposal("pr-2", "failed", cause="loss", who="anna", steps=steps, error="routes were not set"),
        proposal("pr-1", "withdrawn", now=None, then=None, flips=[], changes_routes=False),
    ]
    shown = html(plan_page.run())
    for said in ("an instance was lost", "✕ routes", "routes were not set", "anna", "withdrawn"):
        assert said in shown, said


def test_auto_is_turned_on_and_off(planner: FakePlanner, plan_page: AppTest) -> None:
    answer(plan_page.run(), "auto")
    assert planner.done == [("mode", "", {"auto": True}, "dashboard")]
    assert "Auto is on" in html(plan_page)
    answer(plan_page, "auto")
    assert planner.done[-1][2] == {"auto": False}


def test_what_if(planner: FakePlanner, plan_page: AppTest) -> None:
    planner.answer = SUPPOSED
    plan_page.run().multiselect(key="suppose_lost").set_value(["p0"])
    plan_page.number_input(key="suppose_rate_factor").set_value(1.5)
    suppose(plan_page)
    assert planner.done[0][2]["lost"] == ["p0"]
    assert planner.done[0][2]["rate_factor"] == 1.5
    shown = html(plan_page)
    for said in ("Without p0; request rate × 1.5", "Then, with the best flips", "50 % less", "Best flips"):
        assert said in shown, said


def test_what_if_where_nothing_is_left_or_nothing_helps(planner: FakePlanner, plan_page: AppTest) -> None:
    planner.answer = {"now": expected(), "then": None, "best": None, "why": "no instance would decode"}
    assert "no instance would decode" in html(suppose(plan_page.run()))
    planner.answer = {**SUPPOSED, "best": {"flips": [], "expected": expected()}}
    assert "the roles are best as they are" in html(suppose(plan_page))
    planner.refusal = InvalidRequest("unknown instance 'p9'")
    assert plan_page.session_state["plan_supposed"] is not None
    assert any("unknown instance 'p9'" in one.value for one in suppose(plan_page).warning)
    assert not plan_page.exception


def test_a_search_is_cancelled_and_its_result_shown(planner: FakePlanner, plan_page: AppTest) -> None:
    planner.plans = [search("plan-1", "running"), search("plan-0", "failed")]
    shown = html(plan_page.run())
    for said in ("judging candidates", "best goodput 6.8/s", "no deployment fits"):
        assert said in shown, said
    answer(plan_page, "cancel-plan-1")
    assert planner.done == [("cancel", "plan-1", None, "dashboard")]
    shown = html(plan_page)
    for said in ("2 × A40 on a40-0", "3.60 USD/h", "tabu", "the same", "7.4/s"):
        assert said in shown, said
    assert len(plan_page.get("download_button")) == 1
    assert plan_page.session_state["plan_search"].result.cluster_file == CLUSTER_FILE


def test_a_search_is_submitted(planner: FakePlanner, plan_page: AppTest) -> None:
    plan_page.run()
    button(plan_page, "search_wanted").click().run()
    assert plan_page.warning[0].value == "The inventory is missing."
    plan_page.text_area(key="wanted_inventory").set_value("nodes: []")
    plan_page.text_input(key="wanted_model").set_value("LLaMA-30B")
    plan_page.number_input(key="wanted_itl_s").set_value(0.05)
    button(plan_page, "search_wanted").click().run()
    assert plan_page.warning[0].value.startswith("ITL is too short: itl_s must be at least tpot_s (0.1), got 0.05")
    plan_page.number_input(key="wanted_itl_s").set_value(0.3)
    answer(plan_page, "search_wanted")
    ((what, _, body, who),) = planner.done
    assert (what, who, body["inventory"], body["method"]) == ("submit", "dashboard", "nodes: []", "best")
    assert body["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1, "itl_s": 0.3}
    assert "waiting" in html(plan_page)


def test_what_is_known_stays_when_the_planner_goes(planner: FakePlanner, plan_page: AppTest) -> None:
    planner.proposals, planner.plans = [proposal("pr-1")], [search("plan-1", "running")]
    planner.fleet["trouble"] = "too few requests"
    plan_page.run()
    planner.away = True
    plan_page.run()
    assert not plan_page.exception
    assert "In grey: what it said" in plan_page.error[0].value
    assert 'class="pp pp-stale"' in html(plan_page)
    assert not plan_page.warning  # it may be over
    for key in ("accept-pr-1", "auto", "cancel-plan-1", "suppose", "search_wanted"):
        assert button(plan_page, key).disabled, key
    planner.away = False
    plan_page.run()
    assert not plan_page.error
    assert not button(plan_page, "accept-pr-1").disabled


def test_a_planner_that_never_answered(
    planner: FakePlanner, plan_page: AppTest, monkeypatch: pytest.MonkeyPatch, nobody: str
) -> None:
    monkeypatch.setenv(URL, nobody)
    plan_page.run()
    assert not plan_page.exception
    assert nobody in plan_page.error[0].value
    assert "Nothing to show while the planner does not answer" in html(plan_page)


def test_answers_that_make_no_sense(planner: FakePlanner, plan_page: AppTest) -> None:
    planner.fleet["instances"][0]["role"] = "juggler"
    plan_page.run()
    assert not plan_page.exception
    assert "juggler" in plan_page.error[0].value
