"""Length buckets: fixed-size classes of output length, and how a distribution over them becomes a prediction.

TetriInfer section 3.3.2: with a granularity of 200, answers of 0 to 200 tokens are labelled 0, 200 to 400
are 1, and so on (the paper's "granularity of 100" there is a slip).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.domain.job import OPEN_END, LengthPrediction


@dataclass(frozen=True, slots=True)
class Buckets:
    """`count` classes of `width_tokens` each; the last one is open-ended.

    Raises ValueError unless there are at least two buckets of at least one token.
    """

    width_tokens: int = 200
    count: int = 10

    def __post_init__(self) -> None:
        if self.width_tokens < 1 or self.count < 2:
            raise ValueError(f"need width_tokens >= 1 and count >= 2, got {self.width_tokens} and {self.count}")

    def of(self, output_tokens: int) -> int:
        """The bucket of an answer of that many tokens."""
        return min(max(output_tokens, 0) // self.width_tokens, self.count - 1)

    def bounds(self, bucket: int) -> tuple[int, int]:
        """Tokens [lower, upper) of a bucket."""
        last = bucket == self.count - 1
        return bucket * self.width_tokens, OPEN_END if last else (bucket + 1) * self.width_tokens


def predict(probabilities: Sequence[float], buckets: Buckets, max_tokens: int | None, source: str) -> LengthPrediction:
    """The likeliest bucket (the shorter one of equals), its bounds, its probability as the confidence, and all of them.

    An answer is cut at `max_tokens`, so all that is expected beyond falls into the bucket of `max_tokens`,
    whose upper bound becomes `max_tokens + 1`: exactly `max_tokens` is possible, more is not.
    """
    folded = _fold(probabilities, buckets.count - 1 if max_tokens is None else buckets.of(max_tokens))
    bucket = max(range(len(folded)), key=lambda index: (folded[index], -index))
    lower, upper = buckets.bounds(bucket)
    if max_tokens is not None:
        upper = min(upper, max_tokens + 1)
    shares, width = tuple(folded), buckets.width_tokens
    return LengthPrediction(bucket, lower, upper, min(1.0, folded[bucket]), source, width, shares, max_tokens or 0)


def no_prediction(max_tokens: int | None, source: str) -> LengthPrediction:
    """What is said when nothing is known: any length at all, with confidence 0. Its bucket means nothing."""
    return LengthPrediction(0, 0, OPEN_END if max_tokens is None else max_tokens + 1, 0.0, source)


def _fold(probabilities: Sequence[float], last: int) -> list[float]:
    return [*probabilities[:last], sum(probabilities[last:])]
