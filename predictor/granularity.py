"""Which granularity the lengths of answers can teach: the tokens of a bucket, and the number of buckets. Pure.

TetriInfer takes 200 tokens by trial, of ShareGPT's answers; other models and prompts need another one.
"""

from collections import Counter
from collections.abc import Sequence

from predictor.buckets import Buckets

WIDTHS = (5, 10, 25, 50, 100, 200, 400, 800, 1600, 3200)  # tokens; one of them is chosen
LARGEST_SHARE = 0.5  # of the answers, that one bucket may hold
LAST_FROM = 0.95  # the last bucket begins at or below this quantile of the lengths
MAX_BUCKETS = 64


def choose_buckets(lengths: Sequence[int], count: int | None = None) -> Buckets:
    """The largest of WIDTHS at which no bucket holds more than LARGEST_SHARE of these answers; where every one has such
    a bucket, the width whose commonest bucket is the smallest. Equal for equal lengths.

    count: None chooses the number of buckets, too, so that about one answer in twenty falls into the last one.
    """
    candidates = [Buckets(width, count or _count(lengths, width)) for width in reversed(WIDTHS)]
    fitting = (buckets for buckets in candidates if largest_share(lengths, buckets) <= LARGEST_SHARE)
    return next(fitting, None) or min(candidates, key=lambda buckets: largest_share(lengths, buckets))


def largest_share(lengths: Sequence[int], buckets: Buckets) -> float:
    """The share of the answers that the commonest bucket holds."""
    return max(Counter(map(buckets.of, lengths)).values()) / len(lengths)


def counts(lengths: Sequence[int], buckets: Buckets) -> list[int]:
    """How many answers each bucket holds."""
    seen = Counter(map(buckets.of, lengths))
    return [seen[bucket] for bucket in range(buckets.count)]


def _count(lengths: Sequence[int], width: int) -> int:
    ordered = sorted(lengths)
    last = ordered[min(int(LAST_FROM * len(ordered)), len(ordered) - 1)] // width
    return min(max(last + 1, 2), MAX_BUCKETS)
