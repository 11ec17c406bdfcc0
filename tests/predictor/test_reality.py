from random import Random

import msgspec
import pytest

from predictor.buckets import Buckets
from predictor.service import MIN_ANSWERS, Reality
from shared.wire.api.predictor import Observation

BUCKETS = Buckets(100, 4)
RNG = Random(7)


def answers(count: int, right: float, model: str = "m") -> list[Observation]:
    """Of lengths of which 60 % are in bucket 0, classified rightly so often."""
    found = []
    for _ in range(count):
        tokens = 50 if RNG.random() < 0.6 else 250
        true = BUCKETS.of(tokens)
        predicted = true if RNG.random() < right else 1
        found.append(Observation(10, tokens, 1000, model, predicted, 100.0))
    return found


def judged(*parts: list[Observation]) -> tuple[Reality, list[bool]]:
    reality = Reality("m", BUCKETS, 500.0)
    return reality, [reality.believed for part in parts for one in part if reality.observe(one)]


def test_a_better_classifier_stays_in_use() -> None:
    reality, changes = judged(answers(2000, 0.9))
    assert changes == []
    assert reality.accuracy.classifier == pytest.approx(0.9, abs=0.05)
    assert reality.accuracy.commonest == pytest.approx(0.6, abs=0.08)


def test_a_classifier_without_a_gain_is_rejected_until_it_is_better() -> None:
    reality, changes = judged(answers(600, 0.3))
    assert (changes, reality.believed) == ([False], False)
    assert "no better than the commonest bucket" in reality.why
    assert [reality.believed for one in answers(1000, 0.95) if reality.observe(one)] == [True]
    assert reality.why == ""


def test_few_answers_reject_no_classifier() -> None:
    _, changes = judged(answers(MIN_ANSWERS - 1, 0.0))
    assert changes == []


def test_answers_without_this_classifiers_prediction_do_not_count() -> None:
    reality, changes = judged(answers(1000, 0.0, model="other"), answers(1000, 0.0, model=""))
    assert changes == []
    assert reality.accuracy.classifier is None


def test_cut_answers_are_judged_by_their_limit() -> None:
    """An answer of at most 30 tokens is in bucket 0: all predictions are right, and none is better."""
    reality = Reality("m", BUCKETS, 500.0)
    for one in answers(300, 1.0):
        reality.observe(Observation(10, 30, 30, "m", 0, 30.0))
        assert one.model == "m"
    found = reality.accuracy
    assert found.classifier == found.commonest == found.prompt_length == 1.0
    assert not reality.believed


def test_a_classifier_without_answers_is_described_with_its_zeros() -> None:
    described = msgspec.json.decode(msgspec.json.encode(Reality("m", BUCKETS, 500.0).describe()))
    assert (described["model"], described["answers"], described["believed"]) == ("m", 0, True)
    assert (described["recent"], described["mean_error_tokens"]) == ([], None)
