import pytest

from predictor.buckets import Buckets
from predictor.checkpoint import Ceiling, bucket_means, by_prompt_length, ceiling, commonest, score
from predictor.examples import Example

BUCKETS = Buckets(100, 3)


def test_worked_example() -> None:
    lengths = [10, 20, 150, 900]
    rows = [[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.1, 0.9, 0.0], [0.6, 0.2, 0.2]]
    found = score(lengths, rows, BUCKETS, [50.0, 150.0, 1000.0])
    assert (found.accuracy, found.within_one) == (0.5, 0.75)
    assert found.confusion == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]
    # Expected: 60, 130, 140, 260.
    assert found.mean_error_tokens == pytest.approx((50 + 110 + 10 + 640) / 4)
    # Confidences 0.9, 0.9 (both right), 0.8 (wrong), 0.6 (wrong): (2 * 0.1 + 0.8 + 0.6) / 4.
    assert found.calibration_error == pytest.approx(0.4)
    assert [bin_.count for bin_ in found.calibration] == [1, 1, 2]


def test_nothing_to_score() -> None:
    with pytest.raises(ValueError, match="0 lengths"):
        score([], [], BUCKETS, [0.0] * 3)


def test_a_bucket_without_examples_has_its_middle() -> None:
    assert bucket_means([10, 30, 500], BUCKETS) == [20.0, 150.0, 500.0]


def example(text: str, output_tokens: int, prompt_tokens: int = 8, sample: int = 0) -> Example:
    return Example(text, prompt_tokens, output_tokens, "train", sample)


def test_baselines_learn_from_what_they_are_given() -> None:
    train = [example("a", 10), example("b", 20), example("c", 250, 600), example("d", 250, 600)]
    assert commonest(train, BUCKETS) == [0.5, 0.0, 0.5]
    observed = by_prompt_length(train * 10, BUCKETS)
    assert observed.predict(10).bucket == 0
    assert observed.predict(600).bucket == 2


def test_the_ceiling_lies_between_what_flatters_and_what_does_not() -> None:
    answers = {"sure": [10, 20, 30], "torn": [10, 150, 20], "all": [10, 150, 900], "once": [10]}
    found = ceiling(
        [example(text, n, sample=at) for text, some in answers.items() for at, n in enumerate(some)], BUCKETS
    )
    # Known: 1, 2/3, 1/3. Left out: 1; of the torn either 10 sees one of each (1/2), 150 never; of all none.
    assert found == Ceiling(3, pytest.approx((1 + 1 / 3 + 0) / 3), pytest.approx((1 + 2 / 3 + 1 / 3) / 3))


def test_without_several_answers_there_is_no_ceiling() -> None:
    assert ceiling([example("a", 10), example("b", 20)], BUCKETS) is None
