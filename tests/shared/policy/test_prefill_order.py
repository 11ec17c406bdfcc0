"""The decaying share of steps with prompts in them."""

import pytest

from shared.domain.job import JobView, Slo
from shared.domain.rates import StepForm, StepRates
from shared.errors import InvalidRequest
from shared.policy.prefill_order import Fcfs, LeastSlack, Ljf, PrefillOrder, PrefillShare, Sjf, WaitingJob

RATES = StepRates(StepForm(0.010, token_s=0.001, position_s=0.0001), StepForm(0.0), StepForm(0.0))


def waiting(tokens: int, arrived_s: float = 0.0, ttft_s: float = 2.0, before: int = 0) -> WaitingJob:
    return WaitingJob(JobView("j", before + tokens, 8, Slo(ttft_s=ttft_s)), tokens, before, arrived_s)


JOBS = [waiting(300), waiting(100, 0.5, 1.0), waiting(200, 1.0), waiting(100, 1.5)]


@pytest.mark.parametrize(
    ("order", "rates", "first"),
    [
        (Fcfs(), None, [0, 1, 2, 3]),
        (Sjf(), None, [1, 3, 2, 0]),
        (Ljf(), None, [0, 2, 1, 3]),
        (LeastSlack(), None, [1, 0, 2, 3]),  # by deadlines: 1.5, 2, 3 and 3.5 s
        # 300 tokens take 4.81 s, 100 take 0.61, 200 take 2.21: -2.81, 0.89, 0.79 and 2.89 s.
        (LeastSlack(), RATES, [0, 2, 1, 3]),
    ],
)
def test_order_by_example(order: PrefillOrder, rates: StepRates | None, first: list[int]) -> None:
    assert sorted(range(len(JOBS)), key=lambda at: order.key(JOBS[at], rates)) == first


def test_what_is_computed_elsewhere_counts_for_what_it_costs_here_alone() -> None:
    part, whole = waiting(50, before=950), waiting(400)
    assert Sjf().key(part, None) < Sjf().key(whole, None)
    # Attention of 50 tokens over 950 others and themselves: 0.06 + 50 * 0.0001 * 975 s.
    assert LeastSlack().key(part, RATES) == pytest.approx(2.0 - 0.060 - 4.875)


@pytest.mark.parametrize("order", [Sjf, Ljf, LeastSlack])
def test_somebody_may_always_overtake(order: type[Sjf]) -> None:
    with pytest.raises(InvalidRequest, match=rf"{order.name}: window must be at least 1, not 0"):
        order(window=0)


# The decaying share of steps with prompts in them


def test_it_is_the_share_of_steps() -> None:
    share = PrefillShare()
    assert share.after() == 0.0
    for _ in range(2000):
        share.mixed()
        share.plain(3)
    assert share.after() == pytest.approx(0.25, abs=0.01)
    assert share.after(64) < 0.12


def test_many_steps_at_once_are_as_many_one_by_one() -> None:
    one, many = PrefillShare(), PrefillShare()
    for share in (one, many):
        share.mixed()
        share.mixed()
    for _ in range(37):
        one.plain()
    assert many.after(37) == pytest.approx(one.after())
    many.plain(37)
    assert many.after() == pytest.approx(one.after())
    one.mixed()
    many.mixed()
    assert many.after() == pytest.approx(one.after())
