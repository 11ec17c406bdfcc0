from collections import Counter

import numpy as np
import pytest

from lab.bench.predictor_bayes import BUCKETS, SHARES, Generator


def test_lengths_are_shaped_like_sharegpts() -> None:
    examples, _ = Generator.shaped().examples(20_000, 3)
    seen = Counter(BUCKETS.of(one.output_tokens) for one in examples)
    assert [seen[at] / 20_000 for at in range(6)] == pytest.approx(SHARES, abs=0.01)


def test_the_optimum_is_what_the_best_rule_reaches_and_takes_both_parts() -> None:
    generator = Generator.shaped()
    assert generator.joint.sum() == pytest.approx(1.0)
    assert np.allclose(generator.asked.sum(axis=1), 1.0)
    _, reached = generator.examples(40_000, 5)
    assert reached == pytest.approx(generator.optimum, abs=0.01)
    assert max(SHARES) + 0.2 < generator.by_one_part < generator.optimum - 0.05 < 0.8


def test_the_same_seed_draws_the_same_prompts() -> None:
    generator = Generator.shaped()
    assert generator.examples(50, 1) == generator.examples(50, 1) != generator.examples(50, 2)
