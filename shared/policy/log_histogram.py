"""Histograms of durations with logarithmic buckets: small, mergeable, percentiles within 5 %."""

from collections.abc import Iterable, Mapping
from math import ceil, log

LEAST_S, GROWTH, MOST = 1e-4, 1.1, 200  # the last bucket begins at some 19,000 s
_LOG = log(GROWTH)

Histogram = dict[int, int]  # count by bucket; bucket n lies around LEAST_S * GROWTH ** n


def observe(histogram: Histogram, seconds: float, times: int = 1) -> None:
    at = bucket_of(seconds)
    histogram[at] = histogram.get(at, 0) + times


def bucket_of(seconds: float) -> int:
    """The bucket of a duration; durations outside the range go to its ends."""
    return 0 if seconds <= LEAST_S else min(MOST, round(log(seconds / LEAST_S) / _LOG))


def merged(histograms: Iterable[Mapping[int, int]]) -> Histogram:
    found: Histogram = {}
    for one in histograms:
        for at, times in one.items():
            found[at] = found.get(at, 0) + times
    return found


def quantile(histogram: Mapping[int, int], share: float) -> float | None:
    """The nearest-rank percentile in seconds, within 5 %; None without any. `share` in (0, 1]."""
    total = sum(histogram.values())
    if not total:
        return None
    left = max(1, ceil(share * total))
    for at in sorted(histogram):
        left -= histogram[at]
        if left <= 0:
            return LEAST_S * GROWTH**at
    raise AssertionError("counts are positive")
