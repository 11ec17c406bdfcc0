from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policy.log_histogram import MOST, Histogram, bucket_of, merged, observe, quantile

seconds = st.floats(1e-4, 1e4)


def counted(values: list[float]) -> Histogram:
    histogram: Histogram = {}
    for value in values:
        observe(histogram, value)
    return histogram


@given(st.lists(seconds, min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_within_five_per_cent(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, ceil(share * len(values))) - 1]
    found = quantile(counted(values), share)
    assert found == pytest.approx(exact, rel=0.0501)


@given(st.lists(seconds), st.lists(seconds))
def test_merged_counts_are_those_of_all(some: list[float], others: list[float]) -> None:
    assert merged([counted(some), counted(others)]) == counted(some + others)


def test_the_ends() -> None:
    assert (bucket_of(0.0), bucket_of(1e-9), bucket_of(1e9)) == (0, 0, MOST)
    assert quantile({}, 0.5) is None
