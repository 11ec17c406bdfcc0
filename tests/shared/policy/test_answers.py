"""How long answers turn out."""

import pytest

from shared.domain.job import LengthPrediction
from shared.policy.answers import DOUBT, FIRST_TOKENS, RECENT, Answers, Lengths, within
from tests.shared.policy.views import job, predicted


def test_before_the_first_answer_it_is_what_was_predicted() -> None:
    answers = Answers()
    assert answers.all.mean == FIRST_TOKENS
    assert answers.expected(job(output=5000, prediction=predicted(200, 400))) == within(predicted(200, 400))
    assert answers.expected(job(output=10)) == Lengths(10.0, 10.0)  # never more than max_tokens


@pytest.mark.parametrize(
    ("lower", "upper", "mean", "brief"),
    [(0, 200, 100.5, 37.6), (400, 600, 500.0, 493.3), (1800, 2**31 - 1, 2700.0, 2596.9)],
)
def test_a_range_as_lengths(lower: int, upper: int, mean: float, brief: float) -> None:
    found = within(predicted(lower, upper))
    assert found == pytest.approx(Lengths(mean, brief), rel=0.01)


def test_answers_predicted_alike_correct_the_prediction_and_no_other() -> None:
    answers = Answers()
    for number in range(2000):
        asked = job(job_id=f"{number}", output=1000, prediction=predicted(0, 200))
        answers.begun(asked)
        answers.ended(asked.job_id, 10 if number % 2 else 30)
    found = answers.expected(job(output=1000, prediction=predicted(0, 200)))
    assert found == pytest.approx(Lengths(20.0, 15.0), rel=0.05)
    assert answers.all == pytest.approx(Lengths(20.0, 15.0), rel=0.05)
    assert answers.expected(job(output=1000, prediction=predicted(200, 400))) == within(predicted(200, 400))


def test_the_newest_count_most() -> None:
    answers = Answers()
    for tokens in (*[1000] * 1000, *[10] * (4 * RECENT)):
        answers.ended("unknown", tokens)
    assert answers.all.mean < 40.0


def test_jobs_without_an_answer_leave_nothing_behind() -> None:
    answers = Answers()
    for number in range(100):
        answers.begun(job(job_id=f"{number}", prediction=predicted(0, 200)))
        answers.ended(f"{number}", 0)
    assert answers.all.mean == FIRST_TOKENS
    assert answers.expected(job(output=900, prediction=predicted(0, 200))) == pytest.approx(within(predicted(0, 200)))
    assert not answers._open
    assert DOUBT > 1


def test_a_spread_counts_more_than_its_likeliest_bucket_and_is_corrected_in_proportion() -> None:
    def spread(*shares: float) -> LengthPrediction:
        return LengthPrediction(0, 0, 100, 0.5, "classifier", 100, shares, 400)

    narrow, wide = spread(0.9, 0.1, 0.0, 0.0), spread(0.5, 0.1, 0.0, 0.4)
    answers = Answers()
    assert answers.expected(job(output=1000, prediction=wide)).mean == pytest.approx(180, abs=1)
    for number in range(2000):
        asked = job(job_id=f"{number}", output=1000, prediction=narrow)
        answers.begun(asked)
        answers.ended(asked.job_id, 120)  # twice of what was said
    assert answers.expected(job(output=1000, prediction=narrow)).mean == pytest.approx(120, rel=0.05)
    assert answers.expected(job(output=1000, prediction=wide)).mean == pytest.approx(360, rel=0.05)
