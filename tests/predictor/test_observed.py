import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.buckets import Buckets, ObservedLengths, band_of

BUCKETS = Buckets(200, 10)
Seen = list[tuple[int, int]]
observations = st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 5_000)), max_size=60)


def learnt(seen: Seen, half_life: float = 500.0) -> ObservedLengths:
    lengths = ObservedLengths(BUCKETS, half_life)
    for prompt_tokens, output_tokens in seen:
        lengths.observe(prompt_tokens, output_tokens)
    return lengths


@pytest.mark.parametrize(("tokens", "band"), [(0, 0), (31, 0), (32, 1), (8191, 4), (8192, 5), (10**7, 5)])
def test_bands(tokens: int, band: int) -> None:
    assert band_of(tokens) == band


def test_before_any_observation_nothing_is_claimed() -> None:
    found = learnt([]).predict(100, max_tokens=300)
    assert (found.lower_tokens, found.upper_tokens, found.confidence) == (0, 301, 0.0)
    assert found.source == "observed"


def test_one_observation_in_its_band_and_seen_from_another() -> None:
    lengths = learnt([(100, 450)])
    # Over all bands: (1 + 1/10) / (1 + 1) = 0.55. In its band: (1 + 8 * 0.55) / (1 + 8) = 0.6.
    assert lengths.predict(100).confidence == pytest.approx(0.6)
    assert lengths.predict(5000).confidence == pytest.approx(0.55)
    assert (lengths.predict(5000).lower_tokens, lengths.predict(5000).upper_tokens) == (400, 600)


def test_bands_are_told_apart() -> None:
    lengths = learnt([(10, 50), (1000, 700)] * 40)
    assert lengths.predict(10).lower_tokens == 0
    assert lengths.predict(1000).lower_tokens == 600


def test_old_observations_fade() -> None:
    lengths = learnt([(10, 50)] * 100 + [(10, 500)] * 20, half_life=10.0)
    assert lengths.predict(10).bucket == 2
    assert learnt([(10, 50)] * 100 + [(10, 500)] * 20, half_life=1e6).predict(10).bucket == 0


def test_it_scores_itself_before_it_learns() -> None:
    described = learnt([(10, 50)] * 10 + [(10, 500)], half_life=1e9).describe()
    assert described["accuracy"] == pytest.approx(9 / 10)
    assert described["observations"] == 11


def test_a_half_life_is_positive() -> None:
    with pytest.raises(ValueError, match="half_life"):
        ObservedLengths(BUCKETS, 0.0)


@given(seen=observations, prompt_tokens=st.integers(0, 20_000), half_life=st.floats(0.5, 1e6))
def test_probabilities_are_probabilities(seen: Seen, prompt_tokens: int, half_life: float) -> None:
    found = learnt(seen, half_life).probabilities(prompt_tokens)
    assert sum(found) == pytest.approx(1)
    assert all(share > 0 for share in found)


@given(seen=observations, half_life=st.floats(0.5, 1000))
def test_weights_stay_bounded(seen: Seen, half_life: float) -> None:
    bound = 1 / (1 - 0.5 ** (1 / half_life))
    for band in learnt(seen, half_life).describe()["bands"]:
        assert sum(band["weights"]) <= bound + 0.01


@given(seen=observations, prompt_tokens=st.integers(0, 20_000), output_tokens=st.integers(0, 5_000))
def test_more_of_the_same_makes_it_sure(seen: Seen, prompt_tokens: int, output_tokens: int) -> None:
    lengths = learnt(seen, half_life=20.0)
    for _ in range(300):
        lengths.observe(prompt_tokens, output_tokens)
    found = lengths.predict(prompt_tokens)
    assert found.bucket == BUCKETS.of(output_tokens)
    assert found.confidence > 0.9


@given(seen=observations)
def test_the_same_history_gives_the_same_answer(seen: Seen) -> None:
    assert learnt(seen).predict(77) == learnt(seen).predict(77)
