"""Rates of keys."""

import pytest

from gateway.auth import ApiKey, KeyRates
from gateway.table import LocalTable
from shared.errors import Busy


def test_the_rate_of_a_key_refills_with_time() -> None:
    now = 1.0
    rates, key = KeyRates(LocalTable(), lambda: now), ApiKey("a", "", requests_per_s=2.0, burst=2)

    def refused_for_s() -> float:
        try:
            rates.check(key)
        except Busy as error:
            return error.retry_after_s or 0.0
        return 0.0

    assert [refused_for_s() for _ in range(3)] == [0.0, 0.0, pytest.approx(0.5)]
    now = 1.5
    assert refused_for_s() == 0.0
    now = 100.0
    assert [refused_for_s() for _ in range(3)] == [0.0, 0.0, pytest.approx(0.5)]
