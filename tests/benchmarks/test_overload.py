"""Tokens in a stretch of time, by hand."""

import pytest

from benchmarks.overload import tokens_per_s


@pytest.mark.parametrize(
    ("first_s", "last_s", "tokens"),
    [
        (1.0, 3.0, 0),  # over before
        (9.0, 11.0, 10),  # half of the answer
        (12.0, 14.0, 120),
        (19.0, 21.0, 110),
        (5.0, 25.0, 10),  # half of its time
        (20.0, 22.0, 0),
        (12.0, 12.0, 100),  # an answer of one token, as far as clocks tell: its prompt
    ],
)
def test_prompts_count_with_the_first_token_and_answers_as_they_come(
    first_s: float, last_s: float, tokens: int
) -> None:
    assert tokens_per_s([100], [20], [first_s], [last_s], 10.0, 20.0) == pytest.approx(tokens / 10.0, abs=0.01)


def test_requests_add_up() -> None:
    assert tokens_per_s([100, 50], [20, 10], [11.0, 12.0], [12.0, 13.0], 10.0, 20.0) == pytest.approx(18.0)
