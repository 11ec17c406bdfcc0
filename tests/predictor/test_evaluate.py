"""What an evaluation says of answers that teach nothing, and what its tables show."""

import random
from collections.abc import Callable, Sequence

import pytest
from rich.console import Console

from predictor.checkpoint import CheckpointMeta
from predictor.evaluate import Evaluation, evaluate, print_evaluation, print_granularities
from predictor.examples import Example
from shared.errors import InvalidRequest
from tests.predictor.conftest import META

RNG = random.Random(3)
SPREAD = [RNG.randrange(400) for _ in range(400)]  # the buckets of META have 100 tokens


class Guesses:
    """Names the bucket that a function of the text says."""

    def __init__(self, guess: Callable[[str], int], meta: CheckpointMeta = META) -> None:
        self.meta = meta
        self._guess = guess

    def encode(self, text: str) -> list[int]:
        return [self._guess(text)]

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        return [[0.7 if at == row[0] else 0.1 for at in range(self.meta.bucket_count)] for row in rows]


def examples(lengths: list[int]) -> list[Example]:
    """Each of a prompt of its own."""
    return [Example(f"{number} {length}", 20, length, "train") for number, length in enumerate(lengths)]


def knows(text: str) -> int:
    return min(int(text.split()[-1]) // 100, 3)


def first(_: str) -> int:
    return 0


def found(guess: Callable[[str], int], lengths: list[int], judged: int = 200) -> Evaluation:
    return evaluate(Guesses(guess), examples(lengths), examples(lengths[:judged]))


def codes(evaluation: Evaluation) -> list[str]:
    return [finding.code for finding in evaluation.findings()]


def printed(evaluation: Evaluation) -> str:
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as capture:
        print_evaluation(console, "of a test", evaluation)
    return " ".join(capture.get().split())


def test_a_classifier_that_has_learnt_something_needs_no_warning() -> None:
    good = found(knows, SPREAD)
    report = good.report(None, None)
    assert codes(good) == report["findings"] == []
    assert report["ok"]
    assert set(report["aims"]) == {"accuracy", "largest_bucket"}


def test_answers_in_one_bucket_are_a_warning_that_names_a_granularity() -> None:
    short = [length % 60 for length in SPREAD]
    nothing = found(knows, [*short, 350])
    report = nothing.report(None, None)
    assert nothing.scores.accuracy == 1.0
    assert not report["ok"]
    assert [one["code"] for one in report["findings"]] == codes(nothing) == ["one_bucket", "no_gain"]
    assert "--granularity auto would select 25 tokens" in nothing.findings()[0].text


def test_answers_of_one_length_have_no_granularity_to_offer() -> None:
    text = found(first, [30] * 100).findings()[0].text
    assert "--granularity" not in text
    assert "hardly differ" in text


def test_no_gain_over_the_baselines_is_a_warning() -> None:
    guessing = found(first, SPREAD)
    assert codes(guessing) == ["no_gain"]
    assert not guessing.report(None, None)["ok"]
    assert guessing.report(0.1, None)["ok"], "it was asked for no more"


def test_a_gain_of_a_few_answers_is_within_the_noise() -> None:
    answers = [20] * 60 + [120] * 40

    def once(text: str) -> int:
        return 0 if text.endswith(" 20") else 1

    few = evaluate(Guesses(once), examples(answers), examples([20] * 6 + [120] * 2))
    assert few.scores.accuracy == 1.0
    assert codes(few) == ["within_noise"]
    many = evaluate(Guesses(once), examples(answers), examples(answers))
    assert codes(many) == []


def test_a_table_shows_baselines_ceiling_and_answers_per_bucket() -> None:
    text = printed(found(knows, [*SPREAD, 150]))
    for part in ("this classifier 100.0%", "commonest bucket (", "prompt length alone", "within one bucket"):
        assert part in text
    assert "Noise ceiling: not measured" in text
    trained = sum(length < 100 for length in SPREAD)
    judged = sum(length < 100 for length in SPREAD[:200])
    assert f"0 to 99 tokens {trained} {judged} 100.0%" in text
    assert "300 and more tokens" in text


def test_several_answers_to_a_prompt_measure_the_noise_ceiling() -> None:
    twice = [
        Example(str(number), 20, length, "test", sample)
        for number in range(50)
        for sample, length in ((0, 5), (1, 250))
    ]
    text = printed(evaluate(Guesses(first), examples(SPREAD), twice))
    assert "Noise ceiling: between 0.0% and 50.0% can be right at most (50 prompts" in text


def test_empty_buckets_share_a_row() -> None:
    text = printed(found(knows, [20] * 50 + [350] * 50, 100))
    assert "100 to 299 tokens 0 0 –" in text


def test_granularities_stand_side_by_side_in_eighty_columns() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        print_granularities(console, {100: found(knows, SPREAD), 200: found(first, SPREAD)})
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.strip() and line.split()[0].isdigit()]
    assert [row[:3] for row in rows] == [["100", "4", "100.0%"], ["200", "4", "21.5%"]]
    assert "Warning: 200 tokens: The classifier is right" in capture.get()


@pytest.mark.parametrize(("train", "judged"), [([], SPREAD), (SPREAD, [])])
def test_data_without_answers_to_learn_from_or_to_judge_by_is_refused(train: list[int], judged: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="the data has no answers to"):
        evaluate(Guesses(first), examples(train), examples(judged))
