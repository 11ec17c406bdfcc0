import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.domain.job import LengthPrediction
from shared.policy.decode_admission import PredictedEnd, is_heavy, predicted_tokens
from tests.shared.policy.views import job, predicted


@pytest.mark.parametrize(
    ("end", "tokens"), [(PredictedEnd.LOWER, 200), (PredictedEnd.MIDDLE, 300), (PredictedEnd.UPPER, 400)]
)
def test_ends_of_the_range(end: PredictedEnd, tokens: int) -> None:
    assert predicted_tokens(job(1, 1000, prediction=predicted(200, 400)), end, 7) == tokens
    assert predicted_tokens(job(1, 250, prediction=predicted(200, 400)), end, 7) == min(250, tokens)
    assert predicted_tokens(job(1, 1000), end, 7) == 7


def test_a_prediction_that_says_it_knows_nothing_is_none() -> None:
    nothing = job(1, 1000, prediction=LengthPrediction(0, 0, 1000, 0.0, "observed"))
    assert predicted_tokens(nothing, PredictedEnd.LOWER, 7) == 7


@pytest.mark.parametrize(
    ("lower", "upper", "max_tokens", "heavy"),
    [(0, 200, 1000, False), (200, 400, 1000, True), (200, 400, 128, False), (100, 158, 1000, True)],
)
def test_heavy_is_more_than_128_tokens(lower: int, upper: int, max_tokens: int, heavy: bool) -> None:
    assert is_heavy(job(1, max_tokens, prediction=predicted(lower, upper))) is heavy


def test_without_a_prediction_max_tokens_decides() -> None:
    assert is_heavy(job(1, 129))
    assert not is_heavy(job(1, 128))


SPREAD = LengthPrediction(0, 0, 100, 0.6, "classifier", 100, (0.6, 0.1, 0.1, 0.2), 400)


@pytest.mark.parametrize(("end", "tokens"), [(PredictedEnd.MEAN, 141), (PredictedEnd.P50, 84), (PredictedEnd.P90, 350)])
def test_figures_of_the_distribution(end: PredictedEnd, tokens: int) -> None:
    assert predicted_tokens(job(1, 1000, prediction=SPREAD), end, 7) == tokens
    assert predicted_tokens(job(1, 50, prediction=SPREAD), end, 7) == 50


def test_heavy_goes_by_the_median_of_a_distribution() -> None:
    assert not is_heavy(job(1, 1000, prediction=SPREAD))
    late = LengthPrediction(0, 0, 100, 0.4, "classifier", 100, (0.4, 0.0, 0.3, 0.3), 400)
    assert is_heavy(job(1, 1000, prediction=late))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(any), st.integers(1, 500))
@example([0.5, 0.0625], 1)
@example([0.1] * 6 + [0.0], 10)
def test_quantiles_rise_with_their_share_and_stay_within_the_buckets(shares: list[float], width: int) -> None:
    most = width * len(shares)
    said = LengthPrediction(0, 0, width, 0.5, "classifier", width, tuple(shares), most)
    found = [said.quantile(share / 20) for share in range(1, 21)]
    assert found == sorted(found)
    assert found[0] > 0
    last = max(at for at, share in enumerate(shares, 1) if share)
    assert found[-1] <= max(2, last * width)
    assert 0 < said.mean <= max(2, most)
