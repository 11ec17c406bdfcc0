"""A length predictor in the simulator: it knows the true length and predicts a bucket, with given errors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.domain.job import OPEN_END, LengthPrediction
from shared.errors import InvalidRequest
from shared.sim.workload import Lengths

_ROW_SLACK = 1e-6  # a row of a matrix that was printed with six digits still sums to 1

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """`buckets` buckets of `width_tokens` output tokens each, the last open-ended, and how often predictions are right.

    accuracy: share of requests whose true bucket is predicted, equal in each bucket; wrong predictions fall on the
    buckets just below and above in equal parts (at either end all on the one neighbour). confusion: replaces `accuracy`
    by a whole matrix [true bucket, predicted bucket], whose rows sum to 1. Without either predictions are right. prior:
    how common each true bucket is, for the probabilities that policies see; by default equal. answer_s: how long the
    predictor takes. A placement waits for it if it takes at most `wait_s`; else the prediction is for the dispatch, if
    that comes later, and for the decode instance. Raises InvalidRequest that names what is wrong, for a matrix the row.
    """

    width_tokens: int = 200
    buckets: int = 10
    accuracy: float = 1.0
    confusion: Matrix | None = None
    prior: tuple[float, ...] | None = None
    answer_s: float = 0.0
    wait_s: float = 0.005
    _ends: NDArray[np.float64] = field(init=False, repr=False, compare=False)  # row i: i + cumulative shares
    _predictions: tuple[LengthPrediction, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.width_tokens < 1 or self.buckets < 1:
            raise InvalidRequest(
                f"prediction: width_tokens {self.width_tokens} and buckets {self.buckets} must be at least 1"
            )
        if not 0.0 <= self.accuracy <= 1.0:
            raise InvalidRequest(f"prediction: accuracy must be in 0..1, not {self.accuracy}")
        if min(self.answer_s, self.wait_s) < 0.0:
            raise InvalidRequest("prediction: answer_s and wait_s must not be negative")
        if self.confusion is None:
            shares = _neighbours(self.buckets, self.accuracy)
        else:
            shares = _checked(self.confusion, self.buckets)
        rows = np.arange(self.buckets, dtype=np.float64)[:, None]
        cumulative = np.cumsum(shares, axis=1)
        object.__setattr__(self, "_ends", (cumulative / cumulative[:, -1:] + rows).ravel())
        predictions = _predictions(self.width_tokens, shares, _weights(self.prior, self.buckets))
        object.__setattr__(self, "_predictions", predictions)

    @classmethod
    def from_matrix(cls, confusion: Sequence[Sequence[float]], width_tokens: int = 200) -> "Prediction":
        """A predictor with as many buckets as the matrix [true, predicted] has rows."""
        rows = tuple(tuple(float(share) for share in row) for row in confusion)
        return cls(width_tokens=width_tokens, buckets=len(rows), confusion=rows)

    @property
    def at_placement(self) -> bool:
        """Whether placements wait for the prediction."""
        return self.answer_s <= self.wait_s

    def buckets_of(self, output_tokens: Lengths) -> NDArray[np.int64]:
        true: NDArray[np.int64] = np.minimum(output_tokens // self.width_tokens, self.buckets - 1)
        return true

    def predict(self, output_tokens: Lengths, seed: int) -> NDArray[np.int64]:
        """The predicted bucket of each answer, drawn from the row of its true one; same seed, same draws."""
        true = self.buckets_of(output_tokens)
        draws = np.random.default_rng(seed).random(len(true)) + true
        predicted = np.searchsorted(self._ends, draws, side="right") - true * self.buckets
        within: NDArray[np.int64] = np.minimum(predicted, self.buckets - 1).astype(np.int64)
        return within

    def as_prediction(self, bucket: int) -> LengthPrediction:
        """What policies see of a predicted bucket; one object for each bucket."""
        return self._predictions[bucket]


def _neighbours(buckets: int, accuracy: float) -> NDArray[np.float64]:
    shares = np.eye(buckets)
    if buckets == 1:
        return shares
    shares *= accuracy
    for true in range(buckets):
        beside = [at for at in (true - 1, true + 1) if 0 <= at < buckets]
        shares[true, beside] = (1.0 - accuracy) / len(beside)
    return shares


def _checked(confusion: Matrix, buckets: int) -> NDArray[np.float64]:
    if len(confusion) != buckets:
        raise InvalidRequest(f"prediction: confusion has {len(confusion)} rows, not one for each of {buckets} buckets")
    for number, row in enumerate(confusion):
        if len(row) != buckets:
            raise InvalidRequest(f"prediction: confusion row {number} has {len(row)} shares, not {buckets}")
        if not all(0.0 <= share <= 1.0 for share in row):
            raise InvalidRequest(f"prediction: confusion row {number} has a share outside 0..1: {list(row)}")
        if abs(sum(row) - 1.0) > _ROW_SLACK:
            raise InvalidRequest(f"prediction: confusion row {number} sums to {sum(row):.6g}, not 1")
    return np.asarray(confusion, dtype=np.float64)


def _weights(prior: tuple[float, ...] | None, buckets: int) -> NDArray[np.float64]:
    if prior is None:
        return np.full(buckets, 1.0 / buckets)
    if len(prior) != buckets or min(prior) < 0.0 or sum(prior) <= 0.0:
        raise InvalidRequest(f"prediction: prior must be {buckets} shares of at least 0, not {list(prior)}")
    return np.asarray(prior, dtype=np.float64) / sum(prior)


def _predictions(width: int, shares: NDArray[np.float64], prior: NDArray[np.float64]) -> tuple[LengthPrediction, ...]:
    joint, last = shares * prior[:, None], len(shares) - 1
    said = joint.sum(axis=0)
    posterior = np.divide(joint, said, out=np.eye(len(shares)), where=said > 0.0).T
    return tuple(
        LengthPrediction(
            bucket=at,
            lower_tokens=at * width,
            upper_tokens=OPEN_END if at == last else (at + 1) * width,
            confidence=float(posterior[at, at]) if said[at] > 0 else 0.0,
            source="simulated",
            width_tokens=width,
            shares=tuple(posterior[at].tolist()),
        )
        for at in range(len(shares))
    )
