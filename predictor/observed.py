"""Output length from what was observed lately: a decayed histogram for each band of prompt lengths.

It answers while there is no trained classifier, and is the baseline that a classifier has to beat. Pure: no
clock; age is counted in observations, so a quiet night forgets nothing.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from predictor.buckets import Buckets, no_prediction, predict
from shared.domain.job import LengthPrediction

SOURCE = "observed"
# First prompt length, in tokens, of each band.
BAND_EDGES = (0, 32, 128, 512, 2048, 8192)
# How many observations the uniform prior counts as, and, in one band, the picture over all bands.
UNIFORM_WEIGHT = 1.0
OVERALL_WEIGHT = 8.0


@dataclass(slots=True)
class Histogram:
    """Weights per bucket; each new observation weighs 1 and multiplies the older ones by `keep`."""

    weights: list[float]
    keep: float

    def add(self, shares: list[float]) -> None:
        """Count one observation, which is in each bucket with that probability."""
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
        """Learn from one finished answer; before that, see whether it would have been predicted.

        One that was cut would have been at least so long: it counts for that bucket and all after it, as they are
        known to be shared.
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
        """The likeliest bucket at that prompt length; before any observation, any length, confidence 0."""
        if not self.observations:
            return no_prediction(max_tokens, SOURCE)
        return predict(self.probabilities(prompt_tokens), self.buckets, max_tokens, SOURCE)

    def probabilities(self, prompt_tokens: int) -> list[float]:
        """Per bucket: the band's weights, smoothed by those over all bands, themselves smoothed evenly."""
        return self._bands[band_of(prompt_tokens)].posterior(self.overall(), OVERALL_WEIGHT)

    def overall(self) -> list[float]:
        """Per bucket, whatever the prompt's length."""
        uniform = [1.0 / self.buckets.count] * self.buckets.count
        return self._overall.posterior(uniform, UNIFORM_WEIGHT)

    def describe(self) -> dict[str, Any]:
        """Counts for people. `accuracy` is that of its own predictions, each made before its observation."""
        accuracy = self._hits.weights[1] / self._hits.total if self._hits.total else None
        bands = zip(BAND_EDGES, self._bands, strict=True)
        return {
            "observations": self.observations,
            "accuracy": accuracy,
            "bucket_tokens": self.buckets.width_tokens,
            "bucket_count": self.buckets.count,
            "bands": [
                {"from_prompt_tokens": edge, "weights": [round(weight, 3) for weight in band.weights]}
                for edge, band in bands
            ],
        }


def band_of(prompt_tokens: int) -> int:
    """The index of a prompt's band."""
    return max(bisect_right(BAND_EDGES, prompt_tokens) - 1, 0)
