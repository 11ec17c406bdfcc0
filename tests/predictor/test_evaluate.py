"""Scores, baselines and the noise ceiling; the choice of buckets; findings and tables of an evaluation."""

import random
from collections.abc import Callable, Sequence

import pytest
from rich.console import Console

from predictor.buckets import Buckets
from predictor.checkpoint import Ceiling, CheckpointMeta, bucket_means, by_prompt_length, ceiling, commonest, score
from predictor.evaluate import (
    LARGEST_SHARE,
    WIDTHS,
    Evaluation,
    choose_buckets,
    counts,
    evaluate,
    largest_share,
    print_evaluation,
    print_granularities,
)
from predictor.examples import Example
from shared.errors import InvalidRequest
from tests.predictor.conftest import META

RNG = random.Random(3)
SPREAD = [RNG.randrange(400) for _ in range(400)]  # the buckets of META have 100 tokens
SHORT = [round(RNG.lognormvariate(4.0, 0.8)) for _ in range(500)]  # most of 20 to 150 tokens
THREE = Buckets(100, 3)


class Guesses:
    """A classifier whose bucket is a function of the text."""

    def __init__(self, guess: Callable[[str], int], meta: CheckpointMeta = META) -> None:
        self.meta = meta
        self._guess = guess

    def encode(self, text: str) -> list[int]:
        return [self._guess(text)]

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        return [[0.7 if at == row[0] else 0.1 for at in range(self.meta.bucket_count)] for row in rows]


def examples(lengths: Sequence[int]) -> list[Example]:
    """Each with a prompt of its own, which contains the length."""
    return [Example(f"{number} {length}", 20, length, "train") for number, length in enumerate(lengths)]


def example(text: str, output_tokens: int, prompt_tokens: int = 8, sample: int = 0) -> Example:
    return Example(text, prompt_tokens, output_tokens, "train", sample)


def correct(text: str) -> int:
    return min(int(text.split()[-1]) // 100, 3)


def first(_: str) -> int:
    return 0


def evaluated(guess: Callable[[str], int], lengths: list[int], judged: int = 200) -> Evaluation:
    return evaluate(Guesses(guess), examples(lengths), examples(lengths[:judged]))


def codes(evaluation: Evaluation) -> list[str]:
    return [finding.code for finding in evaluation.findings()]


def printed(evaluation: Evaluation) -> str:
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as capture:
        print_evaluation(console, "of a test", evaluation)
    return " ".join(capture.get().split())


def test_scores_of_a_worked_example() -> None:
    lengths = [10, 20, 150, 900]
    rows = [[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.1, 0.9, 0.0], [0.6, 0.2, 0.2]]
    found = score(lengths, rows, THREE, [50.0, 150.0, 1000.0])
    assert (found.accuracy, found.within_one) == (0.5, 0.75)
    assert found.confusion == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]
    # Expected: 60, 130, 140, 260.
    assert found.mean_error_tokens == pytest.approx((50 + 110 + 10 + 640) / 4)
    # Confidences 0.9, 0.9 (both right), 0.8 (wrong), 0.6 (wrong): (2 * 0.1 + 0.8 + 0.6) / 4.
    assert found.calibration_error == pytest.approx(0.4)
    assert [each.count for each in found.calibration] == [1, 1, 2]
    assert bucket_means([10, 30, 500], THREE) == [20.0, 150.0, 500.0], "an empty bucket has its middle"
    with pytest.raises(ValueError, match="0 lengths"):
        score([], [], THREE, [0.0] * 3)


def test_baselines() -> None:
    train = [example("a", 10), example("b", 20), example("c", 250, 600), example("d", 250, 600)]
    assert commonest(train, THREE) == [0.5, 0.0, 0.5]
    observed = by_prompt_length(train * 10, THREE)
    assert (observed.predict(10).bucket, observed.predict(600).bucket) == (0, 2)


def test_the_noise_ceiling() -> None:
    answers = {"sure": [10, 20, 30], "torn": [10, 150, 20], "all": [10, 150, 900], "once": [10]}
    several = [example(text, n, sample=at) for text, some in answers.items() for at, n in enumerate(some)]
    # Upper: 1, 2/3, 1/3. Lower: 1; "torn": each 10 sees one answer of each bucket (1/2), 150 none; "all": none.
    lower, upper = (1 + 1 / 3 + 0) / 3, (1 + 2 / 3 + 1 / 3) / 3
    assert ceiling(several, THREE) == Ceiling(3, pytest.approx(lower), pytest.approx(upper))
    assert ceiling([example("a", 10), example("b", 20)], THREE) is None


