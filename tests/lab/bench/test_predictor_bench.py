"""`polyphase bench predictor`: figures and aims say what was met with, and settings are the service's own."""

from pathlib import Path
from typing import Any

import pytest

from lab.bench import predictor
from lab.bench.predictor_bayes import aim_of
from lab.bench.predictor_latency import Call, Cell, aims_of, cell_figures, environment, real_prompts
from predictor.settings import PredictorSettings
from predictor.train import default_epochs, default_learning_rate
from shared.errors import InvalidRequest

CALLS = [Call(0.010, "classifier"), Call(0.020, "observed"), Call(0.030, "classifier"), Call(0.5, "")]


def test_a_call_without_an_answer_counts_in_shares_and_not_in_latencies() -> None:
    figures = cell_figures("x", CALLS, 2.0)
    assert figures["x_answers_per_s"] == 1.5
    assert figures["x_by_classifier_per_s"] == 1.0
    assert (figures["x_by_classifier_share"], figures["x_not_answered_share"]) == (0.5, 0.25)
    assert (figures["x_p50_ms"], figures["x_p99_ms"]) == (20.0, 30.0)


def test_a_cell_without_any_answer_has_no_latency() -> None:
    assert cell_figures("x", [Call(0.1, "")], 1.0) == {
        "x_answers_per_s": 0.0,
        "x_by_classifier_per_s": 0.0,
        "x_by_classifier_share": 0.0,
        "x_not_answered_share": 1.0,
    }


@pytest.mark.parametrize(
    ("cells", "answered", "in_time"),
    [
        ([], False, False),
        ([Cell("x", 250.0, CALLS[:3], 1.0)], True, True),
        ([Cell("x", 1000.0, CALLS, 1.0)], False, True),
        ([Cell("x", 1000.0, CALLS[:3] * 400, 1.0), Cell("y", 1000.0, CALLS, 1.0)], False, True),  # the worst one
        ([Cell("x", 250.0, [Call(0.5, "observed")], 1.0)], True, False),
    ],
)
def test_the_aims_are_of_the_worst_cell(cells: list[Cell], answered: bool, in_time: bool) -> None:
    aims = aims_of(cells)
    assert aims["share answered"]["met"] is answered
    assert aims["calls past their deadline"]["met"] is in_time


@pytest.mark.parametrize(("ratio", "met"), [(0.949, False), (0.95, True), (1.01, True)])
def test_the_aim_is_a_share_of_the_optimum(ratio: float, met: bool) -> None:
    assert aim_of(ratio)["accuracy of the optimum"]["met"] is met


def test_prompts_are_of_mixed_lengths() -> None:
    lengths = sorted(len(ids) for ids in real_prompts())
    assert 20 <= lengths[0] < 40
    assert 700 < lengths[-1] <= 1000
    assert 100 < lengths[len(lengths) // 2] < 200
    assert real_prompts() == real_prompts()


def test_the_process_reads_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment(20_000, "tcp://127.0.0.1:20001", Path("a"), Path("b"), "cpu", 2000.0).items():
        monkeypatch.setenv(key, value)
    settings = PredictorSettings.load()
    assert (settings.port, settings.rpc_address, settings.checkpoint) == (20_000, "tcp://127.0.0.1:20001", Path("a"))
    assert (settings.model, settings.timeout_ms) == ("b", 2000.0)


def test_parts_are_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(name: str) -> Any:
        return lambda: {"figures": {name: 1.0}, "aims": {}, "notes": [name]}

    monkeypatch.setattr(predictor, "PARTS", {"bayes": part("bayes"), "latency": part("latency")})
    assert predictor.run_predictor_bench(["latency"])["figures"] == {"latency": 1.0}
    assert predictor.run_predictor_bench()["notes"] == ["bayes", "latency"]
    with pytest.raises(InvalidRequest, match="unknown part luck; known: bayes, latency"):
        predictor.run_predictor_bench(["luck"])


def test_training_from_nothing_has_defaults_of_its_own() -> None:
    assert (default_epochs(""), default_learning_rate("")) == (3.0, 5e-5)
    assert default_epochs("tiny") > 3.0
    assert default_learning_rate("base") < default_learning_rate("small")
