"""Length buckets, and predictions from observed lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.buckets import Buckets, ObservedLengths, band_of, no_prediction, predict
from shared.domain.job import OPEN_END

WIDE, BUCKETS = Buckets(200, 4), Buckets(200, 10)
Observations = list[tuple[int, int]]  # prompt tokens, output tokens
observations = st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 5_000)), max_size=60)


def learnt(observed: Observations, half_life: float = 500.0) -> ObservedLengths:
    lengths = ObservedLengths(BUCKETS, half_life)
    for prompt_tokens, output_tokens in observed:
        lengths.observe(prompt_tokens, output_tokens)
    return lengths


@pytest.mark.parametrize(("tokens", "bucket"), [(0, 0), (199, 0), (200, 1), (399, 1), (400, 2), (600, 3), (10**6, 3)])
def test_tetriinfers_labels(tokens: int, bucket: int) -> None:
    assert WIDE.of(tokens) == bucket


@pytest.mark.parametrize(
    ("probabilities", "max_tokens", "expected"),
    [
        ([0.1, 0.6, 0.2, 0.1], None, (1, 200, 400, 0.6)),
        ([0.1, 0.2, 0.1, 0.6], None, (3, 600, OPEN_END, 0.6)),
        ([0.1, 0.2, 0.1, 0.6], 1000, (3, 600, 1001, 0.6)),
        ([0.4, 0.2, 0.1, 0.3], 300, (1, 200, 301, 0.6)),  # longer answers end at 300
        ([0.1, 0.6, 0.2, 0.1], 200, (1, 200, 201, 0.9)),
        ([0.1, 0.6, 0.2, 0.1], 20, (0, 0, 21, 1.0)),
        ([0.4, 0.4, 0.1, 0.1], None, (0, 0, 200, 0.4)),  # the shorter of equals
    ],
)
def test_predictions(probabilities: list[float], max_tokens: int | None, expected: tuple[int, int, int, float]) -> None:
    found = predict(probabilities, WIDE, max_tokens, "classifier")
    assert (found.bucket, found.lower_tokens, found.upper_tokens) == expected[:3]
    assert found.confidence == pytest.approx(expected[3])


def test_the_prediction_without_information() -> None:
    assert no_prediction(None, "observed").confidence == 0
    assert no_prediction(50, "observed").upper_tokens == 51
    found = learnt([]).predict(100, max_tokens=300)
    assert (found.lower_tokens, found.upper_tokens, found.confidence) == (0, 301, 0.0)
    assert found.source == "observed"


def test_invalid_arguments() -> None:
    for width, count in ((0, 4), (200, 1)):
        with pytest.raises(ValueError, match="width_tokens >= 1 and count >= 2"):
            Buckets(width, count)
    with pytest.raises(ValueError, match="half_life"):
        ObservedLengths(BUCKETS, 0.0)


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=30),
    width=st.integers(1, 500),
    max_tokens=st.none() | st.integers(1, 20_000),
)
def test_a_prediction_is_consistent(weights: list[float], width: int, max_tokens: int | None) -> None:
    buckets = Buckets(width, len(weights))
    found = predict([weight / sum(weights) for weight in weights], buckets, max_tokens, "x")
    assert found.lower_tokens < found.upper_tokens
    assert buckets.of(found.lower_tokens) == found.bucket == buckets.of(found.upper_tokens - 1)
    assert 0 < found.confidence <= 1
    assert max_tokens is None or found.upper_tokens <= max_tokens + 1


@given(tokens=st.integers(0, 10**7), width=st.integers(1, 1000), count=st.integers(2, 50))
def test_each_length_is_in_one_bucket(tokens: int, width: int, count: int) -> None:
    buckets = Buckets(width, count)
    inside = [index for index in range(count) if buckets.bounds(index)[0] <= tokens < buckets.bounds(index)[1]]
    assert inside == [buckets.of(tokens)]


@pytest.mark.parametrize(("tokens", "band"), [(0, 0), (31, 0), (32, 1), (8191, 4), (8192, 5), (10**7, 5)])
def test_bands(tokens: int, band: int) -> None:
    assert band_of(tokens) == band


def test_one_observation_in_its_band_and_in_another() -> None:
    lengths = learnt([(100, 450)])
    # Over all bands: (1 + 1/10) / (1 + 1) = 0.55. In its band: (1 + 8 * 0.55) / (1 + 8) = 0.6.
    assert lengths.predict(100).confidence == pytest.approx(0.6)
    assert lengths.predict(5000).confidence == pytest.approx(0.55)
    assert (lengths.predict(5000).lower_tokens, lengths.predict(5000).upper_tokens) == (400, 600)


def test_bands_have_predictions_of_their_own_and_old_observations_fade() -> None:
    lengths = learnt([(10, 50), (1000, 700)] * 40)
    assert (lengths.predict(10).lower_tokens, lengths.predict(1000).lower_tokens) == (0, 600)
    changed = [(10, 50)] * 100 + [(10, 500)] * 20
    assert learnt(changed, half_life=10.0).predict(10).bucket == 2
    assert learnt(changed, half_life=1e6).predict(10).bucket == 0


def test_the_accuracy_is_that_of_predictions_before_each_observation() -> None:
    described = learnt([(10, 50)] * 10 + [(10, 500)], half_life=1e9).describe()
    assert described.accuracy == pytest.approx(9 / 10)
    assert described.observations == 11


@given(observed=observations, prompt_tokens=st.integers(0, 20_000), half_life=st.floats(0.5, 1e6))
def test_probabilities_sum_to_one_and_weights_are_bounded(
    observed: Observations, prompt_tokens: int, half_life: float
) -> None:
    lengths = learnt(observed, half_life)
    found = lengths.probabilities(prompt_tokens)
    assert sum(found) == pytest.approx(1)
    assert all(share > 0 for share in found)
    assert lengths.predict(77) == learnt(observed, half_life).predict(77)
    bound = 1 / (1 - 0.5 ** (1 / half_life))
    assert all(sum(band.weights) <= bound + 0.01 for band in lengths.describe().bands)


@given(observed=observations, prompt_tokens=st.integers(0, 20_000), output_tokens=st.integers(0, 5_000))
def test_many_equal_observations_give_a_high_confidence(
    observed: Observations, prompt_tokens: int, output_tokens: int
) -> None:
    lengths = learnt([*observed, *[(prompt_tokens, output_tokens)] * 300], half_life=20.0)
    found = lengths.predict(prompt_tokens)
    assert found.bucket == BUCKETS.of(output_tokens)
    assert found.confidence > 0.9