@pytest.mark.parametrize(("factor", "width"), [(1, 50), (7, 200), (0.1, 5)])
def test_the_largest_width_at_which_no_bucket_holds_more_than_half(factor: float, width: int) -> None:
    lengths = [int(factor * length) for length in SHORT]
    chosen = choose_buckets(lengths)
    assert chosen.width_tokens == width
    assert largest_share(lengths, chosen) <= LARGEST_SHARE
    assert largest_share(lengths, Buckets(WIDTHS[WIDTHS.index(width) + 1], 100)) > LARGEST_SHARE
    assert choose_buckets(random.Random(2).sample(lengths, len(lengths))) == chosen, "the order does not matter"


def test_the_number_of_buckets() -> None:
    assert 0.05 <= counts(SHORT, choose_buckets(SHORT))[-1] / len(SHORT) < 0.2
    assert choose_buckets(SHORT, 7).count == 7
    assert 2 <= choose_buckets([1] * 80 + [10**6] * 20).count <= 64


def test_the_width_for_answers_that_are_mostly_of_one_length() -> None:
    lengths = [12] * 60 + [17] * 20 + [3] * 20
    assert choose_buckets(lengths).width_tokens == 5
    assert largest_share(lengths, choose_buckets(lengths)) == 0.6
    assert largest_share([30] * 50, choose_buckets([30] * 50)) == 1.0


def test_a_good_classifier_has_no_finding() -> None:
    good = evaluated(correct, SPREAD)
    report = good.report(None, None)
    assert codes(good) == report["findings"] == []
    assert report["ok"]
    assert set(report["aims"]) == {"accuracy", "largest_bucket"}


def test_answers_in_one_bucket_are_a_finding_that_names_a_granularity() -> None:
    nothing = evaluated(correct, [*(length % 60 for length in SPREAD), 350])
    report = nothing.report(None, None)
    assert nothing.scores.accuracy == 1.0
    assert not report["ok"]
    assert [each["code"] for each in report["findings"]] == codes(nothing) == ["one_bucket", "no_gain"]
    assert "--granularity auto would select 25 tokens" in nothing.findings()[0].text
    text = evaluated(first, [30] * 100).findings()[0].text
    assert "--granularity" not in text
    assert "hardly differ" in text


def test_no_gain_over_the_baselines_is_a_finding() -> None:
    guessing = evaluated(first, SPREAD)
    assert codes(guessing) == ["no_gain"]
    assert not guessing.report(None, None)["ok"]
    assert guessing.report(0.1, None)["ok"], "the accuracy is above the aim"


def test_a_gain_of_a_few_answers_is_within_the_noise() -> None:
    answers = [20] * 60 + [120] * 40
    few = evaluate(Guesses(correct), examples(answers), examples([20] * 6 + [120] * 2))
    assert few.scores.accuracy == 1.0
    assert codes(few) == ["within_noise"]
    assert codes(evaluate(Guesses(correct), examples(answers), examples(answers))) == []


def test_the_tables_of_an_evaluation() -> None:
    text = printed(evaluated(correct, [*SPREAD, 150]))
    for part in ("this classifier 100.0%", "commonest bucket (", "prompt length alone", "within one bucket"):
        assert part in text
    assert "Noise ceiling: not measured" in text
    trained, judged = (sum(length < 100 for length in some) for some in (SPREAD, SPREAD[:200]))
    assert f"0 to 99 tokens {trained} {judged} 100.0%" in text
    assert "300 and more tokens" in text
    assert "100 to 299 tokens 0 0 –" in printed(evaluated(correct, [20] * 50 + [350] * 50, 100)), "empty buckets"
    twice = [Example(str(n), 20, length, "test", at) for n in range(50) for at, length in enumerate((5, 250))]
    text = printed(evaluate(Guesses(first), examples(SPREAD), twice))
    assert "Noise ceiling: between 0.0% and 50.0% can be right at most (50 prompts" in text


def test_the_table_of_granularities_has_eighty_columns() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        print_granularities(console, {100: evaluated(correct, SPREAD), 200: evaluated(first, SPREAD)})
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.strip() and line.split()[0].isdigit()]
    assert [row[:3] for row in rows] == [["100", "4", "100.0%"], ["200", "4", "21.5%"]]
    assert "Warning: 200 tokens: The classifier is right" in capture.get()


@pytest.mark.parametrize(("train", "judged"), [([], SPREAD), (SPREAD, [])])
def test_data_without_answers(train: list[int], judged: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="the data has no answers to"):
        evaluate(Guesses(first), examples(train), examples(judged))
