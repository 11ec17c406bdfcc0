"""A length predictor in the simulator: it knows the true length and says a bucket, as wrongly as a real one would."""

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
    """Buckets of `width_tokens` output tokens, `buckets` of them, the last open-ended; and how often they are right.

    accuracy: share of requests whose own bucket is said, alike in every bucket; the rest goes to the buckets just
    below and above in equal parts (all of it to the one neighbour at either end). confusion: the whole matrix
    instead, [true bucket, said bucket], each row summing to 1; `accuracy` then counts for nothing. Without either a
    prediction is always right. prior: how common each true bucket is, for the probabilities that policies are told; by
    default all alike. answer_s: how long the predictor takes. A placement waits for it, if it takes no longer
    than `wait_s`; else the answer is for the dispatch, if that comes later, and for the decode instance.
    Raises InvalidRequest that names what is wrong, for a matrix the row.
    """

    width_tokens: int = 200
    buckets: int = 10
    accuracy: float = 1.0
    confusion: Matrix | None = None
    prior: tuple[float, ...] | None = None
    answer_s: float = 0.0
    wait_s: float = 0.005
    _ends: NDArray[np.float64] = field(init=False, repr=False, compare=False)  # row i: i + cumulative shares
    _said: tuple[LengthPrediction, ...] = field(init=False, repr=False, compare=False)

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
        object.__setattr__(self, "_said", _predictions(self.width_tokens, shares, _weights(self.prior, self.buckets)))

    @classmethod
    def from_matrix(cls, confusion: Sequence[Sequence[float]], width_tokens: int = 200) -> "Prediction":
        """One with as many buckets as the matrix [true, said] has rows."""
        rows = tuple(tuple(float(share) for share in row) for row in confusion)
        return cls(width_tokens=width_tokens, buckets=len(rows), confusion=rows)

    @property
    def at_placement(self) -> bool:
        """Whether placements have it."""
        return self.answer_s <= self.wait_s

    def buckets_of(self, output_tokens: Lengths) -> NDArray[np.int64]:
        """The true bucket of each answer."""
        true: NDArray[np.int64] = np.minimum(output_tokens // self.width_tokens, self.buckets - 1)
        return true

    def predict(self, output_tokens: Lengths, seed: int) -> NDArray[np.int64]:
        """The bucket that is said of each answer, drawn from its row; same seed, same draws."""
        true = self.buckets_of(output_tokens)
        draws = np.random.default_rng(seed).random(len(true)) + true
        said = np.searchsorted(self._ends, draws, side="right") - true * self.buckets
        within: NDArray[np.int64] = np.minimum(said, self.buckets - 1).astype(np.int64)
        return within

    def as_prediction(self, bucket: int) -> LengthPrediction:
        """What policies get to see of a bucket; one object a bucket.

        Its confidence is the share of answers said to be in the bucket that are, were all buckets equally common.
        """
        return self._said[bucket]


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
