from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.predictor_page import because, scatter, warning
from dashboard.records import LengthSource
from tests.dashboard.pages import html, opened

WHY = "Of the last 300 answers it named the right bucket for 31 %, and the prompt's length alone for 45 %"


def told(source: str = "classifier", *, why: str = "", state: str = "loaded", error: str | None = None) -> Any:
    """What the predictor answers once it has a classifier."""
    return {
        "source": source,
        "why": why,
        "checkpoint": {"path": "/models/lengths", "state": state, "error": error, "metadata": {"bucket_tokens": 100}},
        "reality": {
            "model": "abc",
            "answers": 1234,
            "accuracy": {"classifier": 0.62, "commonest": 0.31, "prompt_length": 0.45},
            "mean_error_tokens": 48.6,
            "believed": not why,
            "recent": [[100.5, 90], [300.0, 450], [20.0, 17]],
        },
        "fallbacks": {"late": 3, "busy": 0},
        "reads_token_ids": True,
        "pending": 0,
        "observed": {"observations": 1500, "accuracy": 0.4},
    }


def parsed(answer: Mapping[str, Any]) -> LengthSource:
    return msgspec.convert(answer, LengthSource)


@pytest.fixture
def predictor(page: AppTest) -> AppTest:
    return opened(page, "predictor")


def test_a_classifier_is_shown_beside_its_baselines(predictor: AppTest, cluster: Any) -> None:
    cluster.lengths = told()
    predictor.run()
    assert not predictor.exception
    assert not predictor.warning
    shown = html(predictor)
    for said in ("The classifier answers", "62 %", "31 %", "45 %", "over 1 234 answers", "49 tokens", "3 late"):
        assert said in shown, said
    assert "/models/lengths" in shown
    assert len(predictor.get("plotly_chart")) == 1


def test_a_classifier_that_is_not_believed_is_a_warning_in_words(predictor: AppTest, cluster: Any) -> None:
    cluster.lengths = told("observed", why=WHY)
    cluster.lengths["reality"]["accuracy"]["classifier"] = 0.31
    predictor.run()
    assert not predictor.exception
    (said,) = (one.value for one in predictor.warning)
    assert "Predictions have fallen back on observed lengths" in said
    assert WHY in said
    shown = html(predictor)
    assert "Observed lengths answer, of 1 500 finished answers: the classifier is not believed." in shown
    assert "31 %, no better than who does not read the prompt" in shown


def test_a_broken_checkpoint_is_a_warning_with_its_error(predictor: AppTest, cluster: Any) -> None:
    cluster.lengths = {**told("observed", state="broken", error="<b>no weights</b>"), "reality": {}}
    predictor.run()
    assert not predictor.exception
    assert "Its checkpoint cannot be used" in predictor.warning[0].value
    assert "&lt;b&gt;no weights&lt;/b&gt;" in html(predictor)
    assert not predictor.get("plotly_chart")


def test_without_a_checkpoint_nothing_is_wrong(predictor: AppTest) -> None:
    predictor.run()
    assert not predictor.exception
    assert not predictor.warning
    assert "Observed lengths answer, of 12 finished answers: there is no checkpoint" in html(predictor)


def test_without_a_predictor_the_page_says_so(predictor: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHASE_DASHBOARD_PREDICTOR_URL", "")
    predictor.run()
    assert not predictor.exception
    assert "No predictor is configured" in html(predictor)


def test_nothing_is_known_of_the_last_answers_yet() -> None:
    empty: dict[str, Any] = {"answers": 0, "accuracy": {"classifier": None, "commonest": None, "prompt_length": None}}
    found = parsed({**told(), "reality": {**empty, "mean_error_tokens": None, "recent": []}})
    assert found.reality.accuracy.classifier is None
    assert because(found) == "The classifier answers: its checkpoint is loaded."


def test_the_reason_is_read_as_it_stands() -> None:
    found = parsed(told("observed", why="that `x` is *worse* than [y](z)"))
    assert warning(found).endswith(r" That \`x\` is \*worse\* than \[y\](z)")


def test_the_diagonal_spans_all_points() -> None:
    diagonal, points = scatter(parsed(told()).reality.recent).data
    assert list(points.x) == [100.5, 300.0, 20.0]
    assert list(points.y) == [90, 450, 17]
    assert list(diagonal.x) == list(diagonal.y)
    assert diagonal.x[1] >= 450
