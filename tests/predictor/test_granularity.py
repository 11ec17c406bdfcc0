"""Which granularity `auto` takes."""

import random

import pytest

from predictor.buckets import Buckets
from predictor.evaluate import LARGEST_SHARE, WIDTHS, choose_buckets, counts, largest_share

RNG = random.Random(1)
SHORT = [round(RNG.lognormvariate(4.0, 0.8)) for _ in range(500)]  # most of 20 to 150 tokens
LONG = [7 * length for length in SHORT]


@pytest.mark.parametrize(("lengths", "width"), [(SHORT, 50), (LONG, 200), ([length // 10 for length in SHORT], 5)])
def test_the_largest_at_which_no_bucket_holds_more_than_half(lengths: list[int], width: int) -> None:
    chosen = choose_buckets(lengths)
    assert chosen.width_tokens == width
    assert largest_share(lengths, chosen) <= LARGEST_SHARE
    larger = WIDTHS[WIDTHS.index(width) + 1]
    assert largest_share(lengths, Buckets(larger, 100)) > LARGEST_SHARE


def test_the_last_bucket_holds_about_one_in_twenty() -> None:
    chosen = choose_buckets(SHORT)
    assert 0.05 <= counts(SHORT, chosen)[-1] / len(SHORT) < 0.2
    assert choose_buckets(SHORT, 7).count == 7


def test_it_depends_on_the_lengths_alone() -> None:
    shuffled = SHORT.copy()
    random.Random(2).shuffle(shuffled)
    assert choose_buckets(shuffled) == choose_buckets(SHORT)


def test_answers_that_are_mostly_of_one_length_get_the_width_that_tells_the_others_apart() -> None:
    lengths = [12] * 60 + [17] * 20 + [3] * 20
    assert choose_buckets(lengths).width_tokens == 5
    assert largest_share(lengths, choose_buckets(lengths)) == 0.6


def test_equal_answers_have_no_granularity() -> None:
    assert largest_share([30] * 50, choose_buckets([30] * 50)) == 1.0


def test_very_long_answers_do_not_make_very_many_buckets() -> None:
    lengths = [1] * 80 + [10**6] * 20
    assert 2 <= choose_buckets(lengths).count <= 64
