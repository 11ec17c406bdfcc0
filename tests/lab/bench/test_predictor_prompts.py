"""The optimum that `bench predictor` judges by is exact, and the prompts are what the table says."""

from collections import Counter

import numpy as np
import pytest

from lab.bench.predictor_bayes import BUCKETS, FILLER, FROM_HEAD, FROM_TAIL, SHARES, TOPICS, VERBS, Drawn, Generator

MANY = 20_000


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator.like_sharegpt()


@pytest.fixture(scope="module")
def drawn(generator: Generator) -> list[Drawn]:
    return generator.draw(MANY, 3)


def test_probabilities_sum_to_one(generator: Generator) -> None:
    assert generator.joint.sum() == pytest.approx(1.0)
    assert generator.joint.sum(axis=(1, 2)) == pytest.approx(SHARES)
    assert np.allclose(generator.posterior.sum(axis=0), 1.0)


def test_the_exact_optimum_is_what_brute_force_finds(generator: Generator) -> None:
    rng = np.random.default_rng(7)
    cells = rng.choice(generator.joint.size, size=400_000, p=generator.joint.ravel())
    bucket, verb, topic = np.unravel_index(cells, generator.joint.shape)
    right = sum(
        np.bincount(bucket[(verb == one) & (topic == other)], minlength=6).max()
        for one in range(6)
        for other in range(6)
    )
    assert right / cells.size == pytest.approx(generator.optimum, abs=0.004)


def test_it_takes_both_words(generator: Generator) -> None:
    assert 0.6 < generator.optimum < 0.75
    assert max(SHARES) < generator.optimum_of_one < 0.8 * generator.optimum


def test_lengths_are_shaped_like_sharegpts(drawn: list[Drawn]) -> None:
    seen = Counter(BUCKETS.of(one.output_tokens) for one in drawn)
    assert [seen[bucket] / MANY for bucket in range(len(SHARES))] == pytest.approx(SHARES, abs=0.012)


def test_labels_are_drawn_from_the_posterior(generator: Generator, drawn: list[Drawn]) -> None:
    (verb, topic), count = Counter((one.verb, one.topic) for one in drawn).most_common(1)[0]
    assert count / MANY == pytest.approx(generator.evidence[verb, topic], abs=0.006)
    seen = Counter(BUCKETS.of(one.output_tokens) for one in drawn if (one.verb, one.topic) == (verb, topic))
    assert [seen[at] / count for at in range(6)] == pytest.approx(generator.posterior[:, verb, topic], abs=0.05)


def test_the_optimum_is_reached_by_the_table_and_by_nobody_else(generator: Generator, drawn: list[Drawn]) -> None:
    best = generator.joint.argmax(axis=0)
    guesses = [int(best[one.verb, one.topic]) for one in drawn]
    assert generator.expected_accuracy(drawn, guesses) == pytest.approx(generator.optimum_on(drawn))
    assert generator.optimum_on(drawn) == pytest.approx(generator.optimum, abs=0.005)
    assert generator.best_accuracy(drawn) == pytest.approx(generator.optimum, abs=0.012)
    assert generator.expected_accuracy(drawn, [1] * MANY) == pytest.approx(SHARES[1], abs=0.012)


def test_each_prompt_has_one_verb_and_one_topic_where_a_predictor_sees_them(drawn: list[Drawn]) -> None:
    for one in drawn[:2000]:
        words = one.prompt.split()
        said = [at for at, word in enumerate(words) if word not in FILLER]
        assert {words[at] for at in said} & set(VERBS[one.verb])
        assert {words[at] for at in said} & set(TOPICS[one.topic])
        assert len(said) == 2
        if len(words) > 60:
            assert all(at < FROM_HEAD or at >= len(words) - FROM_TAIL for at in said)


def test_equal_seeds_draw_equal_prompts(generator: Generator) -> None:
    assert generator.draw(50, 1) == generator.draw(50, 1) != generator.draw(50, 2)
