"""Rates of keys."""

import pytest

from gateway.auth import TokenBucket


def test_a_token_bucket_refills_with_time() -> None:
    bucket = TokenBucket(rate=2.0, burst=2.0, level=2.0, updated_s=0.0)
    assert [bucket.take(0.0), bucket.take(0.0)] == [0.0, 0.0]
    assert bucket.take(0.0) == pytest.approx(0.5)
    assert bucket.take(0.5) == 0.0
    assert bucket.take(100.0) == 0.0
    assert bucket.level == 1.0
