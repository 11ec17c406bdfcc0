import pytest

from shared.domain.rates import ChunkedCost, PartialPrefillCost, Rates
from shared.policy.index import UNKNOWN_S_PER_TOKEN, chunked_rate, prefill_rate, queued_prefill_s
from tests.shared.policy.views import decode, prefill


@pytest.mark.parametrize(
    ("cost", "rate"),
    [
        (None, (0.0, 0.0)),
        (PartialPrefillCost(1e-4, 0.02), (1e-4, 0.02)),
        (PartialPrefillCost(1e-4, -0.02), (1e-4, 0.0)),  # a fit's intercept may be negative; a cost may not
        (PartialPrefillCost(0.0, 0.02), (0.0, 0.0)),
    ],
)
def test_prefill_rate(cost: PartialPrefillCost | None, rate: tuple[float, float]) -> None:
    assert prefill_rate(Rates(prefill=cost)) == rate


def test_a_chunked_rate_falls_back_to_the_plain_one() -> None:
    plain = Rates(prefill=PartialPrefillCost(1e-4, 0.02))
    assert chunked_rate(decode("d", rates=plain)) == (1e-4, 0.02)
    odd = Rates(prefill=PartialPrefillCost(1e-4, 0.02), chunked=ChunkedCost(0.0, 0.0, -1.0))
    assert chunked_rate(decode("d", rates=odd)) == (1e-4, 0.02)


def test_more_decodes_than_a_step_has_tokens_leave_one() -> None:
    rates = Rates(chunked=ChunkedCost(0.0, 0.0, 0.01))
    assert chunked_rate(decode("d", rates=rates, decoding=9999)) == (0.01, 0.0)


def test_queued_seconds() -> None:
    assert queued_prefill_s(prefill("p", rate=1e-3, base=0.5, queued_prefill_tokens=100, queued_prefill=2)) == 1.1
    assert queued_prefill_s(prefill("p", queued_prefill_tokens=100)) == pytest.approx(100 * UNKNOWN_S_PER_TOKEN)
