import pytest

from shared.domain.estimated import Estimated, PromptSize, RouteKind
from shared.policy import truth
from shared.policy.estimate import doubtful_cost, slo_cost
from shared.policy.truth import Compared, EstimateErrors, KindOfRequest, Line, What


def compared(
    ttft_s: float, observed_s: float, *, tpot_s: float | None = None, where: str = "p", tokens: int = 100
) -> Compared:
    return Compared(Estimated(ttft_s, 0.02, RouteKind.FULL, where, "d"), tokens, observed_s, tpot_s)


def test_errors_are_relative_to_what_was_observed() -> None:
    errors = EstimateErrors()
    for predicted_s in (0.1, 0.15, 0.05, 0.3):
        errors.add(compared(predicted_s, 0.1))
    figures = errors.of_instance(What.TTFT, "p")
    assert figures is not None
    assert (figures.count, figures.bias, figures.median, figures.p90) == pytest.approx((4, 0.25, 0.5, 2.0))
    assert errors.of_instance(What.TPOT, "d") is None  # answers too short
    errors.add(compared(0.1, 0.1, tpot_s=0.04))
    tpot = errors.of_instance(What.TPOT, "d")
    assert tpot is not None
    assert tpot.bias == pytest.approx(-0.5)
    assert errors.of_instance(What.TTFT, "d") is errors.of_instance(What.TPOT, "p") is None


def test_errors_are_kept_by_kind_of_request() -> None:
    errors = EstimateErrors()
    errors.add(compared(0.2, 0.1, tokens=100))
    errors.add(compared(0.1, 0.1, tokens=5000))
    short = errors.of_kind(What.TTFT, KindOfRequest(RouteKind.FULL, PromptSize.SHORT))
    long = errors.of_kind(What.TTFT, KindOfRequest(RouteKind.FULL, PromptSize.LONG))
    assert short is not None
    assert long is not None
    assert (short.bias, long.bias) == pytest.approx((1.0, 0.0))
    assert errors.of_kind(What.TTFT, KindOfRequest(RouteKind.WHOLE, PromptSize.SHORT)) is None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "INSTANCES", 10)
    errors = EstimateErrors()
    for number in range(100):
        errors.add(compared(0.2, 0.1, where=f"p{number}"))
    assert errors.of_instance(What.TTFT, "p0") is None
    assert errors.of_instance(What.TTFT, "p99") is not None
    kind = errors.of_kind(What.TTFT, KindOfRequest(RouteKind.FULL, PromptSize.SHORT))
    assert kind is not None
    assert kind.count == truth.WINDOW
    for _ in range(truth.WINDOW):
        errors.add(compared(0.1, 0.1))
    latest = errors.of_instance(What.TTFT, "p")
    assert latest is not None
    assert latest.median == 0.0


def test_predictions_learn_constant_errors_within_bounds() -> None:
    errors = EstimateErrors()
    computed = Estimated(0.1, 0.02, RouteKind.FULL, "p", "d")
    assert errors.corrected(computed) == computed
    for _ in range(truth.FEWEST):
        errors.add(compared(0.1, 0.11, tpot_s=0.022))
    predicted = errors.corrected(computed)
    assert (predicted.ttft_s, predicted.late_s) == pytest.approx((0.11, 0.01))
    assert (predicted.tpot_s, predicted.pace) == pytest.approx((0.022, 1.1))
    other = Estimated(0.1, 0.02, RouteKind.WHOLE, "p", "d")
    assert errors.corrected(other) == other, "nothing is known of this kind"
    for _ in range(truth.WINDOW):  # what is learned does not feed on itself
        errors.add(Compared(predicted, 100, 0.11, 0.022))
    assert errors.corrected(computed).late_s == pytest.approx(0.01)
    assert errors.corrected(computed).pace == pytest.approx(1.1)
    for _ in range(truth.WINDOW):
        errors.add(compared(0.1, 9.0, tpot_s=0.9))
    assert errors.corrected(computed).late_s == pytest.approx(truth.LATE_MOST_S + truth.LATE_MOST_SHARE * 0.1)
    assert errors.corrected(computed).pace == truth.PACE_MOST


def test_long_times_may_be_off_by_more_than_short_ones() -> None:
    line = Line.through([(x, 1.1 * x + 0.01) for x in (0.02, 0.03, 0.04, 0.3, 0.4, 0.5)])
    assert (line.late(0.03), line.late(0.4)) == pytest.approx((0.013, 0.05))
    assert line.late(0.0) == line.late(0.01) > 0.0, "shorter times than the known ones are corrected by as much"
    outlier = [(x, x + 0.01) for x in (0.02, 0.03, 0.04, 0.3, 0.4)] + [(0.5, 5.0)]
    assert Line.through(outlier).late(0.35) == pytest.approx(0.01)
    assert Line.through([(0.0, 0.01)] * 8) == Line(0.0, 0.01)  # an emulated instance may take no time
    alike = Line.through([(0.1, 0.12), (0.11, 0.1), (0.12, 0.13), (0.1, 0.11)])
    assert alike.slope == 0.0


@pytest.mark.parametrize("observed_s", [0.4, 0.025])
def test_estimates_that_are_far_off_are_doubted_until_they_are_better(observed_s: float) -> None:
    errors = EstimateErrors()
    for number in range(truth.SURELY):
        assert not errors.doubtful, f"{number} are too few"
        errors.add(compared(0.1, 0.1, where="q"))
        errors.add(compared(0.1, 0.1, where="r"))
        errors.add(compared(0.1, observed_s, tpot_s=0.022))
    assert errors.doubt(What.TTFT, "p") == pytest.approx(4.0)
    assert errors.doubt(What.TPOT, "d") == errors.doubt(What.TTFT, "q") == truth.DOUBT
    late_s = observed_s - 0.1
    right = Estimated(observed_s, 0.02, RouteKind.FULL, "p", "d", late_s=late_s)
    for _ in range(truth.WINDOW):
        errors.add(compared(0.1, 0.1, where="q"))
        errors.add(compared(0.1, 0.1, where="r"))
        errors.add(Compared(right, 100, observed_s, 0.022))
    assert errors.doubt(What.TTFT, "p") == pytest.approx(4.0), "what was computed counts, not what was predicted"
    for _ in range(truth.WINDOW):
        errors.add(compared(0.1, 0.15))
    assert not errors.doubtful


def test_a_factor_by_which_all_estimates_are_off_is_no_reason_for_doubt() -> None:
    errors = EstimateErrors()
    for _ in range(truth.SURELY):
        for where in ("p", "q", "r"):
            errors.add(compared(0.1, 0.5, where=where))
    assert not errors.doubtful


def test_the_cost_of_doubtful_times_differs_less() -> None:
    for share in (0.0, 0.3, 1.0, 3.0):
        assert doubtful_cost(share, truth.DOUBT) == slo_cost(share)
    sure, doubtful = (doubtful_cost(2.0, factor) - doubtful_cost(0.5, factor) for factor in (1.1, 4.0))
    assert 0.0 < doubtful < sure
