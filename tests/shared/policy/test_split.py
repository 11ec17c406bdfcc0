from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.policy.split import FractionSplit, FullSplit, NoSplit, RandomSplit, Split
from tests.shared.policy.views import decode, job, prefill

EXAMPLES: list[tuple[Split, int, int]] = [
    (FullSplit(), 10, 10),
    (NoSplit(), 10, 0),
    (FractionSplit(0.5), 10, 5),
    (FractionSplit(0.5), 11, 6),
    (FractionSplit(0.01), 10, 1),
    (FractionSplit(0.0), 10, 0),
    (FractionSplit(1.0), 10, 10),
]


@pytest.mark.parametrize(("policy", "prompt", "tokens"), EXAMPLES)
def test_split_by_example(policy: Split, prompt: int, tokens: int) -> None:
    choice = policy.choose(job(prompt), prefill("p"), decode("d"), 0.0, Random(0))
    assert choice.tokens == tokens
    assert choice.reasons[0].figures == {"tokens": tokens, "prompt_tokens": prompt}


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(InvalidRequest, match=r"0\.\.1"):
        FractionSplit(fraction)


def test_random_covers_both_ends() -> None:
    rng, policy = Random(0), RandomSplit()
    drawn = Counter(policy.choose(job(4), prefill("p"), decode("d"), 0.0, rng).tokens for _ in range(500))
    assert set(drawn) == {0, 1, 2, 3, 4}
    assert min(drawn.values()) > 60


@given(st.integers(1, 10_000), st.floats(0, 1), st.integers(0, 99))
def test_a_split_stays_within_the_prompt(prompt: int, fraction: float, seed: int) -> None:
    for policy in (FullSplit(), NoSplit(), FractionSplit(fraction), RandomSplit()):
        first = policy.choose(job(prompt), prefill("p"), decode("d"), 0.0, Random(seed))
        assert 0 <= first.tokens <= prompt
        assert first == policy.choose(job(prompt), prefill("p"), decode("d"), 0.0, Random(seed))
