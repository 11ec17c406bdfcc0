"""Output lengths: how long answers turn out, learned from those that ended, by what was predicted of them."""

from dataclasses import dataclass
from math import ceil, log
from typing import NamedTuple

from shared.domain.job import JobView, LengthPrediction

FIRST_TOKENS = 200.0  # of an answer, on average, before the first has ended
RECENT = 256  # answers that a running mean rests on, the newest most
FEWEST = 16  # answers before their lengths bound how long one may be
UNSEEN_TOKENS = 1024  # before that, at most; a client that names no max_tokens requests the whole context
DOUBT = 16  # answers that a prediction counts for, against the lengths of answers with the same prediction


class Lengths(NamedTuple):
    """Output lengths in tokens. brief: the harmonic mean, over which a delay of one answer is spread."""

    mean: float
    brief: float


UNKNOWN_LENGTHS = Lengths(FIRST_TOKENS, FIRST_TOKENS / 4.0)


class _RunningLengths:
    """Running means of lengths and of their inverses; they begin with what was expected, worth `count` answers."""

    __slots__ = ("_count", "_inverse", "_mean", "lengths")

    def __init__(self, first: Lengths, count: int) -> None:
        self._mean, self._inverse, self._count = first.mean, 1.0 / first.brief, count
        self.lengths = first

    def add(self, lengths: Lengths) -> None:
        self._count += 1
        weight = 1.0 / min(self._count, RECENT)
        self._mean += (lengths.mean - self._mean) * weight
        self._inverse += (1.0 / lengths.brief - self._inverse) * weight
        self.lengths = Lengths(self._mean, 1.0 / self._inverse)


class _Bucket:
    """Answers that were predicted to be in the same bucket: their lengths, and the predicted lengths on average."""

    __slots__ = ("_actual", "_predicted")

    def __init__(self, first: Lengths) -> None:
        self._actual, self._predicted = _RunningLengths(first, DOUBT), _RunningLengths(first, DOUBT)

    def add(self, tokens: int, predicted: Lengths) -> None:
        self._actual.add(Lengths(tokens, tokens))
        self._predicted.add(predicted)

    def corrected(self, lengths: Lengths) -> Lengths:
        actual, predicted = self._actual.lengths, self._predicted.lengths
        return Lengths(lengths.mean * actual.mean / predicted.mean, lengths.brief * actual.brief / predicted.brief)


@dataclass(slots=True)
class _Error:
    """The mean absolute error of one way to guess lengths, in tokens, over the last answers."""

    mean: float = 0.0
    count: int = 0

    def add(self, error: float) -> None:
        self.count += 1
        self.mean += (error - self.mean) / min(self.count, RECENT)


class _Guess(NamedTuple):
    """Of a job's answer: its bound, the predicted bucket and lengths, the expected lengths, and the mean length by each
    way to guess it.
    """

    max_tokens: int
    bucket: int
    predicted: Lengths | None
    expected: Lengths
    by_way: dict[str, float]


class OutputLengths:
    """Expected lengths of a job's answer, and of the answers of all jobs."""

    def __init__(self) -> None:
        self._all = _RunningLengths(UNKNOWN_LENGTHS, 0)
        self._share = 0.5  # of max_tokens, that an answer uses on average
        self._ended = 0
        self._open: dict[str, _Guess] = {}  # by job
        self._errors = {way: _Error() for way in ("all", "max_tokens", "predicted")}
        self._buckets: dict[int, _Bucket] = {}
        self._newest: tuple[JobView, _Guess] | None = None  # one decision needs that of its job several times
        self._newest_bound: tuple[JobView, int] | None = None  # likewise

    def started(self, job: JobView) -> None:
        guess = self._open[job.job_id] = self._guess(job)
        if guess.predicted is not None:
            self._buckets.setdefault(guess.bucket, _Bucket(guess.predicted))

    def ended(self, job_id: str, tokens: int) -> None:
        """Report that an answer of so many tokens has ended; 0 when it failed or its length is not known."""
        self._newest = self._newest_bound = None
        guess = self._open.pop(job_id, None)
        if tokens <= 0:
            return
        self._ended += 1
        self._all.add(Lengths(tokens, tokens))
        if guess is None:
            return
        for way, guessed in guess.by_way.items():
            self._errors[way].add(abs(tokens - guessed))
        if guess.max_tokens > 0:
            self._share += (min(1.0, tokens / guess.max_tokens) - self._share) / min(self._ended, RECENT)
        if guess.predicted is not None:
            self._buckets[guess.bucket].add(tokens, guess.predicted)

    @property
    def all(self) -> Lengths:
        """Of any answer."""
        return self._all.lengths

    def expected(self, job: JobView) -> Lengths:
        """Of this job's answer: the prediction, corrected by how answers with the same prediction turned out; at most
        its max_tokens.
        """
        return self._guess(job).expected

    def bound(self, job: JobView) -> int:
        """Tokens of this job's answer for which room is kept, at most its max_tokens.

        There are three ways to guess: the prediction, the usual length, and the usual share of max_tokens. The one
        with the least error of late counts, because rooms for many jobs add up. Before a few answers have ended it is
        the prediction, or `UNSEEN_TOKENS`.
        """
        if self._newest_bound is not None and self._newest_bound[0] is job:
            return self._newest_bound[1]
        guesses = self._guess(job).by_way
        if self._ended < FEWEST:
            found = guesses.get("predicted", float(UNSEEN_TOKENS))
        else:
            found = guesses[min(guesses, key=lambda way: self._errors[way].mean)]
        bound = max(1, min(job.max_tokens, ceil(found)))
        self._newest_bound = job, bound
        return bound

    def _guess(self, job: JobView) -> _Guess:
        if self._newest is not None and self._newest[0] is job:
            return self._newest[1]
        most, usual, prediction = float(max(1, job.max_tokens)), self._all.lengths, job.prediction
        found, predicted = usual, None
        if prediction is not None:
            bucket, predicted = self._buckets.get(prediction.bucket), within(prediction)
            found = bucket.corrected(predicted) if bucket is not None else predicted
        expected = Lengths(min(most, found.mean), min(most, found.brief))
        by_way = {"all": min(most, usual.mean), "max_tokens": self._share * most}
        if prediction is not None and prediction.confidence > 0.0:
            by_way["predicted"] = expected.mean
        bucket_at = prediction.bucket if prediction is not None else -1
        guess = _Guess(job.max_tokens, bucket_at, predicted, expected, by_way)
        self._newest = job, guess
        return guess


def within(prediction: LengthPrediction) -> Lengths:
    """Lengths spread as predicted, evenly within a bucket; an open end counts as twice the lower one."""
    mean = inverse = 0.0
    for lower, upper, part in prediction.spread():
        mean += part * (lower + upper) / 2.0
        inverse += part * log(upper / lower) / (upper - lower)
    return Lengths(mean, 1.0 / inverse)
