import pytest

from services.worker.app import expected_s
from shared.domain.rates import UNKNOWN_STEPS
from shared.wire.messages import StepRecord


def step(prefill: tuple[tuple[int, int], ...], decodes: int = 0, context: int = 0) -> StepRecord:
    return StepRecord(0, 0.0, 0.1, 0.0, prefill, decodes, context)


def test_what_a_step_should_take() -> None:
    rates = UNKNOWN_STEPS
    assert expected_s(rates, step(((512, 100),))) == pytest.approx(rates.prefill_s(512, 100))
    assert expected_s(rates, step((), 8, 4_000)) == pytest.approx(rates.decode_s(8, 4_000))
    assert expected_s(rates, step(((256, 0),), 8, 4_000)) == pytest.approx(rates.mixed_s(256, 0, 8, 4_000))
    two = expected_s(rates, step(((256, 0), (128, 50))))
    assert two == pytest.approx(rates.prefill_s(256, 0) + rates.prefill_s(128, 50) - rates.prefill.fixed_s)
    assert expected_s(None, step(())) is None
