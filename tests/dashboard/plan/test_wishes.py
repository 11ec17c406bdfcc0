from concurrent.futures import Future

import httpx
import msgspec
import pytest

from dashboard.plan.operations import Act, Deed, Wish, accept, changes, consequences, question
from dashboard.plan.page import change_of, words
from dashboard.plan.records import Proposal
from dashboard.plan.searches import METHODS, body_of, missing_of, wrong_in
from shared.errors import Conflict, DeadlineExceeded, PolyphaseError, Unavailable
from shared.plan.methods.registry import METHODS as KNOWN
from tests.dashboard.planner import proposal


def test_what_is_asked_before_a_proposal_is_carried_out() -> None:
    wish = accept(msgspec.convert(proposal("pr-1"), Proposal))
    assert question(wish) == "Carry out this proposal?"
    assert "d1 from decode to prefill; new routes" in consequences(wish)
    assert changes(Proposal("pr", "open", 0.0)) == "nothing changes"


def ended(error: Exception | None) -> Deed:
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return Deed(Wish(Act.ACCEPT, "pr-1"), future, started_s=100.0)


def unanswered() -> PolyphaseError:
    error = DeadlineExceeded("no answer in 2 s")
    error.__cause__ = httpx.ReadTimeout("")
    return error


@pytest.mark.parametrize(
    ("error", "state", "said"),
    [
        (None, "succeeded", "The proposal is accepted; its steps are told below."),
        (Conflict("it was withdrawn"), "refused", "was refused by the planner: it was withdrawn"),
        (unanswered(), "unknown", "whether it was done is unknown"),
        (Unavailable("gone"), "failed", "failed: gone"),
        (RuntimeError("odd"), "failed", "failed: RuntimeError: odd"),
    ],
)
def test_how_it_ended(error: Exception | None, state: str, said: str) -> None:
    outcome = ended(error).outcome(103.0)
    assert outcome.state == state
    assert said in outcome.text


def test_under_way() -> None:
    deed = Deed(Wish(Act.CANCEL, "plan-1"), Future(), started_s=100.0)
    assert deed.outcome(103.0).text == "Ending the search: 3 s so far."


def test_every_act_has_its_words() -> None:
    for act in Act:
        assert question(Wish(act)).endswith("?")
        assert consequences(Wish(act))


def test_the_body_of_a_what_if() -> None:
    change = change_of(
        {
            "suppose_lost": ["p0"],
            "suppose_count": 2,
            "suppose_like": "d0",
            "suppose_role": "decode",
            "suppose_rate_factor": 1.5,
        }
    )
    assert change == {
        "lost": ["p0"],
        "added": [{"like": "d0", "count": 2, "role": "decode"}],
        "rate_factor": 1.5,
        "prompt_factor": 1.0,
        "output_factor": 1.0,
    }
    assert words(change) == "without p0; 2 more like d0 as decode; request rate × 1.5"
    assert words(change_of({})) == "nothing changed"


def test_the_body_of_a_search() -> None:
    fields = {
        "wanted_inventory": "nodes: []",
        "wanted_model": " LLaMA-30B ",
        "wanted_workload": "azure-conv",
        "wanted_ttft_s": 2,
        "wanted_tpot_s": 0.1,
        "wanted_rate": 0,
        "wanted_method": "best",
    }
    assert body_of(fields)["model"] == "LLaMA-30B"
    assert body_of(fields)["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1}
    assert body_of({**fields, "wanted_itl_s": None})["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1}
    assert body_of({**fields, "wanted_itl_s": 0.3})["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1, "itl_s": 0.3}
    assert missing_of(fields) == wrong_in(fields) == wrong_in({**fields, "wanted_itl_s": 0.1}) == ""
    assert wrong_in({**fields, "wanted_itl_s": 0.05}).startswith(
        "ITL is too short: itl_s must be at least tpot_s (0.1), got 0.05: "
    )
    assert wrong_in({**fields, "wanted_model": " "}) == "The model is missing."
    assert missing_of({**fields, "wanted_model": " "}) == "The model"
    assert missing_of({}) == "The inventory"


def test_the_methods_are_those_that_there_are() -> None:
    assert tuple(KNOWN) == METHODS
