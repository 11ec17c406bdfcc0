import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cost.operators import smooth_max

TIMES = st.floats(1e-12, 1e6)
SHARPNESS = st.floats(1.0, 12.0)


@given(TIMES, TIMES, SHARPNESS)
def test_between_the_greater_and_the_sum(a: float, b: float, p: float) -> None:
    got = smooth_max(a, b, p)
    assert max(a, b) * (1 - 1e-12) <= got <= (a + b) * (1 + 1e-12)
    assert got == pytest.approx(smooth_max(b, a, p))


@given(TIMES, TIMES, SHARPNESS)
def test_sharper_is_closer_to_the_greater(a: float, b: float, p: float) -> None:
    assert smooth_max(a, b, p + 1.0) <= smooth_max(a, b, p) * (1 + 1e-12)


def test_by_hand() -> None:
    assert smooth_max(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert smooth_max(3.0, 4.0, 1.0) == pytest.approx(7.0)
    assert smooth_max(0.0, 2.0, 3.0) == 2.0
