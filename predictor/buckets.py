"""Length buckets, which are fixed-size classes of output length, and the prediction from observed lengths: a decayed
histogram for each band of prompt lengths. Pure.

Observed lengths are used while there is no trained classifier, and are a baseline for it. Their age is counted in
observations, not in time.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.domain.job import OPEN_END, LengthPrediction
from shared.wire.api.predictor import LengthBand, ObservedStatus


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
    """The likeliest bucket (the shorter of equals) with its bounds, its probability as the confidence, and all shares.

    Answers end at `max_tokens`, so the probabilities of longer answers count for the bucket of `max_tokens`, whose
    upper bound becomes `max_tokens + 1`.
    """
    folded = _fold(probabilities, buckets.count - 1 if max_tokens is None else buckets.of(max_tokens))
    bucket = max(range(len(folded)), key=lambda index: (folded[index], -index))
    lower, upper = buckets.bounds(bucket)
    if max_tokens is not None:
        upper = min(upper, max_tokens + 1)
    shares, width = tuple(folded), buckets.width_tokens
    return LengthPrediction(bucket, lower, upper, min(1.0, folded[bucket]), source, width, shares, max_tokens or 0)


def no_prediction(max_tokens: int | None, source: str) -> LengthPrediction:
    """The prediction without information: any length, with confidence 0. Its bucket has no meaning."""
    return LengthPrediction(0, 0, OPEN_END if max_tokens is None else max_tokens + 1, 0.0, source)


def _fold(probabilities: Sequence[float], last: int) -> list[float]:
    return [*probabilities[:last], sum(probabilities[last:])]


SOURCE = "observed"
BAND_EDGES = (0, 32, 128, 512, 2048, 8192)  # the first prompt length of each band, in tokens
UNIFORM_WEIGHT = 1.0  # of the uniform prior, in observations
OVERALL_WEIGHT = 8.0  # of the histogram over all bands as the prior of one band


@dataclass(slots=True)
class Histogram:
    """Weights per bucket; each new observation weighs 1 and multiplies the older ones by `keep`."""

    weights: list[float]
    keep: float

    def add(self, shares: list[float]) -> None:
        """Count one observation with these probabilities of the buckets."""
        self.weights = [weight * self.keep + share for weight, share in zip(self.weights, shares, strict=True)]

    @property
    def total(self) -> float:
        """The sum of weights; below 1 / (1 - keep)."""
        return sum(self.weights)

    def posterior(self, prior: list[float], prior_weight: float) -> list[float]:
        """Probabilities per bucket: smoothed by `prior_weight` observations spread as `prior` (Dirichlet)."""
        total = self.total + prior_weight
        pairs = zip(self.weights, prior, strict=True)
        return [(weight + prior_weight * share) / total for weight, share in pairs]


@dataclass(slots=True)
class ObservedLengths:
    """Estimates the length bucket from prompt length alone.

    `half_life` is the number of observations (of the same band) after which one weighs half.
    """

    buckets: Buckets
    half_life: float = 500.0
    observations: int = 0
    _overall: Histogram = field(init=False)
    _bands: list[Histogram] = field(init=False)
    _hits: Histogram = field(init=False)

    def __post_init__(self) -> None:
        if self.half_life <= 0:
            raise ValueError(f"half_life must be positive, got {self.half_life}")
        keep = 0.5 ** (1.0 / self.half_life)
        self._overall = Histogram([0.0] * self.buckets.count, keep)
        self._bands = [Histogram([0.0] * self.buckets.count, keep) for _ in BAND_EDGES]
        self._hits = Histogram([0.0, 0.0], keep)

    def observe(self, prompt_tokens: int, output_tokens: int, *, cut: bool = False) -> None:
        """Count a finished answer, and whether it would have been predicted correctly.

        A cut answer would have been at least as long: it counts for its bucket and all longer ones, in proportion to
        their probabilities.
        """
        bucket, count = self.buckets.of(output_tokens), self.buckets.count
        if self.observations:
            hit = self.predict(prompt_tokens, output_tokens if cut else None).bucket == bucket
            self._hits.add([float(not hit), float(hit)])
        shares = [float(at == bucket) for at in range(count)]
        if cut:
            known = [share if at >= bucket else 0.0 for at, share in enumerate(self.probabilities(prompt_tokens))]
            shares = [share / sum(known) for share in known]
        self._overall.add(shares)
        self._bands[band_of(prompt_tokens)].add(shares)
        self.observations += 1

    def predict(self, prompt_tokens: int, max_tokens: int | None = None) -> LengthPrediction:
        """The likeliest bucket at that prompt length; before the first observation, any length with confidence 0."""
        if not self.observations:
            return no_prediction(max_tokens, SOURCE)
        return predict(self.probabilities(prompt_tokens), self.buckets, max_tokens, SOURCE)

    def probabilities(self, prompt_tokens: int) -> list[float]:
        """The band's weights, smoothed by those over all bands, which are smoothed by a uniform prior."""
        return self._bands[band_of(prompt_tokens)].posterior(self.overall(), OVERALL_WEIGHT)

    def overall(self) -> list[float]:
        """The probabilities for prompts of any length."""
        uniform = [1.0 / self.buckets.count] * self.buckets.count
        return self._overall.posterior(uniform, UNIFORM_WEIGHT)

    def describe(self) -> ObservedStatus:
        """`observed` of `GET /v1/model`."""
        bands = zip(BAND_EDGES, self._bands, strict=True)
        return ObservedStatus(
            observations=self.observations,
            accuracy=self._hits.weights[1] / self._hits.total if self._hits.total else None,
            bucket_tokens=self.buckets.width_tokens,
            bucket_count=self.buckets.count,
            bands=[LengthBand(edge, [round(weight, 3) for weight in band.weights]) for edge, band in bands],
        )


def band_of(prompt_tokens: int) -> int:
    return max(bisect_right(BAND_EDGES, prompt_tokens) - 1, 0)
