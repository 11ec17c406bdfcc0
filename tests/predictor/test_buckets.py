import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.buckets import Buckets, no_prediction, predict
from shared.domain.job import OPEN_END

WIDE = Buckets(200, 4)


@pytest.mark.parametrize(("tokens", "bucket"), [(0, 0), (199, 0), (200, 1), (399, 1), (400, 2), (600, 3), (10**6, 3)])
def test_tetriinfers_labels(tokens: int, bucket: int) -> None:
    assert WIDE.of(tokens) == bucket


@pytest.mark.parametrize(
    ("probabilities", "max_tokens", "expected"),
    [
        ([0.1, 0.6, 0.2, 0.1], None, (1, 200, 400, 0.6)),
        ([0.1, 0.2, 0.1, 0.6], None, (3, 600, OPEN_END, 0.6)),
        ([0.1, 0.2, 0.1, 0.6], 1000, (3, 600, 1001, 0.6)),
        ([0.4, 0.2, 0.1, 0.3], 300, (1, 200, 301, 0.6)),  # all that would be longer ends at 300
        ([0.1, 0.6, 0.2, 0.1], 200, (1, 200, 201, 0.9)),
        ([0.1, 0.6, 0.2, 0.1], 20, (0, 0, 21, 1.0)),
        ([0.4, 0.4, 0.1, 0.1], None, (0, 0, 200, 0.4)),  # the shorter of equals
    ],
)
def test_worked_examples(
    probabilities: list[float], max_tokens: int | None, expected: tuple[int, int, int, float]
) -> None:
    found = predict(probabilities, WIDE, max_tokens, "classifier")
    assert (found.bucket, found.lower_tokens, found.upper_tokens) == expected[:3]
    assert found.confidence == pytest.approx(expected[3])


def test_knowing_nothing_says_so() -> None:
    assert no_prediction(None, "observed").confidence == 0
    assert no_prediction(50, "observed").upper_tokens == 51


@pytest.mark.parametrize(("width", "count"), [(0, 4), (200, 1)])
def test_impossible_buckets(width: int, count: int) -> None:
    with pytest.raises(ValueError, match="width_tokens >= 1 and count >= 2"):
        Buckets(width, count)


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=30),
    width=st.integers(1, 500),
    max_tokens=st.none() | st.integers(1, 20_000),
)
def test_a_prediction_holds_together(weights: list[float], width: int, max_tokens: int | None) -> None:
    buckets = Buckets(width, len(weights))
    found = predict([weight / sum(weights) for weight in weights], buckets, max_tokens, "x")
    assert found.lower_tokens < found.upper_tokens
    assert buckets.of(found.lower_tokens) == found.bucket == buckets.of(found.upper_tokens - 1)
    assert 0 < found.confidence <= 1
    assert max_tokens is None or found.upper_tokens <= max_tokens + 1


@given(tokens=st.integers(0, 10**7), width=st.integers(1, 1000), count=st.integers(2, 50))
def test_buckets_cover_every_length_once(tokens: int, width: int, count: int) -> None:
    buckets = Buckets(width, count)
    inside = [index for index in range(count) if buckets.bounds(index)[0] <= tokens < buckets.bounds(index)[1]]
    assert inside == [buckets.of(tokens)]
