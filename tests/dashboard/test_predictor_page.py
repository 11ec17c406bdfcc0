"""The Predictor page."""

from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.predictor_page import fallback_warning, scatter, source_sentence
from shared.wire.api.predictor import LengthSource
from tests.dashboard.pages import charts, drawings, opened, shows
from tests.dashboard.sample_data import lengths

WHY = "right for 31 % of the last 300 answers, no better than the commonest bucket"


@pytest.fixture
def predictor(page: AppTest) -> AppTest:
    return opened(page, "predictor")


def test_a_classifier_beside_its_baselines(predictor: AppTest, cluster: Any) -> None:
    cluster.lengths = lengths("classifier", state="loaded")
    predictor.run()
    assert not predictor.warning
    assert shows(predictor, "The classifier predicts output lengths.", "62 %", "31 %", "45 %", "of 1 234 answers")
    assert shows(predictor, "49 tokens", "3 late", "/models/lengths")
    assert charts(predictor) == 1


def test_a_classifier_that_is_not_accurate_enough(predictor: AppTest, cluster: Any) -> None:
    cluster.lengths = lengths("observed", state="loaded", why=WHY)
    cluster.lengths["reality"]["accuracy"]["classifier"] = 0.31
    predictor.run()
    (warning,) = (each.value for each in predictor.warning)
    assert "uses observed lengths instead of the classifier" in warning
    assert WHY[1:] in warning
    assert shows(predictor, "predicted from 1 500 observed answers: the classifier is not accurate enough.")
    assert shows(predictor, "31 %, no better than a baseline")


def test_a_broken_checkpoint(predictor: AppTest, cluster: Any) -> None:
    cluster.lengths = {**lengths(state="broken", error="<b>no weights</b>"), "reality": {}}
    predictor.run()
    assert "The checkpoint is unusable." in predictor.warning[0].value
    assert shows(predictor, "&lt;b&gt;no weights&lt;/b&gt;")
    assert not charts(predictor)


def test_no_checkpoint_is_no_problem(predictor: AppTest) -> None:
    predictor.run()
    assert not predictor.warning
    assert shows(predictor, "Output lengths are predicted from 12 observed answers: there is no checkpoint")


def test_without_a_predictor(predictor: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHASE_DASHBOARD_PREDICTOR_URL", "")
    assert shows(predictor.run(), "No predictor is configured")


def test_before_the_first_answers() -> None:
    accuracy = {"classifier": None, "commonest": None, "prompt_length": None}
    reality = {"answers": 0, "accuracy": accuracy, "mean_error_tokens": None, "recent": []}
    source = msgspec.convert({**lengths("classifier", state="loaded"), "reality": reality}, LengthSource)
    assert source_sentence(source) == "The classifier predicts output lengths."


def test_the_reason_is_shown_unchanged() -> None:
    source = msgspec.convert(lengths(state="loaded", why="that `x` is *worse* than [y](z)"), LengthSource)
    assert fallback_warning(source).endswith(r" That \`x\` is \*worse\* than \[y\](z)")


def test_the_diagonal_spans_all_points() -> None:
    drawn = drawings(scatter([(100.0, 90), (300.0, 450), (20.0, 17)]))[0]
    assert 'd="M0.0 100.00L1000.0 0.00"' in drawn
    assert "M200.0 82.00h0M600.0 10.00h0M40.0 96.60h0" in drawn, "of 500"
